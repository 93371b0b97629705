"""Scalar instructions: (types, formula giving (value, new scc or None))."""

from __future__ import annotations

from mori_triton.emulator.ir import Val
from mori_triton.emulator.isa import floating
from mori_triton.emulator.isa.convert import pair, to_half_toward_zero, to_int
from mori_triton.emulator.isa.half import fma_half
from mori_triton.emulator.isa.integer import (
    Formula,
    add_carry,
    bfe,
    high_word,
    leading_signs,
    sub_borrow,
    wide,
)


def _plain(f: Formula) -> Formula:
    """scc stays as it is."""
    return lambda *a: (f(*a), None)


def _setnz(f: Formula) -> Formula:
    """scc tells whether the result is not zero."""

    def g(*a: Val) -> tuple[Val, Val]:
        x = f(*a)
        return x, x.cmp("ne", 0)

    return g


def _add_signed(a: Val, b: Val) -> tuple[Val, Val]:
    x = a + b
    return x, ((~(a ^ b)) & (a ^ x)).cmp("slt", 0)


def _sub_signed(a: Val, b: Val) -> tuple[Val, Val]:
    x = a - b
    return x, ((a ^ b) & (a ^ x)).cmp("slt", 0)


def _shl_add(n: int) -> Formula:
    def f(a: Val, b: Val) -> tuple[Val, Val]:
        x = (a.zext(64) << n) + b.zext(64)
        return x.trunc(32), (x >> 32).cmp("ne", 0)

    return f


def _minmax(pred: str) -> Formula:
    return lambda a, b: (a.cmp(pred, b).pick(a, b), a.cmp(pred, b))


def _s_bfe(a: Val, b: Val, signed: bool) -> Val:
    """Bit field with offset b[4:0] and width b[22:16]."""
    width = (b >> 16) & 127
    return width.cmp("ugt", 31).pick(a.sar(b & 31) if signed else a >> (b & 31), bfe(a, b, width, signed))


def _s_bfe64(a: Val, b: Val, signed: bool) -> Val:
    """The same with offset b[5:0] of a 64-bit source."""
    off, width = (b & 63).zext(64), ((b >> 16) & 127).zext(64)
    field = width.cmp("ugt", 63).pick(-1, (a.const(1) << (width & 63)) - 1)
    r = (a.sar(off) if signed else a >> off) & field
    if signed:
        # what the width leaves of the field's sign bit
        spare = width.cmp("ugt", 63).pick(0, (64 - width) & 63)
        r = width.cmp("eq", 0).pick(0, (r << spare).sar(spare))
    return r


def _count_leading(a: Val) -> Val:
    return a.cmp("eq", 0).pick(-1, a.intr("ctlz", 0)).trunc(32)


def _absdiff(a: Val, b: Val) -> tuple[Val, Val]:
    x = a - b
    x = x.cmp("slt", 0).pick(0 - x, x)
    return x, x.cmp("ne", 0)


def _count_zeros(a: Val) -> tuple[Val, Val]:
    x = (~a).intr("ctpop").trunc(32)
    return x, x.cmp("ne", 0)


def _any_of_four(a: Val) -> Val:
    """Bit 4i of the result: any of bits 4i .. 4i + 3."""
    x = a | (a >> 1)
    return (x | (x >> 2)) & int("1" * (a.bits // 4), 16)


def _quadmask(a: Val) -> Val:
    """The same bits side by side."""
    x, at, ones = _any_of_four(a), 1, 1
    while at * 4 < a.bits:
        ones = (1 << (2 * at)) - 1
        step = 8 * at
        mask = sum(ones << i for i in range(0, a.bits, step))
        x = (x | (x >> (3 * at))) & mask
        at *= 2
    return x


def _spread(a: Val) -> Val:
    """Each of 32 bits twice."""
    x = a.zext(64)
    for shift, mask in (
        (16, 0x0000FFFF0000FFFF),
        (8, 0x00FF00FF00FF00FF),
        (4, 0x0F0F0F0F0F0F0F0F),
        (2, 0x3333333333333333),
        (1, 0x5555555555555555),
    ):
        x = (x | (x << shift)) & mask
    return x | (x << 1)


def _select(a: Val, b: Val, scc: Val) -> Val:
    return scc.cmp("ne", 0).pick(a, b)


BOOL: dict[str, Formula] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
    "and_not1": lambda a, b: a & ~b,
    "or_not1": lambda a, b: a | ~b,
    "and_not0": lambda a, b: ~a & b,
    "or_not0": lambda a, b: ~a | b,
}

SALU: dict[str, tuple[str, Formula]] = {
    "mov_b32": ("i<-i", _plain(lambda a: a)),
    "mov_b64": ("q<-q", _plain(lambda a: a)),
    "movk_i32": ("i<-k", _plain(lambda a: a)),
    "cmov_b32": ("i<-iDc", _plain(_select)),
    "cselect_b32": ("i<-iic", _plain(_select)),
    "cselect_b64": ("q<-qqc", _plain(_select)),
    "not_b32": ("i<-i", _setnz(lambda a: ~a)),
    "not_b64": ("q<-q", _setnz(lambda a: ~a)),
    # add, subtract, multiply
    "add_co_i32": ("i<-ii", _add_signed),
    "sub_co_i32": ("i<-ii", _sub_signed),
    "addk_co_i32": ("i<-Dk", _add_signed),
    "add_co_u32": ("i<-ii", add_carry),
    "sub_co_u32": ("i<-ii", sub_borrow),
    "add_co_ci_u32": ("i<-iic", add_carry),
    "sub_co_ci_u32": ("i<-iic", sub_borrow),
    "add_nc_u64": ("q<-qq", _plain(lambda a, b: a + b)),
    "sub_nc_u64": ("q<-qq", _plain(lambda a, b: a - b)),
    "mul_i32": ("i<-ii", _plain(lambda a, b: a * b)),
    "mulk_i32": ("i<-Dk", _plain(lambda a, b: a * b)),
    "mul_hi_u32": ("i<-ii", _plain(lambda a, b: high_word(wide(a, b, False)))),
    "mul_hi_i32": ("i<-ii", _plain(lambda a, b: high_word(wide(a, b, True)))),
    "mul_u64": ("q<-qq", _plain(lambda a, b: a * b)),
    "abs_i32": ("i<-i", _setnz(lambda a: a.cmp("slt", 0).pick(0 - a, a))),
    "min_i32": ("i<-ii", _minmax("slt")),
    "max_i32": ("i<-ii", _minmax("sge")),
    "min_u32": ("i<-ii", _minmax("ult")),
    "max_u32": ("i<-ii", _minmax("uge")),
    # shifts
    "lshl_b32": ("i<-ii", _setnz(lambda a, b: a << (b & 31))),
    "lshr_b32": ("i<-ii", _setnz(lambda a, b: a >> (b & 31))),
    "ashr_i32": ("i<-ii", _setnz(lambda a, b: a.sar(b & 31))),
    "lshl_b64": ("q<-qi", _setnz(lambda a, b: a << (b & 63).zext(64))),
    "lshr_b64": ("q<-qi", _setnz(lambda a, b: a >> (b & 63).zext(64))),
    "ashr_i64": ("q<-qi", _setnz(lambda a, b: a.sar((b & 63).zext(64)))),
    # bit fields and counts
    "bfe_u32": ("i<-ii", _setnz(lambda a, b: _s_bfe(a, b, False))),
    "bfe_i32": ("i<-ii", _setnz(lambda a, b: _s_bfe(a, b, True))),
    "bfm_b32": ("i<-ii", _plain(lambda a, b: ((a.const(1) << (a & 31)) - 1) << (b & 31))),
    "brev_b32": ("i<-i", _plain(lambda a: a.intr("bitreverse"))),
    "bcnt1_i32_b32": ("i<-i", _setnz(lambda a: a.intr("ctpop"))),
    "bcnt1_i32_b64": ("i<-q", _setnz(lambda a: a.intr("ctpop").trunc(32))),
    "ctz_i32_b32": ("i<-i", _plain(lambda a: a.cmp("eq", 0).pick(-1, a.intr("cttz", 0)))),
    "ctz_i32_b64": ("i<-q", _plain(lambda a: a.cmp("eq", 0).pick(-1, a.intr("cttz", 0)).trunc(32))),
    "clz_i32_u32": ("i<-i", _plain(lambda a: a.cmp("eq", 0).pick(-1, a.intr("ctlz", 0)))),
    "sext_i32_i16": ("i<-i", _plain(lambda a: (a << 16).sar(16))),
    "sext_i32_i8": ("i<-i", _plain(lambda a: (a << 24).sar(24))),
    "pack_ll_b32_b16": ("i<-ii", _plain(lambda a, b: (a & 0xFFFF) | (b << 16))),
    "bitset1_b32": ("i<-Di", _plain(lambda d, a: d | (d.const(1) << (a & 31)))),
    "bitset0_b32": ("i<-Di", _plain(lambda d, a: d & ~(d.const(1) << (a & 31)))),
}
SALU |= {
    "cmov_b64": ("q<-qDc", _plain(_select)),
    "cmovk_i32": ("i<-kDc", _plain(_select)),
    "absdiff_i32": ("i<-ii", _absdiff),
    "bfe_u64": ("q<-qi", _setnz(lambda a, b: _s_bfe64(a, b, False))),
    "bfe_i64": ("q<-qi", _setnz(lambda a, b: _s_bfe64(a, b, True))),
    "bfm_b64": (
        "q<-ii",
        _plain(lambda a, b: ((a.zext(64).const(1) << (a & 63).zext(64)) - 1) << (b & 63).zext(64)),
    ),
    "brev_b64": ("q<-q", _plain(lambda a: a.intr("bitreverse"))),
    "clz_i32_u64": ("i<-q", _plain(_count_leading)),
    "cls_i32": ("i<-i", _plain(leading_signs)),
    "cls_i32_i64": ("i<-q", _plain(lambda a: leading_signs(a).trunc(32))),
    "bcnt0_i32_b32": ("i<-i", _count_zeros),
    "bcnt0_i32_b64": ("i<-q", _count_zeros),
    "bitset0_b64": ("q<-Di", _plain(lambda d, a: d & ~(d.const(1) << (a & 63).zext(64)))),
    "bitset1_b64": ("q<-Di", _plain(lambda d, a: d | (d.const(1) << (a & 63).zext(64)))),
    "bitreplicate_b64_b32": ("q<-i", _plain(_spread)),
    "quadmask_b32": ("i<-i", _setnz(_quadmask)),
    "quadmask_b64": ("q<-q", _setnz(_quadmask)),
    "wqm_b32": ("i<-i", _setnz(lambda a: _any_of_four(a) * 15)),
    "wqm_b64": ("q<-q", _setnz(lambda a: _any_of_four(a) * 15)),
    "pack_lh_b32_b16": ("i<-ii", _plain(lambda a, b: (a & 0xFFFF) | (b & 0xFFFF0000))),
    "pack_hh_b32_b16": ("i<-ii", _plain(lambda a, b: (a >> 16) | (b & 0xFFFF0000))),
    "pack_hl_b32_b16": ("i<-ii", _plain(lambda a, b: (a >> 16) | (b << 16))),
    # floats, gfx12
    "cvt_f32_i32": ("f<-i", _plain(lambda a: a.stof())),
    "cvt_f32_u32": ("f<-i", _plain(lambda a: a.utof())),
    "cvt_i32_f32": ("i<-f", _plain(lambda a: to_int(a, True))),
    "cvt_u32_f32": ("i<-f", _plain(lambda a: to_int(a, False))),
    "cvt_f16_f32": ("e<-f", _plain(lambda a: a.fconv(16))),
    "cvt_f32_f16": ("f<-e", _plain(lambda a: a.fconv(32))),
    "cvt_hi_f32_f16": ("f<-i", _plain(lambda a: (a >> 16).trunc(16).f().fconv(32))),
    "cvt_pk_rtz_f16_f32": ("i<-ff", _plain(lambda a, b: pair(to_half_toward_zero(a), to_half_toward_zero(b)))),
    "fmaak_f32": ("f<-fff", _plain(floating.fma)),
    "fmamk_f32": ("f<-fff", _plain(floating.fma)),
    "fmac_f32": ("f<-ffD", _plain(floating.fma)),
    "fmac_f16": ("e<-eeD", _plain(fma_half)),
}
for _t, _n in (("f", "f32"), ("e", "f16")):
    SALU |= {
        f"add_{_n}": (f"{_t}<-{_t}{_t}", _plain(lambda a, b: a + b)),
        f"sub_{_n}": (f"{_t}<-{_t}{_t}", _plain(lambda a, b: a - b)),
        f"mul_{_n}": (f"{_t}<-{_t}{_t}", _plain(lambda a, b: a * b)),
        f"min_num_{_n}": (f"{_t}<-{_t}{_t}", _plain(floating.fmin)),
        f"max_num_{_n}": (f"{_t}<-{_t}{_t}", _plain(floating.fmax)),
        f"minimum_{_n}": (f"{_t}<-{_t}{_t}", _plain(floating.minimum)),
        f"maximum_{_n}": (f"{_t}<-{_t}{_t}", _plain(floating.maximum)),
    }
    for _name, _intrinsic in (("ceil", "ceil"), ("floor", "floor"), ("trunc", "trunc"), ("rndne", "rint")):
        SALU[f"{_name}_{_n}"] = (
            f"{_t}<-{_t}",
            _plain(lambda a, name=_intrinsic: a.fconv(32).intr(name).fconv(a.bits)),
        )
for _shift in (1, 2, 3, 4):
    SALU[f"lshl{_shift}_add_u32"] = ("i<-ii", _shl_add(_shift))
for _n, _f in BOOL.items():
    if _n.endswith("not0"):
        # only with exec
        continue
    SALU[f"{_n}_b32"], SALU[f"{_n}_b64"] = ("i<-ii", _setnz(_f)), ("q<-qq", _setnz(_f))
