"""Packed math (two results a lane, with a selector and a sign for each half of each source) and mixed-precision fma."""

from __future__ import annotations

from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.isa import VALU
from mori_triton.emulator.isa.convert import to_bf16
from mori_triton.emulator.isa.floating import fma, fma_odd, fmax, fmin, to_odd
from mori_triton.emulator.isa.integer import Formula
from mori_triton.emulator.lift_base import LiftBase
from mori_triton.emulator.state import Operand

# mnemonic -> (type of a half, formula). f: two registers, one fp32 each; e, h, b: 16-bit halves of one register, fp16,
# integer or bf16 (which a formula sees as fp32). None: the low result is the first source, the high result the second
PACKED: dict[str, tuple[str, Formula | None]] = {
    "pk_fma_f32": ("f", fma),
    "pk_add_f32": ("f", lambda a, b: a + b),
    "pk_mul_f32": ("f", lambda a, b: a * b),
    "pk_mov_b32": ("f", None),
    "pk_add_u16": ("h", lambda a, b: a + b),
    "pk_add_i16": ("h", lambda a, b: a + b),
    "pk_sub_u16": ("h", lambda a, b: a - b),
    "pk_sub_i16": ("h", lambda a, b: a - b),
    "pk_add_bf16": ("b", lambda a, b: a + b),
    "pk_mul_bf16": ("b", lambda a, b: a * b),
    "pk_fma_bf16": ("b", lambda a, b, c: to_odd(fma_odd(a, b, c))),
    "pk_max_num_bf16": ("b", fmax),
    "pk_min_num_bf16": ("b", fmin),
}
for _name in ("mul_lo_u16", "mad_u16", "mad_i16", "lshlrev_b16", "lshrrev_b16", "ashrrev_i16", "max_i16", "min_i16"):
    PACKED[f"pk_{_name}"] = ("h", VALU[_name][1])
for _name in ("max_u16", "min_u16", "add_f16", "mul_f16", "fma_f16", "max_num_f16", "min_num_f16", "maximum_f16"):
    PACKED[f"pk_{_name}"] = (VALU[_name][0][0], VALU[_name][1])
for _name in ("minimum_f16", "maximum3_f16", "minimum3_f16"):
    PACKED[f"pk_{_name}"] = (VALU[_name][0][0], VALU[_name][1])

# with clamp: what overflows stays at the limit
_SATURATING: dict[str, Formula] = {
    "pk_add_u16": lambda a, b: a.intr("uadd.sat", b),
    "pk_sub_u16": lambda a, b: a.intr("usub.sat", b),
    "pk_add_i16": lambda a, b: a.intr("sadd.sat", b),
    "pk_sub_i16": lambda a, b: a.intr("ssub.sat", b),
}

# mnemonic -> (16-bit type of a source, of the result with its half, None for fp32)
MIXED: dict[str, tuple[str, str | None]] = {
    "fma_mix_f32": ("e", None),
    "fma_mixlo_f16": ("e", "l"),
    "fma_mixhi_f16": ("e", "h"),
    "fma_mix_f32_bf16": ("b", None),
    "fma_mixlo_bf16": ("b", "l"),
    "fma_mixhi_bf16": ("b", "h"),
}


def _modifier(ins: Inst, key: str, default: int, n: int) -> list[int]:
    """One flag a source, of op_sel and the like."""
    text = ins.mods.get(key)
    return [int(x) for x in text.strip("[]").split(",")][:n] if text else [default] * n


def _half_value(v: Val, letter: str) -> Val:
    """16 bits (in an i16) as a number: fp16 or integer as they are, bf16 widened to fp32."""
    if letter == "b":
        return (v.zext(32) << 16).f()
    return v.f() if letter == "e" else v


def _half_bits(v: Val, letter: str) -> Val:
    return to_bf16(v) if letter == "b" else v.i()


class Packed(LiftBase):
    """Part of the lifter."""

    def packed(self, ins: Inst, ops: list[str], k: str) -> None:
        n, W, (letter, fn) = len(ops) - 1, self.W, PACKED[k]
        clamp = "clamp" in ins.mods
        if clamp:
            if k not in _SATURATING:
                raise KeyError("clamp")
            fn = _SATURATING[k]
        lo, hi = _modifier(ins, "op_sel", 0, n), _modifier(ins, "op_sel_hi", 1, n)
        neg_lo, neg_hi = _modifier(ins, "neg_lo", 0, n), _modifier(ins, "neg_hi", 0, n)
        srcs = [self.op(o) for o in ops[1:]]
        if any(o.neg or o.abs for o in srcs) or (letter == "h" and any(neg_lo + neg_hi)):
            raise KeyError("sign modifier")
        read = self.pair if letter == "f" else self.halves
        args = [("ptr", self.vptr(o.idx)) if o.kind == "v" else read(o, letter) for o in srcs]
        args += [("ptr", self.vptr(self.op(ops[0]).idx)), (f"i{W}", self.exec().name)]

        def build(f: Fn, p: list) -> None:
            def src(i: int, h: int, neg: int) -> Val:
                if letter == "f":
                    v = f.load(f.gep(p[i], 4 * W * h), 32, W) if srcs[i].kind == "v" else (p[i] >> (32 * h)).trunc(32)
                    v = v.splat(W).f()
                else:
                    v = f.load(p[i], 32, W) if srcs[i].kind == "v" else p[i]
                    v = _half_value((v >> (16 * h)).trunc(16).splat(W), letter)
                return -v if neg else v

            a = [src(i, lo[i], neg_lo[i]) for i in range(n)]
            b = [src(i, hi[i], neg_hi[i]) for i in range(n)]
            ex = p[-1]
            low, high = (a[0], b[1]) if fn is None else (fn(*a), fn(*b))
            if letter == "f":
                self.write_vector(f, p[-2], low, ex)
                self.write_vector(f, f.gep(p[-2], 4 * W), high, ex)
            else:
                low, high = _half_bits(low, letter), _half_bits(high, letter)
                self.write_vector(f, p[-2], low.zext(32) | (high.zext(32) << 16), ex)
            f.emit("ret void")

        kinds = "".join(o.kind[0] for o in srcs)
        self.call(f"{k}_{kinds}_{lo}{hi}{neg_lo}{neg_hi}{'c' * clamp}", "void", args, build)

    def pair(self, o: Operand, letter: str = "f") -> tuple[str, str]:
        """A 64-bit scalar source as a helper's argument; an immediate stands in both halves."""
        if o.kind == "s":
            return "i64", self.sread(o, 64).name
        b = o.bits(32)
        return "i64", self.f.int(b | b << 32, 64).name

    def halves(self, o: Operand, letter: str) -> tuple[str, str]:
        """A 32-bit scalar source of two halves; a float constant stands in the low one."""
        if o.kind != "imm":
            return "i32", self.sread(o).name
        return "i32", str(o.bits(16) if isinstance(o.value, float) and letter == "e" else o.bits(32))

    def mixed(self, ins: Inst, ops: list[str], k: str) -> None:
        """Fused multiply-add in fp32 whose sources are fp32 or a half of a register, each by its own selectors."""
        W, (letter, half) = self.W, MIXED[k]
        is_half, upper = _modifier(ins, "op_sel_hi", 0, 3), _modifier(ins, "op_sel", 0, 3)
        srcs = [self.op(o) for o in ops[1:]]
        args = [
            ("i32", str(o.bits(16))) if o.kind == "imm" and h and letter == "e" else self.pass_(o)
            for o, h in zip(srcs, is_half, strict=True)
        ]
        args += [("ptr", self.vptr(self.op(ops[0]).idx)), (f"i{W}", self.exec().name)]
        clamp = "clamp" in ins.mods

        def build(f: Fn, p: list) -> None:
            vals = []
            for o, x, h, up in zip(srcs, p, is_half, upper, strict=False):
                v = (f.load(x, 32, W) if o.kind == "v" else x).splat(W)
                v = _half_value((v >> (16 * up)).trunc(16), letter).fconv(32) if h else v.f()
                v = v.intr("fabs") if o.abs else v
                vals.append(-v if o.neg else v)
            r = fma(*vals)
            if clamp:
                r = r.intr("maximumnum", r.const(0.0)).intr("minimumnum", r.const(1.0))
            if half:
                r = to_bf16(r) if letter == "b" else r.fconv(16)
            self.write_vector(f, p[-2], r, p[-1], part=half or "")
            f.emit("ret void")

        kinds = "".join(f"{o.kind[0]}{'n' * o.neg}{'a' * o.abs}" for o in srcs)
        self.call(f"{k}_{kinds}_{is_half}{upper}{'c' * clamp}", "void", args, build)
