"""Vector and scalar compares."""

from __future__ import annotations

from mori_triton.emulator.ir import Val
from mori_triton.emulator.isa.floating import exponent, is_nan, is_signalling
from mori_triton.emulator.isa.integer import Formula

_INT = {"eq": "eq", "ne": "ne", "lg": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}
_FLOAT = {
    "eq": "oeq",
    "lg": "one",
    "lt": "olt",
    "le": "ole",
    "gt": "ogt",
    "ge": "oge",
    "o": "ord",
    "u": "uno",
    "neq": "une",
    "nlt": "uge",
    "nle": "ugt",
    "ngt": "ule",
    "nge": "ult",
    "nlg": "ueq",
}
_LETTER = {"f16": "e", "f32": "f", "f64": "d", "i16": "h", "u16": "h", "i32": "i", "u32": "i", "i64": "q", "u64": "q"}
_EXPONENT_MAX = {16: 31, 32: 255, 64: 2047}


# every `<op>_<type>`; `lg` of integers is scalar, `ne` is vector
SUPPORTED = frozenset(f"{op}_{ty}" for ty in _LETTER for op in ((*_FLOAT, "class") if ty[0] == "f" else _INT))


def _class(a: Val, wanted: Val) -> Val:
    """Whether a's class is among the wanted bits: signalling, quiet NaN, -inf, -normal, -denormal, -0, +0, ... +inf."""
    signalling, nan = is_signalling(a), is_nan(a)
    e, negative, zero = exponent(a), a.i().cmp("slt", 0), a.cmp("oeq", 0.0)
    infinite = e.cmp("eq", _EXPONENT_MAX[a.bits])
    bit = e.cmp("eq", 0).pick(zero.pick(wanted.const(5), 4), infinite.pick(wanted.const(2), 3))
    bit = negative.pick(bit, 11 - bit)
    bit = nan.pick(signalling.pick(wanted.const(0), 1), bit)
    return ((wanted >> bit) & 1).cmp("ne", 0)


def compare(name: str) -> tuple[str, Formula]:
    """`[cmp_]<op>_<type>` -> (operand types, formula giving i1). KeyError for an unknown one."""
    op, ty = name.split("_")[-2:]
    t = _LETTER[ty]
    if op == "class":
        return t + "i", _class
    if t in "efd":
        pred = _FLOAT[op]
        return t * 2, lambda a, b: a.cmp(pred, b)
    pred = _INT[op] if op in ("eq", "ne", "lg") else ("s" if ty[0] == "i" else "u") + _INT[op]
    return t * 2, lambda a, b: a.cmp(pred, b)
