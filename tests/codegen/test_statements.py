"""Loads and stores of blocks in Triton's IR, and the instructions that they became; texts written by hand."""

from __future__ import annotations

import pytest

from mori_triton.inspect.code import Access, Source
from mori_triton.inspect.report import BlockAccess, block_accesses
from mori_triton.inspect.statements import Statement, statements

pytestmark = pytest.mark.cpu

TTGIR = """
#blocked = #ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [4, 8], warpsPerCTA = [2, 1], order = [1, 0]}>
#loc = loc("/some/kernels.py":3:1)
    %works = tt.load %ptr : !tt.ptr<i64> loc(#loc4)
    %row = tt.load %row_21, %mask, %other : tensor<64x128x!tt.ptr<i16>, #blocked> loc(#loc5)
    %sum = arith.addi %row, %row : tensor<64x128xi16, #blocked> loc(#loc4)
    tt.store %9, %codes, %7 cacheModifier = cs : tensor<64x128x!tt.ptr<f8E4M3FN>, #blocked> loc(#loc6)
    %b = amdg.buffer_load %p[%offs], %m : tensor<1024xf32, #blocked1> loc(#loc4)
    ttg.local_store %a, %b : tensor<1024xf32, #blocked> -> !ttg.memdesc<1024xf32, #shared> loc(#loc4)
#loc1 = loc(unknown)
#loc2 = loc("/some/kernels.py":12:7)
#loc3 = loc("/some/rows.py":40:9)
#loc4 = loc("works"(#loc2))
#loc5 = loc(callsite(#loc3 at #loc2))
#loc6 = loc("codes"(#loc5))
"""
KERNELS, ROWS = Source("/some/kernels.py", 12, 7), Source("/some/rows.py", 40, 9, ("kernels.py:12:7",))


def test_statements() -> None:
    assert statements(TTGIR, 64) == [
        Statement("load", ROWS, 64 * 128 * 2 // 64),
        Statement("store", ROWS, 64 * 128 // 64),
        Statement("load", KERNELS, 1024 * 4 // 64),
    ]


def access(kind: str, num_bytes: int, source: Source) -> Access:
    return Access(kind, num_bytes, "", "", "", 1, source)


def test_widths_of_a_statement() -> None:
    moved = [Statement("load", ROWS, 64), Statement("store", ROWS, 64), Statement("load", KERNELS, 4)]
    found = block_accesses(
        moved, [access("load", 16, ROWS), access("load", 4, ROWS), access("load", 16, ROWS), access("store", 16, ROWS)]
    )
    # what moves little and left no instruction was found to do nothing
    assert found == [BlockAccess("load", ROWS, 64, (4, 16)), BlockAccess("store", ROWS, 64, (16,))]
    assert [block.narrow for block in found] == [True, False]


def test_an_access_that_took_its_users_place() -> None:
    """The next line's, unless that has a statement of its own."""
    after = Source(ROWS.path, ROWS.line + 1, 2, ROWS.callers)
    moved = [Statement("load", ROWS, 64)]
    assert block_accesses(moved, [access("load", 8, after)]) == [BlockAccess("load", ROWS, 64, (8,))]
    for lost in (
        access("store", 8, after),
        access("load", 8, Source(KERNELS.path, ROWS.line, 1)),
        access("load", 8, after._replace(callers=())),
    ):
        assert block_accesses(moved, [lost]) == [BlockAccess("load", ROWS, 64, ())]
    moved.append(Statement("load", after, 16))
    assert block_accesses(moved, [access("load", 8, after)]) == [
        BlockAccess("load", ROWS, 64, ()),
        BlockAccess("load", after, 16, (8,)),
    ]
