"""Kernels that take a `TensorDescriptor` as argument, against numpy; gfx1250's descriptors bit for bit."""

import numpy as np
import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from mori_triton import emulator, local_world
from mori_triton.emulator.descriptors import descriptor_type, tile_descriptor
from mori_triton.errors import ArgumentError, KernelFault

from . import descriptor_kernels as kernels
from .test_tensor_copies import FIRST, FOURTH, SECOND, THIRD
from .test_triton_kernels import ARCHS, archs, assert_within, nan, on, random
from .test_tutorials import IS_36
from .test_user_kernels import first

pytestmark = pytest.mark.cpu
__all__ = ["on"]

describe = TensorDescriptor.from_tensor


def two_descriptors(arch):
    """Skip what Triton 3.6 cannot compile."""
    if IS_36 and arch == "gfx1250":
        pytest.skip("Triton 3.6 preloads 30 words of arguments there, and its assembler refuses that")


@archs(*ARCHS)
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_transpose(on, dtype):
    """Tiles over the edges: what lies beyond is not stored."""
    two_descriptors(on)
    rows, columns = 40, 72
    whole = nan(columns + 1, rows + 8, dtype=dtype)
    x, y = random(rows, columns, dtype=dtype), whole[:columns, :rows]
    kernels.transpose[(2, 3)](describe(x, [32, 32]), describe(y, [32, 32]), 2.0, BLOCK=32)
    np.testing.assert_array_equal(y, 2 * x.numpy().T)
    assert whole[columns:].isnan().all()
    assert whole[:, rows:].isnan().all()


@archs("gfx942", pytest.param("gfx1250", marks=pytest.mark.slow), pytest.param("gfx1201", marks=pytest.mark.slow))
def test_product(on):
    """What lies beyond the edges is 0."""
    two_descriptors(on)
    m, n, k = 48, 40, 72
    a, b, c = random(m, k, dtype=torch.float16), random(n, k, dtype=torch.float16, seed=1), nan(m, n)
    kernels.product[(2, 2)](
        describe(a, [32, 32]), describe(b, [32, 32]), describe(c, [32, 32]), k, M=32, N=32, BLOCK_K=32
    )
    exact = a.double() @ b.double().T
    assert_within(c, exact, k * 2.0**-24 * (a.double().abs() @ b.double().abs().T))


@first("gfx1250")
def test_one_dimension(on):
    x, y = torch.arange(200, dtype=torch.int32), torch.full((200,), -1, dtype=torch.int32)
    kernels.shift[(4,)](describe(x, [64]), describe(y, [64]), 3, N=64)
    np.testing.assert_array_equal(y, [*[-1] * 3, *range(1, 198)])


@first("gfx942")
def test_beyond_the_edges_is_nan_where_asked_for(on):
    """But for gfx1250, whose tensor data mover has no such thing, and Triton no other code."""
    two_descriptors(on)
    x, y = random(40, 32), torch.ones(64, 32)
    kernels.pair[(1,)]((describe(x, [32, 32], padding="nan"), describe(y, [32, 32])), 1, N=32)
    np.testing.assert_array_equal(y[32:40], x[32:])
    assert (y[40:] == 0).all() if on == "gfx1250" else y[40:].isnan().all()
    assert (y[:32] == 1).all()


@first("gfx1250")
def test_a_tile_is_all_that_is_stored(on):
    """Each warp its part."""
    two_descriptors(on)
    x, y = random(128, 32), torch.ones(128, 32)
    kernels.pair[(1,)]((describe(x, [32, 32]), describe(y, [32, 32])), 1, N=32)
    np.testing.assert_array_equal(y[32:64], x[32:64])
    assert (y[:32] == 1).all()
    assert (y[64:] == 1).all()


@first("gfx1201")
def test_a_part_of_a_tensor_that_has_wide_rows(on):
    """A kernel finds shape and strides in the descriptor."""
    x, out = torch.zeros(50, 64)[:, :40], torch.full((3,), -1)
    kernels.own_shape[(1,)](describe(x, [16, 16]), out)
    assert out.tolist() == [50, 40, 64]


@pytest.mark.parametrize(("arch", "how"), [("gfx1250", {"seed": 1, "weak_memory": True}), ("gfx1201", {})])
def test_in_worlds(arch, how):
    two_descriptors(arch)

    def program(pe):
        x, y = random(40, 72, seed=pe), nan(72, 40)
        kernels.transpose[(2, 3)](describe(x, [32, 32]), describe(y, [32, 32]), 1.0, BLOCK=32)
        return torch.equal(y, x.T)

    assert local_world(2, arch=arch, **how).run(program) == [True, True]


@first("gfx942", "gfx1250")
def test_a_descriptor_of_more_than_the_tensor(on):
    """As on a GPU nothing checks it at the launch; the access is found, and the argument named."""
    two_descriptors(on)
    x = TensorDescriptor(torch.zeros(32, 32), [64, 32], [32, 1], [32, 32])
    with pytest.raises(KernelFault, match=r"past the end of argument both\[0\] "):
        kernels.pair[(1,)]((x, describe(torch.zeros(64, 32), [32, 32])), 1, N=32)


@first("gfx942", "gfx950", "gfx1201")
@pytest.mark.parametrize("made", ["given", "made in the kernel"])
def test_three_dimensions(on, made):
    check_slabs(made)


@archs("gfx1250")
@pytest.mark.parametrize("made", ["given", "made in the kernel"])
def test_three_dimensions_on_gfx1250(on, made):
    if IS_36:
        pytest.skip("Triton 3.6 cannot lower them there")
    check_slabs(made)


def check_slabs(made):
    """A tile of which the last rows lie beyond the edge."""
    x, y = random(4, 24, 32), torch.zeros(4, 24, 32)
    if made == "given":
        kernels.slabs[(1,)](describe(x, [2, 32, 32]), describe(y, [2, 32, 32]), N=32)
    else:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
        kernels.made_slabs[(1,)](x, y, 4, 24, N=32)
    np.testing.assert_array_equal(y[1:3], x[1:3])
    assert (y[0] == 0).all()
    assert (y[3] == 0).all()


@first("gfx1250", "gfx1250", "gfx942")
def test_five_dimensions(on):
    if IS_36 and on == "gfx1250":
        pytest.skip("Triton 3.6 cannot lower them there")
    x, y = random(3, 2, 3, 5, 16), torch.zeros(3, 2, 3, 5, 16)
    kernels.blocks[(1,)](describe(x, [2, 1, 2, 4, 16]), describe(y, [2, 1, 2, 4, 16]))
    want = torch.zeros_like(y)
    want[1:, 1:, 2:, 1:] = x[1:, 1:, 2:, 1:]
    np.testing.assert_array_equal(y, want)


def test_other_memory_is_refused():
    active = emulator.activate("gfx1201")
    try:
        x = describe(torch.zeros(32, 32), [32, 32])
        x.base = torch.zeros(32, 32, device="meta")
        with pytest.raises(ArgumentError, match=r"both\[0\]: want a tensor on the CPU"):
            kernels.pair[(1,)]((x, x), 0, N=32)
    finally:
        active.deactivate()


# shape, strides, block, bits of an element, padding after so many, by so much, warps -> fields that are not 0
ENCODED = {
    "a matrix": (
        ([1000, 70000], [70016, 1], [32, 64], 16, 64, 8, 4),
        {"log_size": 1, "gaps": 1, "interval": 4, "gap": 3, "width": 70000, "height": 1000, "columns": 64, "rows": 8,
         "stride": 70016},
    ),
    "no padding, more warps than rows": (
        ([5, 80000], [2**33, 1], [2, 64], 8, 0, 0, 8),
        {"width": 80000, "height": 5, "columns": 16, "rows": 1, "stride": 2**33},
    ),
    "more warps than elements": (
        ([5, 9], [16, 1], [2, 2], 32, 0, 0, 16),
        {"log_size": 2, "width": 9, "height": 5, "columns": 1, "rows": 1, "stride": 16},
    ),
    "one dimension": (
        ([1000], [1], [100], 64, 32, 2, 8),
        {"log_size": 3, "gaps": 1, "interval": 5, "gap": 3, "width": 1000, "columns": 13},
    ),
    "three dimensions": (
        ([70000, 6, 80], [2**40 + 480, 80, 1], [4, 4, 16], 32, 0, 0, 8),
        {"log_size": 2, "width": 80, "height": 6, "columns": 16, "rows": 2, "depth": 1, "stride": 80,
         "stride_2": 2**40 + 480, "size_2": 70000},
    ),
    "five dimensions": (
        ([70001, 70002, 5, 6, 80], [2**41 + 1, 2**42 + 3, 480, 80, 1], [2, 4, 2, 8, 16], 8, 0, 0, 4),
        {"width": 80, "height": 6, "columns": 16, "rows": 8, "depth": 2, "stride": 80, "stride_2": 480,
         "size_2": 5, "size_3": 70002, "size_4": 70001, "stride_3": 2**42 + 3, "stride_4": 2**41 + 1,
         "tile_3": 2, "tile_4": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODED)
def test_tile_descriptors(name):
    (shape, strides, block, bits, interval, gap, warps), want = ENCODED[name]
    address = 0x7F12_3456_7890
    meta = {"elem_bits": bits, "block_size": block, "interval_padding_pairs": [[interval, gap]] if gap else []}
    words = tile_descriptor("x", address, shape, strides, meta, warps)
    assert len(words) == (48 if len(shape) < 3 else 80)
    fields, tables = {}, (FIRST, SECOND, THIRD, FOURTH)
    for part, table in zip((words[:16], words[16:48], words[48:64], words[64:]), tables, strict=True):
        number = int.from_bytes(part, "little")
        for field, (bit, width) in table.items():
            fields[field] = number >> bit & ((1 << width) - 1)
            number &= ~(((1 << width) - 1) << bit)
        assert number == 0, "a bit outside every field"
    assert {key: value for key, value in fields.items() if value} == {"kind": 1, "type": 2, "address": address, **want}


FITTING = {
    "address": 2**57 - 1, "shape": [2**32 - 1] * 5, "strides": [2**48 - 1] * 4 + [1], "elem_bits": 64,
    "block_size": [2**16 - 1] * 5, "pairs": [[128, 64]],
}  # fmt: skip


def fields_of(changed):
    values = FITTING | changed
    meta = {"elem_bits": values["elem_bits"], "block_size": values["block_size"]}
    meta["interval_padding_pairs"] = values["pairs"]
    return tile_descriptor("x", values["address"], values["shape"], values["strides"], meta, 1)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"address": 2**57}, "x: address: want 0 to 144115188075855871, got 144115188075855872"),
        ({"address": -1}, "x: address: want 0 to 144115188075855871, got -1"),
        *[
            ({"shape": [*[5] * i, wrong, *[5] * (4 - i)]}, f"x: shape[{i}]: want 0 to 4294967295, got {wrong}")
            for i in range(5)
            for wrong in (2**32, -1)
        ],
        *[
            ({"strides": [*[5] * i, wrong, *[5] * (4 - i)]}, f"x: strides[{i}]: want 0 to 281474976710655, got {wrong}")
            for i in range(4)
            for wrong in (2**48, -1)
        ],
        *[
            (
                {"block_size": [*[5] * i, 2**16, *[5] * (4 - i)]},
                f"x: block_size[{i}] of a warp: want 0 to 65535, got 65536",
            )
            for i in range(5)
        ],
        ({"elem_bits": 128}, "x: elem_bits: want 8, 16, 32 or 64, got 128"),
        ({"elem_bits": 4}, "x: elem_bits: want 8, 16, 32 or 64, got 4"),
        ({"pairs": [[256, 2]]}, "x: words of 32 bits before a gap: want 2, 4, 8, 16, 32, 64, 128 or 256, got 512"),
        ({"pairs": [[0, 2]]}, "x: words of 32 bits before a gap: want 2, 4, 8, 16, 32, 64, 128 or 256, got 0"),
        ({"pairs": [[6, 2]]}, "x: words of 32 bits before a gap: want 2, 4, 8, 16, 32, 64, 128 or 256, got 12"),
        ({"pairs": [[4, 65]]}, "x: words of 32 bits of a gap: want 1 to 128, got 130"),
        ({"pairs": [[4, 0]]}, "x: words of 32 bits of a gap: want 1 to 128, got 0"),
        ({"shape": [5] * 6, "strides": [5] * 5 + [1], "block_size": [5] * 6}, "x: dimensions: want 1 to 5, got 6"),
    ],
)
def test_what_does_not_fit_its_field_is_refused(changed, text):
    """And does not run into the next one."""
    with pytest.raises(ArgumentError) as caught:
        fields_of(changed)
    assert str(caught.value) == text


def test_the_largest_values_fit_their_fields():
    words = fields_of({})
    for part, table in zip(
        (words[:16], words[16:48], words[48:64], words[64:]), (FIRST, SECOND, THIRD, FOURTH), strict=True
    ):
        number = int.from_bytes(part, "little")
        for field, (bit, width) in table.items():
            if field in ("kind", "type", "lds", "mask", "barrier", "iterate"):
                continue
            assert number >> bit & ((1 << width) - 1) == (1 << width) - 1, field


def test_what_is_no_descriptor_is_refused():
    """The launch of a compiled kernel, where Triton does not look; and a type of NVIDIA's."""
    active = emulator.activate("gfx1201")
    try:
        x, out = torch.zeros(32, 32), torch.full((3,), -1)
        compiled = kernels.own_shape.warmup(describe(x, [16, 16]), out, grid=(1,))
        with pytest.raises(ArgumentError, match="x: want a TensorDescriptor, got Tensor"):
            compiled[(1, 1, 1)](x, out)
    finally:
        active.deactivate()
    with pytest.raises(ArgumentError, match=r"x: descriptors of type tensordesc_im2col.* are not emulated"):
        descriptor_type("tensordesc_im2col<fp16[32, 32]>", "x", None, 4)
