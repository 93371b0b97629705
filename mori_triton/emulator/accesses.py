"""What memory instructions have in common: addressing modes, scopes, data types and atomic operations by number.

The numbers are those of hip_src/emulator/memory.h, memory.cpp and weak.h.
"""

from __future__ import annotations

import re

# addressing modes
BASE_AND_OFFSET, ADDRESS, BUFFER, BUFFER_OFFSET, SCRATCH, SCRATCH_OFFSET, LOCAL = range(7)
# scopes of an access: how far it reaches past the caches
WORKGROUP, AGENT, SYSTEM = range(3)
# kinds of mori_emu_fence
WAIT_STORES, WRITEBACK_AGENT, WRITEBACK_SYSTEM, INVALIDATE_WORKGROUP, INVALIDATE_AGENT, INVALIDATE_SYSTEM = range(6)

# bytes a lane
LOADS = {
    "u8": 1, "i8": 1, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16,
    "d16_b16": 2, "d16_hi_b16": 2, "d16_u8": 1, "d16_hi_u8": 1, "d16_i8": 1, "d16_hi_i8": 1,
}  # fmt: skip
STORES = {"b8": 1, "b16": 2, "d16_hi_b8": 1, "d16_hi_b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
# what names.canonical makes of gfx9's half-register byte loads
RESPELT = {"ubyte_d16": "d16_u8", "sbyte_d16": "d16_i8", "ud16_hi_b8": "d16_hi_u8", "sd16_hi_b8": "d16_hi_i8"}

_NAMES = "add sub and or xor swap cmpswap max min inc dec fadd fmax fmin rsub sub_clamp pk_add_f16 pk_add_bf16"
OPERATIONS = {name: number for number, name in enumerate(_NAMES.split())}
_SIGNED = 128  # the operation compares signed numbers
_GFX9_ATOMIC = {"inc": "inc_u32", "dec": "dec_u32", "inc_x2": "inc_u64", "dec_x2": "dec_u64"}


def operation(text: str) -> tuple[int, int]:
    """(operation code, bits) of an atomic such as `add_u32`, `max_num_f32`, `min_i64`. KeyError: not one of them."""
    if text.startswith("pk_add_"):
        return OPERATIONS[text], 32
    m = re.match(r"(\w+?)(?:_num)?_([uibf])(32|64)$", _GFX9_ATOMIC.get(text, text))
    if not m:
        raise KeyError(f"atomic {text}")
    name, kind, bits = m.groups()
    code = OPERATIONS.get("f" + name if kind == "f" else name)
    if code is None or text.startswith("f"):
        raise KeyError(f"atomic {text}")
    return code | (_SIGNED if kind == "i" else 0), int(bits)
