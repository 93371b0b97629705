"""docs/seeds.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| (?!behaviour|---)(.*) \| (.*) \|$", (ROOT / "docs/seeds.md").read_text(), re.MULTILINE)


def test_there_are_rows() -> None:
    assert len(ROWS) > 40
    assert len({behaviour for behaviour, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("behaviour", "tests"), ROWS)
def test_its_tests_exist(behaviour: str, tests: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
    assert named, behaviour
    assert len(named) == tests.count("::"), behaviour
    for path, name in named:
        functions = [n.name for n in ast.parse((ROOT / path).read_text()).body if isinstance(n, ast.FunctionDef)]
        assert name in functions, (path, name)
