"""Each of MORI's device functions as a Triton extern, under its name and with its arguments in MORI's order.

A call is ONE operation of the program, whatever `num_warps` is, and a fetched value reaches all of its threads.
Arguments are cast to the table's types; pointers are taken as they are. `_thread`, `_warp` and `_block` say how many
threads move the bytes. What each promises: docs/semantics.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton.language as tl

from mori_triton import abi
from mori_triton.device import externs

# kernels read them as they stand
SIGNAL_SET = tl.constexpr(abi.SIGNAL_SET)
SIGNAL_ADD = tl.constexpr(abi.SIGNAL_ADD)

_NAMES = [*abi.MORI_FUNCTIONS, *abi.EXTRA_FUNCTIONS]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Any]: ...


for _name in _NAMES:
    globals()[_name] = getattr(externs, _name)

__all__ = ["SIGNAL_ADD", "SIGNAL_SET", *_NAMES]  # noqa: PLE0604
