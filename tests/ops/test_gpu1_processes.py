"""Two processes, each a PE, on one GPU: they take turns there, so these are few and small rounds.

The same runs with two emulated GPUs, so that a fault of the test itself shows without a GPU.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops.hashed import Problem
from tests.ops.on_both import DETERMINISTIC, HIDDEN, LL, TOP_K, on_both, small

PROBLEMS = (
    Problem(2, HIDDEN, TOP_K, torch.bfloat16, max_tokens=40, tokens="zero", scales=(3, 4)),
    Problem(2, HIDDEN, TOP_K, torch.bfloat16, max_tokens=40, config=LL),
    Problem(2, HIDDEN, TOP_K, torch.float8_e4m3fn, max_tokens=40, routing="padded", config=DETERMINISTIC),
)


def pe_main(pe: int, device: str, unique_id: bytes, work: Callable[[int], Any], results: Any) -> None:
    """A PE's process."""
    try:
        from mori_triton import emulator, shmem

        if device == "cpu":
            emulator.activate("gfx1201")
        else:
            torch.cuda.set_device(0)
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, pe, 2, unique_id)
        outcome = work(pe)
        shmem.shmem_finalize()
        results.send(outcome)
    except BaseException:
        results.send(traceback.format_exc())
        raise


def run_processes(device: str, work: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from mori_triton import shmem

    monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", "32M")
    monkeypatch.setenv("MORI_TRITON_DEVICE", device)
    context = multiprocessing.get_context("spawn")
    unique_id = shmem.shmem_get_unique_id()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=pe_main, args=(pe, device, unique_id, work, pipes[pe][1]), daemon=True)
        for pe in range(2)
    ]
    for process in processes:
        process.start()
    outcomes = []
    try:
        for pe, (reader, _) in enumerate(pipes):
            assert reader.poll(120), f"PE {pe} says nothing"
            outcomes.append(reader.recv())
            assert not isinstance(outcomes[-1], str), outcomes[-1]
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    assert [p.exitcode for p in processes] == [0, 0]
    return outcomes


def rounds(pe: int) -> int:
    """Two rounds of each problem; the number of wrong elements."""
    from mori_triton import ops
    from mori_triton.host import state as host_state
    from tests.ops import hashed

    wrong, device = 0, host_state.current().driver.name
    for given in PROBLEMS:
        problem = small(given, device)
        op = ops.EpDispatchCombineOp(hashed.op_config(problem, pe))
        hashed.poison(op)
        for index in range(2):
            mine = hashed.Round(problem, pe, index, op.device)
            wrong += int(hashed.one_round(op, problem, mine, deterministic=op.config.deterministic))
        op.close()
    return wrong


def slices(pe: int) -> list[float]:
    """Four pieces of one allocation, filled with values of their own: the first and last entries that this PE sees at
    the other one.
    """
    from mori_triton.host import state

    here = state.current()
    pieces = [here.heap.tensor((1 << 18,), torch.float32) for _ in range(4)]
    for index, piece in enumerate(pieces):
        piece.fill_(10.0 * pe + index + 1)
    here.driver.synchronize()
    here.bootstrap.barrier("filled")
    seen = [here.heap.peer_tensor(piece, 1 - pe)[end].item() for piece in pieces for end in (0, -1)]
    here.bootstrap.barrier("looked")
    return seen


@on_both
def test_two_processes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_processes(device, rounds, monkeypatch) == [0, 0]


@on_both
def test_k8_a_slice_of_an_allocation_is_seen_where_it_is(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run_processes(device, slices, monkeypatch)
    assert first == [11, 11, 12, 12, 13, 13, 14, 14]
    assert second == [1, 1, 2, 2, 3, 3, 4, 4]
