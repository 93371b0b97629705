"""Scalar instructions: the ALU table, compares, exec mask updates, scalar loads, clock and hardware registers."""

from __future__ import annotations

import re

from mori_triton.emulator import isa
from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.lift_base import LiftBase
from mori_triton.emulator.state import CLOCK, EXEC, SCC


def _signed16(text: str) -> int:
    """A 16-bit literal's value, written with or without its sign."""
    x = int(text, 0) & 0xFFFF
    return x - 65536 if x >= 32768 else x


class Scalar(LiftBase):
    """Part of the lifter: emits a scalar instruction in place."""

    def s(self, ins: Inst, base: str) -> None:
        k = base[2:]
        saveexec = re.match(r"(\w+)_(saveexec|wrexec)_b(\d+)$", k)
        if k.startswith("cmp"):
            self.s_compare(k, ins.ops)
        elif k in ("bitcmp0_b32", "bitcmp1_b32", "bitcmp0_b64", "bitcmp1_b64"):
            bits = int(k[-2:])
            at = (self.sread(self.op(ins.ops[1])) & (bits - 1)).zext(bits)
            bit = (self.sread(self.op(ins.ops[0]), bits) >> at) & 1
            self.set_scc(bit.cmp("eq", int(k[6])))
        elif saveexec:
            self.s_saveexec(saveexec[1], saveexec[2], int(saveexec[3]), ins.ops)
        elif k.startswith("load_b"):
            self.s_load(ins, int(k[6:]) // 8)
        elif k in ("memrealtime", "memtime"):
            self.swrite(self.op(ins.ops[0]), self.clock())
        elif k == "sendmsg_rtn_b64":
            if "GET_REALTIME" not in ins.ops[1]:
                raise KeyError("message")
            self.swrite(self.op(ins.ops[0]), self.clock())
        elif k == "getpc_b64":
            # addresses of symbols are absolute here: see Lifter.symbol
            self.swrite(self.op(ins.ops[0]), self.f.int(0, 64))
        elif k == "getreg_b32" and "IB_STS2" in ins.text:
            self.swrite(self.op(ins.ops[0]), self.f.int(0))
        elif k in isa.SALU:
            self.s_alu(k, ins.ops)
        else:
            raise KeyError("no semantics")

    def s_alu(self, k: str, ops: list[str]) -> None:
        f = self.f
        types, fn = isa.SALU[k]
        dtype, stypes = types.split("<-")
        texts, vals = ops[1:], []
        for t in stypes:
            if t == "c":
                vals.append(f.load(f.gep("%w", SCC), 32))
            elif t == "D":
                vals.append(self.typed(self.op(ops[0]), dtype))
            elif t == "k":
                vals.append(f.int(_signed16(texts.pop(0))))
            else:
                o = self.op(texts.pop(0))
                if t == "q" and k.endswith("i64") and o.kind == "imm":
                    o.value = o.signed_literal
                vals.append(self.typed(o, t))
        if texts:
            raise KeyError("operand count")
        value, scc = fn(*vals)
        value = value.i()
        self.swrite(self.op(ops[0]), value.zext(32) if value.bits < 32 else value)
        if scc is not None:
            self.set_scc(scc)

    def s_compare(self, k: str, ops: list[str]) -> None:
        kind, op, ty = k.split("_")
        types, fn = isa.compare(f"{op}_{ty}")
        a = self.typed(self.op(ops[0]), types[0])
        if kind == "cmpk":
            # a 16-bit literal, extended like the type
            b = self.f.int(_signed16(ops[1]) if ty[0] == "i" else int(ops[1], 0) & 0xFFFF)
        else:
            b = self.typed(self.op(ops[1]), types[1])
        self.set_scc(fn(a, b))

    def s_saveexec(self, op: str, kind: str, bits: int, ops: list[str]) -> None:
        """exec = op(source, exec); the destination gets the old exec (saveexec) or the new one (wrexec)."""
        old, src = self.f.load(self.sptr(EXEC), bits), self.sread(self.op(ops[1]), bits)
        new = isa.BOOL[op](src, old)
        self.f.store(self.sptr(EXEC), new)
        self.swrite(self.op(ops[0]), old if kind == "saveexec" else new)
        self.set_scc(new.cmp("ne", 0))

    def s_load(self, ins: Inst, n: int) -> None:
        """Load n bytes from a scalar address into consecutive scalar registers."""
        dst, off = self.op(ins.ops[0]), self.op(ins.ops[2])
        scale = n if "scale_offset" in ins.mods else 1
        index = self.sread(off).zext(64) if off.kind == "s" else self.f.int(off.bits(64), 64)
        a = self.sread(self.op(ins.ops[1]), 64) + index * scale
        a = (a + int(ins.mods.get("offset", "0"), 0)) & ~3
        self.scalar_load(dst.idx, a, n)

    def clock(self) -> Val:
        """100 MHz counter: the machine's virtual clock, or the host's monotonic clock when none is set."""

        def build(f: Fn, p: list) -> None:
            f.declare("declare i32 @clock_gettime(i32, ptr)")
            c = f.load(f.gep(p[0], CLOCK), 64)
            f.when(c.cmp("ne", 0), lambda: f.emit(f"ret i64 {f.load(f.addr(c), 64, align=8).name}"))
            t = f.ptr("alloca [2 x i64]")
            f.ins(f"call i32 @clock_gettime(i32 1, ptr {t})", 32)
            r = f.load(t, 64, align=8) * 100_000_000 + f.load(f.gep(t, 8), 64, align=8) / 10
            f.emit(f"ret i64 {r.name}")

        return self.call("clock", "i64", [("ptr", "%w")], build)
