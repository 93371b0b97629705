"""Scalar instructions: the ALU table, compares, exec mask updates, scalar loads, clock and hardware registers."""

from __future__ import annotations

import re

from mori_triton.emulator import isa
from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.lift_base import LiftBase
from mori_triton.emulator.state import CLOCK, CLOCK_READS, EXEC, SCC, WAVE_ID


def _signed16(text: str) -> int:
    """A 16-bit literal's value, written with or without its sign."""
    x = int(text, 0) & 0xFFFF
    return x - 65536 if x >= 32768 else x


def _hwreg(text: str) -> tuple[str, int, int]:
    """`hwreg(HW_REG_WAVE_MODE, 2, 2)` -> (name without prefixes, first bit, number of bits)."""
    name, *field = [x.strip() for x in text.removeprefix("hwreg(").removesuffix(")").split(",")]
    offset, size = (int(x, 0) for x in field) if field else (0, 32)
    return name.removeprefix("HW_REG_").removeprefix("WAVE_"), offset, size


class Scalar(LiftBase):
    """Part of the lifter: emits a scalar instruction in place."""

    def s(self, ins: Inst, base: str) -> None:
        k = base[2:]
        saveexec = re.match(r"(\w+)_(saveexec|(?<=and_not[01]_)wrexec)_b(\d+)$", k)
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
        elif k == "sendmsg":
            # the end of a wave gives its registers back
            if "MSG_INTERRUPT" in ins.ops[0]:
                self.interrupt()
            elif "DEALLOC_VGPRS" not in ins.ops[0]:
                raise KeyError("message")
        elif k == "getpc_b64":
            # addresses of symbols are absolute here: see Lifter.symbol
            self.swrite(self.op(ins.ops[0]), self.f.int(0, 64))
        elif k == "getreg_b32":
            self.swrite(self.op(ins.ops[0]), self.hardware_register(ins.ops[1]))
        elif k.startswith("setreg_"):
            self.set_mode(ins)
        elif k in ("denorm_mode", "round_mode"):
            self.require_mode(4 if k[0] == "d" else 0, 4, ins.ops[0])
        elif k == "barrier_signal":
            self.require_workgroup_barrier(ins)
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
        if dst.kind != "s":
            raise KeyError(f"destination {ins.ops[0]}")
        scale = n if "scale_offset" in ins.mods else 1
        index = self.sread(off).zext(64) if off.kind == "s" else self.f.int(off.bits(64), 64)
        a = self.sread(self.op(ins.ops[1]), 64) + index * scale
        a = (a + int(ins.mods.get("offset", "0"), 0)) & ~3
        self.scalar_load(dst.idx, a, n)

    def hardware_register(self, text: str) -> Val:
        """A field of a hardware register: the ids of the wave's place on the chip, as far as it has one here."""
        name, offset, size = _hwreg(text)
        if name in ("XCC_ID", "IB_STS2"):
            return self.f.int(0)
        if name in ("HW_ID", "HW_ID1", "HW_ID2"):
            number = self.f.load(self.f.gep("%w", WAVE_ID), 32)
            return (number >> offset) & ((1 << size) - 1)
        raise KeyError(f"hardware register {name}")

    def set_mode(self, ins: Inst) -> None:
        """Refuse to write mode bits that decide rounding or denormals, unless they are the usual ones."""
        name, offset, size = _hwreg(ins.ops[0])
        if name == "MODE" and offset < 8:
            self.require_mode(offset, size, ins.ops[1])
        elif name not in ("MODE", "SCHED_MODE"):
            raise KeyError(f"hardware register {name}")

    def require_mode(self, offset: int, size: int, text: str) -> None:
        """Bits of the mode register: 0-3 round to nearest even, 4-7 keep denormals."""
        field = (1 << size) - 1
        # gfx1250 keeps the high bits of register numbers in what lies above the field
        if not re.match(r"(0x)?[0-9a-f]+$", text) or int(text, 0) & field != (0xF0 >> offset) & field:
            raise KeyError("rounding or denormal mode")

    def require_workgroup_barrier(self, ins: Inst) -> None:
        """Named, cluster and trap barriers are not known. A signal does nothing, the wait is the whole barrier."""
        if ins.ops and int(ins.ops[0], 0) not in (-1, 0xFFFF):
            raise KeyError("barrier")

    def clock(self) -> Val:
        """100 MHz counter: the machine's virtual clock, or the host's monotonic clock when none is set."""

        def build(f: Fn, p: list) -> None:
            f.declare("declare i32 @clock_gettime(i32, ptr)")
            c = f.load(f.gep(p[0], CLOCK), 64)

            def virtual() -> None:
                reads = f.gep(p[0], CLOCK_READS)
                f.store(reads, f.load(reads, 64) + 1)
                f.emit(f"ret i64 {f.load(f.addr(c), 64, align=8).name}")

            f.when(c.cmp("ne", 0), virtual)
            t = f.ptr("alloca [2 x i64]")
            f.ins(f"call i32 @clock_gettime(i32 1, ptr {t})", 32)
            r = f.load(t, 64, align=8) * 100_000_000 + f.load(f.gep(t, 8), 64, align=8) / 10
            f.emit(f"ret i64 {r.name}")

        return self.call("clock", "i64", [("ptr", "%w")], build)
