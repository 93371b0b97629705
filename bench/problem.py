"""The work of a benchmark: an EP problem, its inputs, stand-ins for the experts, and exact checks of every element.

The checks know nothing of the op but what it returns: who is sent what follows from the ids alone, and what combine has
to return from the tokens and the experts' arithmetic, in torch, on the device of the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bench.floor import Traffic
from mori_triton import ops
from mori_triton.ops.formats import codec_of, decode_rows, encode_rows, num_blocks

# elements of a scale row cover so many of the payload, as in block-scaled fp8 models
SCALE_BLOCK = 128
# rows compared or computed at a time: temporaries stay small beside the buffers
_CHUNK_ROWS = 8192
_POISON = 0xFF
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def numbers(text: str) -> list[int]:
    """ "128,4096" as [128, 4096]."""
    return [int(part) for part in text.split(",") if part.strip()]


@dataclass(frozen=True)
class Problem:
    """One benchmark problem; equal on every PE.

    `dtype` is dispatch's: "bf16", or "fp8", e4m3 payload with one float32 scale for each 128 elements. Combine is bf16.
    """

    num_pes: int
    tokens: int  # per PE, every PE alike
    hidden: int = 7168
    top_k: int = 8
    experts: int = 256
    dtype: str = "bf16"
    kernel_type: str = "IntraNode"
    seed: int = 0
    fields: tuple[tuple[str, Any], ...] = ()  # further fields of the config

    @property
    def experts_per_pe(self) -> int:
        return self.experts // self.num_pes

    @property
    def codec(self) -> str:
        """How an external combine's rows travel: "none", or a `quant_type` of the config."""
        return str(dict(self.fields).get("quant_type", "none"))

    @property
    def scale_dim(self) -> int:
        return -(-self.hidden // SCALE_BLOCK) if self.dtype == "fp8" else 0

    def config(self, pe: int) -> ops.EpDispatchCombineConfig:
        return ops.EpDispatchCombineConfig(
            data_type=DTYPES[self.dtype],
            rank=pe,
            world_size=self.num_pes,
            hidden_dim=self.hidden,
            scale_dim=self.scale_dim,
            scale_type_size=4 if self.scale_dim else 0,
            max_token_type_size=2,
            max_num_inp_token_per_rank=self.tokens,
            num_experts_per_rank=self.experts_per_pe,
            num_experts_per_token=self.top_k,
            kernel_type=ops.EpDispatchCombineKernelType[self.kernel_type],
            **dict(self.fields),
        )

    def heap_bytes(self, num_ops: int = 1) -> int:
        """Of each PE's symmetric heap, with room for the library's own words."""
        return num_ops * ops.ep_buffer_layout(self.config(0)).num_bytes + (8 << 20)

    def traffic(self, everyone: list[Inputs]) -> Traffic:
        """Bytes of the round with these inputs of all PEs."""
        rows = sum(int(destinations(self, mine.indices).sum()) for mine in everyone)
        payload = self.hidden * DTYPES[self.dtype].itemsize + 4 * self.scale_dim
        wire = 2 * self.hidden
        if self.codec != "none":
            codec = codec_of(self.codec)
            wire = -(-self.hidden * codec.format.bits // 8) + (4 * num_blocks(self.hidden) if codec.scaled else 0)
        return Traffic(sum(len(mine.indices) for mine in everyone), rows, payload, 2 * self.hidden, wire)


@dataclass(frozen=True)
class Inputs:
    """What one PE gives to dispatch."""

    tokens: torch.Tensor  # [n, hidden] bfloat16 or float8_e4m3fn
    weights: torch.Tensor  # float32 [n, top_k]
    scales: torch.Tensor | None  # float32 [n, scale_dim]
    indices: torch.Tensor  # int32 [n, top_k], distinct experts

    def args(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """In dispatch's order."""
        return self.tokens, self.weights, self.scales, self.indices


def inputs(problem: Problem, pe: int, device: torch.device, num_tokens: int | None = None) -> Inputs:
    """Random tokens of `pe`, and ids uniform over the experts; a function of the arguments and the device alone."""
    n = problem.tokens if num_tokens is None else num_tokens
    generator = torch.Generator(device).manual_seed(1000 * problem.seed + pe)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    tokens = torch.empty(n, problem.hidden, dtype=DTYPES[problem.dtype], device=device)
    for start in range(0, n, _CHUNK_ROWS):
        part = tokens[start : start + _CHUNK_ROWS]
        part.copy_(torch.randn(*part.shape, generator=generator, device=device))
    indices = draw(n, problem.experts).topk(problem.top_k, dim=1).indices.to(torch.int32)
    scales = draw(n, problem.scale_dim) if problem.scale_dim else None
    return Inputs(tokens, draw(n, problem.top_k), scales, indices.contiguous())


def destinations(problem: Problem, indices: torch.Tensor) -> torch.Tensor:
    """bool `[n, num_pes]`: which PEs a token goes to."""
    owners = (indices.long() // problem.experts_per_pe)[:, :, None]
    return (owners == torch.arange(problem.num_pes, device=indices.device)).any(1)


def expert(pe: int | torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What the experts of `pe` make of rows: bfloat16, different on every PE. A tensor of PEs names one for each row.

    Product, sum and rounding are three operations, so every device gets the same bits.
    """
    number = pe[:, None].float() if isinstance(pe, torch.Tensor) else pe
    product = rows.float() * (1.0 + 0.3125 * number)
    return (product + 0.125 * number).to(torch.bfloat16)


def carried(problem: Problem, rows: torch.Tensor) -> torch.Tensor:
    """float32: what combine adds up of bfloat16 rows, after the codec where there is one."""
    if problem.codec == "none":
        return rows.float()
    return decode_rows(*encode_rows(rows, problem.codec), problem.codec, rows.shape[-1])


def run_experts(pe: int, rows: torch.Tensor, out: torch.Tensor, num_rows: int) -> None:
    """`expert` of the first `num_rows` rows, into `out`."""
    for start in range(0, num_rows, _CHUNK_ROWS):
        end = min(start + _CHUNK_ROWS, num_rows)
        out[start:end] = expert(pe, rows[start:end])


def poison(op: ops.EpDispatchCombineOp) -> None:
    """Set every bit of what a round writes: NaNs, and ids and sources of -1."""
    for region in op._layout.regions:
        if region.name in _WRITTEN:
            op._buffers.view(region.name, torch.uint8, region.num_bytes).fill_(_POISON)


# of whichever pipeline
_WRITTEN = (
    "recv_tokens", "recv_weights", "recv_scales", "recv_indices", "recv_sources",
    "combine_in", "combine_out", "staging",
)  # fmt: skip


def check_dispatch(
    problem: Problem, everyone: list[Inputs], pe: int, sources: torch.Tensor, out: tuple, *, poisoned: bool
) -> None:
    """Compare what `pe` received with what every PE sent: each row once, every bit of it, and nothing behind the last.

    Args:
        everyone: by PE.
        sources: int32 `[R]`, source PE * M + token of each row.
        out: what dispatch returned.
        poisoned: the buffers were poisoned before, and written once since.

    Raises: AssertionError that names the first wrong element.
    """
    tokens, weights, scales, ids, total = out
    device, most = tokens.device, problem.tokens
    wanted = [
        source * most + destinations(problem, mine.indices)[:, pe].nonzero()[:, 0].to(device)
        for source, mine in enumerate(everyone)
    ]
    want = torch.cat(wanted)
    num_rows = int(total)
    assert num_rows == len(want), f"PE {pe}: total_recv is {num_rows}, and {len(want)} rows were sent"
    got = sources[:num_rows].long()
    _same(f"PE {pe}: sources, sorted", got.sort().values, want)
    for source, mine in enumerate(everyone):
        rows = (got // most == source).nonzero()[:, 0]
        for part in rows.split(_CHUNK_ROWS):
            token = (got[part] % most).to(mine.tokens.device)
            for name, there, here in (
                ("tokens", mine.tokens, tokens),
                ("weights", mine.weights, weights),
                ("scales", mine.scales, scales),
                ("indices", mine.indices, ids),
            ):
                if there is not None:
                    what = f"PE {pe}: {name} from PE {source}"
                    _same(what, here.view(torch.uint8)[part], there.view(torch.uint8)[token].to(device))
    if poisoned:
        for name, buffer in (("tokens", tokens), ("weights", weights), ("indices", ids), ("sources", sources[:, None])):
            for part in buffer[num_rows:].contiguous().view(torch.uint8).split(_CHUNK_ROWS):
                assert bool((part == _POISON).all()), f"PE {pe}: {name} was written behind row {num_rows}"


def check_combine(problem: Problem, mine: Inputs, out: torch.Tensor) -> None:
    """Compare a PE's combined tokens with the float32 sum over distinct PEs in the order of the ids, rounded once.

    Raises: AssertionError that names the first wrong element.
    """
    num_tokens = len(mine.indices)
    for start in range(0, num_tokens, _CHUNK_ROWS):
        part = slice(start, min(start + _CHUNK_ROWS, num_tokens))
        tokens, owners = mine.tokens[part], mine.indices[part].long() // problem.experts_per_pe
        want = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        for k in range(problem.top_k):
            first = ~(owners[:, :k] == owners[:, k : k + 1]).any(1)
            want += torch.where(first[:, None], carried(problem, expert(owners[:, k], tokens)), 0.0)
        _same(f"combined tokens from {start}", out[part].view(torch.int16), want.to(torch.bfloat16).view(torch.int16))


def check_summed(
    problem: Problem, pe: int, sources: list[torch.Tensor], rows: list[torch.Tensor], mine: Inputs, out: torch.Tensor
) -> None:
    """As `check_combine` for rows that are not this round's experts': `rows[p]`, `sources[p]` are in PE p's buffer.

    A timed round combines the rows that lie in the buffers, whatever their slots hold: the sum is checked all the same.
    """
    num_tokens, most = len(mine.indices), problem.tokens
    slot_of = torch.full((problem.num_pes, num_tokens), -1, dtype=torch.long, device=out.device)
    for other, theirs in enumerate(sources):
        from_me = ((theirs >= pe * most) & (theirs < (pe + 1) * most)).nonzero()[:, 0]
        slot_of[other, (theirs[from_me].long() - pe * most).to(out.device)] = from_me.to(out.device)
    for start in range(0, num_tokens, _CHUNK_ROWS):
        part = slice(start, min(start + _CHUNK_ROWS, num_tokens))
        owners = mine.indices[part].long() // problem.experts_per_pe
        want = torch.zeros(out[part].shape, dtype=torch.float32, device=out.device)
        for k in range(problem.top_k):
            first = ~(owners[:, :k] == owners[:, k : k + 1]).any(1)
            for other, theirs in enumerate(rows):
                sent = (first & (owners[:, k] == other)).nonzero()[:, 0]
                slot = slot_of[other, start + sent]
                assert bool((slot >= 0).all()), f"PE {pe}: a token of PE {other} has no source entry there"
                want[sent] += carried(problem, theirs[slot.to(theirs.device)]).to(out.device)
        _same(f"summed tokens from {start}", out[part].view(torch.int16), want.to(torch.bfloat16).view(torch.int16))


def _same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, want {list(want.shape)}"
    if not torch.equal(got, want):
        wrong = (got != want).nonzero()
        at = tuple(wrong[0].tolist())
        raise AssertionError(f"{what}: {len(wrong)} of {got.numel()} wrong, first at {at}: {got[at]}, want {want[at]}")
