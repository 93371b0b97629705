"""Conversions between 8-bit (and from 4-bit) floats and larger ones, several numbers a lane, with a scale.

A scale is a power of two: the exponent of an fp32 operand (mantissa and sign are ignored), or, on gfx1250, one byte.
Widening multiplies by it, narrowing divides.
"""

from __future__ import annotations

import re
from typing import Any

from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.isa.convert import to_bf8, to_bf16, to_fp8
from mori_triton.emulator.isa.small import SMALL, widen
from mori_triton.emulator.lift_base import LiftBase

_LARGE = "f32|f16|bf16"
_NARROW = re.compile(rf"cvt_scalef32_(pk8?)_(fp8|bf8)_({_LARGE})$")
_WIDEN = re.compile(rf"cvt_(?:(scalef32|scale)_)?(?:(pk8?)_)?({_LARGE})_(fp8|bf8|fp4)$")


def is_small_conversion(k: str) -> bool:
    """Is this one of the family (v_cvt_pk_f16_fp8 of gfx1250 and plain fp4, for which nothing is known, are not)?"""
    m = _WIDEN.match(k)
    return bool(_NARROW.match(k)) or bool(m and (m[1] or (m[3] == "f32" and m[4] != "fp4")))


class SmallFloats(LiftBase):
    """Part of the lifter."""

    def small_conversion(self, ins: Inst, k: str) -> None:
        narrow = _NARROW.match(k)
        if narrow:
            self.narrow(ins, k, 8 if narrow[1] == "pk8" else 2, narrow[2], narrow[3])
        else:
            m = _WIDEN.match(k)
            assert m
            self.widen(ins, k, m[1] or "", {"pk8": 8, "pk": 2}.get(m[2], 1), m[3], m[4])

    def helper(self, ins: Inst, key: str, body: Any) -> None:
        """body(f, pointers or values of the sources, pointer of the destination, exec)."""
        ops = [self.op(o) for o in ins.ops]
        if ops[0].kind != "v" or ops[1].kind != "v" or any(o.neg or o.abs for o in ops):
            raise KeyError("operand")
        args = [self.pass_(o) for o in ops[1:]] + [("ptr", self.vptr(ops[0].idx)), (f"i{self.W}", self.exec().name)]

        def build(f: Fn, p: list) -> None:
            body(f, p[:-2], p[-2], p[-1])
            f.emit("ret void")

        self.call(key + "".join(o.kind[0] for o in ops), "void", args, build)

    def power(self, f: Fn, p: Any, kind: str, sign: int) -> tuple[Val, Val]:
        """(exponent of the scale, or its negative; is the scale a NaN)"""
        v = (f.load(p, 32, self.W) if isinstance(p, str) else p).splat(self.W)
        e = (v >> 23 if kind == "scalef32" else v) & 255
        return (e - 127) if sign > 0 else 127 - e, e.cmp("eq", 255)

    def narrow(self, ins: Inst, k: str, count: int, small: str, large: str) -> None:
        W = self.W
        separate = count == 2 and large == "f32"
        op_sel = [int(x) for x in ins.mods.get("op_sel", "[0,0,0,0]").strip("[]").split(",")]
        if len(ins.ops) != (4 if separate else 3) or any(op_sel[:-1]) or (count == 8 and any(op_sel)):
            raise KeyError("operands")

        def body(f: Fn, p: list, dst: str, ex: Val) -> None:
            shift, nan = self.power(f, p[-1], "scalef32", -1)

            def number(i: int) -> Val:
                if separate:
                    return (f.load(p[i], 32, W) if isinstance(p[i], str) else p[i]).splat(W).f()
                r = f.load(f.gep(p[0], 4 * W * (i if large == "f32" else i // 2)), 32, W)
                return _half(r, i, large)

            codes = []
            for i in range(count):
                x = number(i)
                y = x.intr("ldexp", shift)
                # what only the scale makes infinite is a large number
                infinite = y.intr("fabs").cmp("oeq", float("inf")) & x.intr("fabs").cmp("une", float("inf"))
                y = infinite.pick(y.const(2.0**127).splat(W).intr("copysign", x), y)
                y = nan.pick(float("nan"), y)
                codes.append((to_fp8(y) if small == "fp8" else to_bf8(y)) & 255)
            words = [_join(codes[i : i + 4], 8) for i in range(0, count, 4)]
            for r, word in enumerate(words):
                part = "" if count == 8 else "h" if op_sel[-1] else "l"
                self.write_vector(f, f.gep(dst, 4 * W * r), word, ex, part=part)

        self.helper(ins, f"{k}_{op_sel[-1]}", body)

    def widen(self, ins: Inst, k: str, kind: str, count: int, large: str, small: str) -> None:
        W, bits = self.W, SMALL[small].bits
        # which part of the source: SDWA of gfx9, op_sel else
        op_sel = [int(x) for x in ins.mods.get("op_sel", "[0,0]").strip("[]").split(",")]
        if len(ins.ops) != (3 if kind else 2) or any(op_sel[2:]) or (count == 8 and any(op_sel)):
            raise KeyError("operands")
        if kind == "scale" and self.op(ins.ops[2]).kind != "imm":
            raise KeyError("a scale for each lane")
        low = op_sel[0] * 16 if count * bits == 16 else 8 * (op_sel[0] + 2 * op_sel[1])
        if "src0_sel" in ins.mods:
            name, n = ins.mods["src0_sel"].split("_") if "_" in ins.mods["src0_sel"] else ("WORD", "0")
            low = int(n) * (8 if name == "BYTE" else 16)

        def body(f: Fn, p: list, dst: str, ex: Val) -> None:
            out = []
            shift, nan = self.power(f, p[1], kind, 1) if kind else (None, None)
            for i in range(count):
                at = low + i * bits
                raw = f.load(f.gep(p[0], 4 * W * (at // 32)), 32, W) >> (at % 32)
                x = widen(raw, small, f.module.fnuz)
                if shift is not None and nan is not None:
                    x = nan.pick(float("nan"), x.intr("ldexp", shift))
                out.append(x.i() if large == "f32" else (x.fconv(16).i() if large == "f16" else to_bf16(x)).zext(32))
            words = out if large == "f32" else [_join(out[i : i + 2], 16) for i in range(0, count, 2)]
            for r, word in enumerate(words):
                self.write_vector(f, f.gep(dst, 4 * W * r), word, ex)

        self.helper(ins, f"{k}_{low}", body)


def _half(v: Val, i: int, large: str) -> Val:
    """Number i of registers that hold one (fp32) or two a lane, as fp32."""
    if large == "f32":
        return v.f()
    half = (v >> (16 * (i % 2))) & 0xFFFF
    return (half << 16).f() if large == "bf16" else half.trunc(16).f().fconv(32)


def _join(parts: list[Val], bits: int) -> Val:
    word = parts[0]
    for i, x in enumerate(parts[1:], 1):
        word = word | (x << (bits * i))
    return word
