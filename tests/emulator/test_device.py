"""Devices and modules: numbers, allowed memory, variables."""

import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_triton.emulator import device, launch, module
from mori_triton.errors import ArgumentError, StateError

pytestmark = pytest.mark.cpu


def test_devices_are_not_shared_and_keep_their_architecture():
    a, b = device.acquire("gfx1201", 3), device.acquire("gfx1201", 3)
    assert not {d.number for d in a} & {d.number for d in b}
    assert device.default_device("gfx1201") not in a + b
    device.release(a)
    assert device.acquire("gfx1201", 1)[0] in a
    device.release(b)
    for d in a:
        assert device.device(d.number) is d
        assert d.arch == "gfx1201"
    device.release(a)


def test_ranges_are_named_and_taken_back():
    (d,) = device.acquire("gfx942", 1)
    d.allow(0x1000, 0x100, "first")
    d.allow(0x3000, 0x100, "second")
    assert device.nearest(d.ranges, 0x1104).startswith("nearest: 4 bytes past the end of first")
    assert device.nearest(d.ranges, 0x2FF0).startswith("nearest: 16 bytes before second")
    assert device.nearest(d.ranges, 0x10FC).startswith("the access starts 4 bytes before the end of first")
    assert device.nearest(d.ranges, 0x100).startswith("a null pointer + 256 bytes: remote_ptr gives null for")
    assert device.nearest([], 5) == "nothing is allocated"
    d.disallow(0x1000)
    with pytest.raises(StateError):
        d.disallow(0x1000)
    with pytest.raises(ArgumentError, match="num_bytes: want more than 0, got 0"):
        d.allow(0x1000, 0, "empty")
    device.release([d])
    assert d.ranges == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 20)), max_size=8))
def test_merged_ranges_cover_the_same_bytes(spans):
    ranges = [(low, low + size, "x") for low, size in spans]
    merged = launch.merge(ranges)
    assert merged == sorted(merged)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(merged))
    covered = {byte for low, high in merged for byte in range(low, high)}
    assert covered == {byte for low, high, _ in ranges for byte in range(low, high)}


def test_module_variables_belong_to_one_module():
    text = """
\t.amdgcn_target "amdgcn-amd-amdhsa--gfx1201"
\t.text
k:
\ts_endpgm
\t.amdhsa_kernel k
\t.end_amdhsa_kernel
\t.type\tfirst,@object
\t.data
first:
\t.quad\t7
\t.size\tfirst, 8
\t.type\tsecond,@object
second:
\t.quad\tfirst+4
\t.size\tsecond, 8
"""
    code = module.load_code(text)
    a, b = module.Module(code), module.Module(code)
    a.write("first", (99).to_bytes(8, "little"))
    a.write("no such variable", bytes(8))
    assert a.symbol("first", np.uint64)[0] == 99
    assert b.symbol("first", np.uint64)[0] == 7
    for m in (a, b):
        address, num_bytes = m.symbol_address("first")
        assert num_bytes >= 8
        assert ctypes.c_uint64.from_address(address).value == m.symbol("first", np.uint64)[0]
        assert m.symbol("second", np.uint64)[0] == address + 4
    with pytest.raises(KeyError):
        a.symbol_address("third")
