"""Symmetric memory beside the heap: `PeState.share`."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import local_world
from mori_triton.device.launch import launch
from mori_triton.errors import DriverError, HeapError, KernelFault
from mori_triton.host import state as host_state
from mori_triton.host.drivers import CpuDriver
from mori_triton.host.drivers.base import MemoryKind
from tests.host.worlds import run_world

pytestmark = pytest.mark.cpu

SIZE = 1 << 16


@triton.jit
def store_kernel(bases_ptr, value, offset):
    """One int32 at this offset of every PE's memory in the table."""
    for pe in range(2):
        there = tl.load(bases_ptr + pe).to(tl.pointer_type(tl.int32))
        tl.store(there + offset, value)


def kernels_reach_it(pe: int) -> CpuDriver:
    here = host_state.current()
    memory = here.share(SIZE, MemoryKind.CACHED, "rows")
    assert memory.bases[pe] == memory.base
    assert [region.name for region in memory.regions()] == ["rows of PE 0", "rows of PE 1"]
    assert not here.heap.contains(memory.base)
    table = torch.tensor(memory.bases)
    words = here.driver.tensor(memory.base, (SIZE // 4,), torch.int32)
    assert not words.any()
    here.bootstrap.barrier("zeroed")
    launch(store_kernel, (1,), table, 40 + pe, 8 + pe, num_warps=1)
    here.bootstrap.barrier("stored")
    assert words.nonzero().flatten().tolist() == [8, 9]
    assert words[8:10].tolist() == [40, 41]
    with pytest.raises(KernelFault):
        launch(store_kernel, (1,), table, 1, SIZE // 4, num_warps=1)
    memory.disconnect()
    here.bootstrap.barrier("done")
    here.unshare(memory)
    with pytest.raises(KernelFault):
        launch(store_kernel, (1,), table, 1, 0, num_warps=1)
    # gone with the world
    left = here.share(SIZE, MemoryKind.CACHED, "left").base
    assert left in dict(here.driver.allocations())
    return here.driver


def test_kernels_reach_it_as_long_as_it_is_there() -> None:
    drivers = local_world(2, heap_size="1M").run(kernels_reach_it)
    assert [driver.allocations() for driver in drivers] == [[], []]


def test_stores_to_a_peer_reach_it_in_weak_memory() -> None:
    def program(pe: int) -> list[int]:
        here = host_state.current()
        memory = here.share(SIZE, MemoryKind.CACHED, "rows")
        words = here.driver.tensor(memory.base, (SIZE // 4,), torch.int32)
        here.bootstrap.barrier("zeroed")
        launch(store_kernel, (1,), torch.tensor(memory.bases), 40 + pe, pe, num_warps=1)
        here.bootstrap.barrier("stored")
        seen = words[:2].tolist()
        here.bootstrap.barrier("looked")
        return seen

    # nothing released the stores to the system: a peer sees one or does not
    seen = [local_world(2, heap_size="1M", seed=seed, weak_memory=True).run(program) for seed in range(12)]
    assert {tuple(words) for world in seen for words in world} > {(40, 41)}


def test_all_pes_fail_together_and_keep_nothing() -> None:
    class Failing(CpuDriver):
        blind = False

        def alloc(self, num_bytes, **options):  # type: ignore[no-untyped-def]
            if num_bytes == SIZE and self.here.pe == 1:
                raise DriverError("no memory left")
            return super().alloc(num_bytes, **options)

        def import_handle(self, handle):  # type: ignore[no-untyped-def]
            if self.blind and self.here.pe == 1:
                raise DriverError("no such thing")
            return super().import_handle(handle)

    def program(here):  # type: ignore[no-untyped-def]
        here.driver.here = here
        for num_bytes, blind, text in (
            (SIZE, False, r"the symmetric rows could not be set up \(PE 1: no memory left"),
            (SIZE * 2, True, r"the symmetric rows could not be set up \(PE 1: no such thing"),
            (SIZE * (3 + here.pe), False, r"differ in rows size \(PE 0: 196608; PE 1: 262144"),
        ):
            here.driver.blind = blind
            owned = len(here.driver._owned)
            with pytest.raises(HeapError, match=text):
                here.share(num_bytes, MemoryKind.CACHED, "rows")
            assert len(here.driver._owned) == owned
        here.driver.blind = False
        assert here.share(SIZE * 2, MemoryKind.CACHED, "rows").base

    run_world(2, program, driver=Failing)


def test_what_cannot_be_given_back_keeps_nothing_else() -> None:
    """A device that has failed does not take its memory back; the other parts of the state are closed all the same."""

    class Failing(CpuDriver):
        def free(self, address):  # type: ignore[no-untyped-def]
            super().free(address)
            if address in self.bad:
                raise DriverError(f"free of {address:#x}: the device has failed")

    Failing.bad = []  # type: ignore[attr-defined]
    detached: list[int] = []

    def program(here):  # type: ignore[no-untyped-def]
        here._detach = lambda: detached.append(here.pe)
        memories = [here.share(SIZE, MemoryKind.CACHED, name) for name in ("rows", "words")]
        here.driver.bad = [memories[1].base]
        here.bootstrap.barrier("done")
        with pytest.raises(DriverError, match="the device has failed"):
            here.close()
        assert memories[0].base == 0
        assert here.driver.allocations() == []
        assert here.heap.closed

    run_world(2, program, driver=Failing)
    assert sorted(detached) == [0, 1]
