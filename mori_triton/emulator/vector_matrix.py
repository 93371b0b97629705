"""Matrix products: MFMA of gfx942 and gfx950, WMMA of gfx1201 and gfx1250.

A lane holds consecutive k of one row of A, and likewise of one column of B; a result register holds, lane after lane,
parts of rows of D. So both sources are converted to buffers of rows of lanes, and every row of D is a vector that is
summed up in a loop: short code for any shape.

Products are added to C one k after the other, each with one rounding (fma). The order and the roundings inside the
hardware are not documented.
"""

from __future__ import annotations

import copy
import dataclasses
import re

from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.isa.convert import to_bf16
from mori_triton.emulator.isa.small import SMALL, widen, widen_scale
from mori_triton.emulator.lift_base import LiftBase
from mori_triton.emulator.matrix_products import (
    ANY_FORMAT,
    BITS,
    MATRIX,
    Modifiers,
    Product,
    any_format,
    half_of,
    modifiers,
)
from mori_triton.emulator.state import Operand

__all__ = ["ANY_FORMAT", "MATRIX", "Matrix", "half_of"]


class Matrix(LiftBase):
    """Part of the lifter."""

    def matrix(self, ins: Inst, k: str) -> None:
        how, name = modifiers(k, ins.mods), half_of(k)
        m = any_format(name, *how.formats) if how.formats[0] else MATRIX[name]
        if m.wave != self.W:
            raise KeyError("no semantics")
        ops, tall = [self.op(o) for o in ins.ops], name != k
        if len(ops) != (6 if m.scale_block else 4):
            raise KeyError("operand count")
        for text, of in zip(ins.ops, "dabcss", strict=False):
            want = m.registers(of) * (2 if tall and of in "dac" else 1)
            if self.op(text).kind == "v" and _count(text) != want:
                raise KeyError(f"{_count(text)} registers, not {want}")
        if any(o.kind != "v" for o in ops[:3]) or (m.d == "bf16" and ops[3].kind == "imm" and ops[3].value):
            raise KeyError("operand")
        if m.wave == 32 and any(isinstance(o.value, float) for o in ops[4:]):
            raise KeyError("operand")
        if tall:
            self.tall_product(name, m, how, ops)
        else:
            self.product(name, m, how, ops)

    def tall_product(self, name: str, m: Product, how: Modifiers, ops: list[Operand]) -> None:
        """Twice as many rows: the second half of them is in later registers, and in the second half of A's scales."""
        d, a, b, c = ops[:4]
        size = m.registers("d")
        if -2 * size < d.idx - a.idx < 2 * size or -2 * size < d.idx - b.idx < m.registers("b"):
            raise KeyError("the result overwrites a source")
        halves = []
        for half in range(2):
            moved = [copy.copy(o) for o in ops]
            for o in (moved[0], moved[1], moved[3]):
                o.idx += size * half
            halves.append((dataclasses.replace(how, scale_part=(half, how.scale_part[1])), moved))
        # what the first half overwrites may be the other's C
        for part, operands in halves if d.idx <= c.idx else reversed(halves):
            self.product(name, m, part, operands)

    def product(self, name: str, m: Product, how: Modifiers, ops: list[Operand]) -> None:
        """Call the helper of one product."""
        d, a, b, c = ops[:4]
        # C may be D, or lie elsewhere; results that would overwrite a part of C that is still needed wait in a buffer
        apart = c.kind == "v" and 0 < abs(d.idx - c.idx) < m.registers("d")
        args = [("ptr", self.vptr(o.idx)) for o in (d, a, b)]
        args.append(self.pass_(c, 64 if m.d == "f64" else 16 if m.d in ("f16", "bf16") else 32, m.d[0]))
        args += [self.pass_(o, 32 * m.registers("s")) for o in ops[4:]]
        kinds = "".join(o.kind[0] for o in ops[3:])
        key = f"{name}_{kinds}_{int(apart)}_{how}"

        def build(f: Fn, p: list) -> None:
            Builder(f, m, how, self.W, c).build(p, apart)
            f.emit("ret void")

        self.call(key, "void", args, build)


def _count(text: str) -> int:
    """Registers of an operand's text."""
    found = re.search(r"\[(\d+):(\d+)\]", text)
    return int(found[2]) - int(found[1]) + 1 if found else 1


class Builder:
    """The body of one product's helper."""

    def __init__(self, f: Fn, m: Product, how: Modifiers, W: int, c: Operand) -> None:
        self.f, self.m, self.how, self.W, self.c = f, m, how, W, c
        self.flt = m.d != "i32"
        # accumulators: fp64 or 32 bits
        self.bits = 64 if m.d == "f64" else 32
        self.packed = m.d in ("f16", "bf16")

    def build(self, p: list, apart: bool) -> None:
        f, m, W = self.f, self.m, self.W
        d, a, b, c = p[:4]
        rows = [self.unpack(a, m.a, 0), self.unpack(b, m.b, 1)]
        scales = [self.scale(x, i) for i, x in enumerate(p[4:])]
        count = m.registers("d") // (self.bits // 32)
        size = 4 * W * m.registers("d")
        out = f.ptr(f"alloca i8, i64 {size}, align 64") if apart else d
        f.loop(count, lambda r: self.result(r, rows, scales, c, out))
        if apart:
            f.loop(m.registers("d"), lambda r: f.store(f.gep(d, r * (4 * W)), f.load(f.gep(out, r * (4 * W)), 32, W)))

    def unpack(self, registers: str, form: str, source: int) -> str:
        """A or B as numbers: [element of a lane][lane]."""
        f, W, m = self.f, self.W, self.m
        buffer = f.ptr(f"alloca i8, i64 {m.per_lane * W * self.bits // 8}, align 64")
        bits = BITS[form]

        def put(e: int | Val, v: Val) -> None:
            f.store(f.gep(buffer, e * (W * self.bits // 8)), v.i())

        def read(r: int | Val) -> Val:
            return f.load(f.gep(registers, r * (4 * W)), 32, W)

        if bits == 64:
            put(0, read(0).zext(64) | (read(1).zext(64) << 32))
        elif 32 % bits:
            # 6 bits: an element may lie in two registers
            for e in range(m.per_lane):
                r, shift = divmod(bits * e, 32)
                v = read(r) >> shift
                if shift + bits > 32:
                    v = v | (read(r + 1) << (32 - shift))
                put(e, self.number(v, form, source, e))
        else:
            each = 32 // bits
            count = m.registers("ab"[source])

            def one(r: Val) -> None:
                v = read(r)
                for i in range(min(each, m.per_lane)):
                    put(r * each + i, self.number(v >> (bits * i) if i else v, form, source, i))

            f.loop(count, one)
        return buffer

    def number(self, v: Val, form: str, source: int, e: int) -> Val:
        """The low bits of `v` as fp32, or as i32 for integer products."""
        if form in SMALL:
            return widen(v, form, self.f.module.fnuz)
        if form in ("i8", "iu8", "iu4"):
            up = 32 - BITS[form]
            return (v << up).sar(up) if self.how.signed[source] else (v << up) >> up
        if form == "xf32":
            # 10 bits of mantissa, to nearest even; infinities and NaNs stay
            rounded = (v + ((v >> 13) & 1) + 0xFFF) & 0xFFFFE000
            special = (v & 0x7F800000).cmp("eq", 0x7F800000)
            return special.pick(v, rounded).f()
        x = v.f() if form == "f32" else (v << 16).f() if form == "bf16" else v.trunc(16).f().fconv(32)
        return -x if self.how.neg[source][e % 2] else x

    def scale(self, x: Val | str, source: int) -> str:
        """The factors of A's rows or B's columns, see `widen_scale`: [block of k][row]."""
        f, W, n = self.f, self.W, self.m.n
        part, form = self.how.scale_part[source], self.how.scale_formats[source]
        blocks = self.m.k // self.m.scale_block
        buffer = f.ptr(f"alloca i8, i64 {4 * n * blocks}, align 64")
        if W == 64:
            v = f.load(x, 32, W) if isinstance(x, str) else x.splat(W)
            f.store(buffer, widen_scale((v >> (8 * part)) & 255, form))
            return buffer
        for b in range(blocks):
            register, byte = divmod(b, 4)
            if isinstance(x, str):
                v = f.load(f.gep(x, 4 * (W * register + n * part)), 32, n)
            else:
                v = (x >> (32 * register)).trunc(32).splat(n)
            f.store(f.gep(buffer, 4 * n * b), widen_scale((v >> (8 * byte)) & 255, form).i())
        return buffer

    def place(self, r: Val, part: int) -> tuple[Val, Val]:
        """(row, block) of the lanes part * n .. part * n + n - 1 of result register (or pair) r."""
        m = self.m
        if m.n == 4:
            return r, r.const(part)
        if m.wave == 32:
            return r + 8 * part, r.const(0)
        each = m.n * m.n // 64
        row, block = r % each, r / each
        if m.d == "f64":
            return row * 4 + part, block
        return (row & 3) + 4 * part + (row >> 2) * (256 // m.n), block

    def result(self, r: Val, rows: list[str], scales: list[str], c: str | Val, out: str) -> None:
        """All of one register of D, or two of them when it holds pairs."""
        f, m, W = self.f, self.m, self.W
        for part in range(W // m.n):
            at = r * (W * self.bits // 8) + part * m.n * 4
            if m.d == "f64":
                at = r * (8 * W) + part * m.n * 4
            if self.packed:
                halves = []
                for h in range(2):
                    row = r * 2 + h + 8 * part
                    v = f.load(f.gep(c, at), 32, m.n) >> (16 * h) if isinstance(c, str) else c
                    acc = self.sums(self.start(v.trunc(16)), row, row.const(0), rows, scales)
                    halves.append((to_bf16(acc) if m.d == "bf16" else acc.fconv(16)).i().zext(32))
                f.store(f.gep(out, at), halves[0] | (halves[1] << 16))
                continue
            row, block = self.place(r, part)
            if not isinstance(c, str):
                v = c
            elif m.d == "f64":
                v = f.load(f.gep(c, at), 32, m.n).zext(64) | (f.load(f.gep(c, at + 4 * W), 32, m.n).zext(64) << 32)
            else:
                v = f.load(f.gep(c, at), 32, m.n)
            acc = self.sums(self.start(v), row, block, rows, scales).i()
            f.store(f.gep(out, at), acc.trunc(32))
            if m.d == "f64":
                f.store(f.gep(out, at + 4 * W), (acc >> 32).trunc(32))

    def start(self, v: Val) -> Val:
        """A row of C as accumulators."""
        v = v.splat(self.m.n)
        if not self.flt:
            return v
        v = (v.zext(32) << 16).f() if self.m.d == "bf16" else v.f().fconv(self.bits)
        v = v.intr("fabs") if self.how.abs_c else v
        return -v if self.how.neg_c else v

    def sums(self, acc: Val, row: Val, block: Val, rows: list[str], scales: list[str]) -> Val:
        """acc plus the products of one row of A with all columns of B."""
        f, m = self.f, self.m
        size, log = self.bits // 8, self.how.broadcast
        a_block = ((block >> log) << log) + self.how.source if log else block

        def term(k: int) -> tuple[Val, Val]:
            at = [(e * m.wave + group * m.blocks * m.n) * size for e, group in (m.order[0][k], m.order[1][k])]
            x = f.load(f.gep(rows[0], (a_block * m.n + row) * size + at[0]), self.bits)
            y = f.load(f.gep(rows[1], block * (m.n * size) + at[1]), self.bits, m.n)
            return (x.f(), y.f()) if self.flt else (x, y)

        def add(total: Val, k: int) -> Val:
            x, y = term(k)
            return x.splat(m.n).intr("fma", y, total) if self.flt else total + x.splat(m.n) * y

        step = m.scale_block
        if not step:
            for k in range(m.k):
                acc = add(acc, k)
            return acc
        for first in range(0, m.k, step):
            part = acc.const(0.0)
            for k in range(first, first + step):
                part = add(part, k)
            acc = acc + self.scaled(part, row, first // step, scales)
        return acc

    def scaled(self, part: Val, row: Val, block: int, scales: list[str]) -> Val:
        """A block of products times the factors of A's row and B's columns."""
        f, n = self.f, self.m.n
        base, exponent = 4 * block * n, part.i().const(0)
        x = f.load(f.gep(scales[0], row * 4 + base), 32).splat(n)
        y = f.load(f.gep(scales[1], base), 32, n)
        for factor, form in zip((x, y), self.how.scale_formats, strict=True):
            if form == "E8":
                part = factor.cmp("eq", 128).pick(float("nan"), part)
                exponent = exponent + factor
            else:
                part = part * factor.f()
        return part.intr("ldexp", exponent)
