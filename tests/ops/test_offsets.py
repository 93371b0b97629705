"""f5: rows are addressed with 64-bit offsets, shown by a probe that needs no large memory."""

from __future__ import annotations

import ast
import inspect
import re

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import emulator, local_world
from mori_triton.device.launch import cross_compile, launch
from mori_triton.ops.calls import inverse_of
from mori_triton.ops.kernels import combine, combine_codec, dispatch, finish, formats, local_expert_count, rows
from mori_triton.ops.kernels.rows import row_offset, split_target

pytestmark = pytest.mark.cpu

ROWS = (0, 1, 65536, 7_864_319, 2**31 - 1)
SIZES = (1, 319, 7168, 2**20)


@triton.jit(do_not_specialize=["row", "row_size"])
def probe_kernel(out_ptr, row, row_size):
    """The offset that a kernel would add to a pointer."""
    tl.store(out_ptr, row_offset(row, row_size))


@triton.jit(do_not_specialize=["row", "row_size"])
def narrow_kernel(out_ptr, row, row_size):
    """What a product of 32-bit numbers would give."""
    tl.store(out_ptr, row * row_size)


def offsets(pe: int) -> list[tuple[int, int]]:
    found = []
    for row in ROWS:
        for size in SIZES:
            out = torch.full((1,), -1, dtype=torch.int64)
            launch(probe_kernel, (1,), out, row, size, num_warps=1)
            found.append((int(out), row * size))
    wrong = torch.zeros(1, dtype=torch.int64)
    launch(narrow_kernel, (1,), wrong, 7_864_320, 319, num_warps=1)
    assert int(wrong) == -1_786_249_216, "the probe tells a narrow product from a wide one"
    return found


def test_offsets_past_two_to_the_31() -> None:
    assert emulator is not None
    for got, want in local_world(1, heap_size="1M").run(offsets)[0]:
        assert got == want


def test_the_product_is_64_bits_wide() -> None:
    built = cross_compile(probe_kernel, {"out_ptr": "*i64", "row": "i32", "row_size": "i32"}, arch="gfx1201")
    products = re.findall(r"arith\.muli .* : (\w+)", built.asm["ttir"])
    assert products == ["i64"]


@triton.jit(do_not_specialize=["capacity", "inverse", "shift", "num"])
def split_kernel(targets_ptr, out_ptr, capacity, inverse, shift, num, BLOCK: tl.constexpr):
    """(PE, slot) of every target."""
    offs = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + offs, mask=offs < num, other=0)
    pe, slot = split_target(target, capacity, inverse, shift)
    tl.store(out_ptr + 2 * offs, pe, mask=offs < num)
    tl.store(out_ptr + 2 * offs + 1, slot, mask=offs < num)


def splits(pe: int) -> None:
    """Around every multiple that could round wrongly, up to the largest entry that the config allows."""
    for capacity in (1, 2, 3, 7, 40, 4095, 4096, 32768, 65537 * 8, 2**30 - 1, 2**30, 2**31 - 2, 2**31 - 1):
        near = {m * capacity + d for m in (0, 1, 2, 3, 7, 127, 2**31 // capacity) for d in (-2, -1, 0, 1, 2)}
        targets = sorted(t for t in near | {2**31 - 1, 2**31 - 2} if 0 <= t < (2**31 if capacity > 1 else 1))
        given, out = torch.tensor(targets, dtype=torch.int32), torch.full((64, 2), -1, dtype=torch.int32)
        launch(split_kernel, (1,), given, out, capacity, *inverse_of(capacity), len(targets), BLOCK=64, num_warps=1)
        assert out[: len(targets)].tolist() == [list(divmod(t, capacity)) for t in targets], capacity


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_targets_are_split_exactly(arch: str) -> None:
    local_world(1, heap_size="1M", arch=arch).run(splits)


def test_f2_no_kernel_multiplies_for_an_address_by_itself() -> None:
    """Products in the kernels are `row_offset`, or small by their meaning: these, and no other."""
    small = {
        "tl.program_id(0) * BLOCK_T",  # token
        "num_pes * num_experts_per_rank",  # < 2^31 by the config
        "pe[None, :] * capacity",  # < 2^31 by the config
        "pe * capacity",
        "ROW_UNITS * ((ALIGN + 3) // 4)",  # words of a row
        "quotient.to(tl.int32) * capacity",  # at most the entry
        "tl.num_programs(0) * tl.num_programs(1)",  # pieces of a row times less than 2^16
        "tl.program_id(1) * tl.num_programs(0)",
        "scale_units * SCALE_UNIT",
        "piece * BLOCK",  # within a row
        "me * max_tokens",  # < 2^31 by the config
        "tl.cast(row, tl.int64) * row_size",  # row_offset itself
        "to * 0",
        "(first_block + tl.arange(0, blocks))[:, None] * width",  # within a row, as the next four
        "block[:, None] * BLOCK",
        "block[:, None] * WORDS",
        "piece * BLOCKS",
        "row_units * (ALIGN // 2)",
        "num_bytes // WIRE_ALIGN * WIRE_ALIGN",
        "BLOCK * (4 if FORMAT == 'e2m1' else 8)",  # bits of a block
        "4 * I",  # a shift
        "in_order(total, FORMAT, NUM_BYTES) * lift(FORMAT)",  # numbers
        "unpack(words, FORMAT) * lift(FORMAT)",
        "values * tl.div_rn(tl.full([BLOCKS], 1.0, tl.float32), scales)[:, None]",
    }
    found = set()
    for module in (dispatch, combine, combine_codec, finish, formats, local_expert_count, rows):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                found.add(ast.unparse(node))
    assert found <= small, found - small
