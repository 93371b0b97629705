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


def explore(num_pes: int, rounds: int, *, combine_waits: bool = True) -> set[str]:
    """Every interleaving of the protocol's steps, as docs/protocol.md has them; what went wrong in any.

    A PE's round is: ask each PE for a slot, signal, wait and take the count (dispatch); signal, wait (combine).
    """
    steps = num_pes + 4
    zeros = ((0,) * num_pes,) * num_pes
    # by PE: step, slots asked for; by reader and writer: dispatch and combine words
    begin = ((0,) * num_pes, (0,) * num_pes, zeros, zeros)
    seen, todo, wrong = {begin}, [begin], set()

    def signalled(table: Any, writer: int, epoch: int) -> Any:
        return tuple((*row[:writer], epoch, *row[writer + 1 :]) for row in table)

    while todo:
        at, slots, dispatched, combined = todo.pop()
        moved = False
        for pe in range(num_pes):
            index, step = divmod(at[pe], steps)
            epoch, d, c, s = index + 1, dispatched, combined, list(slots)
            if index == rounds:
                continue
            if step < num_pes:
                s[step] += 1
            elif step == num_pes:
                d = signalled(d, pe, epoch)
            elif step == num_pes + 1:
                if min(d[pe]) < epoch:
                    continue
                # each peer's one row of this round and none of the next
                if s[pe] != num_pes:
                    wrong.add(f"count {s[pe]}")
                if max(d[pe]) > epoch:
                    wrong.add("a dispatch signal was overwritten before it was seen")
                s[pe] = 0
            elif step == num_pes + 2:
                c = signalled(c, pe, epoch)
            elif combine_waits:
                if min(c[pe]) < epoch:
                    continue
                if max(c[pe]) > epoch + 1:
                    wrong.add("two signals ahead")
            moved = True
            after = ((*at[:pe], at[pe] + 1, *at[pe + 1 :]), tuple(s), d, c)
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if not moved and any(a != rounds * steps for a in at):
            wrong.add("nobody can go on")
    return wrong


@pytest.mark.parametrize(("num_pes", "rounds"), [(1, 3), (2, 4), (3, 2)])
def test_a14_no_interleaving_loses_or_mistakes_a_signal(num_pes: int, rounds: int) -> None:
    assert explore(num_pes, rounds) == set()


def test_a14_the_model_sees_a_missing_wait() -> None:
    assert {w.split()[0] for w in explore(2, 2, combine_waits=False)} >= {"count", "a"}
