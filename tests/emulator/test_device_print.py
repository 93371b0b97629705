"""`tl.device_print` and `tl.device_assert`: the lines that Triton's documents promise, on the host's streams.

The format is that of Triton's own tests (python/test/unit/language/test_subprocess.py):

    pid (<x>, <y>, <z>) idx (<i>, <j>, ...) <prefix>(operand <n>) <element>
"""

import io
import re
import sys
from collections import Counter
from contextlib import redirect_stdout

import pytest
import torch

from mori_triton import local_world
from mori_triton.emulator.device import ARCHS as WIDTHS
from mori_triton.errors import KernelFault

from . import print_kernels as kernels
from .test_triton_kernels import ARCHS, on
from .test_user_kernels import first

pytestmark = pytest.mark.cpu
__all__ = ["on"]

N = 128


def warps(arch, n=N):
    """As many as have one element a lane: lanes that hold a copy print it too."""
    return n // WIDTHS[arch][0]


def counted(capsys):
    """The lines printed so far, with their numbers; nothing may have gone to stderr."""
    out, err = capsys.readouterr()
    assert err == ""
    assert out.endswith("\n")
    return Counter(out.splitlines())


def element(i, dtype):
    return f"{i}.000000" if dtype.is_floating_point else f"{i}"


TYPES = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
TYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("on", "dtype"),
    [
        pytest.param(arch, dtype, marks=[] if (dtype, arch) == (torch.float32, "gfx942") else pytest.mark.slow)
        for arch in ARCHS
        for dtype in TYPES
    ],
    indirect=["on"],
)
def test_a_block_of_each_type(on, dtype, capsys):
    kernels.block[(1,)](torch.arange(N).to(dtype), N=N, num_warps=warps(on))
    assert counted(capsys) == Counter(f"pid (0, 0, 0) idx ({i:3}) x: {element(i, dtype)}" for i in range(N))


@first("gfx1250")
@pytest.mark.parametrize("dtype", [torch.int16, *(pytest.param(d, marks=pytest.mark.slow) for d in TYPES[3:5])])
def test_negative_numbers(on, dtype, capsys):
    kernels.block[(1,)](-torch.arange(N).to(dtype), N=N, num_warps=warps(on))
    assert counted(capsys) == Counter(f"pid (0, 0, 0) idx ({i:3}) x: {-i}" for i in range(N))


@first("gfx1201")
@pytest.mark.parametrize("dtype", [torch.uint32, pytest.param(torch.uint64, marks=pytest.mark.slow)])
def test_unsigned_numbers(on, dtype, capsys):
    start = 1 << 31 if dtype == torch.uint32 else (1 << 63) - 1
    x = torch.tensor([start + i for i in range(N)], dtype=dtype)
    kernels.block[(1,)](x, N=N, num_warps=warps(on))
    assert counted(capsys) == Counter(f"pid (0, 0, 0) idx ({i:3}) x: {start + i}" for i in range(N))


@first("gfx1201")
def test_floats_look_as_in_c(on, capsys):
    """A NaN with its sign, as glibc prints it; fp32 without a rounding."""
    special = [float("inf"), float("-inf"), float("nan"), -0.0, 1e-7, 0.1, -3.0000005, 3.4e38]
    x = torch.tensor(special * (N // 8), dtype=torch.float32)
    x[10] = torch.tensor(-0x00400000, dtype=torch.int32).view(torch.float32)
    kernels.block[(1,)](x, N=N, num_warps=warps(on))
    want = ["inf", "-inf", "nan", "-0.000000", "0.000000", "0.100000", "-3.000000", f"{float(x[7]):.6f}"] * (N // 8)
    want[10] = "-nan"
    assert counted(capsys) == Counter(f"pid (0, 0, 0) idx ({i:3}) x: {text}" for i, text in enumerate(want))


@first("gfx950")
@pytest.mark.parametrize(
    ("dtype", "digits"), [(torch.int16, 4), *(pytest.param(d, n, marks=pytest.mark.slow) for d, n in [
        (torch.int32, 8), (torch.int64, 16),
    ])],
)  # fmt: skip
def test_hexadecimal(on, dtype, digits, capsys):
    kernels.hexadecimal[(1,)](torch.arange(N).to(dtype), N=N, num_warps=warps(on))
    assert counted(capsys) == Counter(f"pid (0, 0, 0) idx ({i:3}) x: 0x{i:0{digits}x}" for i in range(N))


@first("gfx942")
def test_every_thread_prints_a_scalar(on, capsys):
    kernels.scalar[(2, 1, 3)](torch.tensor(-42, dtype=torch.int32), num_warps=warps(on))
    assert counted(capsys) == {f"pid ({x}, 0, {z}) idx () x: -42": N for x in range(2) for z in range(3)}


@first("gfx1250")
def test_a_large_block(on, capsys):
    """Each thread prints many elements, of two dimensions."""
    kernels.large[(1, 2)](M=4, N=N, num_warps=warps(on))
    lines = (f"pid (0, {y}, 0) idx ({i}, {j:3}) x: 1" for y in range(2) for i in range(4) for j in range(N))
    assert counted(capsys) == Counter(lines)


@first("gfx950")
def test_a_matrix(on, capsys):
    rows, cols = warps(on), WIDTHS[on][0]
    kernels.matrix[(1,)](torch.arange(N, dtype=torch.int32).reshape(rows, cols), M=rows, N=cols, num_warps=rows)
    lines = (f"pid (0, 0, 0) idx ({i}, {j:2}): {i * cols + j}" for i in range(rows) for j in range(cols))
    assert counted(capsys) == Counter(lines)


@first("gfx1201")
def test_several_operands(on, capsys):
    kernels.operands[(1,)](torch.arange(N, dtype=torch.int32), N=N, num_warps=warps(on))
    lines = [f"pid (0, 0, 0) idx ({i:3}): (operand 0) {i}" for i in range(N)]
    assert counted(capsys) == Counter([*lines, *(f"pid (0, 0, 0) idx ({i:3}): (operand 1) 1" for i in range(N))])


@first("gfx942", "gfx1201")
def test_operands_of_different_kinds(on, capsys):
    x, y = torch.arange(N) / 4, torch.zeros(N, dtype=torch.int16)
    kernels.mixed[(1,)](x, y, -(2**40), N=N, num_warps=warps(on))
    prefix, start = "of a prefix that is longer than one packet of seven words: ", y.data_ptr()
    lines = [f"pid (0, 0, 0) idx ({i:3}) {prefix}(operand 0) {i / 4:.6f}" for i in range(N)]
    lines += [f"pid (0, 0, 0) idx ({i:3}) {prefix}(operand 1) {start + 2 * i:#x}" for i in range(N)]
    lines += [f"pid (0, 0, 0) idx () {prefix}(operand 2) {-(2**40)}"] * N
    assert counted(capsys) == Counter(lines)


@first("gfx1250")
def test_a_prefix_alone(on, capsys):
    kernels.no_operand[(1,)](num_warps=warps(on))
    assert counted(capsys) == {"pid (0, 0, 0) no arg": N}


@first("gfx1201")
def test_lines_of_a_wave_are_in_order_and_time_passes_between(on, capsys):
    """A wave prints its lanes' lines in order, and goes on when the host has printed them."""
    n = WIDTHS[on][0]
    x = torch.arange(n, dtype=torch.int32)
    kernels.twice[(1,)](x, N=n, num_warps=1)
    lines = [f"pid (0, 0, 0) idx ({i:2}) before: {i}" for i in range(n)]
    lines += [f"pid (0, 0, 0) idx ({i:2}) after: {2 * i}" for i in range(n)]
    assert capsys.readouterr().out.splitlines() == lines
    assert torch.equal(x, 2 * torch.arange(n, dtype=torch.int32))


@first("gfx1201", "gfx942")
def test_more_workgroups_than_run_at_a_time(on, capfd):
    """Also where the file descriptors are captured; only some programs print."""
    n = 2 * WIDTHS[on][0]
    kernels.branch[(300,)](torch.arange(n, dtype=torch.int32), N=n, num_warps=2)
    width = len(f"{n - 1}")
    lines = (f"pid ({p}, 0, 0) idx ({i:{width}}) even: {i + p}" for p in range(0, 300, 2) for i in range(n))
    assert Counter(capfd.readouterr().out.splitlines()) == Counter(lines)


class Written(io.StringIO):
    """Keeps what each call of write() was given."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def write(self, text):
        self.texts.append(text)
        return super().write(text)


WEAK = {"weak_memory": True}
WORLDS = [("gfx1201", {}), ("gfx1201", {"seed": 1}), ("gfx942", {"seed": 2, **WEAK})]
WORLDS += [("gfx1250", {}), ("gfx942", {"seed": 3}), *((arch, {"seed": 4, **WEAK}) for arch in ARCHS)]
SLOW_WORLDS = [pytest.param(*world, marks=pytest.mark.slow) for world in WORLDS[3:]]


@pytest.mark.parametrize(("arch", "how"), [*WORLDS[:3], *SLOW_WORLDS])
def test_lines_of_several_pes_stay_whole(arch, how):
    """PEs that print at the same time: each line is written at once, in weak memory too."""

    def program(pe):
        x = torch.full((3, 64), pe + 5, dtype=torch.int32)
        kernels.twice[(3,)](x, N=64, num_warps=warps(arch, 64))
        assert (x == 2 * pe + 10).all()

    def run():
        with redirect_stdout(Written()) as out:
            local_world(2, device="cpu", arch=arch, **how).run(program)
        return out.texts

    texts = run()
    if how:
        assert texts == run()
    values = [f"{when}: {times * (pe + 5)}" for pe in range(2) for when, times in (("before", 1), ("after", 2))]
    lines = (f"pid ({p}, 0, 0) idx ({i:2}) {value}\n" for p in range(3) for i in range(64) for value in values)
    assert Counter(texts) == Counter(lines)


class Broken(io.StringIO):
    """A stream that an interrupt ends."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


@pytest.mark.parametrize("on", ["gfx1201"], indirect=True)
@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_an_error_of_the_stream_ends_the_kernel(on, error, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Broken(error))
    x = torch.arange(N, dtype=torch.int32)
    with pytest.raises(type(error)) as caught:
        kernels.twice[(1,)](x, N=N, num_warps=warps(on))
    assert caught.value is error
    monkeypatch.undo()
    assert torch.equal(x, torch.arange(N, dtype=torch.int32))
    kernels.twice[(1,)](x, N=N, num_warps=warps(on))


@pytest.mark.parametrize("on", ["gfx942"], indirect=True)
def test_what_was_printed_before_a_fault_is_there(on, capsys):
    with pytest.raises(KernelFault, match="outside every registered range"):
        kernels.fault_between[(1,)](torch.zeros(64, dtype=torch.int32), 2**24, N=64, num_warps=1)
    assert counted(capsys) == Counter(f"pid (0, 0, 0) idx ({i:2}) before: {i}" for i in range(64))


def failed_assertions(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    found = Counter(err.splitlines())
    assert len(found) == 1
    ((text, times),) = found.items()
    assert re.fullmatch(r"device assertion failed: 'negative', in \S+ at \S*print_kernels\.py:\d+", text), text
    return times


@first("gfx1201")
def test_assertions(on, capsys):
    """Each lane that finds the condition false prints, then the kernel ends with a fault that says so too."""
    x = torch.arange(2 * N, dtype=torch.int32)
    kernels.assertion[(2,)](x, N=N, num_warps=warps(on), debug=True)
    assert torch.equal(x, torch.arange(2 * N, dtype=torch.int32) + 7)
    assert capsys.readouterr() == ("", "")
    x[5:N:32] = -1
    with pytest.raises(
        KernelFault, match=r"^device assertion failed: 'negative', in .*print_kernels\.py:\d+: s_trap: "
    ):
        kernels.assertion[(2,)](x, N=N, num_warps=warps(on), debug=True)
    assert failed_assertions(capsys) == 4
    # as on a GPU, without debug Triton leaves them out
    kernels.assertion[(1,)](x, N=N, num_warps=warps(on))
    assert int(x[5]) == 6


@first("gfx942")
def test_masked_assertions(on, capsys):
    x = torch.where(torch.arange(N) < 100, 1, -1).int()
    kernels.masked_assertion[(1,)](x, 100, N=N, num_warps=warps(on), debug=True)
    assert (x == 7).all()
    x[99:] = -1
    with pytest.raises(KernelFault, match="negative"):
        kernels.masked_assertion[(1,)](x, 100, N=N, num_warps=warps(on), debug=True)
    assert failed_assertions(capsys) == 1
