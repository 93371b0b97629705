"""prepare(): compiled and loaded once, right for every value; on the emulated device, and against a stub of a GPU's."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import emulator
from mori_triton.device import launch as launching
from mori_triton.device import prepared as prepared_module
from mori_triton.device import shmem
from mori_triton.device.prepared import PreparedKernel, prepare, recording
from mori_triton.emulator import device as devices
from mori_triton.errors import ArgumentError, BitcodeError, StateError
from tests.device.pes import Pes

pytestmark = pytest.mark.cpu

ALL = ["ctx", "out_ptr", "x_ptr", "more_ptr", "count", "big", "first"]


@triton.jit(do_not_specialize=ALL)
def mix_kernel(
    ctx, out_ptr, x_ptr, count, SCALE: tl.constexpr, big, more_ptr, flag: tl.int1, factor, BLOCK: tl.constexpr
):
    """out[i] = PE, the value of x, of more (0 without), and big, mixed."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    value = tl.load(x_ptr + offs, mask=mask).to(tl.int64) * SCALE + shmem.my_pe(ctx)
    if more_ptr is not None:
        value += tl.load(more_ptr + offs, mask=mask)
    if flag:
        value += big + (factor * 2).to(tl.int64)
    tl.store(out_ptr + offs, value, mask=mask)


@triton.jit
def special_kernel(out_ptr, count):
    tl.store(out_ptr, count)


@triton.jit(do_not_specialize=["out_ptr", "first"])
def ids_kernel(out_ptr, first):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(out_ptr + at, first + 100 * x + 10 * y + z)


@triton.jit(do_not_specialize=["out_ptr", "first"])
def slow_kernel(out_ptr, first):
    tl.store(out_ptr, first)


def mixed(pes: Pes, pe: int, prepared: PreparedKernel, count: int, big: int, more: torch.Tensor | None) -> None:
    """Launch and compare with torch."""
    x = torch.randint(-50, 50, (max(count, 1) + 3,), dtype=torch.int32)
    # an odd address: nothing may be known of it
    x = x[1:]
    out = torch.full((count + 8,), -1, dtype=torch.int64)
    prepared(((count + 15) // 16,), pes.contexts[pe].data_ptr(), out, x, count, big, more, True, 1.5)
    wanted = x[:count].long() * 3 + pe + big + 3 + (0 if more is None else more[:count].long())
    assert torch.equal(out[:count], wanted)
    assert bool((out[count:] == -1).all())


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
@pytest.mark.parametrize("with_more", [False, True])
def test_one_kernel_serves_every_value(arch: str, with_more: bool) -> None:
    pes = Pes(2, arch)
    more = torch.arange(100, dtype=torch.int32) if with_more else None
    with pes.current(1) as ctx:
        one = torch.zeros(1, dtype=torch.int32)
        example = ctx, one.long(), one, 1, 3, 1 << 40, more, False, 0.0
        prepared = prepare(mix_kernel, *example, BLOCK=16, num_warps=2)
        assert prepared.arguments == ("ctx", "out_ptr", "x_ptr", "count", "big", "more_ptr", "flag", "factor")
        assert prepared.name == "mix_kernel"
        cache = mix_kernel.device_caches[prepared.device][0]
        known, modules = len(cache), len(devices.device(prepared.device).modules)
        for count, big in ((0, 5), (1, 1), (16, 1 << 40), (37, -3), (64, 2**62)):
            mixed(pes, 1, prepared, count, big, more)
        assert (len(cache), len(devices.device(prepared.device).modules)) == (known, modules)


@pytest.mark.parametrize("grid", [(5,), (2, 3), (2, 3, 2), (0,), (2, 0, 1)])
def test_grids(grid: tuple[int, ...]) -> None:
    pes = Pes(1, "gfx1201")
    with pes.current(0):
        x, y, z = (*grid, 1, 1)[:3]
        out = torch.full((40,), -1, dtype=torch.int32)
        prepare(ids_kernel, out, 0)(grid, out, 7)
        wanted = [7 + 100 * a + 10 * b + c for c in range(z) for b in range(y) for a in range(x)]
        assert out.tolist() == wanted + [-1] * (40 - len(wanted))


def test_a_kernel_that_would_be_specialised_is_refused() -> None:
    pes = Pes(1, "gfx1201")
    with pes.current(0):
        out = torch.zeros(1, dtype=torch.int32)
        with pytest.raises(ArgumentError, match="special_kernel: out_ptr: want it in do_not_specialize"):
            prepare(special_kernel, out, 3)
        with pytest.raises(ArgumentError, match="ids_kernel: arguments: missing a required argument: 'first'"):
            prepare(ids_kernel, out)
        with pytest.raises(ArgumentError, match=r"want a @triton\.jit function, got function"):
            prepare(lambda out: None, out)


def test_arguments_that_do_not_fit_are_named_and_nothing_runs() -> None:
    pes = Pes(1, "gfx1201")
    with pes.current(0) as ctx:
        one = torch.zeros(1, dtype=torch.int32)
        out = torch.full((8,), -1, dtype=torch.int64)
        prepared = prepare(mix_kernel, ctx, out, one, 1, 3, 1 << 40, None, True, 0.0, BLOCK=16)
        good = [ctx, out, one, 1, 5, None, True, 0.0]
        for at, value, message in (
            (1, None, r"out_ptr: want a tensor or an address, got None"),
            (1, -8, r"out_ptr: want a tensor or an address, got -8"),
            (3, 2**31, r"count: want a number that fits i32, got 2147483648"),
            (4, 2**63, r"big: want a number that fits i64"),
            (4, 1.5, r"big: want a number that fits i64, got 1.5"),
            (5, one, r"more_ptr: want None, as it was prepared"),
            (7, "x", r"factor: want a number that fits fp32, got 'x'"),
        ):
            bad = list(good)
            bad[at] = value
            with pytest.raises(ArgumentError, match=f"mix_kernel: {message}"):
                prepared((1,), *bad)
        for bad in (good[:-1], [*good, 1]):
            with pytest.raises(ArgumentError, match=f"mix_kernel: arguments: want ctx, out_ptr.*, got {len(bad)}"):
                prepared((1,), *bad)
        assert out.tolist() == [-1] * 8
        prepared((1,), *good)
        assert out.tolist() == [5, *[-1] * 7]


def test_it_belongs_to_its_device() -> None:
    pes = Pes(2, "gfx1201")
    prepared: list[Any] = [None, None]
    both = threading.Barrier(2)

    def program(pe: int, ctx: torch.Tensor) -> list[int]:
        out = torch.full((2,), -1, dtype=torch.int32)
        prepared[pe] = prepare(ids_kernel, out, 0)
        both.wait(30)
        with pytest.raises(StateError, match=r"ids_kernel was prepared on device \d+, and device \d+ is current"):
            prepared[1 - pe]((2,), out, 1)
        prepared[pe]((1,), out, 2)
        return out.tolist()

    assert pes.run(program) == [[2, -1], [2, -1]]


def test_launch_hooks_of_triton_are_called() -> None:
    pes, seen = Pes(1, "gfx1201"), []

    def note(what: str) -> Any:
        return lambda about: seen.append((what, about.get()["name"], about.get()["stream"]))

    enter, leave = note("enter"), note("exit")
    runtime = triton.knobs.runtime
    with pes.current(0):
        out = torch.zeros(1, dtype=torch.int32)
        prepared = prepare(ids_kernel, out, 0)
        prepared((1,), out, 1)
        runtime.launch_enter_hook.add(enter)
        runtime.launch_exit_hook.add(leave)
        try:
            prepared((1,), out, 2)
        finally:
            runtime.launch_enter_hook.remove(enter)
            runtime.launch_exit_hook.remove(leave)
        prepared((1,), out, 3)
    assert seen == [("enter", "ids_kernel", 0), ("exit", "ids_kernel", 0)]


def test_what_is_left_unresolved_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pes = Pes(1, "gfx1201")
    with pes.current(0):
        monkeypatch.setattr(launching, "unresolved", lambda asm: ["mori_shmem_gone"])
        monkeypatch.setattr(launching, "_linked", set())
        with pytest.raises(BitcodeError, match="ids_kernel: unresolved mori_shmem_gone"):
            prepare(ids_kernel, torch.zeros(1, dtype=torch.int32), 1)


def test_threads_that_prepare_and_launch_at_once_load_one_module() -> None:
    pes, failures = Pes(1, "gfx1201"), []
    outs = [torch.full((1,), -1, dtype=torch.int64) for _ in range(6)]
    start = threading.Barrier(len(outs))

    def work(index: int, number: int, ctx: torch.Tensor) -> None:
        emulator.set_device(number)
        try:
            one = torch.ones(1, dtype=torch.int32)
            start.wait(30)
            example = ctx, outs[index], one, 1, 7, index, None, True, 0.0
            if index % 2:
                launching.launch(mix_kernel, (1,), *example, BLOCK=32)
            else:
                prepare(mix_kernel, *example, BLOCK=32)((1,), *example[:4], *example[5:])
        except BaseException as error:
            failures.append(error)

    with pes.current(0) as ctx:
        number = emulator.current_device()
        modules = devices.device(number).modules
        before = len(modules)
        threads = [threading.Thread(target=work, args=(i, number, ctx)) for i in range(len(outs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert [int(out) for out in outs] == [7 + i for i in range(len(outs))]
        assert len(modules) == before + 1


def test_nobody_waits_for_anothers_loading() -> None:
    """Loading waits for running kernels, and one of those may wait for a kernel that another thread is to launch."""
    pes, failures = Pes(1, "gfx1201"), []
    loading, go_on = threading.Event(), threading.Event()
    outs = torch.full((3,), -1, dtype=torch.int32)

    def slow(module: Any, function: Any, name: str, group: Any, key: Any) -> None:
        if threading.current_thread().name == "slow":
            loading.set()
            assert go_on.wait(10), "somebody waited for this kernel"

    def load_slowly(number: int) -> None:
        emulator.set_device(number)
        try:
            prepare(slow_kernel, outs, 0, num_warps=1)((1,), outs[2:], 5)
        except BaseException as error:
            failures.append(error)

    runtime = triton.knobs.runtime
    with pes.current(0):
        number = emulator.current_device()
        prepared = prepare(ids_kernel, outs, 0, num_warps=2)
        thread = threading.Thread(target=load_slowly, args=(number,), name="slow")
        runtime.kernel_load_end_hook.add(slow)
        try:
            thread.start()
            assert loading.wait(30)
            # loaded before, and new to everyone
            launching.launch(ids_kernel, (1,), outs, 3, num_warps=2)
            prepare(ids_kernel, outs, 0, num_warps=4)((1,), outs[1:], 4)
            prepared((1,), outs, 6)
            assert outs.tolist() == [6, 4, -1]
        finally:
            go_on.set()
            thread.join()
            runtime.kernel_load_end_hook.remove(slow)
    assert not failures
    assert outs.tolist() == [6, 4, 5]


class StubDriver:
    """A GPU's driver as far as a prepared kernel looks at it."""

    stream = 77

    def get_current_device(self) -> int:
        return 3

    def get_current_stream(self, device: int) -> int:
        assert device == 3
        return self.stream

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 3)


class GpuTensor:
    """Stands for a tensor on a GPU."""

    is_cpu = False

    @staticmethod
    def data_ptr() -> int:
        return 0xDEAD0000


def test_what_a_gpus_launcher_is_called_with() -> None:
    calls: list[tuple[Any, ...]] = []
    names = ["ctx", "x_ptr", "BLOCK", "more_ptr", "count"]
    types = dict(zip(names, ["*i64", "*fp32", "constexpr", "constexpr", "i32"], strict=True))
    compiled = SimpleNamespace(
        src=SimpleNamespace(signature=types), name="stub", function=11, packed_metadata=(4, 1, 0),
        run=lambda *args: calls.append(args), launch_metadata=lambda *args: pytest.fail("nobody listens"),
    )  # fmt: skip
    prepared = PreparedKernel(compiled, StubDriver(), names, {"BLOCK": 64})
    prepared((6, 2), 0x1000, GpuTensor(), None, 9)
    prepared((6,), 0x1000, 0x2000, None, 9, stream=5)
    assert calls == [
        (6, 2, 1, 77, 11, (4, 1, 0), None, None, None, 0x1000, 0xDEAD0000, 64, None, 9),
        (6, 1, 1, 5, 11, (4, 1, 0), None, None, None, 0x1000, 0x2000, 64, None, 9),
    ]
    with pytest.raises(ArgumentError, match="stub: x_ptr: want a tensor on the GPU, got one on the CPU"):
        prepared((1,), 0x1000, torch.zeros(3), None, 9)
    assert len(calls) == 2


def test_recording_compiles_and_launches_nothing() -> None:
    """On this thread, until it ends; what is asked for is checked as ever."""
    with recording() as asked:
        prepared = prepare(ids_kernel, torch.zeros(1), 1, num_warps=2)
        prepared((1,), 0, 0)
        with pytest.raises(ArgumentError, match="want it in do_not_specialize"):
            prepare(special_kernel, torch.zeros(1), 1)
        thread = threading.Thread(target=lambda: others.append(getattr(prepared_module._thread, "asked", None)))
        others: list[object] = []
        thread.start()
        thread.join()
    assert [(one.kernel, list(one.values), one.options) for one in asked] == [
        (ids_kernel, ["out_ptr", "first"], {"num_warps": 2})
    ]
    assert others == [None]
    active = emulator.activate("gfx1201")
    try:
        out = torch.zeros(1, dtype=torch.int64)
        prepare(ids_kernel, out, 7)((1,), out, 7)
    finally:
        active.deactivate()
    assert out.item() == 7
