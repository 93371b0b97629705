"""Matrix products: MFMA of gfx942 and gfx950, WMMA of gfx1201 and gfx1250.

A lane holds consecutive k of one row of A, and likewise of one column of B; a result register holds, lane after lane,
parts of rows of D. So both sources are converted to buffers of rows of lanes, and every row of D is a vector that is
summed up in a loop: short code for any shape.

Products are added to C one k after the other, each with one rounding (fma). The order and the roundings inside the
hardware are not documented.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.isa.convert import to_bf16
from mori_triton.emulator.isa.small import FORMATS, SMALL, widen
from mori_triton.emulator.lift_base import LiftBase
from mori_triton.emulator.state import Operand

# bits of an element of a source
_BITS = {"f64": 64, "f32": 32, "xf32": 32, "f16": 16, "bf16": 16, "i8": 8, "iu8": 8, "iu4": 4}
_BITS |= {name: form.bits for name, form in SMALL.items()}


@dataclass(frozen=True)
class Product:
    """`blocks` products of n x k by k x n; a, b: formats of the sources; d: of C and D.

    run: how many consecutive k a lane holds before the lanes of the next group continue. scaled: each 32 products are
    multiplied by two powers of two.
    """

    n: int
    k: int
    a: str
    b: str
    d: str = "f32"
    blocks: int = 1
    run: int = 0
    wave: int = 64
    scaled: bool = False

    @property
    def groups(self) -> int:
        """Groups of lanes that hold different k of the same rows."""
        return self.wave // (self.n * self.blocks)

    @property
    def per_lane(self) -> int:
        return self.k // self.groups

    @functools.cached_property
    def order(self) -> list[list[tuple[int, int]]]:
        """Of A and of B: (element of a lane, group of lanes) of every k."""
        return [self._order(_BITS[form]) for form in (self.a, self.b)]

    def _order(self, bits: int) -> list[tuple[int, int]]:
        # formats smaller than 8 bits are not split
        run = (self.run if bits >= 8 else 0) or self.per_lane
        places = {}
        for group in range(self.groups):
            for e in range(self.per_lane):
                places[e % run + run * (group + self.groups * (e // run))] = e, group
        return [places[k] for k in range(self.k)]

    def registers(self, of: str) -> int:
        """Registers of A, B or D (C)."""
        if of in "ab":
            return -(-self.per_lane * _BITS[getattr(self, of)] // 32)
        numbers = self.n * self.n * self.blocks // self.wave
        return {"f64": 2 * numbers, "f16": numbers // 2, "bf16": numbers // 2}.get(self.d, numbers)


def _products() -> dict[str, Product]:
    found: dict[str, Product] = {}
    for n, k in ((32, 8), (16, 16), (32, 16), (16, 32)):
        for t in ("f16", "bf16"):
            found[f"mfma_f32_{n}x{n}x{k}_{t}"] = Product(n, k, t, t)
    # several products at once
    for n, blocks in ((32, 2), (16, 4), (4, 16)):
        for t, k, d in (("f32", 1, "f32"), ("f16", 4, "f32"), ("bf16", 4, "f32"), ("i8", 4, "i32")):
            found[f"mfma_{d}_{n}x{n}x{k}_{blocks}b_{t}"] = Product(n, k, t, t, d, blocks)
    for n, k in ((32, 2), (16, 4)):
        found[f"mfma_f32_{n}x{n}x{k}_f32"] = Product(n, k, "f32", "f32")
        found[f"mfma_f32_{n}x{n}x{2 * k}_xf32"] = Product(n, 2 * k, "xf32", "xf32")
    for n, k in ((32, 16), (16, 32), (32, 32), (16, 64)):
        found[f"mfma_i32_{n}x{n}x{k}_i8"] = Product(n, k, "i8", "i8", "i32")
    found["mfma_f64_16x16x4_f64"] = Product(16, 4, "f64", "f64", "f64")
    for a in ("fp8", "bf8"):
        for b in ("fp8", "bf8"):
            for n, k in ((32, 16), (16, 32)):
                found[f"mfma_f32_{n}x{n}x{k}_{a}_{b}"] = Product(n, k, a, b)
            found[f"wmma_f32_16x16x16_{a}_{b}"] = Product(16, 16, a, b, wave=32)
            for k in (64, 128):
                found[f"wmma_f32_16x16x{k}_{a}_{b}"] = Product(16, k, a, b, run=8, wave=32)
                found[f"wmma_f16_16x16x{k}_{a}_{b}"] = Product(16, k, a, b, "f16", run=8, wave=32)
    for t in ("f16", "bf16"):
        for k, run in ((16, 0), (32, 8)):
            for d in ("f32", t):
                found[f"wmma_{d}_16x16x{k}_{t}"] = Product(16, k, t, t, d, run=run, wave=32)
    found["wmma_f32_16x16x4_f32"] = Product(16, 4, "f32", "f32", wave=32)
    found["wmma_i32_16x16x16_iu8"] = Product(16, 16, "iu8", "iu8", "i32", wave=32)
    found["wmma_i32_16x16x64_iu8"] = Product(16, 64, "iu8", "iu8", "i32", run=8, wave=32)
    for k in (16, 32):
        found[f"wmma_i32_16x16x{k}_iu4"] = Product(16, k, "iu4", "iu4", "i32", wave=32)
    return found


MATRIX = _products()
# sources of these may be of any of FORMATS, chosen by modifiers
ANY_FORMAT = re.compile(r"(mfma|mfma_scale)_f32_(16x16x128|32x32x64)_f8f6f4$")


def any_format(name: str, a: str, b: str) -> Product:
    """The product that `mfma_f32_16x16x128_f8f6f4` and its like are for two formats."""
    m = ANY_FORMAT.match(name)
    assert m
    n, k = (16, 128) if m[2].startswith("16") else (32, 64)
    return Product(n, k, a, b, run=16, scaled="scale" in name)


@dataclass(frozen=True)
class Modifiers:
    """What the modifiers of an instruction mean. neg: per source A, B, the parity of the elements whose sign flips."""

    neg: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    neg_c: bool = False
    abs_c: bool = False
    signed: tuple[bool, bool] = (True, True)
    # A of a group of 1 << broadcast blocks is that of its block number `source`
    broadcast: int = 0
    source: int = 0
    # which byte of a lane's register scales A, B
    scale_byte: tuple[int, int] = (0, 0)
    formats: tuple[str, str] = field(default=("", ""))


def _flags(mods: dict[str, str], key: str, default: int = 0) -> list[int]:
    text = mods.get(key)
    return [int(x) for x in text.strip("[]").split(",")] if text else [default] * 3


def _modifiers(name: str, mods: dict[str, str]) -> Modifiers:
    mods = {k: v for k, v in mods.items() if k not in ("matrix_a_reuse", "matrix_b_reuse")}
    allowed = {"neg_lo", "neg_hi"} if name.startswith("wmma") else {"cbsz", "abid"}
    if ANY_FORMAT.match(name):
        allowed = {"cbsz", "blgp", *(("op_sel", "op_sel_hi") if "scale" in name else ())}
    for m in mods:
        if m not in allowed:
            raise KeyError(f"modifier {m}")
    lo, hi = _flags(mods, "neg_lo"), _flags(mods, "neg_hi")
    cbsz, abid = int(mods.get("cbsz", "0")), int(mods.get("abid", "0"))
    if ANY_FORMAT.match(name):
        chosen = FORMATS[cbsz], FORMATS[int(mods.get("blgp", "0"))]
        low, high = _flags(mods, "op_sel"), _flags(mods, "op_sel_hi")
        return Modifiers(scale_byte=(low[0] + 2 * high[0], low[1] + 2 * high[1]), formats=chosen)
    product = MATRIX[name]
    if product.a.startswith("iu"):
        if any(hi) or lo[2]:
            raise KeyError("modifier neg_hi")
        return Modifiers(signed=(bool(lo[0]), bool(lo[1])))
    if any(lo[:2] + hi[:2]) and _BITS[product.a] != 16:
        raise KeyError("modifier neg_lo")
    if cbsz and (product.blocks >> cbsz == 0 or abid >> cbsz):
        raise KeyError("modifier cbsz")
    return Modifiers(((lo[0], hi[0]), (lo[1], hi[1])), bool(lo[2]), bool(hi[2]), broadcast=cbsz, source=abid)


class Matrix(LiftBase):
    """Part of the lifter."""

    def matrix(self, ins: Inst, k: str) -> None:
        how = _modifiers(k, ins.mods)
        m = any_format(k, *how.formats) if how.formats[0] else MATRIX[k]
        if m.wave != self.W:
            raise KeyError("no semantics")
        ops = [self.op(o) for o in ins.ops]
        if len(ops) != (6 if m.scaled else 4):
            raise KeyError("operand count")
        for text, of in zip(ins.ops, "dabc", strict=False):
            if self.op(text).kind == "v" and _count(text) != m.registers(of):
                raise KeyError(f"{_count(text)} registers, not {m.registers(of)}")
        d, a, b, c = ops[:4]
        if any(o.kind != "v" for o in (d, a, b)) or (m.d == "bf16" and c.kind == "imm" and c.value):
            raise KeyError("operand")
        # C may be D, or lie elsewhere; results that would overwrite a part of C that is still needed wait in a buffer
        apart = c.kind == "v" and 0 < abs(d.idx - c.idx) < m.registers("d")
        args = [("ptr", self.vptr(o.idx)) for o in (d, a, b)]
        args.append(self.pass_(c, 64 if m.d == "f64" else 16 if m.d in ("f16", "bf16") else 32, m.d[0]))
        args += [self.pass_(o) for o in ops[4:]]
        kinds = "".join(o.kind[0] for o in ops[3:])
        key = f"{k}_{kinds}_{int(apart)}_{how}"

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
        bits = _BITS[form]

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
            up = 32 - _BITS[form]
            return (v << up).sar(up) if self.how.signed[source] else (v << up) >> up
        if form == "xf32":
            # 10 bits of mantissa, to nearest even; infinities and NaNs stay
            rounded = (v + ((v >> 13) & 1) + 0xFFF) & 0xFFFFE000
            special = (v & 0x7F800000).cmp("eq", 0x7F800000)
            return special.pick(v, rounded).f()
        x = v.f() if form == "f32" else (v << 16).f() if form == "bf16" else v.trunc(16).f().fconv(32)
        return -x if self.how.neg[source][e % 2] else x

    def scale(self, x: Val | str, source: int) -> str:
        """Exponents of A's rows or B's columns, one a lane."""
        f, W = self.f, self.W
        v = f.load(x, 32, W) if isinstance(x, str) else x.splat(W)
        buffer = f.ptr(f"alloca i8, i64 {4 * W}, align 64")
        f.store(buffer, ((v >> (8 * self.how.scale_byte[source])) & 255) - 127)
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

        if not m.scaled:
            for k in range(m.k):
                acc = add(acc, k)
            return acc
        for first in range(0, m.k, 32):
            part = acc.const(0.0)
            for k in range(first, first + 32):
                part = add(part, k)
            acc = acc + self.scaled(part, row, first // 32, scales)
        return acc

    def scaled(self, part: Val, row: Val, group: int, scales: list[str]) -> Val:
        """32 products times the scales of A's row and B's columns; the scale 255 is a NaN."""
        f, m = self.f, self.m
        base = 4 * group * m.n
        x = f.load(f.gep(scales[0], row * 4 + base), 32).splat(m.n)
        y = f.load(f.gep(scales[1], base), 32, m.n)
        bad = x.cmp("eq", 128) | y.cmp("eq", 128)
        return bad.pick(float("nan"), part.intr("ldexp", x + y))
