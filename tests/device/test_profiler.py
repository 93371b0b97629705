"""What a profiler build logs: every operation of every program, under the name it was called by."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import abi, bitcode, emulator
from mori_triton.device import externs, shmem
from mori_triton.device.launch import launch
from mori_triton.host.profile import ProfileLog
from tests.device.pes import Pes

pytestmark = pytest.mark.cpu


@triton.jit(do_not_specialize=["dst", "src", "sig"])
def busy_kernel(ctx, dst, src, sig):
    """Six operations of every program, one of them refused."""
    pid = tl.program_id(0)
    shmem.put(ctx, dst + 64 * pid, src, 48, 1)
    externs.ctx_get_nbi_thread(ctx, src + 1024 + 64 * pid, dst, 16, 1, 0)
    shmem.put(ctx, dst, src, 48, 9)
    shmem.signal_add(ctx, sig, 1, 1)
    shmem.quiet(ctx)
    shmem.wait_ge(ctx, sig, 0, 1, 0)


class Log:
    """A log of PE 0 of `Pes`, laid out by hand."""

    def __init__(self, pes: Pes, capacity: int) -> None:
        self.memory = torch.full((16 + abi.PROFILE_RECORD_SIZE * (capacity + 1),), 0xA5, dtype=torch.uint8)
        self.memory[:16] = torch.frombuffer(bytearray(struct.pack("<QQ", 0, capacity)), dtype=torch.uint8)
        pes.contexts[0][abi.CONTEXT_FIELDS["profile"].offset // 8] = self.memory.data_ptr()

    def allow(self) -> None:
        emulator.allow(emulator.current_device(), self.memory.data_ptr(), self.memory.numel(), "profile")

    def records(self) -> tuple[int, list[tuple[int, ...]]]:
        data = bytes(self.memory.numpy())
        count, capacity = struct.unpack_from("<QQ", data)
        stored = range(min(count, capacity))
        return count, [struct.unpack_from("<QQQIiQ", data, 16 + i * abi.PROFILE_RECORD_SIZE) for i in stored]


def run(arch: str, programs: int, capacity: int, num_warps: int, **build: Any) -> Log:
    pes = Pes(2, arch)
    pes.view(0, 8192, 2, torch.int64)[:] = 0
    log = Log(pes, capacity)
    with pes.current(0) as ctx:
        log.allow()
        library = bitcode.specialize(arch, provider="p2p", **build)
        args = ctx, pes.base(0) + 4096, pes.base(0) + 16384, pes.base(0) + 8192
        launch(busy_kernel, (programs,), *args, num_warps=num_warps, extern_libs={abi.LIBRARY: str(library)})
    return log


@pytest.mark.parametrize(("arch", "num_warps"), [("gfx1201", 4), ("gfx942", 1)])
def test_every_operation_of_every_program_is_logged_once(arch: str, num_warps: int) -> None:
    count, records = run(arch, 3, 64, num_warps, profiler=True).records()
    assert count == 18
    wanted = [
        ("mori_shmem_ctx_put_block", 1, 48),
        ("mori_shmem_ctx_get_nbi_thread", 1, 16),
        ("mori_shmem_ctx_put_block", 9, 48),
        ("mori_shmem_ctx_signal_add", 1, 8),
        ("mori_shmem_ctx_quiet", -1, 0),
        ("mori_shmem_ctx_wait_ge", 1, 0),
    ]
    for program in range(3):
        mine = [record for record in records if record[5] == program]
        assert [(abi.symbol_name(symbol), peer, size) for _, _, size, symbol, peer, _ in mine] == wanted
        times = [time for start, end, *_ in mine for time in (start, end)]
        assert times == sorted(times), "one after another"
        assert times[0] > 0


def test_what_finds_no_room_is_counted_and_stays_out() -> None:
    log = run("gfx1201", 2, 5, 2, profiler=True)
    count, records = log.records()
    assert (count, len(records)) == (12, 5)
    assert bool((log.memory[-abi.PROFILE_RECORD_SIZE :] == 0xA5).all())


def test_other_builds_log_nothing() -> None:
    assert run("gfx1201", 1, 8, 1).records() == (0, [])


def test_the_host_reads_it() -> None:
    class Driver:
        """Memory that is there already."""

        ticks_per_second = 10**8

        def __init__(self, memory: torch.Tensor) -> None:
            self.memory = memory

        def alloc(self, num_bytes: int, kind: object) -> int:
            assert num_bytes <= self.memory.numel()
            return self.memory.data_ptr()

        def host_view(self, address: int, num_bytes: int) -> memoryview:
            return memoryview(self.memory.numpy())

        def synchronize(self) -> None: ...

    log = run("gfx1201", 2, 16, 1, profiler=True)
    before = log.memory[:16].clone()
    found = ProfileLog(Driver(log.memory), pe=0, capacity=16)  # type: ignore[arg-type]
    log.memory[:16] = before
    operations, lost = found.take()
    assert (len(operations), lost) == (12, 0)
    assert {(o.pe, o.program) for o in operations} == {(0, 0), (0, 1)}
    assert all(o.end_us >= o.start_us > 0 for o in operations)
