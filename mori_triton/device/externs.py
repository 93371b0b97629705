"""The device library's functions as Triton externs, one for each row of `abi.FUNCTIONS`, under its key.

Arguments are cast to the table's types, so a plain Python int, a pointer or a 32-bit value where 64 bits are wanted are
fine. Every function is called by all threads of a program and is ONE operation; results reach all threads. Only the
pure ones (`ctx_my_pe`, `ctx_n_pes`, `ctx_ptr`, `ptr`, `ptr_p2p`, ...) take blocks; a block elsewhere would be one
operation for each element a thread happens to hold, so it is refused at compile time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language import core

from mori_triton import abi
from mori_triton.errors import NotSupported

if "_semantic" not in inspect.signature(core.extern_elementwise).parameters:
    # older ones call it _builder, and some of them fail only when a kernel is compiled
    raise NotSupported(f"Triton {triton.__version__}: want 3.6 or newer")

# functions without barrier or side effect: elementwise on blocks
ELEMENTWISE = frozenset({"ctx_my_pe", "ctx_n_pes", "ctx_ptr", "my_pe", "n_pes", "ptr", "ptr_p2p"})


def _make(key: str, function: abi.Function) -> Callable[..., Any]:
    types = tuple(getattr(tl, name) for name in function.args)
    ret = getattr(tl, function.ret)

    def call(*args: Any, _semantic: Any = None) -> Any:
        if len(args) != len(types):
            raise ValueError(f"{key}: want {len(types)} arguments {function.args}, got {len(args)}")
        values = [_cast(key, i, a, t, _semantic) for i, (a, t) in enumerate(zip(args, types, strict=True))]
        if key not in ELEMENTWISE:
            for i, value in enumerate(values):
                if value.type.is_block():
                    raise ValueError(f"{key}: argument {i}: want a scalar (one operation a program), got {value.type}")
        return core.extern_elementwise(
            abi.LIBRARY, "", values, {types: (function.symbol, ret)}, is_pure=function.pure, _semantic=_semantic
        )

    call.__name__ = call.__qualname__ = key
    call.__doc__ = f"`{function.symbol}({', '.join(function.args)}) -> {function.ret}`"
    return core.extern(call)


def _cast(key: str, i: int, value: Any, dtype: Any, semantic: Any) -> Any:
    value = semantic.to_tensor(core._unwrap_if_constexpr(value))
    if dtype.is_int() and not (value.dtype.is_int() or value.dtype.is_ptr()):
        raise ValueError(f"{key}: argument {i}: want an integer or a pointer, got {value.dtype}")
    return core.cast(value, dtype, _semantic=semantic)


if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Any]: ...


for _key, _function in abi.FUNCTIONS.items():
    globals()[_key] = _make(_key, _function)

__all__ = sorted(abi.FUNCTIONS)  # noqa: PLE0605
