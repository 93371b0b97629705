"""Vector integer instructions: arithmetic, logic, shifts, bit fields, carries, lane counting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mori_triton.emulator.ir import Pair, Val

# takes the sources as values, returns the result: Val, Pair or a tuple of them
Formula = Callable[..., Any]


def bfe(a: Val, offset: Val, width: Val, signed: bool) -> Val:
    """Bit field of `a` at offset & 31, width & 31 bits wide; past bit 31 there are zeros or copies of the sign."""
    off, width = offset & 31, width & 31
    top = a << ((32 - width - off) & 31)
    r = top.sar((32 - width) & 31) if signed else (a >> off) & ((a.const(1) << width) - 1)
    if signed:
        r = (off + width).cmp("ugt", 31).pick(a.sar(off), r)
    return width.cmp("eq", 0).pick(0, r)


def minmax(pred: str) -> Formula:
    """The operand that compares `pred` to the other."""
    return lambda a, b: a.cmp(pred, b).pick(a, b)


def three_int(pred: str) -> Formula:
    two = minmax(pred)
    return lambda a, b, c: two(two(a, b), c)


def med3_int(less: str, greater: str) -> Formula:
    low, high = minmax(less), minmax(greater)
    return lambda a, b, c: high(low(a, b), low(high(a, b), c))


def wide(a: Val, b: Val, signed: bool) -> Val:
    """The 64-bit product."""
    return a.sext(64) * b.sext(64) if signed else a.zext(64) * b.zext(64)


def high_word(x: Val) -> Val:
    return (x >> 32).trunc(32)


def two_words(hi: Val, lo: Val) -> Val:
    return (hi.zext(64) << 32) | lo.zext(64)


def _mbcnt(base: int) -> Formula:
    """Number of bits of `a` that belong to lower lanes, plus b; `a` holds lanes base .. base + 31."""

    def f(a: Val, b: Val) -> Val:
        lanes = a.lanes or b.lanes or a.fn.W
        a, b = a.splat(lanes), b.splat(lanes)
        below = a.fn.vec([(1 << max(0, min(32, l - base))) - 1 for l in range(lanes)])
        return (a & below).intr("ctpop") + b

    return f


def add_carry(a: Val, b: Val, c: Val | None = None) -> tuple[Val, Val]:
    """(sum, carry out as i1); c: carry in, 0 or 1."""
    x = a + b
    carry = x.cmp("ult", a)
    if c is None:
        return x, carry
    y = x + c.zext(32)
    return y, carry | y.cmp("ult", x)


def sub_borrow(a: Val, b: Val, c: Val | None = None) -> tuple[Val, Val]:
    """(difference, borrow out as i1); c: borrow in, 0 or 1."""
    x, borrow = a - b, a.cmp("ult", b)
    if c is None:
        return x, borrow
    y = x - c.zext(32)
    return y, borrow | x.cmp("ult", y)


def add_pair(a: Pair, b: Pair) -> Pair:
    lo = a.lo + b.lo
    return Pair(lo, a.hi + b.hi + lo.cmp("ult", a.lo).zext(32))


def sub_pair(a: Pair, b: Pair) -> Pair:
    return Pair(a.lo - b.lo, a.hi - b.hi - a.lo.cmp("ult", b.lo).zext(32))


def _shift_left(n: Val, a: Pair) -> Pair:
    """By n & 63."""
    a, n = _same_lanes(a, n)
    lo, hi, far = a.lo << (n & 31), a.hi.intr("fshl", a.lo, n & 31), (n & 32).cmp("ne", 0)
    return Pair(far.pick(0, lo), far.pick(lo, hi))


def _shift_right(signed: bool) -> Formula:
    def f(n: Val, a: Pair) -> Pair:
        a, n = _same_lanes(a, n)
        near, far = a.hi.intr("fshr", a.lo, n & 31), (n & 32).cmp("ne", 0)
        hi = a.hi.sar(n & 31) if signed else a.hi >> (n & 31)
        return Pair(far.pick(hi, near), far.pick(a.hi.sar(31) if signed else 0, hi))

    return f


def _same_lanes(a: Pair, n: Val) -> tuple[Pair, Val]:
    lanes = a.lo.lanes or n.lanes
    return a.splat(lanes), n.splat(lanes)


def _mad_wide(signed: bool) -> Formula:
    """The 64-bit product of a and b, plus c."""

    def f(a: Val, b: Val, c: Pair) -> Pair:
        x = wide(a, b, signed)
        return add_pair(Pair(x.trunc(32), (x >> 32).trunc(32)), c)

    return f


def _perm(a: Val, b: Val, sel: Val) -> Val:
    """Each result byte is one of 8 source bytes (b holds bytes 0..3), 0, 255, or 8 copies of a sign."""
    r = a.const(0)
    for i in range(4):
        s = (sel >> (8 * i)) & 255
        byte = (two_words(a, b) >> ((s & 7) * 8).zext(64)).trunc(32) & 255
        # selectors 8..11: the sign of bytes 1, 3, 5, 7
        sign = ((two_words(a, b) >> ((s & 3) * 16 + 15).zext(64)).trunc(32) & 1) * 255
        byte = s.cmp("ult", 8).pick(byte, s.cmp("ult", 12).pick(sign, s.cmp("eq", 12).pick(0, s.const(255))))
        r = r | (byte << (8 * i))
    return r


def leading_signs(a: Val) -> Val:
    """Number of leading bits equal to the sign bit; -1 if all are."""
    x = a ^ a.sar(a.bits - 1)
    return x.cmp("eq", 0).pick(-1, x.intr("ctlz", 0))


def perm_of(sel: int) -> Formula | None:
    """`_perm` for a known selector, as few shifts and masks as there are runs of bytes; None if it copies signs."""
    picks = [sel >> (8 * i) & 255 for i in range(4)]
    if any(8 <= s <= 11 for s in picks):
        return None

    def f(a: Val, b: Val) -> Val:
        # (source, how far its bytes move up) -> mask of the result bytes
        groups: dict[tuple[int, int], int] = {}
        ones = 0
        for i, s in enumerate(picks):
            if s < 8:
                group = (s // 4, i - s % 4)
                groups[group] = groups.get(group, 0) | 255 << (8 * i)
            elif s > 12:
                ones |= 255 << (8 * i)
        r = None
        for (which, up), mask in groups.items():
            x = a if which else b
            x = x << (8 * up) if up > 0 else x >> (-8 * up) if up < 0 else x
            reached = (0xFFFFFFFF << 8 * up if up > 0 else 0xFFFFFFFF >> -8 * up) & 0xFFFFFFFF
            x = x if mask == reached else x & mask
            r = x if r is None else r | x
        r = a.const(0) if r is None else r
        return r | ones if ones else r

    return f


def _sext24(a: Val) -> Val:
    return (a << 8).sar(8)


def bitop(table: int) -> Formula:
    """Any function of three bits, given as its truth table: bit 4a + 2b + c of `table`."""

    def f(a: Val, b: Val, c: Val | None = None) -> Val:
        c, r = c or a.const(0), None
        for i in range(8):
            if table >> i & 1:
                t = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
                r = t if r is None else r | t
        return r or a.const(0)

    return f


INTEGER: dict[str, tuple[str, Formula]] = {
    "mov_b32": ("i<-i", lambda a: a),
    "mov_b64": ("w<-w", lambda a: a),
    "accvgpr_read_b32": ("i<-i", lambda a: a),
    "accvgpr_write_b32": ("i<-i", lambda a: a),
    "accvgpr_mov_b32": ("i<-i", lambda a: a),
    "cndmask_b32": ("i<-iim", lambda a, b, m: m.pick(b, a)),
    # add, subtract, multiply
    "add_nc_u32": ("i<-ii", lambda a, b: a + b),
    "sub_nc_u32": ("i<-ii", lambda a, b: a - b),
    "subrev_nc_u32": ("i<-ii", lambda a, b: b - a),
    "add_nc_i32": ("i<-ii", lambda a, b: a + b),
    "sub_nc_i32": ("i<-ii", lambda a, b: a - b),
    "add_nc_u64": ("w<-ww", add_pair),
    "sub_nc_u64": ("w<-ww", sub_pair),
    "add_co_u32": ("im<-ii", add_carry),
    "sub_co_u32": ("im<-ii", sub_borrow),
    "subrev_co_u32": ("im<-ii", lambda a, b: sub_borrow(b, a)),
    "add_co_ci_u32": ("im<-iim", add_carry),
    "sub_co_ci_u32": ("im<-iim", sub_borrow),
    "subrev_co_ci_u32": ("im<-iim", lambda a, b, c: sub_borrow(b, a, c)),
    "add3_u32": ("i<-iii", lambda a, b, c: a + b + c),
    "mul_lo_u32": ("i<-ii", lambda a, b: a * b),
    "mul_hi_u32": ("i<-ii", lambda a, b: high_word(wide(a, b, False))),
    "mul_hi_i32": ("i<-ii", lambda a, b: high_word(wide(a, b, True))),
    "mul_u32_u24": ("i<-ii", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "mad_u32_u24": ("i<-iii", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    "mul_hi_u32_u24": ("i<-ii", lambda a, b: high_word(wide(a & 0xFFFFFF, b & 0xFFFFFF, False))),
    "mul_i32_i24": ("i<-ii", lambda a, b: _sext24(a) * _sext24(b)),
    "mul_hi_i32_i24": ("i<-ii", lambda a, b: high_word(wide(_sext24(a), _sext24(b), True))),
    "mad_i32_i24": ("i<-iii", lambda a, b, c: _sext24(a) * _sext24(b) + c),
    "mad_u32": ("i<-iii", lambda a, b, c: a * b + c),
    "mul_u64": ("q<-qq", lambda a, b: a * b),
    "mad_co_u64_u32": ("w.<-iiw", _mad_wide(False)),
    "mad_co_i64_i32": ("w.<-iiw", _mad_wide(True)),
    "mad_nc_u64_u32": ("w<-iiw", _mad_wide(False)),
    "mad_nc_i64_i32": ("w<-iiw", _mad_wide(True)),
    # logic
    "not_b32": ("i<-i", lambda a: ~a),
    "and_b32": ("i<-ii", lambda a, b: a & b),
    "or_b32": ("i<-ii", lambda a, b: a | b),
    "xor_b32": ("i<-ii", lambda a, b: a ^ b),
    "xnor_b32": ("i<-ii", lambda a, b: ~(a ^ b)),
    "or3_b32": ("i<-iii", lambda a, b, c: a | b | c),
    "xor3_b32": ("i<-iii", lambda a, b, c: a ^ b ^ c),
    "and_or_b32": ("i<-iii", lambda a, b, c: (a & b) | c),
    "bfi_b32": ("i<-iii", lambda a, b, c: (a & b) | (~a & c)),
    # shifts
    "lshlrev_b32": ("i<-ii", lambda a, b: b << (a & 31)),
    "lshrrev_b32": ("i<-ii", lambda a, b: b >> (a & 31)),
    "ashrrev_i32": ("i<-ii", lambda a, b: b.sar(a & 31)),
    "lshlrev_b64": ("w<-iw", _shift_left),
    "lshrrev_b64": ("w<-iw", _shift_right(False)),
    "ashrrev_i64": ("w<-iw", _shift_right(True)),
    "lshl_or_b32": ("i<-iii", lambda a, b, c: (a << (b & 31)) | c),
    "lshl_add_u32": ("i<-iii", lambda a, b, c: (a << (b & 31)) + c),
    "lshl_add_u64": ("w<-wiw", lambda a, b, c: add_pair(_shift_left(b & 7, a), c)),
    "add_lshl_u32": ("i<-iii", lambda a, b, c: (a + b) << (c & 31)),
    "xad_u32": ("i<-iii", lambda a, b, c: (a ^ b) + c),
    # bit fields and bytes
    "bfe_u32": ("i<-iii", lambda a, b, c: bfe(a, b, c, False)),
    "bfe_i32": ("i<-iii", lambda a, b, c: bfe(a, b, c, True)),
    "perm_b32": ("i<-iii", _perm),
    "alignbit_b32": ("i<-iii", lambda a, b, c: (two_words(a, b) >> (c & 31).zext(64)).trunc(32)),
    "alignbyte_b32": ("i<-iii", lambda a, b, c: (two_words(a, b) >> ((c & 3) * 8).zext(64)).trunc(32)),
    "bfm_b32": ("i<-ii", lambda a, b: ((a.const(1) << (a & 31)) - 1) << (b & 31)),
    "bfrev_b32": ("i<-i", lambda a: a.intr("bitreverse")),
    "bcnt_u32_b32": ("i<-ii", lambda a, b: a.intr("ctpop") + b),
    "clz_i32_u32": ("i<-i", lambda a: a.cmp("eq", 0).pick(-1, a.intr("ctlz", 0))),
    "ctz_i32_b32": ("i<-i", lambda a: a.cmp("eq", 0).pick(-1, a.intr("cttz", 0))),
    "cls_i32": ("i<-i", leading_signs),
    "sad_u32": ("i<-iii", lambda a, b, c: a.cmp("ugt", b).pick(a - b, b - a) + c),
    "prng_b32": ("i<-i", lambda a: (a << 1) ^ (a.sar(31) & 197)),
    "mbcnt_lo_u32_b32": ("i<-ii", _mbcnt(0)),
    "mbcnt_hi_u32_b32": ("i<-ii", _mbcnt(32)),
}
for _name, _type in (("i32", "i"), ("u32", "i"), ("i64", "q"), ("u64", "q")):
    _lt, _gt = ("slt", "sgt") if _name[0] == "i" else ("ult", "ugt")
    INTEGER[f"min_{_name}"] = (f"{_type}<-{_type * 2}", minmax(_lt))
    INTEGER[f"max_{_name}"] = (f"{_type}<-{_type * 2}", minmax(_gt))
    if _type == "i":
        INTEGER[f"min3_{_name}"] = ("i<-iii", three_int(_lt))
        INTEGER[f"max3_{_name}"] = ("i<-iii", three_int(_gt))
        INTEGER[f"med3_{_name}"] = ("i<-iii", med3_int(_lt, _gt))
        for _which, _pred in (("min", _lt), ("max", _gt)):
            # gfx1250
            INTEGER[f"add_{_which}_{_name}"] = ("i<-iii", lambda a, b, c, pred=_pred: minmax(pred)(a + b, c))
        INTEGER[f"maxmin_{_name}"] = ("i<-iii", lambda a, b, c, lt=_lt, gt=_gt: minmax(lt)(minmax(gt)(a, b), c))
        INTEGER[f"minmax_{_name}"] = ("i<-iii", lambda a, b, c, lt=_lt, gt=_gt: minmax(gt)(minmax(lt)(a, b), c))
