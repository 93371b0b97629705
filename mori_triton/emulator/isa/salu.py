"""Scalar instructions: (types, formula giving (value, new scc or None))."""

from __future__ import annotations

from mori_triton.emulator.ir import Val
from mori_triton.emulator.isa.integer import Formula, add_carry, bfe, high_word, sub_borrow, wide


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
    "max_i32": ("i<-ii", _minmax("sgt")),
    "min_u32": ("i<-ii", _minmax("ult")),
    "max_u32": ("i<-ii", _minmax("ugt")),
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
for _n in (1, 2, 3, 4):
    SALU[f"lshl{_n}_add_u32"] = ("i<-ii", _shl_add(_n))
for _n, _f in BOOL.items():
    SALU[f"{_n}_b32"], SALU[f"{_n}_b64"] = ("i<-ii", _setnz(_f)), ("q<-qq", _setnz(_f))
