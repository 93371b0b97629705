"""The Triton driver of the emulated device: activation, hooks, errors, the object cache, the oldest Triton."""

import gc
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import bitcode, emulator, local_world
from mori_triton.emulator import device as devices
from mori_triton.emulator import jit, module
from mori_triton.errors import ArgumentError, KernelFault, StateError, UnsupportedInstruction

from . import kernels

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def gfx1201():
    active = emulator.activate("gfx1201")
    yield active
    active.deactivate()


def run_vadd(n=300):
    x, y, out = torch.randn(n), torch.randn(n), torch.full((n,), float("nan"))
    kernels.vadd[(triton.cdiv(n, 256),)](x, y, out, n, BLOCK=256)
    assert torch.equal(out, x + y)


def scan():
    """A kernel that no other test runs with these numbers."""
    x, out = torch.arange(64).int(), torch.zeros(66, dtype=torch.int32)
    kernels.scan_sum_max[(1,)](x, out, N=64, num_warps=2)
    assert torch.equal(out[:64], x.cumsum(0).int())


def python(code, **environment):
    """Run a script in a new interpreter; returns the process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    script = f"import warnings; warnings.simplefilter('ignore')\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)


# --------------------------------------------------------------------------------------------------- activation
def test_deactivate_puts_back_what_was_there():
    runtime = triton.knobs.runtime
    before, compiler = triton.runtime.driver._active, triton.compiler.compile
    chain, mine = runtime.kernel_load_start_hook, lambda *args: None
    chain.add(mine)
    try:
        hooks = list(chain.calls)
        first = emulator.activate("gfx1201")
        second = emulator.activate("gfx942")
        assert mine in runtime.kernel_load_start_hook.calls
        assert triton.runtime.driver.active.get_current_target().arch == "gfx942"
        second.deactivate()
        assert triton.runtime.driver.active.get_current_target().arch == "gfx1201"
        run_vadd()
        first.deactivate()
        assert triton.runtime.driver._active is before
        assert triton.compiler.compile is compiler
        assert runtime.kernel_load_start_hook is chain
        assert chain.calls == hooks
    finally:
        chain.remove(mine)
    with pytest.raises(StateError, match="no activate"):
        first.deactivate()


def test_somebody_elses_driver_is_left_alone():
    class Other:
        pass

    other, before = Other(), triton.runtime.driver._active
    active = emulator.activate("gfx1201")
    triton.runtime.driver.set_active(other)
    active.deactivate()
    assert triton.runtime.driver._active is other
    triton.runtime.driver._active = before


def test_kernels_that_die_after_deactivate_do_not_complain(monkeypatch):
    """Triton asks the driver that is active then to unload what ours has loaded."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    for _ in range(2):

        @triton.jit
        def short_lived(out):
            tl.store(out, 1)

        for _ in range(2):
            active, out = emulator.activate("gfx1201"), torch.zeros(1)
            short_lived[(1,)](out)
            device = devices.device(emulator.current_device())
            assert [m.code.name for m in device.modules] == ["short_lived"]
            active.deactivate()
            assert device.modules == []
            assert out == 1
        del short_lived
        gc.collect()
    assert not unraisable


def test_device_numbers_are_not_those_of_real_gpus(gfx1201):
    assert emulator.current_device() >= 4096
    assert triton.runtime.driver.active.get_current_device() == emulator.current_device()
    triton.runtime.driver.active.set_current_device(emulator.current_device())
    emulator.set_device(None)
    assert triton.runtime.driver.active.get_active_torch_device() == torch.device("cpu")
    assert triton.runtime.driver.active.get_device_interface() is torch.cpu


def test_a_plain_function_as_hook_is_chained_not_lost(gfx1201, monkeypatch):
    seen = []
    gfx1201.deactivate()
    monkeypatch.setattr(triton.knobs.runtime, "kernel_load_start_hook", lambda *args: seen.append(args[2]))
    emulator.activate("gfx1201")
    kernels.grid_ids[(1,)](torch.zeros(1, dtype=torch.int32), num_warps=8)
    assert seen == ["grid_ids"]


def test_launch_hooks_are_called(gfx1201):
    calls, runtime = [], triton.knobs.runtime
    enter, leave = (lambda meta: calls.append(("enter", meta.get()["name"]))), (lambda meta: calls.append("exit"))
    runtime.launch_enter_hook.add(enter)
    runtime.launch_exit_hook.add(leave)
    try:
        run_vadd()
    finally:
        runtime.launch_enter_hook.remove(enter)
        runtime.launch_exit_hook.remove(leave)
    assert calls == [("enter", "vadd"), "exit"]


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ArgumentError, match=r"arch: want gfx942 or .*, got 'gfx90a'"):
        emulator.activate("gfx90a")


def test_a_thread_without_a_device_says_what_to_do():
    from mori_triton.emulator.driver import driver

    driver().hold()
    try:
        with pytest.raises(StateError, match=r"emulator.activate"):
            emulator.current_device()
    finally:
        driver().release()


def test_devices_are_per_thread(gfx1201):
    pair, seen = devices.acquire("gfx942", 2), {}

    def work(device):
        emulator.set_device(device.number)
        run_vadd()
        seen[device.number] = triton.runtime.driver.active.get_current_target().arch

    threads = [threading.Thread(target=work, args=(device,)) for device in pair]
    for thread in threads:
        thread.start()
    run_vadd()
    for thread in threads:
        thread.join()
    devices.release(pair)
    assert set(seen.values()) == {"gfx942"}
    assert triton.runtime.driver.active.get_current_target().arch == "gfx1201"
    with pytest.raises(ArgumentError, match=r"device: want the number of an emulated device \(4096 to "):
        emulator.set_device(9999)


def test_many_threads_may_compile_and_launch_at_once(gfx1201):
    @triton.jit
    def scale(x, out, n, FACTOR: tl.constexpr):
        i = tl.arange(0, 64)
        tl.store(out + i, tl.load(x + i, mask=i < n) * FACTOR, mask=i < n)

    errors, pair = [], devices.acquire("gfx1201", 6)

    def work(device, factor):
        try:
            emulator.set_device(device.number)
            x, out = torch.randn(64), torch.full((64,), float("nan"))
            for f in (2, factor):
                scale[(1,)](x, out, 64, FACTOR=f)
                assert torch.equal(out, x * f)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(device, 3 + i % 2)) for i, device in enumerate(pair)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    devices.release(pair)
    assert not errors


def test_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for start in (emulator.activate, lambda: local_world(2).run(print)):
        with pytest.raises(StateError, match=r"TRITON_INTERPRET=1: .*local_world\(device='cpu'\)"):
            start()


def test_binaries_without_text_are_refused(gfx1201, tmp_path, monkeypatch):
    @triton.jit
    def textless(out):
        tl.store(out, 1)

    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(StateError, match=r"text of textless was not stored.*unset TRITON_STORE_BINARY_ONLY"):
        textless[(1,)](torch.zeros(1, dtype=torch.int32))


def test_a_text_that_was_written_again_is_loaded_again(gfx1201, tmp_path):
    x, y, out = torch.randn(256), torch.randn(256), torch.empty(256)
    compiled = kernels.vadd.warmup(x, y, out, 256, BLOCK=256, grid=(1,))
    text, path, utils = compiled.asm["amdgcn"], tmp_path / "vadd.amdgcn", gfx1201.utils
    found = []
    for text_now in (text, text.replace("add_f32", "sub_f32"), text):
        path.write_text(text_now)
        utils.on_load(None, None, "vadd", {"vadd.amdgcn": str(path)}, "hash")
        module = utils.load_binary("vadd", b"", 0, gfx1201.get_current_device())[0]
        found.append(module.code.text)
        utils.unload_module(module)
    assert found[0] == found[2] == text
    assert "sub_f32" in found[1]


# --------------------------------------------------------------------------------------------------- bad arguments
def test_tensors_of_another_device_are_refused(gfx1201):
    x = torch.empty(300, device="meta")
    with pytest.raises((ArgumentError, RuntimeError, ValueError), match=r"CPU|meta|cpu"):
        kernels.vadd[(1,)](x, x, x, 300, BLOCK=256)


def test_out_of_bounds_names_the_access_and_the_nearest_memory(gfx1201):
    x, y, out = torch.randn(1024), torch.randn(1000), torch.empty(1024)
    with pytest.raises(KernelFault) as caught:
        kernels.vadd[(4,)](x, y, out, 1024, BLOCK=256)
    text = str(caught.value)
    assert "global access outside every registered range" in text
    assert "vadd of device" in text
    assert "workgroup 3, wave" in text
    assert "line " in text
    assert "load_b" in text
    assert "past the end of argument y" in text
    # the device is usable afterwards
    run_vadd()


def test_memory_has_to_be_allowed(gfx1201):
    target = torch.zeros(4, dtype=torch.int32)

    @triton.jit
    def poke(address, out):
        tl.store(address.to(tl.pointer_type(tl.int32)), 5)
        tl.store(out, 1)

    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KernelFault, match="global access outside"):
        poke[(1,)](target.data_ptr(), out, num_warps=1)
    number = emulator.current_device()
    emulator.allow(number, target.data_ptr(), 16, "a heap")
    poke[(1,)](target.data_ptr(), out, num_warps=1)
    assert target.tolist() == [5, 0, 0, 0]
    with pytest.raises(KernelFault, match="nearest: 0 bytes past the end of a heap"):
        poke[(1,)](target.data_ptr() + 16, out, num_warps=1)
    emulator.disallow(number, target.data_ptr())
    with pytest.raises(KernelFault, match="global access outside"):
        poke[(1,)](target.data_ptr(), out, num_warps=1)
    with pytest.raises(StateError, match="no memory was allowed"):
        emulator.disallow(number, target.data_ptr())


# --------------------------------------------------------------------------------------------------- object cache
TEXT = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx1201"
	.text
tiny:
	s_nop {number}
	{instruction}
	s_endpgm
	.amdhsa_kernel tiny
	.end_amdhsa_kernel
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty object cache; yields a function that counts how often the lifter runs while loading a text."""
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", str(tmp_path))
    lifted = []
    original = module._lift
    monkeypatch.setattr(module, "_lift", lambda *args: lifted.append(1) or original(*args))

    def load(text):
        module._codes.clear()
        # an object may be linked once only in a process: what is asked for is whether it would be built
        monkeypatch.setattr(jit, "_link", lambda *codes: None)
        monkeypatch.setattr(jit, "address", lambda name: 1)
        lifted.clear()
        module.load_code(text)
        return len(lifted)

    load.files = lambda: sorted(tmp_path.rglob("*.o"))
    return load


def test_objects_are_kept_and_never_stale(cache, monkeypatch):
    text = TEXT.format(number=0, instruction="s_nop 0")
    assert cache(text) == 1
    assert cache(text) == 0
    assert cache(TEXT.format(number=1, instruction="s_nop 0")) == 1
    changes = {"KERNEL_LEVEL": 1, "_lifter": lambda: "other sources", "_host": lambda: "another CPU"}
    for name, value in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(jit, name, value)
            assert cache(text) == 1
    assert cache(text) == 0


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:60], lambda b: b"", lambda b: b[:-5] + b"xxxxx"])
def test_a_damaged_object_is_built_again(cache, damage):
    text = TEXT.format(number=2, instruction="s_nop 0")
    assert cache(text) == 1
    (path,) = cache.files()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert cache(text) == 1
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_time_only(cache, monkeypatch):
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", "/proc/nowhere")
    assert cache(TEXT.format(number=3, instruction="s_nop 0")) == 1


def test_an_unknown_instruction_is_named_with_its_line():
    with pytest.raises(UnsupportedInstruction, match=r"line 6: `v_frobnicate_b32 v0, v1`"):
        module.load_code(TEXT.format(number=4, instruction="v_frobnicate_b32 v0, v1"))


def test_processes_share_the_object_cache(gfx1201, tmp_path, monkeypatch):
    # the emulator's own functions are not what this is about
    for name in ("emulator_memory.bc", "emulator_scheduler.bc"):
        key = jit._digest(bitcode.host_file(name).read_bytes(), str(jit.OWN_LEVEL))
        (tmp_path / "objects" / key[:2]).mkdir(parents=True)
        kept = jit.env.cache_dir() / "objects" / key[:2] / f"{key}.o"
        if kept.exists():
            shutil.copy(kept, tmp_path / "objects" / key[:2])
    code = "from tests.emulator import test_driver as t\nt.emulator.activate(); t.scan()"
    done = python(code, MORI_TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    # this process finds the other's object and lifts nothing
    lifted, original = [], module._lift
    monkeypatch.setattr(module, "_lift", lambda *args: lifted.append(1) or original(*args))
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", str(tmp_path))
    scan()
    assert not lifted
