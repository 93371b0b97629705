"""The search for launch shapes, on made-up times; and the journal of a run."""

from __future__ import annotations

import dataclasses
import json
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mori_triton.errors import ArgumentError
from mori_triton.ops.tune.journal import Journal
from mori_triton.ops.tune.search import Call, axes_of, effective, grids_of, search
from mori_triton.ops.tuning import NO_LIMIT, EpLaunchConfig

pytestmark = pytest.mark.cpu

DISPATCH = Call("dispatch", "bf16", 4096, 7168, 8, 14336)
IN_PLACE = dataclasses.replace(DISPATCH, phase="combine", zero_copy=True, quant_type="none")
EXTERNAL = dataclasses.replace(IN_PLACE, zero_copy=False)
LL = dataclasses.replace(DISPATCH, kernel_type="IntraNodeLL")
START = EpLaunchConfig(1024, 8192, 8, 16, 4, 1024, 8192, 8)


def distance(call: Call, a: EpLaunchConfig, b: EpLaunchConfig) -> int:
    """How far one shape is from another, along all axes together."""
    return sum(abs(math.log2(getattr(a, n)) - math.log2(getattr(b, n))) for n in axes_of(call))


@pytest.mark.parametrize("call", [DISPATCH, IN_PLACE, EXTERNAL, LL])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_valley_is_walked_down_to_its_bottom(call, data):
    """Where every step towards one shape is faster, the search ends there, and measures no shape twice."""
    # so many tokens that no number of programs is too large
    call = dataclasses.replace(call, num_tokens=1 << 22)
    bottom = dataclasses.replace(START, **{n: data.draw(st.sampled_from(v)) for n, v in axes_of(call).items()})
    seen = []

    def measure(shape, best):
        seen.append(shape)
        return 100.0 + 10 * distance(call, shape, bottom)

    found = search(call, [START], measure, margin=0.0)
    assert found.shape == bottom
    assert found.us == 100.0
    assert found.num_measured == len(seen) == len(set(seen))


def test_noise_moves_nothing():
    found = search(DISPATCH, [START], lambda shape, best: 100.0 if shape == START else 99.0, margin=0.02)
    assert found.shape == START


def test_the_best_start_is_gone_on_from_and_broken_shapes_are_never_taken():
    good = dataclasses.replace(START, num_programs=64)
    broken = dataclasses.replace(START, num_programs=32)

    def measure(shape, best):
        return {64: 50.0, 32: float("inf")}.get(shape.num_programs, 100.0)

    assert search(IN_PLACE, [START, broken, good], measure, margin=0.01).shape.num_programs == 64
    assert search(IN_PLACE, [broken, START, good], measure, margin=0.01).shape.num_programs == 64


def test_the_end_of_time_and_of_what_can_be_gained():
    for stop in ({"go_on": lambda: False}, {"enough_us": 100.0}):
        found = search(
            DISPATCH, [START, START], lambda shape, best: 100.0, grids=grids_of(DISPATCH), margin=0.0, **stop
        )
        assert (found.num_measured, found.us) == (1, 100.0)


def test_shapes_that_launch_the_same_programs_are_one():
    tiny = dataclasses.replace(DISPATCH, num_tokens=2, row_bytes=6000)
    large, small = (dataclasses.replace(START, num_programs=p, piece_bytes=b) for p, b in ((4096, 16384), (2, 8192)))
    assert effective(tiny, large) == effective(tiny, small)
    assert effective(tiny, dataclasses.replace(START, route_tokens=32)).route_tokens == 2
    assert effective(DISPATCH, START).num_programs == 1024
    # combine does not route, dispatch does not stage
    assert effective(IN_PLACE, dataclasses.replace(START, route_tokens=1)) == effective(IN_PLACE, START)
    assert effective(DISPATCH, dataclasses.replace(START, stage_warps=1)) == effective(DISPATCH, START)
    assert effective(EXTERNAL, dataclasses.replace(START, stage_warps=1)) != effective(EXTERNAL, START)
    nothing = dataclasses.replace(DISPATCH, num_tokens=0)
    assert effective(nothing, START).num_programs == 1
    # one kernel for all: a program takes whole tokens
    small = dataclasses.replace(DISPATCH, num_tokens=9, kernel_type="IntraNodeLL")
    assert effective(small, dataclasses.replace(START, route_tokens=2)).num_programs == 5
    assert effective(small, dataclasses.replace(START, route_warps=1)) == effective(small, START)


def test_a_step_goes_past_shapes_that_come_to_the_same():
    """100 tokens of 2 pieces: from 200 programs on all is the same, and 1024 of them are no end of the way down."""
    few = dataclasses.replace(IN_PLACE, num_tokens=100)
    found = search(few, [START], lambda shape, best: effective(few, shape).num_programs, margin=0.0)
    assert (found.shape.num_programs, found.us) == (8, 8)


def test_grids_look_where_no_single_step_leads():
    """Two ditches, one for each kernel, with walls around: a valley that only a grid finds, then its neighbourhood."""
    bottom = dataclasses.replace(START, piece_bytes=2048, num_warps=2, stage_piece_bytes=4096, stage_warps=16)

    def us(shape, best):
        moving = (shape.piece_bytes, shape.num_warps) == (2048, 2)
        staging = (shape.stage_piece_bytes, shape.stage_warps) == (4096, 16)
        return 1000.0 - 100 * moving - 100 * staging - math.log2(shape.num_programs)

    assert search(EXTERNAL, [START], us, margin=0.0).us > 900
    found = search(EXTERNAL, [START], us, grids=grids_of(EXTERNAL), margin=0.0)
    best = dataclasses.replace(bottom, num_programs=NO_LIMIT, stage_programs=found.shape.stage_programs)
    assert found.shape == best
    assert found.us == us(found.shape, 0.0) < 800
    assert len(grids_of(DISPATCH)) == len(grids_of(IN_PLACE)) == 1


# ------------------------------------------------------------------------------------------------------------ journal
def test_a_journal_is_gone_on_with(tmp_path):
    path, run = tmp_path / "new" / "j.jsonl", {"device": "cpu", "tokens": (1, 2)}
    first = Journal(path, run)
    first.add("rule", call=[1, "a"], us=3.0)
    first.add("rule", call=[1, "a"], us=2.0)
    with path.open("a") as file:
        file.write('{"kind": "rule", "call": [2')
    again = Journal(path, run)
    assert again.find("rule", call=(1, "a"))["us"] == 2.0
    assert again.find("rule", call=(2, "a")) is None
    again.add("rule", call=[2, "a"], us=1.0)
    assert Journal(path, run).find("rule", call=[2, "a"])["us"] == 1.0
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["run", "rule", "rule", "rule"]


def test_a_journal_that_has_ended_is_started_over(tmp_path):
    journal = Journal(tmp_path / "j.jsonl", {})
    journal.add("rule", us=1)
    journal.add("end")
    assert Journal(tmp_path / "j.jsonl", {}).lines == []
    assert (tmp_path / "j.jsonl").read_text().count("\n") == 1


def test_a_journal_of_another_run_is_refused_unless_started_afresh(tmp_path):
    path = tmp_path / "j.jsonl"
    Journal(path, {"device": "cpu", "ep": 2}).add("rule", us=1)
    with pytest.raises(ArgumentError, match=r"another run \(ep: 2 there, 4 now\)"):
        Journal(path, {"device": "cpu", "ep": 4})
    assert Journal(path, {"device": "cpu", "ep": 4}, fresh=True).lines == []
    assert Journal(path, {"device": "cpu", "ep": 4}).lines == []


@pytest.mark.parametrize("text", ["x\n", '{"kind": "rule"}\n', '{"kind": "run"}\nx\n{"kind": "rule"}\n', "half"])
def test_what_is_no_journal_is_never_overwritten(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"notes.txt:\d: want a line of a tuning journal"):
        Journal(path, {}, fresh=True)
    assert path.read_text() == text
