"""The same with one process per PE: heaps in shared memory, every process its own emulated GPU."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import time
import traceback
from typing import Any

import pytest

from tests.ops.cases import Case, check_case, run_case
from tests.ops.test_rdna4 import EP2

pytestmark = pytest.mark.cpu


def pe_main(pe: int, num_pes: int, unique_id: bytes, work: list[Case], results: Any, late_s: float, turn: Any) -> None:
    """A PE's process, which takes its time to finalize when it is the last PE."""
    try:
        import triton

        from mori_triton import emulator, shmem

        compile_one = triton.JITFunction._do_compile

        def compile_in_turn(*args: Any, **named: Any) -> Any:
            # all need the same kernels at the same time: who comes second finds them in Triton's cache
            with turn:
                return compile_one(*args, **named)

        triton.JITFunction._do_compile = compile_in_turn
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
            assert reader.poll(120), f"PE {pe} says nothing"
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
