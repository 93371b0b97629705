"""Memory accesses as instructions, with what they need in a wave's registers, and what they should do."""

import numpy as np

from tests.emulator.bare import BareWave

GPUS = ["gfx1201", "gfx942", "gfx950", "gfx1250"]
# type: (bytes in memory, signed, where it goes in the register: None = all of it, else the first bit of a half)
LOADS = {
    "u8": (1, False, None), "i8": (1, True, None), "u16": (2, False, None), "i16": (2, True, None),
    "b32": (4, False, None), "b64": (8, False, None), "b96": (12, False, None), "b128": (16, False, None),
    "d16_b16": (2, False, 0), "d16_hi_b16": (2, False, 16), "d16_u8": (1, False, 0), "d16_hi_u8": (1, False, 16),
    "d16_i8": (1, True, 0), "d16_hi_i8": (1, True, 16),
}  # fmt: skip
STORES = {"b8": (1, 0), "b16": (2, 0), "d16_hi_b8": (1, 16), "d16_hi_b16": (2, 16)}
STORES |= {name: (size, 0) for name, size in (("b32", 4), ("b64", 8), ("b96", 12), ("b128", 16))}
GFX9 = {
    "u8": "ubyte", "i8": "sbyte", "u16": "ushort", "i16": "sshort", "b32": "dword", "b64": "dwordx2", "b96": "dwordx3",
    "b128": "dwordx4", "d16_b16": "short_d16", "d16_hi_b16": "short_d16_hi", "d16_u8": "ubyte_d16",
    "d16_hi_u8": "ubyte_d16_hi", "d16_i8": "sbyte_d16", "d16_hi_i8": "sbyte_d16_hi", "b8": "byte", "b16": "short",
    "d16_hi_b8": "byte_d16_hi",
}  # fmt: skip
MODES = ["base", "address", "flat", "buffer", "scratch"]
OFFSET = 8
PRIVATE = 64
SENTINEL = 0xDEADBEEF


def registers(first: int, num_bytes: int) -> str:
    n = max(1, num_bytes // 4)
    return f"v{first}" if n == 1 else f"v[{first}:{first + n - 1}]"


def operands(kind: str, mode: str, data: str) -> str:
    """Operands of a load or store: offset in v10, address in v[12:13], base in s[4:5], resource in s[8:11]."""
    load = kind == "load"

    def order(address: str) -> str:
        return f"{data}, {address}" if load else f"{address}, {data}"

    return {
        "base": f"{order('v10')}, s[4:5] offset:{OFFSET}",
        "address": f"{order('v[12:13]')}, off offset:{OFFSET}",
        "flat": f"{order('v[12:13]')} offset:{OFFSET}",
        "buffer": f"{data}, v10, s[8:11], s6 offen offset:{OFFSET}",
        "scratch": f"{order('v10')}, s7 offset:{OFFSET}",
    }[mode]


def loads_and_stores(arch: str) -> dict[str, str]:
    """Every load and store in every addressing mode, and some of their other forms: name -> instruction."""
    gfx9, found = not arch.startswith("gfx12"), {}
    for kind, types in (("load", LOADS), ("store", STORES)):
        for ty, (size, *_) in types.items():
            for mode in MODES:
                space = "global" if mode in ("base", "address") else mode
                name = f"{space}_{kind}_{GFX9[ty] if gfx9 else ty}"
                found[f"{kind}_{ty}_{mode}"] = f"{name} {operands(kind, mode, registers(20, size))}"
    found["load_uniform"] = f"buffer_load_{'dwordx2' if gfx9 else 'b64'} v[20:21], off, s[8:11], s6 offset:{OFFSET}"
    found["load_over_address"] = f"global_load_{'dwordx4' if gfx9 else 'b128'} v[10:13], v[12:13], off"
    if arch == "gfx1250":
        found["load_scaled"] = f"global_load_b64 v[20:21], v10, s[4:5] offset:{OFFSET} scale_offset"
    return found


def atomics(arch: str) -> dict[str, str]:
    """Every atomic, with and without a result: name -> instruction."""
    gfx9, found = not arch.startswith("gfx12"), {}
    for size, word in ((32, ""), (64, "_x2")):
        for op in ATOMICS:
            for returns in (False, True):
                name = f"global_atomic_{op}{word}" if gfx9 else f"global_atomic_{gfx12_atomic(op, size)}"
                data = registers(20, size // 8 * (2 if op == "cmpswap" else 1))
                out = f"{registers(30, size // 8)}, " if returns else ""
                bits = (" sc0" if gfx9 else " th:TH_ATOMIC_RETURN") if returns else ""
                found[f"atomic_{op}_{size}_{returns}"] = f"{name} {out}v10, {data}, s[4:5] offset:{OFFSET}{bits}"
    for op, number in (("fadd", "add_f32"), ("fmin", "min_num_f32"), ("fmax", "max_num_f32")):
        if not gfx9 or op == "fadd":
            found[f"atomic_{op}_32_False"] = f"global_atomic_{number} v10, v20, s[4:5] offset:{OFFSET}"
    for kind in ("f16", "bf16"):
        found[f"atomic_{kind}"] = f"global_atomic_pk_add_{kind} v10, v20, s[4:5] offset:{OFFSET}"
    return found


ATOMICS = ["add", "sub", "and", "or", "xor", "swap", "cmpswap", "smin", "smax", "umin", "umax", "inc", "dec"]


def gfx12_atomic(op: str, size: int) -> str:
    if op in ("smin", "smax", "umin", "umax"):
        return f"{op[1:]}_{'i' if op[0] == 's' else 'u'}{size}"
    return f"{op}_{'u' if op in ('add', 'sub', 'inc', 'dec') else 'b'}{size}"


def masks(W: int, rng) -> list[int]:
    """All lanes, a run at the start, one in the middle, one lane, every second lane, random lanes."""
    full = (1 << W) - 1
    middle = ((1 << W // 3) - 1) << 5
    return [full, (1 << (W - 3)) - 1, middle, 1 << (W - 1), full // 3, int(rng.integers(1, 1 << 30)) * 5 & full]


def lane_offsets(W: int, size: int, room: int, rng) -> dict[str, np.ndarray]:
    """Byte offsets of the lanes: consecutive, all the same, reversed, with a gap, anywhere, anywhere aligned."""
    lanes = np.arange(W)
    return {
        "run": lanes * size,
        "same": np.full(W, 3 * size),
        "reversed": (W - 1 - lanes) * size,
        "gap": lanes * size + (lanes > W // 2) * 16,
        "anywhere": rng.integers(0, room - 16, W),
        "aligned": rng.integers(0, room // 16 - 1, W) * 16,
    }


def active(mask: int, W: int) -> np.ndarray:
    return np.array([bool(mask >> lane & 1) for lane in range(W)])


def set_resource(wave: BareWave, base: int, num_bytes: int) -> None:
    """A raw buffer in s[8:11]. gfx1250: 57 bits of address, 45 of size; others: 48 and, in the third word, 32."""
    bits = base | num_bytes << (57 if wave.p.program.arch == "gfx1250" else 64)
    wave.set64(8, bits & ((1 << 64) - 1))
    wave.set64(10, bits >> 64)


def prepare(wave: BareWave, memory: np.ndarray, start: int, offsets: np.ndarray, limit: int) -> None:
    """Point every addressing mode at memory[start + offsets]."""
    base = memory.ctypes.data + start
    wave.allow(memory)
    wave.v[10] = offsets
    address = base - OFFSET + offsets
    wave.v[12], wave.v[13] = address & 0xFFFFFFFF, address >> 32
    wave.set64(4, base - OFFSET)
    # the resource's base, half of the way as scalar offset; out of range from `limit` on
    set_resource(wave, base - OFFSET - 64, limit + OFFSET)
    wave.s[6], wave.s[7] = 64, 0


def loaded(raw: np.ndarray, old: np.ndarray, ty: str) -> np.ndarray:
    """Registers after a lane has loaded `raw` (its bytes); old: what they held."""
    size, signed, half = LOADS[ty]
    if size >= 4:
        return raw.view(np.uint32)
    value = int.from_bytes(raw.tobytes(), "little", signed=signed)
    if half is None:
        return np.array([value & 0xFFFFFFFF], np.uint32)
    keep = int(old[0]) & ~(0xFFFF << half)
    return np.array([keep | (value & 0xFFFF) << half], np.uint32)


def atomic_reference(op: str, size: int, old: int, x: int, compare: int) -> int:
    full = (1 << size) - 1

    def signed(v: int) -> int:
        return v - (1 << size) if v >> (size - 1) else v

    return {
        "add": lambda: old + x & full, "sub": lambda: old - x & full, "and": lambda: old & x, "or": lambda: old | x,
        "xor": lambda: old ^ x, "swap": lambda: x, "cmpswap": lambda: x if old == compare else old,
        "smin": lambda: old if signed(old) < signed(x) else x, "smax": lambda: old if signed(old) > signed(x) else x,
        "umin": lambda: min(old, x), "umax": lambda: max(old, x),
        "inc": lambda: 0 if old >= x else old + 1, "dec": lambda: x if old == 0 or old > x else old - 1,
    }[op]()  # fmt: skip
