"""Packed math: two results per lane from register pairs, with a selector and a sign for each half of each source."""

from __future__ import annotations

from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.isa.floating import fma
from mori_triton.emulator.state import Operand

# None: the low result is the first source, the high result the second
PACKED = {
    "pk_fma_f32": fma,
    "pk_add_f32": lambda a, b: a + b,
    "pk_mul_f32": lambda a, b: a * b,
    "pk_mov_b32": None,
}


class Packed:
    """Part of the lifter."""

    def packed(self, ins: Inst, ops: list[str], k: str) -> None:
        n, W, fn = len(ops) - 1, self.W, PACKED[k]

        def get(key: str, default: int) -> list[int]:
            return [int(x) for x in ins.mods[key].strip("[]").split(",")] if key in ins.mods else [default] * n

        lo, hi, neg_lo, neg_hi = get("op_sel", 0), get("op_sel_hi", 1), get("neg_lo", 0), get("neg_hi", 0)
        srcs = [self.op(o) for o in ops[1:]]
        args = [("ptr", self.vptr(o.idx)) if o.kind == "v" else ("i64", self.pair(o).name) for o in srcs]
        args += [("ptr", self.vptr(self.op(ops[0]).idx)), (f"i{W}", self.exec().name)]

        def build(f: Fn, p: list) -> None:
            def src(i: int, h: int, neg: int) -> Val:
                if srcs[i].kind == "v":
                    v = f.load(f.gep(p[i], 4 * W * h), 32, W)
                else:
                    v = (p[i] >> (32 * h)).trunc(32).splat(W)
                return -v.f() if neg else v.f()

            a = [src(i, lo[i], neg_lo[i]) for i in range(n)]
            b = [src(i, hi[i], neg_hi[i]) for i in range(n)]
            ex = p[-1].bits_to_lanes(W)
            r = (a[0], b[1]) if fn is None else (fn(*a), fn(*b))
            for h, v in enumerate(r):
                self.write_vector(f, f.gep(p[-2], 4 * W * h), v, ex)
            f.emit("ret void")

        kinds = "".join(o.kind[0] for o in srcs)
        self.call(f"{k}_{kinds}_{lo}{hi}{neg_lo}{neg_hi}", "void", args, build)

    def pair(self, o: Operand) -> Val:
        """A 64-bit scalar source; an immediate stands in both halves."""
        if o.kind == "s":
            return self.sread(o, 64)
        b = o.bits(32) & 0xFFFFFFFF
        return self.f.int(b | b << 32, 64)
