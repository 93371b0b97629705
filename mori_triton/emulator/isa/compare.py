"""Vector and scalar compares."""

from __future__ import annotations

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


def compare(name: str) -> tuple[str, Formula]:
    """`[cmp_]<op>_<type>` -> (operand types, formula giving i1). KeyError for an unknown one."""
    op, ty = name.split("_")[-2:]
    if ty[0] == "f":
        pred = _FLOAT[op]
        return {"f32": "ff", "f64": "dd"}[ty], lambda a, b: a.cmp(pred, b)
    pred = _INT[op] if op in ("eq", "ne", "lg") else ("s" if ty[0] == "i" else "u") + _INT[op]
    return {"32": "ii", "64": "qq", "16": "hh"}[ty[1:]], lambda a, b: a.cmp(pred, b)
