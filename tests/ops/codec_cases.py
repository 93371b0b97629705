"""Rounds of dispatch and combine with small floats: inputs, a program for a PE of any world, and the check of all PEs.

Experts are looked up, not computed: the row that PE `p` makes of a token is a function of `p`, the token and the
distribution, so the check knows every row without what dispatch brought.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import torch

from mori_triton import ops
from mori_triton.host import state as host_state
from mori_triton.ops.combine_codec import sum_rows_torch
from mori_triton.ops.formats import E2M1, FORMAT_OF_DTYPE, combine_error_bound
from tests.ops.cases import poison

EXPERTS = 2


@dataclasses.dataclass(frozen=True)
class CodecCase:
    """Rounds of one op; `dtype` is combine's, `sent` dispatch's payload dtype."""

    quant: str = "none"
    values: str = "normal"
    hidden: int = 200  # combine's columns
    dtype: torch.dtype = torch.bfloat16
    sent: torch.dtype = torch.bfloat16
    num_pes: int = 3
    top_k: int = 3
    num_tokens: int = 3
    rounds: int = 2
    weights: bool = True
    registered: bool = False
    split: bool = False  # by way of dispatch_send, dispatch_recv, combine_send, combine_recv
    scales: tuple[int, torch.dtype] | None = None  # entries of a token's scale row, and their type
    config: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        names = [str(d).removeprefix("torch.") for d in (self.sent, self.dtype)]
        return f"{self.quant}-{self.values}-h{self.hidden}-{'-'.join(names)}-{self.num_pes}pes-k{self.top_k}"


def generator(*what: Any) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(what).encode()))


def bfloat16_rows(values: str, hidden: int, seed: torch.Generator) -> torch.Tensor:
    """`[hidden]` bfloat16 of a distribution."""
    row = torch.randn(hidden, generator=seed)
    column = torch.arange(hidden)
    if values == "wide":
        row = row * torch.ldexp(torch.ones(hidden), torch.randint(-14, 14, (hidden,), generator=seed))
    elif values == "outlier":
        row[torch.randint(0, hidden, (1,), generator=seed)] = 1e4
    elif values == "large":
        row = row * 2000
    elif values == "tiny":
        # scales around the smallest that there is
        row = row * 2.0**-93
    elif values == "huge":
        row = row * 2.0**124
    elif values == "denormal":
        row = torch.randint(-127, 128, (hidden,), generator=seed) * 2.0**-133
    elif values == "one denormal":
        row = torch.where(column == hidden // 2, 2.0**-133, 0.0)
    elif values == "zeros":
        row = torch.zeros(hidden) * torch.sign(row)
    elif values == "powers":
        # a block's largest is 448: its scale is 1, and all of these are numbers of e4m3
        row = torch.ldexp(torch.sign(row), torch.randint(-9, 9, (hidden,), generator=seed))
        row[::128] = 448.0
    elif values == "halves":
        # scale 1 for e2m1, whose numbers these are
        row = E2M1.table[torch.randint(0, 16, (hidden,), generator=seed)]
        row[::128] = 6.0
    elif values == "infinite":
        row = torch.where(column == hidden // 3, torch.inf, row)
        row = torch.where(column == hidden - 1, -torch.inf, row)
    elif values == "nan":
        row = torch.where(column == hidden // 3, torch.nan, row)
    elif values == "all infinite":
        row = torch.full((hidden,), torch.inf) * torch.sign(row)
    else:
        assert values == "normal"
    return row.to(torch.bfloat16)


def random_bytes(shape: tuple[int, ...], seed: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=seed).to(torch.uint8)


def expert_row(case: CodecCase, index: int, pe: int, source: int, token: int) -> torch.Tensor:
    """What PE `pe` hands to combine for a token: `[hidden]` of the case's dtype."""
    seed = generator(case.values, case.hidden, str(case.dtype), index, pe, source, token)
    if case.dtype == torch.bfloat16:
        return bfloat16_rows(case.values, case.hidden, seed)
    if case.dtype in FORMAT_OF_DTYPE:
        row = random_bytes((case.hidden,), seed)
        form = FORMAT_OF_DTYPE[case.dtype]
        if form.bits == 8 and case.values != "nan":
            row[form.decode(row).isnan()] = 0x11
        return row.view(case.dtype)
    return torch.randn(case.hidden, generator=seed).to(case.dtype)


def sent_tokens(case: CodecCase, index: int, pe: int) -> torch.Tensor:
    """Dispatch's payload: any bytes, NaNs included, as they are not looked at."""
    n = tokens_of(case, index, pe)
    # from one row more: torch does not view nothing as another type
    found = random_bytes((n + 1, case.hidden * case.sent.itemsize), generator("sent", case.hidden, index, pe))
    return found.view(case.sent)[:n]


def sent_scales(case: CodecCase, index: int, pe: int) -> torch.Tensor | None:
    """Any bytes."""
    if case.scales is None:
        return None
    n, (width, dtype) = tokens_of(case, index, pe), case.scales
    found = random_bytes((n + 1, width * dtype.itemsize), generator("scales", case.scales[0], index, pe))
    return found.view(dtype)[:n]


def tokens_of(case: CodecCase, index: int, pe: int) -> int:
    """Uneven, and sometimes none."""
    return (case.num_tokens + pe + 2 * index) % (case.num_tokens + 1)


def ids_of(case: CodecCase, index: int, pe: int) -> torch.Tensor:
    """With ids of no expert among them."""
    shape = (tokens_of(case, index, pe), case.top_k)
    return torch.randint(-1, case.num_pes * EXPERTS, shape, generator=generator("ids", case.top_k, index, pe)).int()


def config_of(case: CodecCase, pe: int, **changes: Any) -> ops.EpDispatchCombineConfig:
    fields = {
        "data_type": case.sent,
        "rank": pe,
        "world_size": case.num_pes,
        "hidden_dim": case.hidden,
        "scale_dim": case.scales[0] if case.scales else 0,
        "scale_type_size": case.scales[1].itemsize if case.scales else 0,
        "max_token_type_size": max(case.dtype.itemsize, case.sent.itemsize),
        "max_num_inp_token_per_rank": case.num_tokens,
        "num_experts_per_rank": EXPERTS,
        "num_experts_per_token": case.top_k,
        "quant_type": case.quant,
        **dict(case.config),
        **changes,
    }
    return ops.EpDispatchCombineConfig(**fields)


def start(case: CodecCase, pe: int) -> ops.EpDispatchCombineOp:
    """An op whose buffers are poisoned on every PE before any PE goes on."""
    op = ops.EpDispatchCombineOp(config_of(case, pe))
    poison(op)
    if "combine_in_scales" in [region.name for region in op._layout.regions]:
        poison(op, "combine_in_scales")
    op._state.driver.synchronize()
    host_state.current().bootstrap.barrier("poisoned")
    return op


def combine_input(op: ops.EpDispatchCombineOp, case: CodecCase, index: int, pairs: list[tuple[int, int]]) -> Any:
    """The experts' rows for what came from these (source PE, token)."""
    rows = [expert_row(case, index, op.config.rank, source, token).view(torch.uint8) for source, token in pairs]
    blank = torch.zeros(1, case.hidden * case.dtype.itemsize, dtype=torch.uint8)
    given = torch.cat([torch.stack(rows), blank] if rows else [blank]).view(case.dtype).to(op.device)
    if not case.registered:
        return given
    buffer = op.get_registered_combine_input_buffer(case.dtype, case.hidden)
    buffer.view(torch.uint8)[: len(pairs)] = given.view(torch.uint8)[: len(pairs)]
    return buffer


def run_codec_case(pe: int, case: CodecCase) -> list[dict[str, Any]]:
    """What a PE runs. Returns of every round what came, bit for bit, and what combine gave."""
    op = start(case, pe)
    outcomes = run_rounds(op, case)
    op.close()
    return outcomes


def run_rounds(op: ops.EpDispatchCombineOp, case: CodecCase) -> list[dict[str, Any]]:
    """Rounds of a case on an op that may have been made for wider rows."""
    pe = op.config.rank
    outcomes = []
    for index in range(case.rounds):
        ids = ids_of(case, index, pe)
        weights = torch.rand(ids.shape, generator=generator("weights", index, pe)) if case.weights else None
        inputs = sent_tokens(case, index, pe), weights, sent_scales(case, index, pe), ids
        given = [None if t is None else t.to(op.device) for t in inputs]
        if case.split:
            out, out_weights, out_scales, _, _ = op.dispatch_send(*given)
            op.dispatch_recv()
        else:
            out, out_weights, out_scales, _, _ = op.dispatch(*given)
        sources, positions = op.decode_send_flat_idx(op.get_dispatch_src_token_pos().cpu())
        pairs = list(zip(sources.tolist(), positions.tolist(), strict=True))
        came = out[: len(pairs)].view(torch.uint8).cpu().clone()
        scales = None if out_scales is None else out_scales[: len(pairs)].view(torch.uint8).cpu().clone()
        rows = combine_input(op, case, index, pairs)
        poison(op, "combine_out", "combine_out_weights")
        if case.split:
            combined, back = op.combine_send(rows, out_weights if case.weights else None, given[3])
            op.combine_recv()
        else:
            combined, back = op.combine(rows, out_weights if case.weights else None, given[3])
        outcomes.append(
            {
                "pairs": pairs,
                "came": came,
                "scales": scales,
                "weights sent": weights,
                "combined": combined.view(torch.uint8).cpu().clone(),
                "weights": None if back is None else back.cpu().clone(),
            }
        )
    return outcomes


def owners(ids: torch.Tensor, num_pes: int) -> list[int]:
    """Distinct PEs of a row of expert ids, in order."""
    return list(dict.fromkeys(i // EXPERTS for i in ids.tolist() if 0 <= i < num_pes * EXPERTS))


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit, but that one NaN is as good as another where a type has many."""
    if want.dtype in FORMAT_OF_DTYPE:
        return torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    both = got.isnan() & want.isnan()
    return torch.equal(torch.where(both, 0, got).view(torch.uint8), torch.where(both, 0, want).view(torch.uint8))


def check_codec_case(case: CodecCase, results: list[list[dict[str, Any]]]) -> None:
    """Dispatch: bytes as sent. Combine: bit for bit the reference, and every element within its error bound."""
    for index in range(case.rounds):
        ids = [ids_of(case, index, pe) for pe in range(case.num_pes)]
        sent = [(sent_tokens(case, index, pe), sent_scales(case, index, pe)) for pe in range(case.num_pes)]
        for pe in range(case.num_pes):
            got = results[pe][index]
            wanted = {(s, t) for s, rows in enumerate(ids) for t, i in enumerate(rows) if pe in owners(i, case.num_pes)}
            assert set(got["pairs"]) == wanted
            assert len(got["pairs"]) == len(wanted)
            for row, (source, token) in enumerate(got["pairs"]):
                tokens, scales = sent[source]
                assert torch.equal(got["came"][row], tokens[token].view(torch.uint8)), (index, pe, row)
                if scales is not None:
                    assert torch.equal(got["scales"][row], scales[token].view(torch.uint8)), (index, pe, row)
            for token, mine in enumerate(ids[pe]):
                check_token(case, index, pe, token, owners(mine, case.num_pes), got["combined"][token])
                if case.weights:
                    want = torch.zeros(case.top_k)
                    for _ in owners(mine, case.num_pes):
                        want += got["weights sent"][token]
                    assert torch.equal(got["weights"][token], want)
            # rows that hold nothing
            assert bool((got["combined"][len(ids[pe]) :] == 255).all())


def check_token(case: CodecCase, index: int, pe: int, token: int, to: list[int], combined: torch.Tensor) -> None:
    if not to:
        assert not combined.any(), "a token that went nowhere"
        return
    rows = torch.stack([expert_row(case, index, p, pe, token).view(torch.uint8) for p in to]).view(case.dtype)
    want = sum_rows_torch(rows, case.quant)
    assert same_bits(combined.view(case.dtype), want), (index, pe, token, combined, want)
    if case.dtype not in FORMAT_OF_DTYPE:
        check_bound(rows, combined.view(case.dtype), case.quant)


def check_bound(rows: torch.Tensor, combined: torch.Tensor, quant: str) -> None:
    """Every element of `combined` as near to the exact sum as `ops.formats` says."""
    bound = combine_error_bound(rows, quant)
    error = (combined.double() - rows.double().sum(0)).abs()
    beyond = (error > bound) | (error.isnan() & bound.isfinite())
    assert not beyond.any(), (quant, beyond.nonzero()[0], error[beyond][0], bound[beyond][0])
