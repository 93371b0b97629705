"""Helper functions of lifted kernels: objects of their own that kernels share."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mori_triton.emulator import jit

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
HELPERS = """declare i32 @llvm.smax.i32(i32, i32)
declare i32 @llvm.smin.i32(i32, i32)
define internal i32 @largest(i32 %a0, i32 %a1) {
  %t1 = call i32 @llvm.smax.i32(i32 %a0, i32 %a1)
  ret i32 %t1
}
define internal void @put(ptr %a0, i32 %a1) {
  store i32 %a1, ptr %a0, align 4
  ret void
}
define internal void @put_largest(ptr %a0, i32 %a1, i32 %a2) {
  %t1 = call i32 @largest(i32 %a1, i32 %a2)
  call void @put(ptr %a0, i32 %t1)
  ret void
}
"""


def kernel(name: str, constant: int) -> str:
    """`name(out)` writes the larger one of 7 and the constant."""
    call = f"call void @put_largest(ptr %w, i32 7, i32 {constant})"
    return f"{HELPERS}define void @{name}(ptr %w) {{\n  {call}\n  ret void\n}}\n"


def run(name: str) -> int:
    out = np.zeros(1, np.int32)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(jit.address(name))(out.ctypes.data)
    return int(out[0])


def test_helpers_that_call_no_other_are_named_by_their_text() -> None:
    main, helpers = jit.split(kernel("one", 1))
    assert len(helpers) == 2
    assert all(text.count("define ") == 1 and f"@{name}(" in text for name, text in helpers.items())
    # each declares what it calls, and nothing else: its text, and so its name, is that of another kernel's
    assert sorted(text.count("declare ") for text in helpers.values()) == [0, 1]
    assert "define internal void @put_largest(" in main
    assert main.count("define ") == 2
    assert all(main.count(f"@{name}(") == 2 for name in helpers)
    assert jit.split(kernel("two", 2))[1] == helpers
    other = kernel("two", 2).replace("store i32 %a1, ptr %a0, align 4", "store i32 %a1, ptr %a0, align 1")
    assert len({*jit.split(other)[1], *helpers}) == 3


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_kernels_share_helpers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_object = [], jit.compile_object
    monkeypatch.setattr(jit, "compile_object", lambda *args: compiled.append(args) or compile_object(*args))

    def load(name: str, constant: int) -> int:
        compiled.clear()
        jit.load(jit.digest(name), lambda: (kernel(name, constant), {}))
        assert run(name) == max(7, constant)
        return len(compiled)

    assert [load("shares_1", 3), load("shares_2", 9), load("shares_3", -5)] == [3, 1, 1]
    assert len(list(cache.rglob("*.o"))) == 5
    # another cache gets those that this process has already
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", str(cache / "other"))
    assert [load("shares_4", 4), load("shares_5", 8)] == [3, 1]


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_kernel_whose_helper_is_gone_is_built_again(cache: Path, harm: str) -> None:
    name = f"harmed_{harm}"
    program = (
        "from mori_triton.emulator import jit\nfrom tests.emulator.test_jit import kernel, run\n"
        f"jit.load(jit.digest('{name}'), lambda: print('built') or (kernel('{name}', 8), {{}}))\n"
        f"print(run('{name}'))"
    )

    def start() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT, timeout=100
        )
        return done.stdout.split()

    assert start() == ["built", "8"]
    assert start() == ["8"]
    helpers = [jit._path(jit._digest(str(jit.KERNEL_LEVEL), name)) for name in jit.split(kernel(name, 8))[1]]
    whole = [path.read_bytes() for path in helpers]
    if harm == "missing":
        helpers[0].unlink()
    else:
        helpers[0].write_bytes(whole[0][:-1])
    assert start() == ["built", "8"]
    assert [path.read_bytes() for path in helpers] == whole


def test_processes_that_want_the_same_build_it_once(cache: Path) -> None:
    """The second waits for the first, and so finds it."""
    program = (
        "import sys, time\nfrom mori_triton.emulator import jit\nfrom tests.emulator.test_jit import kernel, run\n"
        "def build():\n    print('built', flush=True)\n    sys.stdin.readline()\n    return kernel('at_once', 8), {}\n"
        "print('starts', flush=True)\njit.load(jit.digest('at_once'), build)\nprint(run('at_once'), flush=True)"
    )

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True, cwd=ROOT)
        assert process.stdout is not None
        assert process.stdout.readline() == "starts\n"
        return process

    with start() as first:
        assert first.stdout.readline() == "built\n"
        with start() as second:
            # time to build it itself, were it to do so
            time.sleep(0.5)
            assert first.communicate("\n", timeout=100)[0] == "8\n"
            assert second.communicate("\n", timeout=100)[0] == "8\n"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """It has a copy of the descriptor for as long as it lives."""
    path = tmp_path / "objects" / "some.o"

    def enter() -> None:
        with jit._alone(path):
            pass

    with jit._alone(path):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    again = threading.Thread(target=enter, daemon=True)
    try:
        again.start()
        again.join(5)
        assert not again.is_alive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
