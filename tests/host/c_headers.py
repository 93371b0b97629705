"""Reads a C header as far as a driver table needs it: function signatures, constants, struct layouts.

No compiler: the machine that runs the tests need not have one. What it does not understand is a KeyError, not a guess.
Types are compared as tuples: `("int", bytes)`, `("pointer", what it points to)`, `("struct", layout)`, `("opaque",)`.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

OPAQUE = ("opaque",)
_BASE = {
    "char": 1, "signed char": 1, "unsigned char": 1, "short": 2, "unsigned short": 2, "int": 4, "unsigned int": 4,
    "unsigned": 4, "long long": 8, "unsigned long long": 8, "size_t": 8, "uint64_t": 8, "uint32_t": 4, "float": 4,
    "unsigned __int64": 8,
}  # fmt: skip


class Header:
    """The declarations of one or more headers, the first declaration of a name winning."""

    def __init__(self, *paths: Path) -> None:
        text = "\n".join(path.read_text(errors="replace") for path in paths)
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
        text = re.sub(r"//[^\n]*", " ", text).replace("\\\n", " ")
        self.defines: dict[str, str] = {}
        for name, value in re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(\S[^\n]*?)[ \t]*$", text, re.MULTILINE):
            self.defines.setdefault(name, value)
        text = re.sub(r"^[ \t]*#[^\n]*$", "", text, flags=re.MULTILINE)
        self.text = re.sub(r"\s+", " ", text)
        # an enumerator's text, or the one before it
        self.constants: dict[str, tuple[str, int]] = {}
        self.enums: set[str] = set()
        self._read_enums()
        # what it returns, its arguments
        self._functions: dict[str, tuple[str, str]] = {}
        pattern = r"(CUresult|hipError_t|const char\*) (?:CUDAAPI )?(\w+) ?\(((?:[^()]|\(0\))*)\);"
        # those of symbols whose names now stand for later versions, for programs that are linked to them
        self._former: dict[str, tuple[str, str]] = {}
        for result, name, arguments in re.findall(pattern, self.text):
            both = result, arguments.replace("__dparm(0)", "")
            (self._former if name in self._functions else self._functions)[name] = both

    def _read_enums(self) -> None:
        for tag, body, name in re.findall(r"enum (?:__HIP_NODISCARD )?(\w*) ?\{([^{}]*)\} ?(\w*) ?;", self.text):
            self.enums |= {tag, name}
            before = ("-1", 0)
            for item in filter(None, map(str.strip, body.split(","))):
                key, _, given = map(str.strip, item.partition("="))
                before = (given, 0) if given else (before[0], before[1] + 1)
                self.constants.setdefault(key.split()[0], before)

    def constant(self, name: str) -> int:
        """The value of an enumerator or of a `#define`d number."""
        text, more = self.constants.get(name) or (self.defines[name], 0)
        text = text.strip("() ")
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)[uUlL]*", text):
            return int(text.rstrip("uUlL"), 0) + more
        if "<<" in text:
            left, right = text.split("<<")
            return (int(left, 0) << int(right, 0)) + more
        return self.constant(text) + more

    def exported(self, name: str) -> str:
        """The symbol that a call of `name` is linked to: headers rename functions to versions of them."""
        value = self.defines.get(name, name)
        inner = re.fullmatch(r"__CUDA_API_PTS[ZD]\((\w+)\)", value)
        return inner.group(1) if inner else value

    def declares(self, symbol: str) -> bool:
        """Whether there is a function whose exported symbol this is."""
        return symbol in self._former or any(self.exported(name) == symbol for name in self._functions)

    def _function(self, symbol: str) -> tuple[str, str]:
        found = [both for name, both in self._functions.items() if self.exported(name) == symbol]
        return found[0] if found else self._former[symbol]

    def arguments(self, symbol: str) -> tuple[Any, ...]:
        """Argument types of the function whose exported symbol this is."""
        listed = [arg.partition("=")[0].strip() for arg in self._function(symbol)[1].split(",")]
        return () if listed in ([""], ["void"]) else tuple(self.type_of(self._without_name(arg)) for arg in listed)

    def returned(self, symbol: str) -> tuple[Any, ...]:
        """What it returns."""
        return self.type_of(self._function(symbol)[0])

    @staticmethod
    def _without_name(arg: str) -> str:
        return (
            re.sub(r"\b(?!char|int|long|short|unsigned|size_t)\w+$", "", arg).strip()
            if re.search(r"[\w*] ?\w+$", arg)
            else arg
        )

    def type_of(self, text: str) -> tuple[Any, ...]:
        """A C type as written, without a name."""
        text = re.sub(r"\b(const|struct)\b", " ", text)
        text = re.sub(r"\s+", " ", text).strip()
        if text.endswith("*"):
            inner = text[:-1].strip()
            return ("pointer", OPAQUE if inner == "void" else self.type_of(inner))
        if text in _BASE:
            return ("int", _BASE[text])
        if text.startswith("enum ") or text in self.enums:
            return ("int", 4)
        for pattern in (
            rf"typedef (?:struct|union) (?:\w+ )?\{{(?P<body>(?:[^{{}}]|\{{[^{{}}]*\}})*)\}} ?{text} ?;",
            rf"(?:struct|union) {text} \{{(?P<body>(?:[^{{}}]|\{{[^{{}}]*\}})*)\}}",
        ):
            match = re.search(pattern, self.text)
            if match:
                return ("struct", *self._layout(match.group("body")))
        match = re.search(rf"typedef ([\w ]+?[ *]+) ?{text} ?;", self.text)
        if match:
            return self.type_of(match.group(1))
        return OPAQUE

    def _layout(self, body: str) -> tuple[Any, ...]:
        """Fields as (offset, type, count); offsets by natural alignment."""
        fields, end = [], 0
        for declared in re.findall(r"(?:[^;{}]|\{[^{}]*\})+;", body):
            text = declared.rstrip(";").strip()
            nested = re.match(r"(struct|union) ?(?:\w+ )?\{(.*)\}", text)
            count = 1
            if nested:
                members = self._layout(nested.group(2))
                # of a union whose members are alike, one
                kind: tuple[Any, ...] = members[0][1] if nested.group(1) == "union" else ("struct", *members)
            else:
                array = re.search(r"\[(\w+)\]$", text)
                if array:
                    number = array.group(1)
                    count, text = (
                        int(number) if number.isdigit() else self.constant(number),
                        text[: array.start()].strip(),
                    )
                kind = self.type_of(re.sub(r"\w+$", "", text))
            align = alignment(kind)
            offset = -(-end // align) * align
            fields.append((offset, kind, count))
            end = offset + size(kind) * count
        return tuple(fields)


def alignment(kind: tuple[Any, ...]) -> int:
    return max(alignment(field[1]) for field in kind[1:]) if kind[0] == "struct" else size(kind)


def size(kind: tuple[Any, ...]) -> int:
    if kind[0] == "struct":
        offset, last, count = kind[-1]
        return -(-(offset + size(last) * count) // alignment(kind)) * alignment(kind)
    return 8 if kind[0] == "pointer" else kind[1]


def type_of(declared: Any) -> tuple[Any, ...]:
    """The same for a ctypes type. `c_void_p` is a pointer to what nobody looks into."""
    if declared is ctypes.c_void_p:
        return ("pointer", OPAQUE)
    if declared is ctypes.c_char_p:
        return ("pointer", ("int", 1))
    if isinstance(declared, type) and issubclass(declared, ctypes._Pointer):
        return ("pointer", type_of(declared._type_))
    if issubclass(declared, ctypes.Structure):
        fields = []
        for name, whole in declared._fields_:
            array = issubclass(whole, ctypes.Array)
            kind, count = (whole._type_, whole._length_) if array else (whole, 1)
            fields.append((getattr(declared, name).offset, type_of(kind), count))
        assert ctypes.sizeof(declared) == size(("struct", *fields))
        return ("struct", *fields)
    return ("int", ctypes.sizeof(declared))
