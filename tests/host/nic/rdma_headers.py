"""What libibverbs' and the providers' headers declare, in the words of the ctypes tables.

Function arguments are ("int", bytes), ("pointer", "name of a struct") or ("pointer", ...); a struct is its fields'
names, offsets and sizes. Built on the text that `c_headers.Header` makes of headers.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

from tests.host import c_headers

INTEGERS = {
    "char": 1, "int": 4, "unsigned int": 4, "unsigned": 4, "bool": 1, "size_t": 8, "off_t": 8, "uint8_t": 1,
    "uint16_t": 2, "uint32_t": 4, "uint64_t": 8, "__be64": 8, "__be32": 4, "__u64": 8,
}  # fmt: skip


class Headers(c_headers.Header):
    def __init__(self, *paths: Path) -> None:
        super().__init__(*paths)
        self.declared: dict[str, tuple[str, list[str]]] = {}
        for result, name, arguments in re.findall(r"([\w ]+?[ *]+)\b(\w+) ?\(([^(){}]*)\) ?;", self.text):
            self.declared.setdefault(name, (result, [part.strip() for part in arguments.split(",")]))

    def kind(self, text: str) -> Any:
        """A C type, with or without a name behind it."""
        text = re.sub(r"\b(const|static|inline|extern)\b", " ", text).strip()
        stars = text.count("*")
        base = re.sub(r"\s+", " ", text.split("*")[0]).strip()
        tagged = re.match(r"(struct|union|enum) (\w+)", base)
        if not stars:
            if tagged and tagged[1] == "enum":
                return ("int", 4)
            words = base if base in INTEGERS or base == "void" else base.rpartition(" ")[0]
            return None if words == "void" else ("int", INTEGERS[words])
        if stars > 1:
            return ("pointer", "pointer")
        if tagged:
            return ("pointer", tagged[2])
        word = base.split()[0] if base else ""
        return ("pointer", "") if word == "void" else ("pointer", ("int", INTEGERS[word]))

    def signature(self, symbol: str) -> tuple[Any, tuple[Any, ...]]:
        result, arguments = self.declared[symbol]
        return self.kind(result), tuple(self.kind(argument) for argument in arguments if argument != "void")

    def fields(self, tag: str, first: int | None = None) -> list[tuple[str, int, int]]:
        """Name, offset and size of each field of a struct, or of the first ones."""
        found = re.search(rf"struct {tag} \{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}} ?;", self.text)
        assert found, f"no struct {tag}"
        return self._fields(found[1], first)[0]

    def _fields(self, body: str, first: int | None = None) -> tuple[list[tuple[str, int, int]], int, int]:
        """The fields of a struct, its size and its alignment."""
        fields, end, widest = [], 0, 1
        for declaration in re.findall(r"(?:[^;{}]|\{[^{}]*\})+;", body)[:first]:
            text = declaration.rstrip("; ").strip()
            match = re.match(r"(.*?)(\w+)(?:\[(\w+)\])?$", text)
            assert match, text
            size, align = self._size(match[1].strip())
            count = 1 if match[3] is None else int(match[3])
            at = -(-end // align) * align
            fields.append((match[2], at, size * count))
            end, widest = at + size * count, max(widest, align)
        return fields, -(-end // widest) * widest, widest

    def _size(self, text: str) -> tuple[int, int]:
        if text.endswith("*"):
            return 8, 8
        nested = re.match(r"struct (?:\w+ )?\{(.*)\}", text)
        if nested:
            return self._fields(nested[1])[1:]
        if text == "union ibv_gid":
            # the kernel's type of 16 bytes that are two numbers too
            members = r"uint8_t raw\[16\]; struct \{ __be64 \w+; __be64 \w+; \} global;"
            assert re.search(rf"union ibv_gid \{{ {members} \}};", self.text)
            return 16, 8
        if text.startswith("struct "):
            body = re.search(rf"{text} \{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}} ?;", self.text)
            assert body, text
            return self._fields(body[1])[1:]
        size = 4 if text.startswith("enum ") else INTEGERS[text]
        return size, size

    def size_of(self, tag: str) -> int:
        return self._size(f"struct {tag}")[0]


def kind_of(declared: Any, names: dict[type, str]) -> Any:
    """The same for a type of a table; `names`: what its structs are in C."""
    if declared is None:
        return None
    if issubclass(declared, ctypes._Pointer):
        to = declared._type_
        if issubclass(to, ctypes.Structure):
            return ("pointer", names[to])
        return ("pointer", "pointer") if issubclass(to, ctypes.c_void_p) else ("pointer", ("int", ctypes.sizeof(to)))
    if issubclass(declared, ctypes.c_void_p):
        return ("pointer", getattr(declared, "_struct_", ""))
    if declared is ctypes.c_char_p:
        return ("pointer", ("int", 1))
    return ("int", ctypes.sizeof(declared))
