"""`--every`: which cases of a test run with the oldest Triton."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest

pytestmark = pytest.mark.cpu


def case(test: str, *markers: str, **params: Any) -> Any:
    name = f"{test}[{'-'.join(map(str, params.values()))}]" if params else test
    item = SimpleNamespace(nodeid=name, get_closest_marker=lambda name: name in markers)
    if params:
        item.callspec = SimpleNamespace(params=params)
    return item


def chosen(every: int, items: list[Any]) -> list[str]:
    left, left_out = list(items), list[Any]()

    def deselected(items: list[Any]) -> None:
        left_out.extend(items)

    config: Any = SimpleNamespace(getoption={"every": every}.get, hook=SimpleNamespace(pytest_deselected=deselected))
    conftest.pytest_collection_modifyitems(config, left)
    assert sorted(i.nodeid for i in left + left_out) == sorted(i.nodeid for i in items)
    return [item.nodeid for item in left]


def test_values_take_turns() -> None:
    seeds = [case("a", seed=seed) for seed in range(7)]
    assert chosen(3, seeds) == ["a[0]", "a[3]", "a[6]"]
    assert chosen(1, seeds) == [item.nodeid for item in seeds]


def test_what_is_compiled_does_not() -> None:
    items = [case("a", seed=seed, arch=arch, dtype=dtype) for arch in "xy" for dtype in "ij" for seed in range(2)]
    assert chosen(7, items) == ["a[0-x-i]", "a[0-x-j]", "a[0-y-i]", "a[0-y-j]"]


def test_every_test_has_a_case() -> None:
    assert chosen(7, [case("a"), case("b", seed=1), case("b", seed=2), case("c", seed=1)]) == ["a", "b[1]", "c[1]"]


def test_all_that_only_compile() -> None:
    assert len(chosen(7, [case("a", "compile", hidden=hidden) for hidden in range(9)])) == 9


def test_kinds_are_parameters_of_tests() -> None:
    sources = "\n".join(path.read_text() for path in Path(__file__).parent.rglob("*.py"))
    named = re.findall(r'parametrize\(\s*(?:\(([^()]*)\)|"([\w, ]+)")|^def test_\w+\(([^)]*)\)', sources, re.MULTILINE)
    words = set(re.findall(r"\w+", str(named)))
    assert words >= conftest.KINDS
