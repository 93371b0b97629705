"""An evaluator for the pseudocode in which AMD's ISA documents define each instruction.

The texts come from the PyPI package tinygrad (`runtime/autogen/amd/*/str_pcode.py`, extracted from AMD's PDFs); this
module runs them over an environment of `Num` values. Each is compiled once, by pcode_parser.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from tests.emulator.pcode_num import Num
from tests.emulator.pcode_parser import Parser
from tests.emulator.pcode_views import KINDS, VIEW, Env


@cache
def _compile(text: str, table: Pseudocode) -> Callable[[Env], None]:
    return Parser(text, table.function).block("")


class Pseudocode:
    """The texts of one ISA document: mnemonic in lower case, without encoding suffix -> text."""

    def __init__(self, table: dict, functions: dict[str, Callable] | None = None) -> None:
        """table: opcode -> text; functions: further built-in functions."""
        self.functions = functions or {}
        self.texts: dict[str, str] = {}
        for key, text in table.items():
            name = re.sub(r"_E(32|64)$", "", key.name).lower()
            # the long encodings' texts name every source; both texts of one name agree otherwise
            if name not in self.texts or key.name.endswith("E64"):
                self.texts[name] = text

    def run(self, name: str, env: Env) -> Env:
        """Execute the text of a mnemonic over env, in place."""
        _compile(self.texts[name], self)(env)
        return env

    def function(self, name: str) -> Callable[..., Num]:
        """A built-in function of this document, or `v_max_num_f32(a, b)`: another instruction on other sources."""
        if name in self.functions:
            return self.functions[name]
        kind = VIEW.search(name.rsplit("_", 1)[-1])
        width, letter = int(kind[2]), KINDS[kind[1]]

        def call(*args: Num) -> Num:
            env = {f"S{i}": a for i, a in enumerate(args)} | {"D0": Num(0, 64, "B"), "WAVE_MODE.IEEE": Num(1, 1, "U")}
            self.run(name, env)
            return Num(env["D0"].bits, width, letter)

        return call


__all__ = ["Num", "Pseudocode"]
