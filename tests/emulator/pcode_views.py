"""Tokens, literals and places (registers, their typed views and bit slices) of AMD's instruction pseudocode."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.emulator.pcode_num import Num, cast, encode

_TOKEN = re.compile(
    r"\s+|//[^\n]*"
    r"|(?P<cast>\d+'(?:BF|[UIFB])(?!\w))"
    r"|(?P<num>\d+'(?:0x[0-9a-fA-F]+|\d+(?:\.\d+)?)[UIFB]?|0x[0-9a-fA-F]+(?:ULL|LL|U)?|\d+\.\d+F?|\d+(?:ULL|LL|U)?)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<op>\*\*|\+:|<<|>>|<=|>=|==|!=|<>|&&|\|\||\+=|-=|\|=|[-+*/%&|^~!<>=?:;,.(){}\[\]])"
)
KINDS = {"f": "F", "bf": "BF", "u": "U", "i": "I", "b": "B"}
VIEW = re.compile(r"(bf|f|u|i|b)(\d+)$")
_INF = float("inf")
# name -> double; `.f32` behind it picks the width. Rounded to nearest even, an underflow is 0 and an overflow infinity
CONSTANTS = {"INF": _INF, "NAN": float("nan"), "PI": 3.141592653589793, "UNDERFLOW_F32": 0.0, "OVERFLOW_F32": _INF}
CONSTANTS |= {"UNDERFLOW_F64": 0.0, "OVERFLOW_F64": _INF, "UNDERFLOW_F16": 0.0, "OVERFLOW_F16": _INF}

Env = dict
Node = Callable[[Env], Num]


def tokenize(text: str) -> list[tuple[str, str]]:
    out, at = [], 0
    while at < len(text):
        m = _TOKEN.match(text, at)
        if not m or m.end() == at:
            raise SyntaxError(f"pseudocode: {text[at : at + 20]!r}")
        at = m.end()
        if m.lastgroup:
            out.append((m.lastgroup, m[m.lastgroup]))
    return [*out, ("end", "")]


def literal(text: str) -> Num:
    width, kind = 32, "I"
    m = re.match(r"(\d+)'(.*?)([UIFB]?)$", text) if "'" in text else None
    if m:
        width, text = int(m[1]), m[2]
        kind = m[3] or ("F" if "." in text else "B")
    elif text.endswith("ULL"):
        width, kind, text = 64, "U", text[:-3]
    elif text.endswith("LL"):
        width, kind, text = 64, "I", text[:-2]
    elif text.startswith("0x"):
        kind, text = "U", text.rstrip("U")
        width = 32 if int(text, 16) < 1 << 32 else 64
    elif text.endswith("U"):
        kind, text = "U", text[:-1]
    elif "." in text:
        width, kind = (32, "F") if text.endswith("F") else (64, "F")
        text = text.rstrip("F")
    if kind == "F":
        return Num(encode(float(text), width), width, "F")
    return Num(int(text, 0), width, kind)


def _convert(x: Num, width: int, kind: str) -> Num:
    """What an assignment to a typed place stores."""
    if kind == "F" and x.kind == "F":
        return cast(x, width, "F")
    if x.kind == "R":
        return Num(encode(x.bits, width), width, kind)
    if kind in ("U", "I") and x.kind in ("U", "I"):
        return Num(x.value(), width, kind)
    return Num(x.bits, width, kind)


def _reverse(bits: int, width: int) -> int:
    return int(format(bits, f"0{width}b")[::-1], 2)


class View:
    """`.u32`"""

    def __init__(self, width: int, kind: str) -> None:
        self.width, self.kind = width, kind

    def get(self, env: Env, x: Num) -> Num:
        if self.kind == "F" and x.kind == "F" and x.width != self.width:
            return cast(x, self.width, "F")
        return Num(x.bits, self.width, self.kind)

    def put(self, env: Env, x: Num, new: Num) -> Num:
        new, mask = _convert(new, self.width, self.kind), (1 << self.width) - 1
        return Num((x.bits & ~mask) | new.bits, max(x.width, self.width), x.kind)


class Slice:
    """`[high : low]`, `[base +: count]` or `[bit]`; arrays are indexed. high < low reverses the bits."""

    def __init__(self, first: Node, second: Node | None, mode: str) -> None:
        self.first, self.second, self.mode = first, second, mode

    def bounds(self, env: Env) -> tuple[int, int, bool]:
        a = self.first(env).value()
        if self.mode == "bit":
            return a, a, False
        b = self.second(env).value()
        if self.mode == "+:":
            return a + b - 1, a, False
        return (a, b, False) if a >= b else (b, a, True)

    def get(self, env: Env, x):
        if isinstance(x, (list, dict)):
            return x[self.first(env).value()]
        high, low, reverse = self.bounds(env)
        width = high - low + 1
        bits = x.bits >> low & ((1 << width) - 1)
        return Num(_reverse(bits, width) if reverse else bits, width, "U" if x.kind in "FI" else x.kind)

    def put(self, env: Env, x, new: Num):
        if isinstance(x, (list, dict)):
            x[self.first(env).value()] = new
            return x
        high, low, reverse = self.bounds(env)
        width = high - low + 1
        bits = new.bits & ((1 << width) - 1)
        bits = _reverse(bits, width) if reverse else bits
        mask = ((1 << width) - 1) << low
        return Num((x.bits & ~mask) | bits << low, max(x.width, high + 1), x.kind)


def store(env: Env, name: str, views: list, value: Num) -> None:
    if not views:
        old = env.get(name)
        # a declared or register place keeps its type
        env[name] = _convert(value, old.width, old.kind) if isinstance(old, Num) and name in _TYPED else value
        return
    stack = [env.get(name, Num(0, 64, "B"))]
    for v in views[:-1]:
        stack.append(v.get(env, stack[-1]))
    for v, x in zip(reversed(views), reversed(stack), strict=True):
        value = v.put(env, x, value)
    env[name] = value


# registers: assigning to the bare name keeps 64 bits
_TYPED = frozenset({"D0", "D1", "VCC", "EXEC", "SCC"})


def bit_not(x: Num) -> Num:
    return Num(~x.bits, x.width, x.kind)


def negate(x: Num) -> Num:
    if x.kind == "F":
        return Num(x.bits ^ 1 << (x.width - 1), x.width, "F")
    return Num(-x.value(), x.width, x.kind)


def concat(parts: list[Num]) -> Num:
    bits, width = 0, 0
    for p in parts:
        bits, width = bits << p.width | p.bits, width + p.width
    return Num(bits, width, "B")
