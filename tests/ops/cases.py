"""Dispatch/combine cases: what goes in, a program that runs them on a PE, and the check of what came out on all PEs."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import torch

from mori_triton import ops
from mori_triton.host import state as host_state
from tests.ops import reference

STORED = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16), "float16": np.dtype(np.float16)}
# no id, count or position is this
SENTINEL = -777777


@dataclasses.dataclass(frozen=True)
class Case:
    """One op's life: `rounds` rounds of dispatch and combine."""

    num_pes: int = 2
    hidden: int = 24
    top_k: int = 3
    dtype: str = "bfloat16"
    tokens: str = "uneven"  # uneven, zero, full, one
    routing: str = "random"  # random, to_one, none_to_last, duplicates, padded, out_of_range, nowhere, spread
    weights: bool = True
    scales: tuple[int, int] = (0, 0)  # scale_dim, scale_type_size
    rounds: int = 3
    max_tokens: int = 5
    experts_per_pe: int = 3
    registered: bool = False  # experts write into the registered buffer
    num_ops: int = 1
    config: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        scales = "x".join(map(str, self.scales))
        return (
            f"{self.num_pes}pes-h{self.hidden}-k{self.top_k}-{self.dtype}-{self.tokens}-{self.routing}-"
            f"{'w' if self.weights else 'now'}-s{scales}"
        )


@dataclasses.dataclass
class Round:
    """One PE's part of a round, in numpy."""

    tokens: np.ndarray
    indices: np.ndarray
    weights: np.ndarray | None
    scales: np.ndarray | None


def config_of(case: Case, pe: int, **changes: Any) -> ops.EpDispatchCombineConfig:
    fields = {
        "data_type": getattr(torch, case.dtype),
        "rank": pe,
        "world_size": case.num_pes,
        "hidden_dim": case.hidden,
        "scale_dim": case.scales[0],
        "scale_type_size": case.scales[1],
        "max_token_type_size": STORED[case.dtype].itemsize,
        "max_num_inp_token_per_rank": case.max_tokens,
        "num_experts_per_rank": case.experts_per_pe,
        "num_experts_per_token": case.top_k,
        **dict(case.config),
        **changes,
    }
    return ops.EpDispatchCombineConfig(**fields)


def _rng(*what: Any) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little"))


def num_tokens(case: Case, pe: int, index: int) -> int:
    most = case.max_tokens
    if case.tokens == "full":
        return most
    if case.tokens == "one":
        return 1
    if case.tokens == "zero" and (pe + index) % 2 == 0:
        return 0
    return int(_rng(case, pe, index, "n").integers(0, most + 1))


def ids_of(case: Case, pe: int, index: int, n: int) -> np.ndarray:
    rng, k, each = _rng(case, pe, index, "ids"), case.top_k, case.experts_per_pe
    experts = case.num_pes * each
    ids = rng.integers(0, experts, (n, k))
    if case.routing == "to_one":
        ids = rng.integers(0, each, (n, k)) + (index % case.num_pes) * each
    elif case.routing == "none_to_last" and case.num_pes > 1:
        ids = rng.integers(0, experts - each, (n, k))
    elif case.routing == "duplicates":
        ids[:] = ids[:, :1]
    elif case.routing == "padded":
        ids[rng.random((n, k)) < 0.4] = -1
        ids[n // 2 :][:1] = -1
    elif case.routing == "out_of_range":
        bad = rng.choice([-1, -2, experts, experts + 5, 2**31 - 1, -(2**31)], (n, k))
        ids = np.where(rng.random((n, k)) < 0.4, bad, ids)
    elif case.routing == "nowhere":
        ids[:] = -1
    elif case.routing == "spread":
        ids = (np.arange(k)[None, :] * each + rng.integers(0, each, (n, k))) % experts
    return ids.astype(np.int32)


def payload(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32) * rng.choice([0.01, 1.0, 1.0, 300.0], shape).astype(
        np.float32
    )
    # a zero that has a sign shows a copy that is none, and a sum that starts wrongly
    values[rng.random(shape) < 0.02] = -0.0
    return reference.from_float32(values, dtype)


def round_of(case: Case, pe: int, index: int, op: int = 0) -> Round:
    """The inputs of round `index` on `pe`: a function of the arguments alone."""
    n = num_tokens(case, pe, index)
    rng = _rng(case, pe, index, op)
    scale_bytes = case.scales[0] * case.scales[1]
    return Round(
        payload(rng, (n, case.hidden), STORED[case.dtype]),
        ids_of(case, pe, index, n),
        rng.random((n, case.top_k)).astype(np.float32) if case.weights else None,
        rng.integers(0, 256, (n, scale_bytes)).astype(np.uint8) if scale_bytes else None,
    )


def to_torch(stored: np.ndarray) -> torch.Tensor:
    if stored.dtype == np.uint16:
        return torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(stored.copy())


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (
        tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    ).copy()


def control(op: ops.EpDispatchCombineOp, *words: Any) -> list[int]:
    """Control words of an op, by their names in kernels/finish.py."""
    all_words = op._buffers.region("control").tolist()
    return [all_words[word.value] for word in words]


def to_scales(case: Case, stored: np.ndarray | None) -> torch.Tensor | None:
    if stored is None:
        return None
    dtype = {1: torch.uint8, 2: torch.float16, 4: torch.float32}[case.scales[1]]
    if len(stored) == 0:
        return torch.empty(0, case.scales[0], dtype=dtype)
    return torch.from_numpy(stored.copy()).view(dtype)


def poison(op: ops.EpDispatchCombineOp, *names: str) -> None:
    """Fill buffers with NaNs (all bits set), or the sentinel where they hold integers.

    Without names: all that a round writes before it is read, of those that the op's kernel type has.
    """
    here = {region.name for region in op._layout.regions}
    for name in names or [name for name in _ROUND if name in here]:
        region = op._layout[name]
        if name in _INTEGERS:
            op._buffers.view(name, torch.int32, region.num_bytes // 4).fill_(SENTINEL)
        else:
            op._buffers.view(name, torch.uint8, region.num_bytes).fill_(255)


_INTEGERS = ("recv_indices", "recv_sources", "forward", "staged_indices")
_ROUND = (
    *("recv_tokens", "recv_weights", "recv_scales", "combine_in", "combine_in_weights"),
    *("staged_weights", "staging", "staging_weights", *_INTEGERS),
)


def is_poison(array: np.ndarray) -> bool:
    if array.dtype == np.int32:
        return bool((array == SENTINEL).all())
    return bool((array.view(np.uint8) == 255).all()) if array.size else True


def start(case: Case, pe: int, **changes: Any) -> ops.EpDispatchCombineOp:
    """An op whose buffers are poisoned on every PE before any PE goes on."""
    op = ops.EpDispatchCombineOp(config_of(case, pe, **changes))
    poison(op)
    host_state.current().driver.synchronize()
    host_state.current().bootstrap.barrier("poisoned")
    return op


def experts(pe: int, rows: torch.Tensor) -> torch.Tensor:
    return to_torch(reference.expert_output(pe, to_numpy(rows))).to(rows.device)


def inputs_on(op: ops.EpDispatchCombineOp, case: Case, mine: Round) -> tuple[torch.Tensor | None, ...]:
    """A round's arguments of dispatch, on the op's device: tokens, weights, scales, indices."""
    weights = None if mine.weights is None else torch.from_numpy(mine.weights.copy())
    given = to_torch(mine.tokens), weights, to_scales(case, mine.scales), torch.from_numpy(mine.indices.copy())
    return tuple(None if tensor is None else tensor.to(op.device) for tensor in given)


def dispatch_round(op: ops.EpDispatchCombineOp, case: Case, mine: Round) -> dict[str, Any]:
    """Dispatch, and everything that it returned as numpy."""
    given = inputs_on(op, case, mine)
    return dispatched(op, given, op.dispatch(*given))


def dispatched(op: ops.EpDispatchCombineOp, given: tuple[Any, ...], result: tuple[Any, ...]) -> dict[str, Any]:
    """What a dispatch brought, as numpy, from what it returned."""
    out, out_weights, out_scales, out_indices, total = result[:5]
    sources = op.get_dispatch_src_token_pos()
    pes, tokens = op.decode_send_flat_idx(sources)
    return {
        "total": int(total[0]),
        "shapes": [tuple(t.shape) for t in (out, out_weights, out_indices, total)],
        "sources": list(zip(pes.tolist(), tokens.tolist(), strict=True)),
        "tokens": to_numpy(out),
        "weights": to_numpy(out_weights),
        "scales": None if out_scales is None else out_scales.contiguous().view(torch.uint8).cpu().numpy().copy(),
        "indices": to_numpy(out_indices),
        "given": given,
        "out": out,
        "out_weights": out_weights,
    }


def combine_round(
    op: ops.EpDispatchCombineOp, case: Case, pe: int, got: dict[str, Any], **named: Any
) -> dict[str, Any]:
    """Run this PE's experts on what dispatch brought, combine, and drop what only this PE may hold."""
    poison(op, "combine_out", "combine_out_weights")
    total, out = got["total"], got.pop("out")
    out_weights, given = got.pop("out_weights"), got.pop("given")
    rows = experts(pe, out[:total])
    if case.registered:
        buffer = op.get_registered_combine_input_buffer(out.dtype, out.shape[1])
        buffer[:total] = rows
        rows = buffer
    result, result_weights = op.combine(rows, out_weights[:total] if case.weights else None, given[3], **named)
    got["combined"] = to_numpy(result)
    got["combined_weights"] = None if result_weights is None else to_numpy(result_weights)
    return got


def run_case(pe: int, case: Case) -> list[list[dict[str, Any]]]:
    """What a PE runs: `num_ops` ops interleaved. Returns the outcome of every round of every op."""
    return run_rounds(pe, case, [[round_of(case, pe, i, op) for i in range(case.rounds)] for op in range(case.num_ops)])


def run_rounds(pe: int, case: Case, mine: list[list[Round]]) -> list[list[dict[str, Any]]]:
    """As `run_case`, with this PE's inputs given by [op][round]."""
    with_ops = [start(case, pe) for _ in mine]
    outcomes: list[list[dict[str, Any]]] = [[] for _ in mine]
    for rounds in zip(*mine, strict=True):
        got = [dispatch_round(op, case, given) for op, given in zip(with_ops, rounds, strict=True)]
        for i, op in enumerate(with_ops):
            outcomes[i].append(combine_round(op, case, pe, got[i]))
    for op in with_ops:
        op.close()
    return outcomes


def check_case(case: Case, results: list[list[list[dict[str, Any]]]]) -> None:
    """Compare the outcomes of all PEs (indexed by PE) with the numpy reference."""
    for op in range(case.num_ops):
        sent = [[round_of(case, pe, index, op) for pe in range(case.num_pes)] for index in range(case.rounds)]
        check_rounds(case, sent, [results[pe][op] for pe in range(case.num_pes)])


def check_rounds(case: Case, sent: list[list[Round]], results: list[list[dict[str, Any]]]) -> None:
    """Compare one op's outcomes, [PE][round], with what numpy makes of its inputs, [round][PE]."""
    highest = [0] * case.num_pes
    for index, given in enumerate(sent):
        wanted = reference.received([r.indices for r in given], case.experts_per_pe)
        for pe in range(case.num_pes):
            got = results[pe][index]
            highest[pe] = max(highest[pe], got["total"])
            check_dispatch(case, pe, got, given, wanted[pe], highest[pe])
            check_combine(case, pe, got, given[pe])


def check_dispatch(
    case: Case, pe: int, got: dict[str, Any], sent: list[Round], wanted: set[tuple[int, int]], highest: int
) -> None:
    rows = case.num_pes * case.max_tokens
    assert got["shapes"] == [(rows, case.hidden), (rows, case.top_k), (rows, case.top_k), (1,)]
    assert got["total"] == len(wanted)
    assert len(set(got["sources"])) == len(got["sources"]) == got["total"]
    assert set(got["sources"]) == wanted
    for row, (source, token) in enumerate(got["sources"]):
        from_pe = sent[source]
        assert got["tokens"][row].tobytes() == from_pe.tokens[token].tobytes(), (pe, row)
        assert got["indices"][row].tolist() == from_pe.indices[token].tolist(), (pe, row)
        if case.weights:
            assert from_pe.weights is not None
            assert got["weights"][row].tobytes() == from_pe.weights[token].tobytes(), (pe, row)
        if from_pe.scales is not None:
            assert got["scales"][row].tobytes() == from_pe.scales[token].tobytes(), (pe, row)
    # slots that no round has used yet
    for name in ("tokens", "indices", "weights", "scales"):
        if got[name] is not None:
            assert is_poison(got[name][highest if name != "weights" or case.weights else 0 :]), (pe, name)


def check_combine(case: Case, pe: int, got: dict[str, Any], mine: Round) -> None:
    n = len(mine.tokens)
    want = reference.combined(pe, mine.tokens, mine.indices, case.num_pes, case.experts_per_pe)
    assert got["combined"].shape == (case.max_tokens, case.hidden)
    assert got["combined"][:n].tobytes() == want.tobytes(), (pe, got["combined"][:n], want)
    assert is_poison(got["combined"][n:])
    if case.weights:
        assert mine.weights is not None
        want = reference.combined_weights(mine.weights, mine.indices, case.num_pes, case.experts_per_pe)
        assert got["combined_weights"][:n].tobytes() == want.tobytes()
        assert is_poison(got["combined_weights"][n:])
    else:
        assert got["combined_weights"] is None
