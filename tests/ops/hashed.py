"""Dispatch and combine checked on the device that they run on, element by element, without a copy to the host.

Every input is a hash of (seed, round, PE, token, column). So whoever received a row can work out what it has to hold
from where it came from, and a check is a number of wrong elements that stays on the device until somebody asks.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

from mori_triton import ops
from mori_triton.host import state as host_state

MASK = (1 << 35) - 1
# rows checked at a time: a hash takes 8 bytes an element
CHUNK = 4096
BYTE_TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, getattr(torch, "float4_e2m1fn_x2", torch.float8_e4m3fn))


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is dispatched among whom."""

    num_pes: int = 2
    hidden: int = 24
    top_k: int = 3
    dtype: torch.dtype = torch.bfloat16
    max_tokens: int = 5
    experts_per_pe: int = 4
    tokens: str = "uneven"  # uneven, zero, full, one
    routing: str = "random"  # random, to_one, none_to_last, duplicates, padded, out_of_range, nowhere, spread
    weights: bool = True
    scales: tuple[int, int] = (0, 0)  # scale_dim, scale_type_size
    registered: bool = False  # experts write into the registered buffer
    # every call has max_tokens rows; those past the round's tokens go nowhere
    fixed_shape: bool = False
    seed: int = 0
    config: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        name = str(self.dtype).rsplit(".", maxsplit=1)[-1]
        more = "-".join(str(getattr(value, "name", value)) for _, value in self.config)
        return f"{self.num_pes}pes-h{self.hidden}-k{self.top_k}-{name}-{self.tokens}-{self.routing}-{more}"

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of expert outputs."""
        return torch.bfloat16 if self.dtype in BYTE_TYPES else self.dtype

    @property
    def num_experts(self) -> int:
        return self.num_pes * self.experts_per_pe


def op_config(problem: Problem, pe: int) -> ops.EpDispatchCombineConfig:
    fields: dict[str, Any] = {
        "data_type": problem.dtype,
        "rank": pe,
        "world_size": problem.num_pes,
        "hidden_dim": problem.hidden,
        "scale_dim": problem.scales[0],
        "scale_type_size": problem.scales[1],
        "max_token_type_size": max(problem.dtype.itemsize, problem.sum_dtype.itemsize),
        "max_num_inp_token_per_rank": problem.max_tokens,
        "num_experts_per_rank": problem.experts_per_pe,
        "num_experts_per_token": problem.top_k,
        "use_external_inp_buf": not problem.registered,
        **dict(problem.config),
    }
    return ops.EpDispatchCombineConfig(**fields)


def mix(*values: Any) -> torch.Tensor:
    """A hash of integers, elementwise with broadcasting; int64 from 0."""
    state: Any = 0x2545F491
    for value in values:
        state = (state ^ value) * 0x2127599BF4325C37 + 0x3C6EF372FE94F82B
        if isinstance(state, int):
            # as an int64 would
            state = (state + (1 << 63)) % (1 << 64) - (1 << 63)
        state = state ^ ((state >> 29) & MASK)
    return state & ((1 << 62) - 1)


def num_tokens(problem: Problem, pe: int, index: int) -> int:
    """Tokens of a PE in a round."""
    if problem.tokens == "full":
        return problem.max_tokens
    if problem.tokens == "one":
        return 1
    if problem.tokens == "zero" and (pe + index) % 2 == 0:
        return 0
    return random.Random(f"{problem.seed} {pe} {index}").randint(0, problem.max_tokens)


def ids_of(problem: Problem, index: int, pe: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """`[rows, k]` int32 ids of tokens of PEs, both `[rows]`."""
    column = torch.arange(problem.top_k, device=pe.device)
    each, experts = problem.experts_per_pe, problem.num_experts
    h = mix(problem.seed, 1, index, pe[:, None], token[:, None], column[None, :])
    ids = h % experts
    if problem.routing == "to_one":
        ids = h % each + index % problem.num_pes * each
    elif problem.routing == "none_to_last" and problem.num_pes > 1:
        ids = h % (experts - each)
    elif problem.routing == "duplicates":
        ids = ids[:, :1].expand(-1, problem.top_k)
    elif problem.routing == "padded":
        ids = torch.where((h >> 8) % 5 < 2, -1, ids)
        ids = torch.where(token[:, None] % 4 == 2, -1, ids)
    elif problem.routing == "out_of_range":
        bad = torch.tensor([-1, -2, experts, experts + 5, 2**31 - 1, -(2**31)], device=pe.device)
        ids = torch.where((h >> 8) % 5 < 2, bad[(h >> 16) % 6], ids)
    elif problem.routing == "nowhere":
        ids = torch.full_like(h, -1)
    elif problem.routing == "spread":
        ids = (column * each + h % each) % experts
    return ids.to(torch.int32)


def payload(problem: Problem, index: int, pe: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """`[rows, hidden]` of the problem's dtype."""
    row = mix(problem.seed, 2, index, pe, token)[:, None]
    h = mix(row, torch.arange(problem.hidden, device=pe.device)[None, :])
    if problem.dtype in BYTE_TYPES:
        return (h & 255).to(torch.uint8).view(problem.dtype)
    values = (h % 4001 - 2000).float() * torch.pow(2.0, -((h >> 20) % 9).float())
    # a zero that has a sign shows a copy that is none
    return torch.where((h >> 32) % 61 == 0, -0.0, values).to(problem.dtype)


def weights_of(problem: Problem, index: int, pe: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """`[rows, k]` float32."""
    column = torch.arange(problem.top_k, device=pe.device)
    return (mix(problem.seed, 3, index, pe[:, None], token[:, None], column[None, :]) & 0xFFFFFF).float() * 2.0**-24


def scales_of(problem: Problem, index: int, pe: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """`[rows, scale_dim]` of a dtype of the right size: random bits."""
    dim, size = problem.scales
    column = torch.arange(dim * size, device=pe.device)
    bits = (mix(problem.seed, 4, index, pe[:, None], token[:, None], column[None, :]) & 255).to(torch.uint8)
    dtype = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.int64}[size]
    return bits.view(dtype) if len(bits) else torch.empty(0, dim, dtype=dtype, device=pe.device)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def expert(problem: Problem, pe: torch.Tensor | int, rows: torch.Tensor) -> torch.Tensor:
    """What the experts of `pe` (one, or one for each row) make of rows: different on every PE, rounded once."""
    values = rows.view(torch.uint8).float() if problem.dtype in BYTE_TYPES else rows.float()
    factor = pe * 0.3125 + 1.0
    # in two steps: no fused multiply-add anywhere
    scaled = values * (factor if isinstance(factor, float) else factor[:, None].float())
    return (scaled + 0.25).to(problem.sum_dtype)


def owners(problem: Problem, ids: torch.Tensor) -> torch.Tensor:
    """`[rows, k]`: the PE that an id carries the token to; -1 for ids of no PE and all but the first of a PE."""
    known = (ids >= 0) & (ids < problem.num_experts)
    owner = torch.where(known, ids.long().clamp(0, problem.num_experts) // problem.experts_per_pe, -1)
    same = owner[:, :, None] == owner[:, None, :]
    earlier = torch.ones(same.shape[1:], dtype=torch.bool, device=ids.device).tril(-1)
    return torch.where((same & earlier).any(2), -1, owner)


class Round:
    """What one PE gives to round `index`."""

    def __init__(self, problem: Problem, pe: int, index: int, device: torch.device) -> None:
        self.problem, self.pe, self.index = problem, pe, index
        self.n = num_tokens(problem, pe, index)
        rows = problem.max_tokens if problem.fixed_shape else self.n
        token = torch.arange(rows, device=device)
        source = torch.full_like(token, pe)
        self.ids = torch.where((token < self.n)[:, None], ids_of(problem, index, source, token), -1)
        bits = torch.empty(rows, problem.hidden * problem.dtype.itemsize, dtype=torch.uint8, device=device)
        self.tokens = bits.view(problem.dtype)
        for start in range(0, rows, CHUNK):
            part = slice(start, start + CHUNK)
            bits_of(self.tokens)[part] = bits_of(payload(problem, index, source[part], token[part]))
        self.weights = weights_of(problem, index, source, token) if problem.weights else None
        self.scales = scales_of(problem, index, source, token) if problem.scales[0] else None

    def given(self) -> tuple[Any, ...]:
        return self.tokens, self.weights, self.scales, self.ids


def wrong_in_dispatch(
    problem: Problem, pe: int, index: int, result: tuple[Any, ...], sources: torch.Tensor, *, in_order: bool = False
) -> torch.Tensor:
    """The number of wrong elements in what dispatch returned, on the device. `sources`: `[>= total]` int32."""
    out, out_weights, out_scales, out_ids, total = result[:5]
    device, most, rows = out.device, problem.max_tokens, len(sources)
    valid = torch.arange(rows, device=device) < total
    source = torch.where(valid, sources.long(), 0)
    counts = torch.tensor([num_tokens(problem, p, index) for p in range(problem.num_pes)], device=device)
    # who has to be here: each (source PE, token) once or not at all
    every_pe = torch.arange(problem.num_pes, device=device).repeat_interleave(most)
    every_token = torch.arange(most, device=device).repeat(problem.num_pes)
    here = (owners(problem, ids_of(problem, index, every_pe, every_token)) == pe).any(1)
    here &= every_token < counts[every_pe]
    inside = (source >= 0) & (source < problem.num_pes * most)
    source = source.clamp(0, problem.num_pes * most - 1)
    came = torch.zeros_like(here, dtype=torch.int64).index_add_(0, source, (valid & inside).long())
    wrong = (came != here.long()).sum() + (total.long() != here.sum()).sum() + (valid & ~inside).sum()
    if in_order:
        wrong += ((source[1:] <= source[:-1]) & valid[1:]).sum()
    for start in range(0, rows, CHUNK):
        part = slice(start, start + CHUNK)
        who, token, now = source[part] // most, source[part] % most, valid[part, None]
        wanted = bits_of(payload(problem, index, who, token))
        wrong += ((bits_of(out[:rows][part]) != wanted) & now).sum()
        wrong += ((out_ids[:rows][part] != ids_of(problem, index, who, token)) & now).sum()
        if problem.weights:
            wrong += ((out_weights[:rows][part] != weights_of(problem, index, who, token)) & now).sum()
        if out_scales is not None:
            wanted = bits_of(scales_of(problem, index, who, token))
            wrong += ((bits_of(out_scales[:rows][part]) != wanted) & now).sum()
    return wrong


def wrong_in_combine(
    problem: Problem, mine: Round, result: tuple[torch.Tensor, torch.Tensor | None], *, rows: slice = slice(None)
) -> torch.Tensor:
    """The number of wrong elements in what combine returned for this PE's tokens, or those of a slice of them."""
    out, out_weights = result
    owner = owners(problem, mine.ids[: mine.n][rows])
    tokens, out = mine.tokens[: mine.n][rows], out[: mine.n][rows]
    wrong = torch.zeros((), dtype=torch.int64, device=out.device)
    for start in range(0, len(tokens), CHUNK):
        part = slice(start, start + CHUNK)
        wanted = torch.zeros(out[part].shape, dtype=torch.float32, device=out.device)
        for column in range(problem.top_k):
            pe = owner[part, column]
            wanted = torch.where(
                (pe >= 0)[:, None], wanted + expert(problem, pe.clamp(0), tokens[part]).float(), wanted
            )
        wrong += (bits_of(out[part]) != bits_of(wanted.to(out.dtype))).sum()
    if out_weights is not None and mine.weights is not None:
        weights, wanted = mine.weights[: mine.n][rows], torch.zeros_like(mine.weights[: mine.n][rows])
        for column in range(problem.top_k):
            wanted = torch.where((owner[:, column] >= 0)[:, None], wanted + weights, wanted)
        wrong += (bits_of(out_weights[: mine.n][rows]) != bits_of(wanted)).sum()
    return wrong


def all_sources(op: ops.EpDispatchCombineOp) -> torch.Tensor:
    """int32 `[R]`: as `get_dispatch_src_token_pos`, but without waiting for the device to know how many there are."""
    return op._buffers.view("recv_sources", torch.int32, op.config.max_recv)


def poison(op: ops.EpDispatchCombineOp) -> None:
    """Fill what peers write or read with ones, all bits; of the buffers that the op has. Collective."""
    here = {region.name for region in op._layout.regions}
    for name in here & {
        "recv_tokens",
        "recv_weights",
        "recv_scales",
        "recv_indices",
        "recv_sources",
        "staging",
        "combine_in",
        "combine_out",
    }:
        op._buffers.view(name, torch.uint8, op._layout[name].num_bytes).fill_(255)
    state = host_state.current()
    state.driver.synchronize()
    state.bootstrap.barrier("poisoned")


def one_round(
    op: ops.EpDispatchCombineOp, problem: Problem, mine: Round, *, deterministic: bool = False
) -> torch.Tensor:
    """Dispatch, experts, combine: the number of wrong elements. Nothing waits for the device."""
    result = op.dispatch(*mine.given())
    wrong = wrong_in_dispatch(problem, mine.pe, mine.index, result, all_sources(op), in_order=deterministic)
    return wrong + wrong_in_combine(problem, mine, run_experts(op, problem, mine, result))


def run_experts(
    op: ops.EpDispatchCombineOp, problem: Problem, mine: Round, result: tuple[Any, ...], **named: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The experts of this PE on every row, also those that hold anything, and combine."""
    out, out_weights = result[:2]
    rows = expert(problem, mine.pe, out)
    if problem.registered:
        buffer = op.get_registered_combine_input_buffer(rows.dtype, problem.hidden)
        buffer.copy_(rows)
        rows = buffer
    return op.combine(rows, out_weights if problem.weights else None, mine.ids, **named)
