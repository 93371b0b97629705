"""LDS instructions: loads, stores and atomics in a workgroup's memory, and the lane permutes that use its crossbar."""

from __future__ import annotations

import functools
import re

from mori_triton.emulator.accesses import LOADS, LOCAL, STORES, operation
from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.lift_base import LiftBase

# where kernels for gfx1250 send what a lane must not write
NOWHERE = 0x7FFFFFFF
_ACCESS = re.compile(r"(load|store)_(2addr_(?:stride64_)?)?([ubi]\d+)(_d16_hi|_d16)?$")
_ATOMIC = re.compile(r"(\w+?)(_rtn)?_((?:num_)?[uibf](?:32|64))$")


class Lds(LiftBase):
    """Part of the lifter: emits LDS instructions."""

    def ds(self, ins: Inst, base: str) -> None:
        k = base[3:]
        if k in ("bpermute_b32", "permute_b32"):
            self.permute(ins, k)
        elif k == "swizzle_b32":
            self.swizzle(ins)
        elif _ACCESS.match(k):
            self.lds_access(ins, k)
        else:
            self.lds_atomic(ins, k)

    def lds_access(self, ins: Inst, k: str) -> None:
        match = _ACCESS.match(k)
        assert match
        kind, two, ty, d16 = match.groups()
        ops, m, n = [self.op(o) for o in ins.ops], ins.mods, int(ty[1:]) // 8
        if d16:
            sign = "b16" if n == 2 else ty
            ty = f"d16{d16[4:]}_{sign}"
        if ty not in (LOADS if kind == "load" else STORES):
            raise KeyError(f"data type {ty}")
        if kind == "load":
            address, registers = ops[1].idx, [ops[0].idx, ops[0].idx + n // 4]
        else:
            address, registers = ops[0].idx, [o.idx for o in ops[1:]]
        if two:
            unit = n * (64 if "stride" in two else 1)
            offsets = [int(m.get("offset0", "0"), 0) * unit, int(m.get("offset1", "0"), 0) * unit]
        else:
            offsets = [int(m.get("offset", "0"), 0)]
        lanes = self.lanes_in_lds(address) if kind == "store" and self.sends_nowhere else None
        parts = list(zip(registers, offsets, strict=False))
        # the address may be overwritten by the half that holds it: that half comes last
        if two and kind == "load" and registers[0] <= address < registers[1]:
            parts.reverse()
        for register, offset in parts:
            self.access(f"{kind}_{ty}", address, register, LOCAL, offset=offset, lanes=lanes)

    @functools.cached_property
    def sends_nowhere(self) -> bool:
        """Do stores of this kernel have addresses that are meant to have no effect?"""
        return self.p.arch == "gfx1250" and any(hex(NOWHERE) in i.text for i in self.p.insts)

    def lanes_in_lds(self, register: int) -> Val:
        """The active lanes, without those whose address in LDS is NOWHERE: their accesses have no effect."""
        W = self.W

        def build(f: Fn, p: list) -> None:
            inside = f.load(p[0], 32, W).cmp("ult", NOWHERE).lanes_to_bits()
            f.emit(f"ret i{W} {(inside & p[1]).name}")

        args = [("ptr", self.vptr(register)), (f"i{W}", self.exec().name)]
        return self.call("lanes_in_lds", f"i{W}", args, build)

    def lds_atomic(self, ins: Inst, k: str) -> None:
        m = _ATOMIC.match(k)
        if not m or m[1].startswith(("cmpst", "mskor", "append", "consume")):
            raise KeyError("no semantics")
        name = {"storexchg": "swap", "wrxchg": "swap"}.get(m[1], m[1])
        code, bits = operation(f"{name}_{m[3]}")
        ops = [self.op(o) for o in ins.ops]
        out = ops.pop(0).idx if m[2] else None
        how = LOCAL | code << 8 | (64 if m[2] else 0)
        offset = int(ins.mods.get("offset", "0"), 0)
        self.access(f"atomic_{bits}", ops[0].idx, ops[1].idx, how, offset=offset, out=out)

    def permute(self, ins: Inst, k: str) -> None:
        """bpermute: every lane fetches from the lane its address names. permute: every lane sends to that lane."""
        ops, W = [self.op(o) for o in ins.ops], self.W
        args = [("ptr", self.vptr(o.idx)) for o in ops]
        args += [("i32", ins.mods.get("offset", "0")), (f"i{W}", self.exec().name)]

        def build(f: Fn, p: list) -> None:
            dst, addr, src, off, ex = p
            copy = f.ptr(f"alloca <{W} x i32>")

            def slot(lane: Val) -> str:
                return f.gep(copy, ((f.load(f.gep(addr, lane * 4), 32) + off) & (4 * W - 4)).zext(64))

            active = ex.bits_to_lanes(W)
            if k == "permute_b32":
                f.store(copy, f.load(src, 32, W) & 0)
                f.for_lanes(ex, lambda lane: f.store(slot(lane), f.load(f.gep(src, lane * 4), 32)))
                f.store(dst, active.pick(f.load(copy, 32, W), f.load(dst, 32, W)))
            else:
                # inactive lanes read as 0
                f.store(copy, active.pick(f.load(src, 32, W), 0))
                f.for_lanes(ex, lambda lane: f.store(f.gep(dst, lane * 4), f.load(slot(lane), 32)))
            f.emit("ret void")

        self.call(k, "void", args, build)

    def swizzle(self, ins: Inst) -> None:
        ops, W, spec = [self.op(o) for o in ins.ops], self.W, ins.mods["offset"]
        lanes = swizzle_lanes(spec, W)
        args = [("ptr", self.vptr(o.idx)) for o in ops] + [(f"i{W}", self.exec().name)]

        def build(f: Fn, p: list) -> None:
            active = p[2].bits_to_lanes(W)
            value = active.shuffle(lanes).pick(f.load(p[1], 32, W).shuffle(lanes), 0)
            self.write_vector(f, p[0], value, active)
            f.emit("ret void")

        self.call(f"swizzle_{spec}", "void", args, build)


def swizzle_lanes(spec: str, W: int) -> list[int]:
    """Source lane of each lane of a ds_swizzle_b32, from the symbolic or numeric form of its offset."""
    m = re.match(r"swizzle\((\w+),(.*)\)", spec)
    lanes = range(W)
    if not m:
        x = int(spec, 0)
        if x & 0x8000:
            return [(lane & ~3) | (x >> 2 * (lane & 3) & 3) for lane in lanes]
        return [(lane & ~31) | (((lane & x & 31) | (x >> 5 & 31)) ^ (x >> 10 & 31)) for lane in lanes]
    mode, a = m[1], [x.strip(' "') for x in m[2].split(",")]
    if mode == "SWAP":
        return [lane ^ int(a[0]) for lane in lanes]
    if mode == "REVERSE":
        return [lane ^ (int(a[0]) - 1) for lane in lanes]
    if mode == "QUAD_PERM":
        return [(lane & ~3) | int(a[lane & 3]) for lane in lanes]
    if mode == "BROADCAST":
        return [(lane & ~(int(a[0]) - 1)) | int(a[1]) for lane in lanes]
    raise KeyError(f"swizzle mode {mode}")
