"""What tests of MORI's names share: the user's program, and what its results have to be."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np

import mori_triton


def user_program() -> ModuleType:
    """`tests/ir/mori_program.py`, which imports `mori`."""
    mori_triton.alias_mori()
    return importlib.import_module("tests.ir.mori_program")


def check(results: list[dict[str, Any]], *, mapped: bool = True) -> None:
    """Compare what every PE's `mori_program.run` returned with numpy."""
    n = len(results)
    total = np.sum([result["x"] for result in results], axis=0)
    for pe, result in enumerate(results):
        assert result["who"] == [pe, n]
        assert result["word"] == 100 + (pe - 1) % n
        # the right neighbour's word, which I have written
        assert result["got"] == [100 + pe] * 2
        assert set(result["signal"]) == {n}
        # nobody has written it where peers cannot be read
        np.testing.assert_array_equal(result["read"], total if mapped else np.full_like(total, np.nan))
        np.testing.assert_array_equal(result["put_signal"], total)
