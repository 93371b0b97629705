"""docs/bug_cases.md names tests that exist, and has a row for every case that it has to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| ([A-Z]\d+) \| (.*) \| (.*) \| (.*) \|$", (ROOT / "docs/bug_cases.md").read_text(), re.MULTILINE)
# by letter: of A to H those that one GPU can show, of I to N all
CASES = {
    "A": (1, 3, 7, 8, 9, 12),
    "B": (1, 5, 6, 8, 11, 12),
    "C": (1, 2, 3, 4, 7, 8, 9, 10),
    "D": (1, 2, 3, 5, 7, 9, 10, 15, 18, 20, 21),
    "E": (1, 3, 4, 5, 6, 7),
    "F": (1, 2, 5),
    "G": (1, 2, 5, 6, 7, 8),
    "H": (4,),
    "I": (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 15, 16, 19),
    "J": (1, 2),
    "K": (1, 2, 4, 6, 7, 8, 10, 11, 12, 13),
    "L": (1, 2, 3, 4, 6, 7),
    "M": (1, 2, 3, 4, 5, 7, 8, 9, 14, 15),
    "N": (1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13),
}


def test_every_case_has_a_row() -> None:
    assert sorted(case for case, *_ in ROWS) == sorted(
        f"{letter}{number}" for letter in CASES for number in CASES[letter]
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_its_tests_exist(row: tuple[str, str, str, str]) -> None:
    case, _, here, tests = row
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
    # a case without a test says so, and why
    assert bool(named) != here.startswith("no test: "), case
    assert named or tests == "–", case
    for path, name in named:
        functions = [n.name for n in ast.parse((ROOT / path).read_text()).body if isinstance(n, ast.FunctionDef)]
        assert name in functions, (case, path, name)
