"""Signal words between rounds (bug cases A5, A14): what reset leaves, and that no signal is lost, early or mistaken."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mori_triton import local_world, ops
from mori_triton.errors import PeerTimeout
from mori_triton.host import state as host_state
from mori_triton.ops import plans
from mori_triton.ops.kernels.finish import COMBINE_EPOCH, DISPATCH_EPOCH
from tests.ops.cases import Case, check_combine, combine_round, control, dispatch_round, round_of, run_case, start

pytestmark = pytest.mark.cpu

SIGNALS = ("dispatch_signals", "combine_signals")


def words(op: ops.EpDispatchCombineOp, *names: str) -> list[int]:
    """Every word of these regions."""
    found: list[int] = []
    for name in names:
        found += op._buffers.region(name).tolist()
    return found


@pytest.mark.parametrize("tokens", ["zero", "full"])
def test_a5_reset_is_over_everywhere_before_anyone_dispatches(tokens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PE 0 (idle where tokens are "zero") gives up on a late PE 1 and resets at once; PE 1 signals into that, and is
    slow to clear its own words.
    """
    case, gave_up, lock = Case(tokens=tokens, rounds=1), threading.Event(), threading.Lock()
    made: dict[int, ops.EpDispatchCombineOp] = {}
    found: list[list[int]] = []
    real = plans.Step.launch

    def looking(step: plans.Step, given: Any) -> None:
        with lock:
            # the first launch of the first PE after reset
            if gave_up.is_set() and len(made) == 2 and not found:
                found.extend(
                    words(op, *SIGNALS, "recv_slots", "total_recv") + control(op, DISPATCH_EPOCH, COMBINE_EPOCH)
                    for op in made.values()
                )
        real(step, given)

    # compiled before a second counts
    local_world(2, heap_size="16M").run(run_case, case)
    monkeypatch.setattr(plans.Step, "launch", looking)

    def program(pe: int) -> dict[str, Any]:
        op, mine = start(case, pe), round_of(case, pe, 0)
        clear = op._clear
        op._clear = lambda: (time.sleep(0.1 * pe), clear())  # type: ignore[method-assign]
        if pe == 0:
            with pytest.raises(PeerTimeout):
                dispatch_round(op, case, mine)
            gave_up.set()
        else:
            assert gave_up.wait(60)
            time.sleep(0.1)
            dispatch_round(op, case, mine)
        made[pe] = op
        op.reset()
        return combine_round(op, case, pe, dispatch_round(op, case, mine))

    results = local_world(2, heap_size="16M", timeout_s=1.0).run(program)
    for pe, got in enumerate(results):
        check_combine(case, pe, got, round_of(case, pe, 0))
    assert found == [[0] * 8] * 2


@pytest.mark.parametrize("num_pes", [2, 3, 4])
def test_a14_no_tokens_is_not_the_idle_value(num_pes: int) -> None:
    case = Case(num_pes=num_pes, routing="nowhere", tokens="zero")

    def program(pe: int) -> list[list[int]]:
        op, seen = start(case, pe), []
        for index in range(3):
            seen.append(words(op, *SIGNALS))
            host_state.current().bootstrap.barrier(f"looked at {index}")
            got = dispatch_round(op, case, round_of(case, pe, index))
            assert got["total"] == 0
            combine_round(op, case, pe, got)
            host_state.current().bootstrap.barrier(f"round {index} is over")
        return seen

    for seen in local_world(num_pes, heap_size="16M").run(program):
        assert seen == [[0] * 2 * num_pes, [1] * 2 * num_pes, [2] * 2 * num_pes]


def explore(num_pes: int, calls: str) -> set[str]:
    """Every interleaving of the protocol's steps, as docs/protocol.md has them; what went wrong in any.

    `calls` of every PE, in order: D, a dispatch: write to each PE and ask it for a slot, signal, wait and take the
    count, use the rows; C, a combine: put rows, signal, wait, read each PE's; S, a meeting: signal, wait.
    """
    num_steps = {"D": num_pes + 3, "C": num_pes + 3, "S": 2}
    zeros = (0,) * num_pes
    # by PE: (call, step), slots asked for, call that its rows for peers are of; by reader and writer: call that what
    # came is of, and the signal words of each kind
    begin = (((0, 0),) * num_pes, zeros, zeros, (zeros,) * num_pes, *((zeros,) * num_pes,) * 3)
    seen, todo, wrong = {begin}, [begin], set()

    def put(table: Any, reader: int, writer: int, value: int) -> Any:
        row = table[reader]
        return (*table[:reader], (*row[:writer], value, *row[writer + 1 :]), *table[reader + 1 :])

    while todo:
        at, slots, rows, came, *words = todo.pop()
        moved = False
        for pe, (index, step) in enumerate(at):
            if index == len(calls):
                continue
            kind, number = calls[index], index + 1
            s, r, c, w = list(slots), list(rows), came, list(words)
            of_kind = "DCS".index(kind)
            epoch = calls[: index + 1].count(kind)
            signal = {"D": num_pes, "C": 1, "S": 0}[kind]
            if step == signal:
                for reader in range(num_pes):
                    w[of_kind] = put(w[of_kind], reader, pe, epoch)
            elif step == signal + 1:
                if min(w[of_kind][pe]) < epoch:
                    continue
                if max(w[of_kind][pe]) > epoch + 1:
                    wrong.add("two signals ahead")
                if kind == "D":
                    # each peer's one row of this call and none of the next
                    if s[pe] != num_pes:
                        wrong.add(f"count {s[pe]}")
                    s[pe] = 0
            elif kind == "D" and step < num_pes:
                s[step] += 1
                c = put(c, step, pe, number)
            elif kind == "D" and set(c[pe]) != {number}:
                wrong.add("rows of another dispatch")
            elif kind == "C" and step == 0:
                r[pe] = number
            elif kind == "C" and r[step - 3] != number:
                wrong.add("rows of another combine")
            moved = True
            after = (index + 1, 0) if step + 1 == num_steps[kind] else (index, step + 1)
            state = ((*at[:pe], after, *at[pe + 1 :]), tuple(s), tuple(r), c, *w)
            if state not in seen:
                seen.add(state)
                todo.append(state)
        if not moved and any(index != len(calls) for index, _ in at):
            wrong.add("nobody can go on")
    return wrong


@pytest.mark.parametrize(
    ("num_pes", "calls"),
    [(1, "DCDC"), (2, "DCDCDC"), (3, "DCD"), (2, "DSDSD"), (2, "DCSCDSDC"), (2, "DSDCSCSC"), (3, "DSD"), (2, "SDC")],
)
def test_a14_no_interleaving_loses_or_mistakes_a_signal(num_pes: int, calls: str) -> None:
    assert explore(num_pes, calls) == set()


@pytest.mark.parametrize(
    ("calls", "fault"), [("DDD", "count"), ("DDD", "rows of another d"), ("DCCC", "rows of another c")]
)
def test_a14_the_model_sees_a_missing_meeting(calls: str, fault: str) -> None:
    assert any(what.startswith(fault) for what in explore(2, calls))
