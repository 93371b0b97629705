"""Points of the RDNA4 matrix: their inputs, what a PE runs, and checks of every element of what it got.

The checks know the ids, the tokens and the experts' arithmetic, and what the op returned: nothing of its buffers. All
of it is torch on the device of the tensors, so that they serve the emulated device, GPUs and the benchmark alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mori_triton import ops
from mori_triton.host import state as host_state

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KERNEL_TYPE = ops.EpDispatchCombineKernelType.IntraNodeRDNA4
# rows compared or computed at a time: temporaries stay small beside the buffers
CHUNK_ROWS = 8192
_POISON = 0xFF
_WRITTEN = ("recv_tokens", "recv_weights", "recv_indices", "recv_sources", "staged_", "staging", "combine_")
# distinct experts of a token come from so many
EXPERTS = 256


@dataclasses.dataclass(frozen=True)
class Point:
    """One op of the matrix. `capacity` is `M`, the most tokens of a call on a PE."""

    world_size: int = 2
    dtype: str = "bf16"
    top_k: int = 8
    hidden: int = 2048
    capacity: int = 8
    weights: bool = True
    experts: int = EXPERTS

    def __str__(self) -> str:
        weights = "weights" if self.weights else "no-weights"
        return f"EP{self.world_size}-{self.dtype}-k{self.top_k}-h{self.hidden}-M{self.capacity}-{weights}"

    @property
    def experts_per_pe(self) -> int:
        return self.experts // self.world_size

    def config(self, pe: int) -> ops.EpDispatchCombineConfig:
        return ops.EpDispatchCombineConfig(
            data_type=DTYPES[self.dtype],
            rank=pe,
            world_size=self.world_size,
            hidden_dim=self.hidden,
            scale_dim=0,
            scale_type_size=0,
            max_token_type_size=2,
            max_num_inp_token_per_rank=self.capacity,
            num_experts_per_rank=self.experts_per_pe,
            num_experts_per_token=self.top_k,
            kernel_type=KERNEL_TYPE,
        )


# ------------------------------------------------------------------------------------------------------------- inputs
@dataclasses.dataclass(frozen=True)
class Sent:
    """What one PE gives to a dispatch."""

    tokens: torch.Tensor  # [n, hidden]
    weights: torch.Tensor | None  # float32 [n, top_k]
    ids: torch.Tensor  # int32 [n, top_k], distinct; -1: no expert

    def args(self) -> tuple[torch.Tensor, torch.Tensor | None, None, torch.Tensor]:
        """In dispatch's order."""
        return self.tokens, self.weights, None, self.ids

    def to(self, device: torch.device) -> Sent:
        """The same on another device."""
        weights = None if self.weights is None else self.weights.to(device)
        return Sent(self.tokens.to(device), weights, self.ids.to(device))


def draw(
    point: Point, pe: int, seed: int, num_tokens: int, *, padded: bool = False, device: Any = "cpu"
) -> Sent:  # fmt: skip
    """Random tokens, and ids uniform over the experts; a function of the arguments and the kind of device alone.

    `padded`: a quarter of the ids, and every id of every fifth token, are -1.
    """
    generator = torch.Generator(device).manual_seed(1009 * seed + pe)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    tokens = torch.empty(num_tokens, point.hidden, dtype=DTYPES[point.dtype], device=device)
    for part in tokens.split(CHUNK_ROWS):
        part.copy_(torch.randn(*part.shape, generator=generator, device=device))
    # a zero that has a sign shows a copy that is none
    tokens[:, ::61] = -0.0
    ids = uniform(num_tokens, point.experts).topk(point.top_k, dim=1).indices.to(torch.int32)
    if padded:
        ids = torch.where(uniform(*ids.shape) < 0.25, -1, ids)
        ids[::5] = -1
    weights = uniform(num_tokens, point.top_k) if point.weights else None
    return Sent(tokens, weights, ids.contiguous())


def with_payload_of(routed: Sent, other: Sent) -> Sent:
    """The ids of one, the tokens and weights of the other, which has as many."""
    return Sent(other.tokens, other.weights, routed.ids)


def num_tokens(point: Point, pe: int, index: int) -> int:
    """Uneven: a PE that takes turns sends all it may, the next one nothing (or one), the others a few."""
    place = (pe + index) % point.world_size
    few = (index % 2, 5, 3)
    return point.capacity if place == 0 else min(point.capacity, few[place - 1])


def owners(point: Point, ids: torch.Tensor) -> torch.Tensor:
    """int64 `[n, top_k]`: the PE of each id; -1 for no expert and for all but the first id of a PE."""
    owner = torch.where(ids >= 0, ids.long() // point.experts_per_pe, -1)
    for column in range(point.top_k - 1, 0, -1):
        again = (owner[:, :column] == owner[:, column : column + 1]).any(1)
        owner[:, column] = torch.where(again, -1, owner[:, column])
    return owner


def expert(pe: int, rows: torch.Tensor, salt: int) -> torch.Tensor:
    """What the experts of `pe` make of rows, another thing for each salt. Operations are rounded one by one."""
    product = rows.float() * (1.0 + 0.3125 * pe + 0.125 * salt)
    return (product + 0.25 * (pe + salt)).to(rows.dtype)


def expert_weights(pe: int, weights: torch.Tensor, salt: int) -> torch.Tensor:
    """What `pe` gives to combine for weights."""
    return weights * (1.0 + 0.25 * pe + 0.5 * salt)


# ------------------------------------------------------------------------------------------------------------- checks
def check_dispatch(
    point: Point, pe: int, everyone: list[Sent], out: tuple[Any, ...], sources: torch.Tensor, *, poisoned: bool
) -> None:
    """Compare what `pe` received with what every PE sent: each row once, bit for bit, nothing behind the last.

    Args:
        out: what dispatch returned.
        sources: int32 `[total]`, `source PE * M + token` of each row.
        poisoned: the outputs were poisoned before.

    Raises: AssertionError that names the first wrong element.
    """
    tokens, weights, _, ids, total = out[:5]
    most, num_rows = point.capacity, int(total)
    goes = [(owners(point, sent.ids) == pe).any(1).nonzero()[:, 0] for sent in everyone]
    want = torch.cat([source * most + rows for source, rows in enumerate(goes)])
    assert num_rows == len(want), f"PE {pe}: total_recv is {num_rows}, {len(want)} rows were sent"
    got = sources.long()
    _same(f"PE {pe}: sources, sorted", got.sort().values, want)
    for source, sent in enumerate(everyone):
        for part in (got // most == source).nonzero()[:, 0].split(CHUNK_ROWS):
            token = got[part] % most
            for name, here, there in (
                ("tokens", tokens, sent.tokens), ("weights", weights, sent.weights), ("ids", ids, sent.ids)
            ):  # fmt: skip
                if there is not None:
                    _same(f"PE {pe}: {name} from PE {source}", _bits(here)[part], _bits(there)[token])
    if poisoned:
        for name, buffer in (("tokens", tokens), ("ids", ids), ("weights", weights if point.weights else None)):
            if buffer is not None:
                for part in buffer[num_rows:].split(CHUNK_ROWS):
                    written = (part.contiguous().view(torch.uint8) != _POISON).any()
                    assert not written, f"PE {pe}: {name} were written behind row {num_rows}"


def check_combine(point: Point, sent: Sent, out: tuple[torch.Tensor, torch.Tensor | None], salt: int) -> None:
    """Compare combined tokens with the float32 sum over distinct PEs, in the order of the ids, rounded once.

    Weights likewise, in float32. Raises: AssertionError that names the first wrong element.
    """
    combined, combined_weights = out
    for start in range(0, len(sent.ids), CHUNK_ROWS):
        part = slice(start, min(start + CHUNK_ROWS, len(sent.ids)))
        tokens, owner = sent.tokens[part], owners(point, sent.ids[part])
        of_pe = [expert(pe, tokens, salt).float() for pe in range(point.world_size)]
        want = _sum_in_order(owner, of_pe).to(tokens.dtype)
        _same(f"combined tokens from {start}", _bits(combined[part]), _bits(want))
        if sent.weights is not None:
            assert combined_weights is not None, "combine returned no weights"
            of_pe = [expert_weights(pe, sent.weights[part], salt) for pe in range(point.world_size)]
            want = _sum_in_order(owner, of_pe)
            _same(f"combined weights from {start}", _bits(combined_weights[part]), _bits(want))


def _sum_in_order(owner: torch.Tensor, of_pe: list[torch.Tensor]) -> torch.Tensor:
    """float32 `[n, width]`: of each token the rows `of_pe` of its owners, added to zero from left to right."""
    # owners to the front, in the order of their columns: there are at most as many as PEs
    front = (owner < 0).long().sort(dim=1, stable=True).indices[:, : len(of_pe)]
    total, everything = torch.zeros_like(of_pe[0]), torch.stack(of_pe)
    token = torch.arange(len(owner), device=owner.device)
    for pe in owner.gather(1, front).T:
        total = torch.where((pe >= 0)[:, None], total + everything[pe.clamp(0), token], total)
    return total


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def _same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, want {list(want.shape)}"
    if not torch.equal(got, want):
        wrong = (got != want).nonzero()
        at = tuple(wrong[0].tolist())
        raise AssertionError(f"{what}: {len(wrong)} of {got.numel()} wrong, first at {at}: {got[at]}, want {want[at]}")


# ----------------------------------------------------------------------------------------------------- what a PE runs
def sent_of(point: Point, seed: int, rounds: int, device: Any = "cpu") -> list[list[Sent]]:
    """By round, by PE; and last the payload of a replay, as many tokens as in the first round."""
    pes = range(point.world_size)
    counts = [[num_tokens(point, pe, index) for pe in pes] for index in range(rounds)] + [
        [num_tokens(point, pe, 0) for pe in pes]
    ]
    return [
        [draw(point, pe, 100 * seed + index, count[pe], padded=index % 2 == 1, device=device) for pe in pes]
        for index, count in enumerate(counts)
    ]


def heap_bytes(point: Point) -> int:
    """Of each PE's symmetric heap, with room for the library's own words."""
    return ops.ep_buffer_layout(point.config(0)).num_bytes + (8 << 20)


def poison(op: ops.EpDispatchCombineOp) -> None:
    """Set every bit of what a round writes: NaNs, ids and sources of -1. Collective."""
    meet("before poison")
    for region in op._layout.regions:
        if region.name.startswith(_WRITTEN):
            op._buffers.view(region.name, torch.uint8, region.num_bytes).fill_(_POISON)
    meet("poisoned")


def meet(what: str) -> None:
    """All PEs, everything launched so far done."""
    state = host_state.current()
    state.driver.synchronize()
    state.bootstrap.barrier(f"rdna4_checks: {what}")


class Life:
    """The op of one PE, and rounds on it of which every element is checked."""

    def __init__(self, point: Point, pe: int) -> None:
        self.point, self.pe = point, pe
        self.op = ops.EpDispatchCombineOp(point.config(pe))

    def dispatch(self, everyone: list[Sent], **routing: Any) -> tuple[Any, ...]:
        """Dispatch into poisoned buffers, and check."""
        poison(self.op)
        out = self.op.dispatch(*everyone[self.pe].args(), **routing)
        sources = self.op.get_dispatch_src_token_pos()
        check_dispatch(self.point, self.pe, everyone, out, sources, poisoned=True)
        return out

    def rows_for(self, out: tuple[Any, ...], salt: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What this PE's experts make of what dispatch brought: rows and weights for combine, of the caller's."""
        total = int(out[4])
        weights = expert_weights(self.pe, out[1][:total], salt) if self.point.weights else None
        return expert(self.pe, out[0][:total], salt), weights

    def combine(
        self, mine: Sent, given: tuple[torch.Tensor, torch.Tensor | None], salt: int, **routing: Any
    ) -> None:  # fmt: skip
        """Combine and check."""
        result = self.op.combine(given[0], given[1], mine.ids, **routing)
        host_state.current().driver.synchronize()
        check_combine(self.point, mine, result, salt)

    def rounds(self, sent: list[list[Sent]], *, double: bool) -> None:
        """A round for each entry; `double`: with two combines of different rows."""
        for everyone in sent:
            out = self.dispatch(everyone)
            for given, salt in [(self.rows_for(out, salt), salt) for salt in range(1 + double)]:
                self.combine(everyone[self.pe], given, salt)

    def interleaved(self, first: list[Sent], second: list[Sent], payload: list[Sent]) -> None:
        """Two dispatches, combined in the order of their making; then the first one's routing with other payload."""
        one = self.dispatch(first, return_routing=True)
        given_one, handle_one = self.rows_for(one, 1), one[5]
        two = self.dispatch(second, return_routing=True)
        given_two, handle_two = self.rows_for(two, 2), two[5]
        self.combine(first[self.pe], given_one, 1, routing=handle_one)
        self.combine(second[self.pe], given_two, 2, routing=handle_two)
        again = [with_payload_of(routed, other) for routed, other in zip(first, payload, strict=True)]
        out = self.dispatch(again, routing=handle_one)
        given = self.rows_for(out, 3)
        self.combine(again[self.pe], given, 3, routing=handle_one)


def run_point(
    pe: int, point: Point, sent: list[list[Sent]], interleave: bool = True, double: bool = True
) -> None:  # fmt: skip
    """What a PE runs of a point, with what `sent_of` gave: every element is checked, AssertionError for a wrong one."""
    life = Life(point, pe)
    sent = [[theirs.to(life.op.device) for theirs in everyone] for everyone in sent]
    life.rounds(sent[:-1], double=double)
    if interleave:
        life.interleaved(sent[0], sent[1], sent[-1])
    life.op.close()
