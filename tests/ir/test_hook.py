"""`install_hook`: which PE's context a module gets and when, with PEs of one process that share one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton import abi, shmem
from mori_triton.emulator import device as devices
from mori_triton.errors import StateError
from mori_triton.host import state
from mori_triton.ir import triton as mori_device
from mori_triton.ir.triton import get_extern_libs, install_hook, runtime
from mori_triton.world import gpu, gpus
from tests import fake_gpus
from tests.ir.programs import check, user_program

pytestmark = pytest.mark.cpu


class OneDevice(fake_gpus.FakeGpus):
    """A fake GPU whose streams are of one device, as a real one's: nobody but the hook tells modules their PE."""

    def take_stream(self, index: int, driver: Any) -> Any:
        stream = super().take_stream(index, driver)
        if len(self.streams) > 1:
            devices.release([stream.device])
            stream.device = self.streams[0].device
        return stream

    def attach(self, here: Any) -> Callable[[], None]:
        device = fake_gpus._thread.stream.device
        for region in here.heap.regions():
            if region.pe == here.pe:
                device.allow(region.address, region.num_bytes, region.name)

        def undo() -> None:
            for region in here.heap.regions():
                if region.pe == here.pe:
                    device.disallow(region.address)

        return undo


class _Driver:
    """Of a GPU: module 5's variable is at address 80."""

    name, device_index = "cuda", 0

    def __init__(self) -> None:
        self.written: list[tuple[int, bytes]] = []

    def module_global(self, module: int, name: str) -> tuple[int, int]:
        assert name == abi.CONTEXT_SYMBOL
        return 16 * module, 8

    def write(self, address: int, data: bytes) -> None:
        self.written.append((address, data))

    def synchronize(self) -> None:
        self.written.append((0, b"idle"))


class _Heap:
    ctx_address = 0x1234


class _State:
    """What of a `PeState` the hook looks at."""

    def __init__(self, pe: int, *, owns_bootstrap: bool) -> None:
        self.pe, self.owns_bootstrap, self.closed = pe, owns_bootstrap, False
        self.driver, self.heap = _Driver(), _Heap()
        self.extensions: dict[str, Any] = {}
        self.on_close: list[Callable[[], None]] = []


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No hook of ours at the start, nothing known of earlier tests, and worlds on "cuda" share one fake device."""
    chain = triton.knobs.HookChain(reversed=True)
    monkeypatch.setattr(triton.knobs.runtime, "kernel_load_end_hook", chain)
    monkeypatch.setattr(state, "on_open", [])
    for name in ("_modules", "_early", "_slots"):
        monkeypatch.setattr(runtime, name, {})
    monkeypatch.setattr(fake_gpus.FakeGpus, "made", [], raising=False)
    monkeypatch.setattr(gpu, "Gpus", OneDevice)
    monkeypatch.setattr(gpus, "check_available", lambda device: None)
    yield
    if hasattr(triton.knobs.runtime, "kernel_unload_hook"):
        triton.knobs.runtime.kernel_unload_hook.remove(runtime._on_unload)


def world(n: int) -> Any:
    return mori.local_world(n, device="cuda", heap_size="1M", timeout_s=20.0)


@triton.jit
def who_kernel(out_ptr):
    tl.store(out_ptr, mori_device.my_pe())
    tl.store(out_ptr + 1, mori_device.n_pes())


def who(libraries: dict[str, str] | None = None) -> list[int]:
    out = torch.full((2,), -9, dtype=torch.int32)
    who_kernel[(1,)](out, extern_libs=libraries or get_extern_libs())
    state.current().driver.synchronize()
    return out.tolist()


def in_turn(pe: int, call: Callable[[], Any]) -> Any:
    return mori.current_world().preload(call)


def test_pes_that_share_a_device_know_who_they_are() -> None:
    install_hook()

    def program(pe: int) -> tuple[list[int], str]:
        return in_turn(pe, who), get_extern_libs()[abi.LIBRARY]

    results = world(3).run(program)
    assert [found for found, _ in results] == [[0, 3], [1, 3], [2, 3]]
    assert len({path for _, path in results}) == 3
    # worlds that come later have the same copies, so their kernels are compiled
    assert world(3).run(program) == results


def test_without_the_hook_everything_is_refused() -> None:
    assert world(2).run(lambda pe: in_turn(pe, who)) == [[-1, 0]] * 2


def test_the_users_program_on_one_device() -> None:
    user = user_program()

    def load(launches: Any) -> None:
        def turn() -> None:
            for _, kernel, _, args, meta in launches:
                kernel.warmup(*args, grid=(1,), extern_libs=get_extern_libs(), **meta)._init_handles()

        mori.current_world().preload(turn)

    def program(pe: int) -> Any:
        first = user.run(numel=300, block=256, before=load)
        shmem.shmem_finalize()
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, pe, 3, bytes(128))
        # nothing is loaded any more: the modules were told the new heap
        return first, user.run(numel=300, block=256)

    results = world(3).run(program)
    check([first for first, _ in results])
    check([second for _, second in results])


def test_the_context_is_taken_back_at_finalize() -> None:
    install_hook()

    def program(pe: int) -> tuple[list[int], list[int], list[int]]:
        seen = in_turn(pe, who)
        modules = runtime._modules[runtime._place(state.current())]

        def values() -> list[int]:
            return [int(module.symbol(abi.CONTEXT_SYMBOL, np.uint64)[0]) for module in modules]

        during, address = values(), state.current().heap.ctx_address
        assert during == [address]
        shmem.shmem_finalize()
        after = values()
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, pe, 2, bytes(128))
        assert values() == [state.current().heap.ctx_address]
        return seen, after, who()

    assert world(2).run(program) == [([pe, 2], [0], [pe, 2]) for pe in range(2)]


def test_modules_loaded_before_the_hook_of_a_state_are_told_when_it_opens() -> None:
    # a process that loads a kernel, and initialises shmem afterwards
    install_hook()
    runtime._early[5] = None
    here: Any = _State(3, owns_bootstrap=True)
    for tell in state.on_open:
        tell(here)
        tell(here)
    assert here.driver.written == [(80, (0x1234).to_bytes(8, "little"))]
    # one that is unloaded is not written to
    runtime._modules[runtime._place(here)][7] = None
    runtime._on_unload(5, None, "", {}, "")
    for callback in here.on_close:
        callback()
    assert here.driver.written[1:] == [(0, b"idle"), (112, bytes(8))]


def test_a_state_that_was_open_before_the_hook_is_told_too() -> None:
    runtime._modules["cuda", 0, None] = {5: None}
    here: Any = _State(0, owns_bootstrap=True)
    try:
        state.bind(here)
        here.pid = os.getpid()
        install_hook()
        install_hook()
    finally:
        state.unbind()
    assert here.driver.written == [(80, (0x1234).to_bytes(8, "little"))]


def test_the_library_of_another_pe_is_refused() -> None:
    install_hook()
    shared: dict[int, dict[str, str]] = {}

    def program(pe: int) -> None:
        shared[pe] = get_extern_libs()
        state.current().meet("all have asked")
        if pe == 1:
            who(shared[0])

    with pytest.raises(StateError, match=r"loaded by PE 1, linked with copy 0 .*, want copy 1 .*get_extern_libs\(\)"):
        world(2).run(program)
    path = mori_device.get_extern_libs("gfx1201")
    with pytest.raises(StateError, match="linked with the device library itself, want copy 0"):
        world(1).run(lambda pe: who(path))


def test_worlds_at_the_same_time_have_different_copies() -> None:
    def pe_of_a_world(pe: int) -> Any:
        return _State(pe, owns_bootstrap=False)

    first, second = ([pe_of_a_world(pe) for pe in range(2)] for _ in range(2))
    slots = [runtime._slot(here) for here in (first[1], second[1], second[0], first[0])]
    assert slots == [1, 2, 0, 3]
    assert [runtime._slot(here) for here in (first[1], second[1], second[0], first[0])] == slots
    # what a closed one had is free again
    first[1].closed = True
    assert runtime._slot(pe_of_a_world(1)) == 1
    # a process that is one PE has its modules for itself
    assert runtime._slot(_State(1, owns_bootstrap=True)) is None


@pytest.mark.parametrize("kind", ["none", "function", "chain"])
def test_foreign_hooks_stay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def foreign(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        loaded.append(name)

    present = {"none": None, "function": foreign, "chain": triton.knobs.HookChain()}[kind]
    if kind == "chain":
        present.add(foreign)
    monkeypatch.setattr(triton.knobs.runtime, "kernel_load_end_hook", present)
    install_hook()
    install_hook()
    calls = triton.knobs.runtime.kernel_load_end_hook.calls
    assert calls == ([] if kind == "none" else [foreign]) + [runtime._on_load]
    assert state.on_open == [runtime._adopt]
    assert world(2).run(lambda pe: in_turn(pe, who)) == [[0, 2], [1, 2]]
    assert loaded == ([] if kind == "none" else ["who_kernel"] * 2)


def test_kernels_without_moris_names_are_left_alone() -> None:
    install_hook()

    def program(pe: int) -> list[int]:
        out = torch.zeros(1, dtype=torch.int32)
        in_turn(pe, lambda: plain_kernel[(1,)](out))
        state.current().driver.synchronize()
        return out.tolist()

    assert world(2).run(program) == [[1]] * 2
    assert not any(runtime._modules.values())


@triton.jit
def plain_kernel(out_ptr):
    tl.store(out_ptr, 1)
