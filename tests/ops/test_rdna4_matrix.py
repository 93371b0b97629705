"""The RDNA4 op over a selection of its matrix in which every pair of values meets; the rest is `verify_rdna4_ep.py`'s.

On the emulated gfx1201. What a point's PEs run and how it is checked: `rdna4_checks`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mori_triton import local_world, ops
from mori_triton.errors import ArgumentError
from tests import verify_rdna4_ep
from tests.ops import rdna4_checks as checks
from tests.ops.rdna4_checks import Point, draw, run_point, sent_of

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
MATRIX: dict[str, Sequence[Any]] = {
    "top_k": (1, 2, 7, 8, 9, 31, 32, 33, 63, 64),
    "hidden": (2048, 3072, 7168),
    "capacity": (8, 256, 300),
    "world_size": (2, 4),
    "dtype": ("bf16", "fp16"),
    "weights": (True, False),
}


# of each hidden size; what kernels are compiled for, so few combinations of it, and the opposite for one top-k
COMPILED_FOR = ((4, "fp16", True), (2, "fp16", False), (2, "bf16", True))
OPPOSITE_OF = 9


def selection() -> list[Point]:
    """Points in which every two values of different factors meet.

    Each top-k meets each hidden size, which takes 30 points, with the capacities going round.
    """
    points = []
    for row, top_k in enumerate(MATRIX["top_k"]):
        for column, hidden in enumerate(MATRIX["hidden"]):
            world_size, dtype, weights = COMPILED_FOR[column]
            if top_k == OPPOSITE_OF:
                world_size, dtype, weights = 6 - world_size, "fp16" if dtype == "bf16" else "bf16", not weights
            capacity = MATRIX["capacity"][(row + column) % 3]
            points.append(Point(world_size, dtype, top_k, hidden, capacity, weights))
    return points


SELECTION = selection()


def test_the_selection_has_every_pair() -> None:
    chosen = {
        (a, getattr(point, a), b, getattr(point, b))
        for point in SELECTION
        for a, b in itertools.permutations(MATRIX, 2)
    }
    for (a, of_a), (b, of_b) in itertools.permutations(MATRIX.items(), 2):
        for one, other in itertools.product(of_a, of_b):
            assert (a, one, b, other) in chosen
    # ten values meet three: fewer points cannot do
    assert len(SELECTION) == 30


@pytest.mark.parametrize("point", SELECTION, ids=str)
def test_a_point_of_the_matrix(point: Point) -> None:
    world = local_world(point.world_size, arch="gfx1201", heap_size=checks.heap_bytes(point))
    world.run(run_point, point, sent_of(point, 0, 2))


@pytest.mark.parametrize("seed", range(2))
def test_a_small_point_under_a_seed_in_weak_memory(seed: int) -> None:
    # short rows, few tokens: one thing runs at a time there
    point = Point(2, "bf16", 8, 64, 5)
    world = local_world(2, arch="gfx1201", heap_size=checks.heap_bytes(point), seed=seed, weak_memory=True)
    world.run(run_point, point, sent_of(point, seed, 2))


# -------------------------------------------------------------------------------------------------- that the checks see
class Outcome:
    """What a right op would return of PE 1 of two, made by plain indexing."""

    def __init__(self) -> None:
        self.point = point = Point(2, "fp16", 3, 16, 6, experts=8)
        self.everyone = [draw(point, pe, 5, 4 + pe, padded=pe == 1) for pe in range(2)]
        goes = [
            (s, t) for s, sent in enumerate(self.everyone) for t, ids in enumerate(sent.ids.tolist()) if max(ids) >= 4
        ]
        goes = goes[1:] + goes[:1]
        self.sources = torch.tensor([6 * s + t for s, t in goes], dtype=torch.int32)

        def received(name: str) -> torch.Tensor:
            given = [getattr(sent, name) for sent in self.everyone]
            out = torch.full((12, given[0].shape[1] * given[0].itemsize), 255, dtype=torch.uint8).view(given[0].dtype)
            for row, (source, token) in enumerate(goes):
                out[row] = given[source][token]
            return out

        self.total = torch.tensor([len(goes)], dtype=torch.int32)
        self.out = [received("tokens"), received("weights"), None, received("ids"), self.total]
        mine = self.everyone[1]
        self.combined = torch.zeros(6, 16, dtype=torch.float16), torch.zeros(6, 3)
        for token, ids in enumerate(mine.ids.tolist()):
            pes = list(dict.fromkeys(i // 4 for i in ids if i >= 0))
            rows = [checks.expert(pe, mine.tokens[token], 2).float() for pe in pes]
            self.combined[0][token] = sum(rows, torch.zeros(16)).to(torch.float16)
            assert mine.weights is not None
            weights = [checks.expert_weights(pe, mine.weights[token], 2) for pe in pes]
            self.combined[1][token] = sum(weights, torch.zeros(3))

    def check(self) -> None:
        checks.check_dispatch(self.point, 1, self.everyone, tuple(self.out), self.sources, poisoned=True)
        checks.check_combine(self.point, self.everyone[1], self.combined, 2)


def flip(tensor: Any, row: int) -> None:
    tensor.view(torch.uint8)[row, -1] ^= 1


FAULTS = {
    "a bit of a token": lambda o: flip(o.out[0], 1),
    "a bit of a weight": lambda o: flip(o.out[1], 0),
    "an id": lambda o: flip(o.out[3], int(o.total) - 1),
    "one row less": lambda o: o.total.sub_(1),
    "a row twice": lambda o: o.sources[0].copy_(o.sources[1]),
    "two rows exchanged": lambda o: o.sources[:2].copy_(o.sources[:2].flip(0)),
    "a write behind the last row": lambda o: flip(o.out[0], int(o.total)),
    "a bit of a sum": lambda o: flip(o.combined[0], 4),
    "a bit of a sum of weights": lambda o: flip(o.combined[1], 1),
    "a sum of one PE only": lambda o: o.combined[0][3].copy_(checks.expert(0, o.everyone[1].tokens[3], 2)),
}


def test_the_checks_pass_what_is_right() -> None:
    Outcome().check()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checks_see(fault: str) -> None:
    outcome = Outcome()
    FAULTS[fault](outcome)
    with pytest.raises(AssertionError, match=r"PE 1|combined"):
        outcome.check()


# ---------------------------------------------------------------------------------------------------------- the command
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VERIFY_WORLD_SIZE", "3"), ("VERIFY_TOPKS", "8,65"), ("VERIFY_TOPKS", ""), ("VERIFY_HIDDEN_SIZES", "2047"),
        ("VERIFY_CAPACITIES", "8;256"), ("VERIFY_DTYPES", "fp32"), ("VERIFY_WEIGHTS", "1"),
        ("VERIFY_HANDLE_INTERLEAVE", "yes"), ("VERIFY_DOUBLE_COMBINE", "0,1"), ("VERIFY_ROUNDS", "1"),
        ("VERIFY_SEEDS", "9-0"), ("VERIFY_SEEDS", "1,2"), ("VERIFY_WEAK_MEMORY", "1"), ("VERIFY_DEVICE", "tpu"),
        ("VERIFY_TOPK", "8"),
    ],
)  # fmt: skip
def test_a_malformed_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        verify_rdna4_ep.settings({name: value})


def test_the_command_without_variables_is_the_whole_matrix() -> None:
    points = list(verify_rdna4_ep.settings({"VERIFY_DEVICE": "cpu"}).points())
    want = {tuple(zip(MATRIX, row, strict=True)) for row in itertools.product(*MATRIX.values())}
    assert len(points) == len(want) == 720
    assert {tuple((name, getattr(point, name)) for name in MATRIX) for point, _ in points} == want
    assert {seed for _, seed in points} == {None}
    these = {"VERIFY_TOPKS": "all", "VERIFY_SEEDS": "3-5", "VERIFY_WEAK_MEMORY": "1", "VERIFY_DEVICE": "cpu"}
    this = verify_rdna4_ep.settings(these)
    assert (this.topks, this.seeds, this.weak_memory) == (list(range(1, 65)), [3, 4, 5], True)


TINY = {
    "VERIFY_WORLD_SIZE": "2", "VERIFY_TOPKS": "8", "VERIFY_HIDDEN_SIZES": "64", "VERIFY_CAPACITIES": "5",
    "VERIFY_DTYPES": "bf16", "VERIFY_DEVICE": "cpu",
}  # fmt: skip


def test_the_command_ends_with_status_0() -> None:
    command = [sys.executable, str(ROOT / "tests" / "verify_rdna4_ep.py")]
    environ = {**os.environ, **TINY}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 right" in done.stdout


def test_a_wrong_point_is_named_and_the_status_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    true = ops.EpDispatchCombineOp.combine

    def combine(self: Any, input: torch.Tensor, weights: Any, *args: Any, **named: Any) -> Any:
        if weights is not None and self.config.rank == 1:
            flip(input, 0)
        return true(self, input, weights, *args, **named)

    monkeypatch.setattr(ops.EpDispatchCombineOp, "combine", combine)
    for name, value in TINY.items():
        monkeypatch.setenv(name, value)
    assert verify_rdna4_ep.main() == 1
    said = capsys.readouterr().out
    assert "wrong: EP2-bf16-k8-h64-M5-weights: " in said
    assert "1 of 2 right" in said
    monkeypatch.setenv("VERIFY_TOPKS", "0")
    assert verify_rdna4_ep.main() == 2
    assert "VERIFY_TOPKS: want" in capsys.readouterr().out
