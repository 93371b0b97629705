"""Scalar instructions (SALU, scalar loads, clock)."""
import re

from mori_triton.emulator import isa
from mori_triton.emulator.state import *


class Scalar:
    def s(self, ins, base):
        k, ops, f = base[2:], ins.ops, self.f
        if k.startswith("cmp"):
            kind, op, ty = k.split("_") if not k.startswith("cmpk") else k.replace("cmpk", "cmp").split("_")
            types, fn = isa.compare(f"{op}_{ty}")
            self.set_scc(fn(*(self.sread(self.op(o), 64 if t == "q" else 32) for t, o in zip(types, ops))))
        elif k in ("bitcmp0_b32", "bitcmp1_b32"):
            bit = (self.sread(self.op(ops[0])) >> (self.sread(self.op(ops[1])) & 31)) & 1
            self.set_scc(bit.cmp("eq", int(k[6])))
        elif "saveexec" in k or "wrexec" in k:
            op, bits = re.match(r"(\w+)_(?:saveexec|wrexec)_b(\d+)", k).groups()
            old, src = f.load(self.sptr(EXEC), int(bits)), self.sread(self.op(ops[1]), int(bits))
            new = isa.BOOL[op](src, old)
            f.store(self.sptr(EXEC), new)
            self.swrite(self.op(ops[0]), old if "save" in k else new)
            self.set_scc(new.cmp("ne", 0))
        elif k.startswith("load_b"):
            n, dst, off = int(k[6:]) // 8, self.op(ops[0]), self.op(ops[2])
            a = self.sread(self.op(ops[1]), 64) + (self.sread(off).zext(64) if off.kind == "s" else off.value) + int(ins.mods.get("offset", "0"), 0)

            def build(f, p):
                w, a, d, pc = p
                self.check(f, w, a, n, pc)
                for i in range(0, n, 4):
                    f.store(f.gep(d, i), f.load(f.addr(a + i), 32, order="monotonic"))
                f.emit("ret i1 true")
            self.guarded(self.call(f"s_load_{n}", "i1", [("ptr", "%w"), ("i64", (a & ~3).name), ("ptr", self.sptr(dst.idx)), ("i32", str(self.pos))], build))
        elif k in ("memrealtime", "memtime", "sendmsg_rtn_b64"):
            if k == "sendmsg_rtn_b64" and "GET_REALTIME" not in ops[1]:
                raise KeyError("message")
            self.swrite(self.op(ops[0]), self.clock())
        elif k == "getpc_b64":
            self.swrite(self.op(ops[0]), f.int(0, 64))           # see symbol()
        elif k == "getreg_b32" and "IB_STS2" in ops[1] + ins.text:
            self.swrite(self.op(ops[0]), f.int(0))
        elif k in isa.SALU:
            types, fn = isa.SALU[k]
            d, st = types.split("<-")
            texts, vals = ops[1:], []
            texts = list(texts)
            for t in st:
                if t == "c":
                    vals.append(f.load(f.gep("%w", SCC), 32))
                elif t == "D":
                    vals.append(self.sread(self.op(ops[0])))
                elif t == "k":
                    x = int(texts.pop(0), 0)
                    vals.append(f.int(x - 65536 if x >= 32768 else x))
                else:
                    vals.append(self.sread(self.op(texts.pop(0)), 64 if t == "q" else 32))
            value, scc = fn(*vals)
            self.swrite(self.op(ops[0]), value)
            if scc is not None:
                self.set_scc(scc)
        else:
            raise KeyError("no semantics")

    def clock(self):
        """100 MHz counter: the machine's virtual clock, or the host's monotonic clock when none is set"""
        def build(f, p):
            f.declare("declare i32 @clock_gettime(i32, ptr)")
            c = f.load(f.gep(p[0], CLOCK), 64)
            f.when(c.cmp("ne", 0), lambda: f.emit(f"ret i64 {f.load(f.addr(c), 64, align=8).name}"))
            t = f.ptr("alloca [2 x i64]")
            f.ins(f"call i32 @clock_gettime(i32 1, ptr {t})", 32)
            r = f.load(t, 64, align=8) * 100_000_000 + f.load(f.gep(t, 8), 64, align=8) / 10
            f.emit(f"ret i64 {r.name}")
        return self.call("clock", "i64", [("ptr", "%w")], build)
