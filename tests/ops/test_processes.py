"""The same with one process per PE: heaps in shared memory, every process its own emulated GPU."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from tests.ops.cases import Case, check_case, run_case
from tests.ops.test_rdna4 import EP2

pytestmark = pytest.mark.cpu

# how long a PE waits for others that compile, and the test for a PE: the first ends first, as it says more
TURN_S, PE_S = 60, 120


def in_turn(turn: Any, function: Callable[..., Any], limit_s: float) -> Callable[..., Any]:
    """The function, called by one process at a time; `turn` is their lock."""

    def call(*args: Any, **named: Any) -> Any:
        # one that died in its turn keeps it
        if not turn.acquire(timeout=limit_s):
            raise TimeoutError(f"another PE compiles for more than {limit_s} s, or died as it did")
        try:
            return function(*args, **named)
        finally:
            turn.release()

    return call


def pe_main(pe: int, num_pes: int, unique_id: bytes, work: list[Case], results: Any, late_s: float, turn: Any) -> None:
    """A PE's process, which takes its time to finalize when it is the last PE."""
    try:
        import triton

        from mori_triton import emulator, shmem

        # all need the same kernels at the same time: who comes second finds them in Triton's cache
        triton.JITFunction._do_compile = in_turn(turn, triton.JITFunction._do_compile, TURN_S)
        emulator.activate("gfx1201")
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, pe, num_pes, unique_id)
        outcome = [run_case(pe, case) for case in work]
        if pe == num_pes - 1:
            time.sleep(late_s)
        shmem.shmem_finalize()
        results.send(outcome)
    except BaseException:
        results.send(traceback.format_exc())
        raise


def run_processes(num_pes: int, work: list[Case], monkeypatch: pytest.MonkeyPatch, late_s: float = 0.0) -> None:
    from mori_triton import shmem

    monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", "16M")
    context = multiprocessing.get_context("spawn")
    unique_id = shmem.shmem_get_unique_id()
    pipes, turn = [context.Pipe(duplex=False) for _ in range(num_pes)], context.Lock()
    processes = [
        context.Process(target=pe_main, args=(pe, num_pes, unique_id, work, pipes[pe][1], late_s, turn), daemon=True)
        for pe in range(num_pes)
    ]
    for process in processes:
        process.start()
    try:
        outcomes = []
        for pe, (reader, _) in enumerate(pipes):
            assert reader.poll(PE_S), f"PE {pe} says nothing"
            outcomes.append(reader.recv())
            assert not isinstance(outcomes[-1], str), outcomes[-1]
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    assert [p.exitcode for p in processes] == [0] * num_pes
    for index, case in enumerate(work):
        check_case(case, [outcome[index] for outcome in outcomes])


@pytest.mark.parametrize("num_pes", [3])
def test_one_process_per_pe(num_pes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work = [
        Case(num_pes=num_pes, hidden=24, top_k=3, scales=(5, 4)),
        Case(num_pes=num_pes, hidden=2880, top_k=8, tokens="zero", routing="out_of_range", dtype="float16"),
        Case(num_pes=num_pes, num_ops=2, routing="duplicates", weights=False),
    ]
    run_processes(num_pes, work, monkeypatch)


def test_d6_processes_end_well_when_one_finalizes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody unmaps what a peer may still read, however far apart they come to the end."""
    run_processes(2, [Case(num_pes=2, rounds=2), dataclasses.replace(EP2, rounds=2)], monkeypatch, late_s=0.3)


def die_in_turn(turn: Any) -> None:
    in_turn(turn, os._exit, 10)(3)


def test_the_turn_of_a_pe_that_died_ends_the_others() -> None:
    context = multiprocessing.get_context("spawn")
    turn = context.Lock()
    assert in_turn(turn, divmod, 10)(7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        in_turn(turn, divmod, 10)(7, 0)
    process = context.Process(target=die_in_turn, args=(turn,), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 3
    with pytest.raises(TimeoutError, match="another PE compiles for more than"):
        in_turn(turn, divmod, 0.1)(7, 2)
