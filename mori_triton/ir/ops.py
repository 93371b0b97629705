"""The table of MORI's device functions, in MORI's form: name -> symbol, types of arguments and result, purity."""

from __future__ import annotations

from typing import Any

from mori_triton import abi

SIGNAL_SET = abi.SIGNAL_SET
SIGNAL_ADD = abi.SIGNAL_ADD


def _entry(function: abi.Function) -> dict[str, Any]:
    entry: dict[str, Any] = {"symbol": function.symbol, "args": list(function.args), "ret": function.ret}
    return {**entry, "pure": True} if function.pure else entry


# MORI's 89, and the nine immediate puts that its library exports and its table lacks
MORI_DEVICE_FUNCTIONS: dict[str, dict[str, Any]] = {
    name: _entry(function) for name, function in {**abi.MORI_FUNCTIONS, **abi.EXTRA_FUNCTIONS}.items()
}
