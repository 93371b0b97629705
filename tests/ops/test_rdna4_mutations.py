"""The RDNA4 pipelines with one release, acquire, scope or acknowledgement taken away fail under some seed.

The library's own weakenings are hunted one by one in `test_mutations.py`; here are those that these kernels lean on,
and what the host adds: the meeting between two calls of a kind, and which rows combine may leave where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mori_triton import local_world
from mori_triton.errors import Deadlock, KernelFault, PeerTimeout
from mori_triton.ops import plans, rdna4
from mori_triton.ops.kernels import rdna4_dispatch
from mori_triton.ops.op_base import EpOpBase
from tests.ops import reference
from tests.ops.cases import start, to_numpy, to_torch
from tests.ops.mutants import Mutant, mutated_kernel, source_mutants
from tests.ops.test_mutations import Bench, expert_kernel, library
from tests.ops.test_rdna4 import EP2

pytestmark = pytest.mark.cpu

ARCHS = ("gfx1201", "gfx942")
SEEDS = range(8)
CASE = dataclasses.replace(EP2, hidden=296, top_k=2, max_tokens=3, experts_per_pe=2)
FACTORS = (1.5, 2.5)


def inputs(pe: int, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every token goes to the other PE, in every second round to both."""
    n, rng = CASE.max_tokens, np.random.default_rng([pe, index])
    there = np.full(n, 1 - pe) * 2
    ids = np.stack([there, there + 1 if index % 2 else pe * 2 + np.zeros(n, int)], 1).astype(np.int32)
    tokens = reference.from_float32(rng.standard_normal((n, CASE.hidden)).astype(np.float32), np.dtype(np.uint16))
    return tokens, ids, rng.random((n, CASE.top_k)).astype(np.float32)


def wanted(tokens: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sums, sum_weights = np.zeros(tokens.shape, np.float32), np.zeros_like(weights)
    for token, row in enumerate(ids):
        for owner in reference.owners(row, 2, CASE.experts_per_pe):
            made = reference.from_float32(
                reference.to_float32(tokens[token]) * np.float32(FACTORS[owner]), tokens.dtype
            )
            sums[token] += reference.to_float32(made)
            sum_weights[token] += weights[token]
    return reference.from_float32(sums, tokens.dtype), sum_weights


def rounds(pe: int, launch: Callable[..., Any]) -> None:
    """Two rounds, the second with two dispatches and two combines in a row; AssertionError for a wrong element."""
    op = start(CASE, pe)
    for index in range(2):
        tokens, ids, weights = inputs(pe, index)
        indices = torch.from_numpy(ids)
        given = to_torch(tokens), torch.from_numpy(weights), None, indices
        if index:
            op.dispatch(*(None if t is None else t.flip(0).contiguous() for t in given))
        out, out_weights, _, _, total = op.dispatch(*given)
        rows = torch.full(out.shape, float("nan"), dtype=out.dtype)
        launch(expert_kernel, (4,), out, total, rows, FACTORS[pe], H=CASE.hidden, BLOCK=512, num_warps=2)
        assert int(total) == len(reference.received([inputs(p, index)[1] for p in range(2)], CASE.experts_per_pe)[pe])
        sums, sum_weights = op.combine(rows, out_weights, indices)
        got = [(to_numpy(sums), to_numpy(sum_weights))]
        if index:
            sums, sum_weights = op.combine(rows.neg(), out_weights.neg(), indices)
            got.append((to_numpy(-sums), to_numpy(-sum_weights)))
        want = wanted(tokens, ids, weights)
        for found in got:
            assert found[0].tobytes() == want[0].tobytes(), "tokens"
            assert found[1].tobytes() == want[1].tobytes(), "weights"
        # rows that experts leave as they are: the next dispatch may not overtake the sums
        op.dispatch(*given)
        again, _ = op.combine(out, None, indices)
        plain = np.zeros(tokens.shape, np.float32)
        for token, row in enumerate(ids):
            for _ in reference.owners(row, 2, CASE.experts_per_pe):
                plain[token] += reference.to_float32(tokens[token])
        assert to_numpy(again).tobytes() == reference.from_float32(plain, tokens.dtype).tobytes(), "rows left in place"


class Rdna4Bench(Bench):
    """As `Bench`, with these rounds."""

    original: dict[str, list[str]] | None = None  # code for the first GPU, as it is

    @property
    def changes_code(self) -> bool:
        """Whether this hunt is for a change of kernels, and not of what the host does."""
        return self.library is not None or bool(self.kernels)

    def run(self, arch: str, seed: int) -> str:
        world = local_world(2, arch=arch, heap_size="1M", seed=seed, weak_memory=True, timeout_s=5.0)
        try:
            world.run(rounds, self.launch)
        except (AssertionError, KernelFault, Deadlock, PeerTimeout) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def hunt(self) -> str:
        """How the first seed that sees a fault says so; "" if none does."""
        for arch in ARCHS:
            self.code = {}
            for seed in SEEDS:
                what = self.run(arch, seed)
                if what:
                    return f"{arch}, seed {seed}: {what}"
                if self.changes_code and self.code == self.original:
                    # a first cache that writes through needs no more than a wait, which a barrier has too
                    break
        return ""


@pytest.fixture(scope="module")
def bench() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        made = Rdna4Bench(patch)
        # as it is: also what tells which kernel calls what of the library
        assert [what for seed in SEEDS if (what := made.run(ARCHS[0], seed))] == []
        made.original = made.code
        yield made


FUNCTIONS = {f"mori_shmem_ctx_{name}" for name in ("signal_set_all_last", "wait_all_ge")}
NEEDED = (
    'signal_set_all_last: fence syncscope("agent") release -> nothing',
    "signal_set_all_last: fence release -> nothing",
    "wait_all_ge: fence acquire -> nothing",
)
# not those that make a fence narrower, or a word's store or load: test_mutations.py has them
FENCES = [mutant for mutant in library().mutants(FUNCTIONS) if str(mutant) in NEEDED]


@pytest.mark.parametrize("mutant", FENCES, ids=str)
def test_a_fence_less(mutant: Mutant, bench: Rdna4Bench) -> None:
    bench.library, bench.users = library().write(mutant), mutant.users
    try:
        assert bench.hunt()
    finally:
        bench.library = None


def test_the_fences_are_found() -> None:
    assert sorted(map(str, FENCES)) == sorted(NEEDED)


def test_slots_given_out_in_a_narrower_scope(bench: Rdna4Bench, tmp_path: Path) -> None:
    (mutant,) = source_mutants(rdna4_dispatch)
    weaker = mutated_kernel(rdna4_dispatch, dataclasses.replace(mutant, kernel="rdna4_dispatch_kernel"), tmp_path)
    bench.kernels = {"rdna4_dispatch_kernel": weaker}
    try:
        assert bench.hunt()
    finally:
        bench.kernels = {}


def test_calls_in_a_row_without_an_acknowledgement(bench: Rdna4Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = EpOpBase._run

    def run(op: EpOpBase, what: str, plan: plans.Plan, given: Any, capturing: bool, **named: Any) -> None:
        op._last = None
        real(op, what, plan, given, capturing, **named)

    monkeypatch.setattr(EpOpBase, "_run", run)
    assert bench.hunt()


def test_own_rows_left_where_peers_write(bench: Rdna4Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdna4, "_KEPT_IN", (*rdna4._KEPT_IN, "recv_tokens"))
    assert bench.hunt()
