"""Conversions between floats of 8, 6 or 4 bits and larger ones, several numbers a lane, with a scale.

A scale is a power of two: the exponent of an fp32 operand (mantissa and sign are ignored), or, widening on gfx1250, one
byte. Widening multiplies by it, narrowing divides.
"""

from __future__ import annotations

import re
from typing import Any

from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.isa.convert import to_bf16
from mori_triton.emulator.isa.small import SMALL, narrow, widen
from mori_triton.emulator.lift_base import LiftBase

_LARGE = "f32|f16|bf16"
# numbers at once -> the sizes that are converted so; 2xpk16 takes its numbers from two operands in turn
_COUNTS = {
    "": (1, (8,)),
    "pk": (2, (8, 4)),
    "pk8": (8, (8, 4)),
    "pk16": (16, (6,)),
    "pk32": (32, (6,)),
    "2xpk16": (32, (6,)),
}
_NARROW = re.compile(rf"cvt_scalef32_(pk|pk8|pk16|pk32|2xpk16)_(\w+)_({_LARGE})$")
_WIDEN = re.compile(rf"cvt_(?:(scalef32|scale)_)?(?:(pk|pk8|pk16|pk32)_)?({_LARGE})_(fp8|bf8|fp6|bf6|fp4)$")


def is_small_conversion(k: str) -> bool:
    """Is this one of the family (v_cvt_pk_f16_fp8 of gfx1250 and plain fp4, for which nothing is known, are not)?"""
    m = _NARROW.match(k)
    if m:
        return m[2] in SMALL and SMALL[m[2]].bits in _COUNTS[m[1]][1] and (m[1] != "2xpk16" or m[3] == "f32")
    m = _WIDEN.match(k)
    return bool(m and SMALL[m[4]].bits in _COUNTS[m[2] or ""][1] and (m[1] or (m[3] == "f32" and m[4] != "fp4")))


class SmallFloats(LiftBase):
    """Part of the lifter."""

    def small_conversion(self, ins: Inst, k: str) -> None:
        m = _NARROW.match(k)
        if m:
            self.narrow(ins, k, m[1], m[2], m[3])
            return
        m = _WIDEN.match(k)
        assert m
        self.widen(ins, k, m[1] or "", _COUNTS[m[2] or ""][0], m[3], m[4])

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

    def narrow(self, ins: Inst, k: str, how: str, small: str, large: str) -> None:
        W, (count, _), bits = self.W, _COUNTS[how], SMALL[small].bits
        separate = large == "f32" and how in ("pk", "2xpk16")
        # the destination's flag stands last
        *flags, last = _op_sel(ins) or [0]
        op_sel = [*flags, *[0] * (3 - len(flags)), last]
        if (
            len(ins.ops) != (4 if separate else 3)
            or any(op_sel[: 2 if bits == 4 else 3])
            or (how != "pk" and any(op_sel))
        ):
            raise KeyError("operands")

        def body(f: Fn, p: list, dst: str, ex: Val) -> None:
            e, nan = _power(f.load(p[-1], 32, W) if isinstance(p[-1], str) else p[-1], W)

            def number(i: int) -> Val:
                if separate:
                    source = p[i % 2]
                    register = f.gep(source, 4 * W * (i // 2)) if isinstance(source, str) else ""
                    return (f.load(register, 32, W) if register else source).splat(W).f()
                r = f.load(f.gep(p[0], 4 * W * (i if large == "f32" else i // 2)), 32, W)
                return _half(r, i, large)

            codes = []
            for i in range(count):
                x = number(i)
                y = x.intr("ldexp", 0 - e)
                # what only the scale makes infinite is a large number
                infinite = y.intr("fabs").cmp("oeq", float("inf")) & x.intr("fabs").cmp("une", float("inf"))
                y = infinite.pick(y.const(2.0**127).splat(W).intr("copysign", x), y)
                codes.append(narrow(nan.pick(float("nan"), y), small))
            part = ""
            if how == "pk":
                part = f"BYTE_{op_sel[2] + 2 * op_sel[3]}p" if bits == 4 else "h" if op_sel[3] else "l"
            for r, word in enumerate(_join(codes, bits)):
                self.write_vector(f, f.gep(dst, 4 * W * r), word, ex, part=part)

        self.helper(ins, f"{k}_{op_sel}", body)

    def widen(self, ins: Inst, k: str, kind: str, count: int, large: str, small: str) -> None:
        W, bits = self.W, SMALL[small].bits
        # which part of the source: SDWA of gfx9, op_sel else
        op_sel, select = [*_op_sel(ins), 0, 0], int(ins.mods.get("scale_sel", "0"))
        if len(ins.ops) != (3 if kind else 2) or any(op_sel[2:]) or (count > 2 and any(op_sel)):
            raise KeyError("operands")
        if "scale_sel" in ins.mods and (kind != "scale" or select not in ((0, 8) if bits == 8 else (0,))):
            raise KeyError("scale_sel")
        low = op_sel[0] * 16 if count * bits == 16 else 8 * (op_sel[0] + 2 * op_sel[1])
        if "src0_sel" in ins.mods:
            name, n = ins.mods["src0_sel"].split("_") if "_" in ins.mods["src0_sel"] else ("WORD", "0")
            low = int(n) * (8 if name == "BYTE" else 16)

        def scale(f: Fn, p: Any) -> tuple[Val, Val]:
            v = f.load(p, 32, W) if isinstance(p, str) else p
            if kind == "scalef32":
                return _power(v, W)
            # both halves of the wave have the scales in its first 16 lanes: one byte, or each half its own
            v = v.splat(W).shuffle([lane % 16 for lane in range(W)])
            if bits < 8 or select:
                v = v >> f.vec([8 * (lane // 16) for lane in range(W)])
            return _power(v << 23, W)

        def body(f: Fn, p: list, dst: str, ex: Val) -> None:
            out = []
            shift, nan = scale(f, p[1]) if kind else (None, None)
            for i in range(count):
                register, at = divmod(low + i * bits, 32)
                raw = f.load(f.gep(p[0], 4 * W * register), 32, W) >> at
                if at + bits > 32:
                    raw = raw | (f.load(f.gep(p[0], 4 * W * (register + 1)), 32, W) << (32 - at))
                x = widen(raw, small, f.module.fnuz)
                if shift is not None and nan is not None:
                    x = nan.pick(float("nan"), x.intr("ldexp", shift))
                out.append(x.i() if large == "f32" else (x.fconv(16).i() if large == "f16" else to_bf16(x)).zext(32))
            for r, word in enumerate(_join(out, 32 if large == "f32" else 16)):
                self.write_vector(f, f.gep(dst, 4 * W * r), word, ex)

        self.helper(ins, f"{k}_{low}_{select}", body)


def _op_sel(ins: Inst) -> list[int]:
    text = ins.mods.get("op_sel")
    return [int(x) for x in text.strip("[]").split(",")] if text else []


def _power(v: Val, W: int) -> tuple[Val, Val]:
    """(exponent of a scale in fp32, is the scale a NaN)"""
    e = (v.splat(W) >> 23) & 255
    return e - 127, e.cmp("eq", 255)


def _half(v: Val, i: int, large: str) -> Val:
    """Number i of registers that hold one (fp32) or two a lane, as fp32."""
    if large == "f32":
        return v.f()
    half = (v >> (16 * (i % 2))) & 0xFFFF
    return (half << 16).f() if large == "bf16" else half.trunc(16).f().fconv(32)


def _join(parts: list[Val], bits: int) -> list[Val]:
    """Numbers of `bits` bits one behind the other, in registers."""
    words: list[Val] = []
    for i, x in enumerate(parts):
        register, at = divmod(i * bits, 32)
        if register == len(words):
            words.append(x << at if at else x)
        else:
            words[register] = words[register] | (x << at)
        if at + bits > 32:
            words.append(x >> (32 - at))
    return words
