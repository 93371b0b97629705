"""Loads that transpose small matrices between lanes, and copies from global memory to LDS.

Copies that the hardware calls asynchronous are complete when the instruction is, as every load is here.
"""

from __future__ import annotations

import re

from mori_triton.emulator.accesses import ADDRESS, BASE_AND_OFFSET, BUFFER, BUFFER_OFFSET, LOADS, LOCAL
from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.tensor_copies import TensorCopies

# gfx950, gfx1250, gfx1201: bits of a lane, bits of an element
_TRANSPOSE = re.compile(r"load_(?:b(?P<b1>\d+)_tr_b(?P<e1>\d+)|tr(?P<e2>\d+)_b(?P<b2>\d+)|tr_b(?P<b3>\d+))$")
_TO_LDS = re.compile(r"global_load_(lds|async_to_lds)_(\w+)$|buffer_load_(\w+)$")
# (bits of a lane, bits of an element)
_KNOWN = {
    ("gfx950", "ds"): {(64, 16), (64, 8), (64, 4)},
    ("gfx1250", "ds"): {(128, 16), (64, 8)},
    ("gfx1250", "global"): {(128, 16), (64, 8)},
    ("gfx1201", "global"): {(128, 16), (64, 8)},
}


def source_lane(lane: Val, element: int, bits: int, wave: int) -> Val:
    """Which lane loaded the element that `lane` gets as its number `element`.

    Lanes work in groups, each of which loads a matrix, row after row, and gets its columns. gfx9's groups have 16 lanes
    and rows of 16 elements that 1, 2 or 4 neighbours load. gfx12's have 8 lanes for 16-bit elements; for 8-bit ones 16
    lanes load 8 rows of 16 elements: 4 rows of the left half, the same rows of the right half, then the next 4.
    """
    per_lane = (64 if wave == 64 or bits == 8 else 128) // bits
    if wave == 64:
        neighbours = 16 // per_lane
        return (lane & 48) | ((lane & 15) / per_lane + element * neighbours)
    if bits == 16:
        return (lane & 24) | element
    return (lane & 16) | ((lane & 8) >> 1) | (element & 3) | (element & 4) << 1


class Transfers(TensorCopies):
    """Part of the lifter."""

    def transfer(self, ins: Inst, base: str) -> bool:
        """Emit `ins` if it is one of these."""
        space, _, rest = base.partition("_")
        m = _TRANSPOSE.match(rest)
        if m and space in ("ds", "global"):
            size = int(m["b1"] or m["b2"] or m["b3"])
            bits = int(m["e1"] or m["e2"] or (16 if size == 128 else 8))
            self.transposing_load(ins, space, size, bits)
            return True
        if base in ("tensor_load_to_lds", "tensor_store_from_lds"):
            self.tensor_copy(ins, load=base == "tensor_load_to_lds")
            return True
        m = _TO_LDS.match(base)
        if m and (m[1] or (m[3] and "lds" in ins.mods)):
            self.load_to_lds(ins, space, m[2] or m[3], per_lane=m[1] == "async_to_lds")
            return True
        return False

    def transposing_load(self, ins: Inst, space: str, size: int, bits: int) -> None:
        if (size, bits) not in _KNOWN.get((self.p.arch, space), ()):
            raise KeyError("no semantics")
        W, ops, registers = self.W, [self.op(o) for o in ins.ops], size // 32
        dst, offset = ops[0].idx, int(ins.mods.get("offset", "0"), 0)
        # every lane takes part
        everyone = self.f.int(-1, W)
        if space == "ds":
            self.access(f"load_b{size}", ops[1].idx, dst, LOCAL, offset=offset, lanes=everyone)
        else:
            self.global_load(ins, f"load_b{size}", ops[1:], dst, offset, everyone)

        def build(f: Fn, p: list) -> None:
            raw = f.ptr(f"alloca i8, i64 {4 * W * registers}, align 64")
            for r in range(registers):
                f.store(f.gep(raw, 4 * W * r), f.load(f.gep(p[0], 4 * W * r), 32, W))
            per_lane = size // bits

            def one(lane: Val) -> None:
                at = (lane & (per_lane - 1)) * bits
                row, shift = (at >> 5) * (4 * W), (at & 31).trunc(32)
                for r in range(registers):
                    word = f.int(0)
                    for i in range(32 // bits):
                        element = r * (32 // bits) + i
                        x = f.load(f.gep(raw, row + source_lane(lane, element, bits, W) * 4), 32)
                        word = word | (((x >> shift) & ((1 << bits) - 1)) << (bits * i))
                    f.store(f.gep(p[0], lane * 4 + 4 * W * r), word)

            f.loop(W, one)
            f.emit("ret void")

        self.call(f"transpose_{size}_{bits}", "void", [("ptr", self.vptr(dst))], build)

    def global_load(self, ins: Inst, what: str, ops: list, data: int, offset: int, lanes: Val) -> None:
        """ops: address, scalar base or `off`."""
        address, scalar = ops
        how = self.scope(ins.mods, False) << 4 | (8 if "scale_offset" in ins.mods else 0)
        if scalar.kind == "null":
            self.access(what, address.idx, data, how | ADDRESS, offset=offset, lanes=lanes)
        else:
            base = self.sread(scalar, 64)
            self.access(what, address.idx, data, how | BASE_AND_OFFSET, base=base, offset=offset, lanes=lanes)

    def load_to_lds(self, ins: Inst, space: str, ty: str, *, per_lane: bool) -> None:
        """Load to spare registers and store those to LDS.

        The address in LDS is that of a register for each lane; or m0 plus the lane's number times 4 bytes, or 16 for
        larger types. The instruction's offset applies to both addresses.
        """
        ty = "u8" if ty == "b8" else ty
        allowed = {"gfx942": ("b32",), "gfx950": ("b32", "b96", "b128"), "gfx1250": ("u8", "b32", "b64", "b128")}
        if ty not in allowed.get(self.p.arch, ()):
            raise KeyError(f"data type {ty}")
        ops, offset = [self.op(o) for o in ins.ops], int(ins.mods.get("offset", "0"), 0)
        lanes, data, where = self.exec(), self.spare + 1, self.spare
        if per_lane:
            where = ops.pop(0).idx
            lanes = self.lanes_in_lds(where)
        else:
            self.consecutive(where, 16 if LOADS[ty] > 4 else 4)
        if space == "buffer":
            how = self.scope(ins.mods, False) << 4 | (BUFFER_OFFSET if "offen" in ins.mods else BUFFER)
            address, resource, scalar = ops
            base, limit = self.resource(resource.idx)
            base = base + self.sread(scalar).zext(64)
            self.access(f"load_{ty}", address.idx, data, how, base=base, offset=offset, limit=limit, lanes=lanes)
        else:
            self.global_load(ins, f"load_{ty}", ops, data, offset, lanes)
        stored = "b8" if ty == "u8" else ty
        self.access(f"store_{stored}", where, data, LOCAL, offset=offset, lanes=lanes)

    def consecutive(self, register: int, step: int) -> None:
        """m0 + lane * step, in every lane of a register."""
        f, W = self.f, self.W
        m0 = self.sread(self.op("m0"))
        f.store(self.vptr(register), f.vec([step * lane for lane in range(W)]) + m0.splat(W))
