"""Launches: argument block, scratch, local memory, and what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_triton.emulator import launch
from mori_triton.errors import ArgumentError
from tests.emulator.snippets import ADD_ONE, POINTER, kernel

pytestmark = pytest.mark.cpu


def test_arguments_have_to_fit():
    with pytest.raises(ArgumentError, match="arguments of k: want 1, got 2"):
        launch.Launch(kernel(ADD_ONE, args=[POINTER]), (1, 1, 1), [0, 0])
    with pytest.raises(ArgumentError, match="argument 0: want a CPU tensor, a number or None, got str"):
        launch.Launch(kernel(ADD_ONE, args=[POINTER]), (1, 1, 1), ["x"])


VALUES = {
    "i1": (st.booleans(), 1, int),
    "i8": (st.integers(-128, 127), 1, None),
    "i16": (st.integers(-(2**15), 2**15 - 1), 2, None),
    "i32": (st.integers(-(2**31), 2**31 - 1), 4, None),
    "u32": (st.integers(0, 2**32 - 1), 4, None),
    "i64": (st.integers(-(2**63), 2**63 - 1), 8, None),
    "u64": (st.integers(0, 2**64 - 1), 8, None),
    "fp16": (st.floats(), 2, np.float16),
    "bf16": (st.floats(width=32), 2, None),
    "fp32": (st.floats(), 4, np.float32),
    "fp64": (st.floats(), 8, np.float64),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=5), st.data())
def test_arguments_are_laid_out_as_the_code_says(types, data):
    """The argument block against numpy and torch, at the offsets of the code's metadata."""

    values = [data.draw(VALUES[kind][0]) for kind in types]
    k = kernel("\ts_endpgm", args=[(VALUES[kind][1], "by_value") for kind in types])
    x = launch.Launch(k, (1, 1, 1), values, types=tuple(types))
    for (offset, size, _), kind, value in zip(k.code.args, types, values, strict=True):
        got = x.kernarg[offset : offset + size].tobytes()
        if kind == "bf16":
            want = torch.tensor(value, dtype=torch.float32).bfloat16().view(torch.int16).numpy().tobytes()
            if math.isnan(value):
                want = got if np.frombuffer(got, np.uint16)[0] & 0x7FFF > 0x7F80 else want
        elif VALUES[kind][2] in (np.float16, np.float32, np.float64):
            with np.errstate(over="ignore"):
                want = VALUES[kind][2](value).tobytes()
            if math.isnan(value):
                got, want = np.isnan(np.frombuffer(got, VALUES[kind][2])), [True]
        else:
            want = int(value).to_bytes(size, "little", signed=value < 0)
        assert got == want


def test_numbers_of_unknown_type_go_by_size():
    k = kernel("\ts_endpgm", args=[(4, "by_value"), (8, "by_value"), (2, "by_value"), (8, "global_buffer")])
    x = launch.Launch(k, (1, 1, 1), [1.5, -2.0, np.float32(0.5), None])
    assert (
        x.kernarg[:18].tobytes()
        == np.float32(1.5).tobytes() + bytes(4) + np.float64(-2).tobytes() + np.float16(0.5).tobytes()
    )


def test_scratch_that_triton_asks_for():
    """Two more pointers than arguments: Triton's global and profile scratch, per workgroup."""
    k = kernel("\ts_endpgm", args=[POINTER] * 3)
    x = launch.Launch(k, (3, 1, 1), [0], scratch=(256, 0))
    address, profile = x.kernarg[8:24].view(np.uint64)
    assert address % 16 == 0
    assert profile == 0
    assert (int(address), int(address) + 3 * 256, "Triton's scratch") in x.named_ranges


@pytest.mark.parametrize(
    ("arch", "grid", "num_warps", "message"),
    [
        ("gfx1201", (1, 1, 1), 33, "num_warps: want 1 to 32 on gfx1201, got 33"),
        ("gfx942", (1, 1, 1), 17, "num_warps: want 1 to 16 on gfx942, got 17"),
        # both numbers share a register: one too large would be taken for another workgroup
        ("gfx1201", (1, 65536, 1), 1, r"grid\[1\]: want 0 to 65535 on gfx1201, got 65536"),
        ("gfx1250", (1, 1, 65536), 1, r"grid\[2\]: want 0 to 65535 on gfx1250, got 65536"),
        ("gfx942", (-1, 1, 1), 1, r"grid\[0\]: want 0 to 2147483647 on gfx942, got -1"),
    ],
)
def test_what_no_gpu_would_launch_is_refused(arch, grid, num_warps, message):
    k = kernel("\ts_endpgm", arch=arch)
    with pytest.raises(ArgumentError, match=message):
        launch.Launch(k, grid, [], num_warps=num_warps)


def test_static_and_dynamic_local_memory_add_up():
    for static, shared, want in ((0, 0, 0), (8, 0, 8), (0, 100, 100), (8, 100, 116), (16, 64, 80)):
        k = kernel("\ts_endpgm", lds=static)
        assert launch.Launch(k, (1, 1, 1), [], shared=shared).kind.lds_bytes == want
