"""What each instruction computes, as tables: mnemonic -> ("destination<-sources", formula over `ir.Val`).

Operand types, one letter each:

    i  32-bit integer        q  64-bit integer        h  16-bit integer (low or high half of a register)
    w  64-bit integer as an `ir.Pair` of halves
    f  32-bit float          d  64-bit float          e  16-bit float (half)
    m  lane mask, one bit a lane (a formula sees one flag a lane)
    .  a scalar destination that is never read (the carry of a wide multiply-add)
    D  as a source: the destination's old value       c  the scalar condition code as 0 or 1
    k  a signed 16-bit literal

Names are those of gfx12 without prefix `v_`/`s_` and encoding suffix; `names.canonical` maps every other spelling to
them. A formula of a vector instruction may use `a.fn`, the function being built. Every entry is compared with AMD's
published pseudocode, lane by lane, in tests/emulator/test_isa.py.
"""

from mori_triton.emulator.isa.compare import compare
from mori_triton.emulator.isa.convert import CONVERT
from mori_triton.emulator.isa.floating import FLOATING
from mori_triton.emulator.isa.half import CLEARS_HIGH_HALF, HALF
from mori_triton.emulator.isa.integer import INTEGER, bitop
from mori_triton.emulator.isa.names import ATOMIC_RMW, NOP, canonical, unknown_modifier
from mori_triton.emulator.isa.salu import BOOL, SALU

VALU = {**INTEGER, **HALF, **FLOATING, **CONVERT}

__all__ = [
    "ATOMIC_RMW",
    "BOOL",
    "CLEARS_HIGH_HALF",
    "NOP",
    "SALU",
    "VALU",
    "bitop",
    "canonical",
    "compare",
    "unknown_modifier",
]
