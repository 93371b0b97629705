"""Tuning as a whole, on the emulated device: what is written, when, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mori_triton import local_world, ops
from mori_triton.errors import ArgumentError
from mori_triton.ops.tune import Problem, bench, calls_of, tune
from mori_triton.ops.tuning import EpLaunchConfig, launch_config
from mori_triton.ops.tuning_tables import EpTuningTables, TuningRule, load_table, save_table

pytestmark = pytest.mark.cpu

TINY = Problem("IntraNode", 2, 64, 2, 4, (1, 3), ("bf16",))
ONE = dataclasses.replace(TINY, num_tokens=(3,), phases=("dispatch",))
HEADER = {"gpu_arch": "gfx1201", "gpu_model": "emulated", "kernel_type": "IntraNode", "ep_size": 2}
NAME = "gfx1201_emulated_IntraNode_ep2_{}.json"


def rules_in(out: Path, phase: str = "dispatch") -> list[TuningRule]:
    return list(load_table(out / NAME.format(phase), phase).rules)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Times as the test wants them: `us(shape)` of the shape that was last set; the kernels run all the same."""
    settings: dict[str, Any] = {"us": lambda phase, shape: 100.0, "measured": []}
    true = bench.PeBench.measure

    def measure(self, call, shape, rounds, repeats, give_up_us=float("inf")):
        times = true(self, call, shape, rounds, 1, give_up_us)
        if self.pe == 0:
            settings["measured"].append(shape)
            return [settings["us"](call.phase, shape)] * 3
        return times

    monkeypatch.setattr(bench.PeBench, "measure", measure)
    return settings


def test_calls_of_a_problem():
    problem = dataclasses.replace(
        TINY, hidden=256, dtypes=("bf16", "fp4"), quant_types=("none", "fp8_blockwise"), num_tokens=(1, 64, 4096, 200)
    )
    calls = list(calls_of(problem))
    assert [c.num_tokens for c in calls[:4]] == [64, 4096, 200, 1], "those nearest to 128 and 4096 first"
    groups = dict.fromkeys(c.group for c in calls)
    assert list(groups) == [
        ("dispatch", "bf16", False, ""),
        ("dispatch", "fp4", False, ""),
        ("combine", "bf16", True, "none"),
        ("combine", "bf16", False, "none"),
        ("combine", "bf16", False, "fp8_blockwise"),
    ]
    small = dataclasses.replace(problem, kernel_type="IntraNodeLL")
    assert {c.phase for c in calls_of(small)} == {"dispatch"}, "its combine is IntraNode's"
    assert {(c.dtype, c.hidden_dim, c.row_bytes) for c in calls} == {("bf16", 256, 512), ("fp4", 128, 128)}


def test_a_rule_is_written_that_an_op_then_uses(tmp_path, clock):
    """The shape with 16 programs of 1 warp is made the fastest, step by step from the built-in one."""
    clock["us"] = lambda phase, s: 100.0 + 10 * abs(s.num_programs - 16) + 10 * s.num_warps
    (outcome,) = tune(dataclasses.replace(ONE, num_tokens=(30,)), device="cpu", out=tmp_path)
    assert outcome.decision == "new"
    (rule,) = rules_in(tmp_path)
    assert (rule.dtype, rule.num_tokens, rule.hidden_dim, rule.topk) == ("bf16", 30, 64, 2)
    assert (rule.block_num, rule.warp_per_block, rule.latency_us) == (16, 1, 110.0)
    assert rule.stage_programs is None, "dispatch stages nothing"
    tables = EpTuningTables(load_table(tmp_path / NAME.format("dispatch"), "dispatch"), None)
    shape = launch_config("cpu", "dispatch", 30, 128, dtype=torch.bfloat16, top_k=2, tables=tables)
    assert (shape.num_programs, shape.num_warps) == (16, 1)
    assert set(tmp_path.iterdir()) == {tmp_path / NAME.format("dispatch")}


def test_a_combine_in_place_is_timed_with_the_dispatch_before_it(tmp_path, clock):
    """Whose time is taken off: 100 µs of 130."""
    clock["us"] = lambda phase, shape: 130.0 if phase == "combine" else 100.0
    problem = dataclasses.replace(ONE, phases=("combine",))
    outcomes = tune(problem, device="cpu", out=tmp_path, budget_s=0.0)
    assert {o.call.zero_copy: o.us for o in outcomes} == {True: 30.0, False: 130.0}
    assert {r.zero_copy: r.latency_us for r in rules_in(tmp_path, "combine")} == {True: 30.0, False: 130.0}


def test_real_times_on_every_path(tmp_path):
    """No made-up clock: the whole run as `mori-triton tune` makes it, codec and fp8 payload included."""
    problem = dataclasses.replace(
        TINY, hidden=128, num_tokens=(2,), dtypes=("bf16", "fp8_e4m3"), quant_types=("none", "fp8_blockwise")
    )
    outcomes = tune(problem, device="cpu", out=tmp_path, budget_s=1.0)
    assert [o.decision for o in outcomes] == ["new"] * 5, [o.decision for o in outcomes]
    assert all(0 <= o.us < float("inf") and o.floor_us > 0 for o in outcomes)
    assert len(rules_in(tmp_path)) == 2
    assert len(rules_in(tmp_path, "combine")) == 3


def test_a_codec_alone(tmp_path, clock):
    problem = dataclasses.replace(ONE, hidden=128, quant_types=("fp8_direct_cast",), phases=("dispatch", "combine"))
    outcomes = tune(problem, device="cpu", out=tmp_path, budget_s=0.0)
    assert [(o.call.phase, o.call.quant_type, o.decision) for o in outcomes] == [
        ("dispatch", None, "new"), ("combine", "fp8_direct_cast", "new"),
    ]  # fmt: skip


OLD = TuningRule("bf16", 3, 64, 4, 2, topk=2, piece_bytes=1024, route_tokens=8, route_warps=1, latency_us=1.0)


def is_old(shape: EpLaunchConfig) -> bool:
    return (shape.num_programs, shape.piece_bytes, shape.route_tokens) == (4, 1024, 8)


@pytest.mark.parametrize(
    ("old_us", "decision"), [(50.0, "kept"), (100.2, "kept"), (101.2, "better"), (200.0, "better")]
)
def test_an_old_rule_goes_only_when_it_is_slower_in_this_run(tmp_path, clock, old_us, decision):
    """Whatever it says of itself (1 µs), and by more than the noise."""
    clock["us"] = lambda phase, shape: old_us if is_old(shape) else 100.0
    other = dataclasses.replace(OLD, num_tokens=500, block_num=9)
    save_table(tmp_path / NAME.format("dispatch"), {**HEADER, "phase": "dispatch"}, [OLD, other])
    (outcome,) = tune(ONE, device="cpu", out=tmp_path)
    assert (outcome.decision, outcome.old, outcome.old_us) == (decision, OLD, old_us)
    now, untouched = rules_in(tmp_path)
    assert untouched == other
    assert (now == OLD) == (decision == "kept")
    assert outcome.rule == now


def test_noise_keeps_the_old_rule(tmp_path, clock):
    """10 % faster, where the same shape differs by 30 % from one time to the next."""
    count = iter(range(10**6))
    clock["us"] = lambda phase, shape: (100.0 if is_old(shape) else 90.0) * (1.0, 1.15, 1.3)[next(count) // 2 % 3]
    save_table(tmp_path / NAME.format("dispatch"), {**HEADER, "phase": "dispatch"}, [OLD])
    (outcome,) = tune(ONE, device="cpu", out=tmp_path)
    assert outcome.decision == "kept"
    assert rules_in(tmp_path) == [OLD]


# ------------------------------------------------------------------------------------------------------ wrong results
def corrupted(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PE 1's results of a phase are wrong in one byte."""
    true = getattr(ops.EpDispatchCombineOp, what)

    def wrong(self, *args, **kwargs):
        results = true(self, *args, **kwargs)
        if self.config.rank == 1:
            rows = results[0].view(torch.uint8)
            # sign and exponent of the third number
            rows[0, 5] = rows[0, 5] ^ 0x41
        return results

    monkeypatch.setattr(ops.EpDispatchCombineOp, what, wrong)


@pytest.mark.parametrize(
    ("what", "quant", "says"),
    [("dispatch", "none", "PE 1: bf16 from PE"), ("combine", "none", "PE 1: sums are not those"),
     ("combine", "fp8_blockwise", "PE 1: sums are further")],
)  # fmt: skip
def test_a_shape_with_a_wrong_result_is_not_saved(tmp_path, clock, monkeypatch, what, quant, says):
    corrupted(what, monkeypatch)
    problem = dataclasses.replace(ONE, phases=(what,), hidden=128, quant_types=(quant,))
    outcomes = tune(problem, device="cpu", out=tmp_path)
    assert all(o.decision.startswith(f"wrong: {says}") for o in outcomes), outcomes
    assert all(o.rule is None for o in outcomes)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- resume
def test_an_interrupted_run_goes_on(tmp_path, clock):
    journal = tmp_path / "journal.jsonl"

    def interrupt(outcome):
        if outcome.call.num_tokens == 2:
            raise KeyboardInterrupt

    problem = dataclasses.replace(TINY, phases=("dispatch",), num_tokens=(3, 1, 2))
    with pytest.raises(KeyboardInterrupt):
        tune(problem, device="cpu", out=tmp_path, journal=journal, report=interrupt)
    before = len(clock["measured"])
    assert before > 0
    outcomes = tune(problem, device="cpu", out=tmp_path, journal=journal)
    assert sorted(o.call.num_tokens for o in outcomes) == [1, 2, 3]
    first = clock["measured"][:before]
    assert 0 < len(clock["measured"]) - before < len(first), "only what was left is measured"
    assert sorted(r.num_tokens for r in rules_in(tmp_path)) == [1, 2, 3]
    kinds = [json.loads(line)["kind"] for line in journal.read_text().splitlines()]
    assert kinds == ["run", "calibration", "outcome", "outcome", "outcome", "end"]


def test_a_table_that_was_taken_away_is_written_from_the_journal(tmp_path, clock):
    journal = tmp_path / "journal.jsonl"
    tune(ONE, device="cpu", out=tmp_path, journal=journal)
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    before = rules_in(tmp_path)
    (tmp_path / NAME.format("dispatch")).unlink()
    measured = len(clock["measured"])
    tune(ONE, device="cpu", out=tmp_path, journal=journal)
    assert rules_in(tmp_path) == before
    assert len(clock["measured"]) == measured


@pytest.mark.parametrize(
    ("change", "says"),
    [({"num_tokens": ()}, "num_tokens: want numbers from 1"), ({"num_tokens": (0,)}, "num_tokens: want numbers from 1"),
     ({"dtypes": ("int8",)}, "dtypes: want some of: bf16"), ({"dtypes": ()}, "dtypes: want some of"),
     ({"num_experts": 5}, "num_experts: want a multiple of ep_size = 2"),
     ({"num_experts": 2, "topk": 3}, "num_experts: want .* at least topk = 3"),
     ({"quant_types": ("fp2",)}, "quant_type: want"), ({"phases": ("route",)}, "phases: want")],
)  # fmt: skip
def test_a_problem_that_cannot_be(tmp_path, change, says):
    with pytest.raises(ArgumentError, match=says):
        tune(dataclasses.replace(TINY, **change), device="cpu", out=tmp_path)


def test_the_budget_is_kept(tmp_path, clock):
    """With no time at all, each call's old or built-in shape is measured and its result checked."""
    tune(ONE, device="cpu", out=tmp_path, budget_s=0.0)
    # once in the search, twice in the end
    assert len(clock["measured"]) == 3


def test_rows_of_an_earlier_round_do_not_pass(tmp_path, monkeypatch):
    """A dispatch that does nothing the second time is found, although what the first one left would be right."""
    true, first = bench.PeBench._dispatch, {}

    def lazy(self, call, op):
        if self.pe not in first:
            first[self.pe] = true(self, call, op)
        return first[self.pe]

    monkeypatch.setattr(bench.PeBench, "_dispatch", lazy)

    def program(pe):
        here = bench.PeBench(ONE, board)
        shape = launch_config("cpu", "dispatch", 3, 128, dtype=torch.bfloat16, top_k=2)
        wrong = here.verify(next(iter(calls_of(ONE))), shape)
        here.close()
        return wrong

    board: dict[int, dict[str, Any]] = {}
    assert all("rows came, not" in wrong for wrong in local_world(2).run(program))
