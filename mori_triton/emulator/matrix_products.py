"""The matrix products: shapes, number formats and register layouts, as tables; and what their modifiers mean."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TypeVar

from mori_triton.emulator.isa.small import FORMATS, SCALES, SMALL

_T = TypeVar("_T")

# bits of an element of a source
BITS = {"f64": 64, "f32": 32, "xf32": 32, "f16": 16, "bf16": 16, "i8": 8, "iu8": 8, "iu4": 4}
BITS |= {name: form.bits for name, form in SMALL.items()}


@dataclass(frozen=True)
class Product:
    """`blocks` products of n x k by k x n; a, b: formats of the sources; d: of C and D.

    run: how many consecutive k a lane holds before the lanes of the next group continue, twice as many if they are
    smaller than 8 bits. scale_block: so many products share two factors, one of A's row, one of B's column; 0: none do.
    """

    n: int
    k: int
    a: str
    b: str
    d: str = "f32"
    blocks: int = 1
    run: int = 0
    wave: int = 64
    scale_block: int = 0

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
        return [self._order(BITS[form]) for form in (self.a, self.b)]

    def _order(self, bits: int) -> list[tuple[int, int]]:
        run = (self.run if bits >= 8 else 2 * self.run) or self.per_lane
        places = {}
        for group in range(self.groups):
            for e in range(self.per_lane):
                places[e % run + run * (group + self.groups * (e // run))] = e, group
        return [places[k] for k in range(self.k)]

    def registers(self, of: str) -> int:
        """Registers of A, B, D (C), or of the scales of one source (s)."""
        if of == "s":
            # a byte for each of a row's blocks; with 64 lanes each lane has that of its own elements
            return self.k // self.scale_block // 4 if self.wave == 32 else 1
        if of in "ab":
            return -(-self.per_lane * BITS[getattr(self, of)] // 32)
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
ANY_FORMAT = re.compile(r"(mfma|wmma)(?:_(scale|scale16))?_f32_(16x16x128|32x32x64)_f8f6f4$")

# of twice as many rows of 4-bit floats: two of those with 16, one for each half of the registers of A, C and D
TALL = re.compile(r"(wmma(?:_scale|_scale16)?_f32)_32x16x128_f4$")


def half_of(name: str) -> str:
    """The product of 16 rows that one of 32 is two of; any other name as it is."""
    return TALL.sub(r"\1_16x16x128_f8f6f4", name)


def any_format(name: str, a: str, b: str) -> Product:
    """The product that `mfma_f32_16x16x128_f8f6f4` and its like are for two formats.

    An instruction of gfx1250 with scales is the one without them behind a prefix, so both have one layout.
    """
    m = ANY_FORMAT.match(name)
    assert m
    n, k = (16, 128) if m[3].startswith("16") else (32, 64)
    block = {"scale": 32, "scale16": 16}.get(m[2], 0)
    if m[1] == "wmma" and n == 16:
        return Product(n, k, a, b, run=16, wave=32, scale_block=block)
    if m[1] == "mfma" and block != 16:
        return Product(n, k, a, b, run=16, scale_block=block)
    raise KeyError("no semantics")


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
    formats: tuple[str, str] = ("", "")
    # which byte of a lane's register (MFMA), which half of the lanes (WMMA) scales A, B
    scale_part: tuple[int, int] = (0, 0)
    scale_formats: tuple[str, str] = ("E8", "E8")


def _flags(mods: dict[str, str], key: str, default: int = 0) -> list[int]:
    text = mods.get(key)
    return [int(x) for x in text.strip("[]").split(",")] if text else [default] * 3


def _each(mods: dict[str, str], what: str, values: dict[str, _T], default: _T) -> tuple[_T, _T]:
    """The meanings of a modifier of A and of its like of B."""
    a, b = (values[mods[name]] if name in mods else default for name in (f"matrix_a_{what}", f"matrix_b_{what}"))
    return a, b


def modifiers(name: str, mods: dict[str, str]) -> Modifiers:
    """The modifiers of an instruction by its canonical name. KeyError with the reason for those that are not known."""
    mods = {k: v for k, v in mods.items() if k not in ("matrix_a_reuse", "matrix_b_reuse")}
    if TALL.match(name):
        for m in ("matrix_a_fmt", "matrix_b_fmt", "matrix_a_scale"):
            # A's scales have all lanes, one for each row
            if m in mods:
                raise KeyError(f"modifier {m}")
        return modifiers(half_of(name), {**mods, **dict.fromkeys(("matrix_a_fmt", "matrix_b_fmt"), "MATRIX_FMT_FP4")})
    allowed = {"neg_lo", "neg_hi"} if name.startswith("wmma") else {"cbsz", "abid"}
    any_of = ANY_FORMAT.match(name)
    if any_of and any_of[1] == "wmma":
        allowed |= {
            f"matrix_{x}_{what}" for x in "ab" for what in ("fmt", *(("scale", "scale_fmt") if any_of[2] else ()))
        }
    elif any_of:
        allowed = {"cbsz", "blgp", *(("op_sel", "op_sel_hi") if any_of[2] else ())}
    for m in mods:
        if m not in allowed:
            raise KeyError(f"modifier {m}")
    lo, hi = _flags(mods, "neg_lo"), _flags(mods, "neg_hi")
    cbsz, abid = int(mods.get("cbsz", "0")), int(mods.get("abid", "0"))
    if any_of and any_of[1] == "mfma":
        chosen = FORMATS[cbsz], FORMATS[int(mods.get("blgp", "0"))]
        low, high = _flags(mods, "op_sel"), _flags(mods, "op_sel_hi")
        if any_of[2] and "op_sel_hi" not in mods:
            # the assembler's default is not 0, and LLVM writes it always
            raise KeyError("no op_sel_hi")
        return Modifiers(formats=chosen, scale_part=(low[0] + 2 * high[0], low[1] + 2 * high[1]))
    if any_of:
        if any(lo[:2] + hi[:2]):
            raise KeyError("modifier neg_lo")
        return Modifiers(
            neg_c=bool(lo[2]),
            abs_c=bool(hi[2]),
            formats=_each(mods, "fmt", {f"MATRIX_FMT_{x.upper()}": x for x in FORMATS}, "fp8"),
            scale_part=_each(mods, "scale", {"MATRIX_SCALE_ROW0": 0, "MATRIX_SCALE_ROW1": 1}, 0),
            scale_formats=_each(mods, "scale_fmt", {f"MATRIX_SCALE_FMT_{x}": x for x in SCALES}, "E8"),
        )
    product = MATRIX[name]
    if product.a.startswith("iu"):
        if any(hi) or lo[2]:
            raise KeyError("modifier neg_hi")
        return Modifiers(signed=(bool(lo[0]), bool(lo[1])))
    if any(lo[:2] + hi[:2]) and BITS[product.a] != 16:
        raise KeyError("modifier neg_lo")
    if cbsz and (product.blocks >> cbsz == 0 or abid >> cbsz):
        raise KeyError("modifier cbsz")
    return Modifiers(((lo[0], hi[0]), (lo[1], hi[1])), bool(lo[2]), bool(hi[2]), broadcast=cbsz, source=abid)
