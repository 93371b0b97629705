"""Code of `bitcode/x86_64/`, compiled for this CPU, for host threads that run without the interpreter's lock."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mori_triton import bitcode

_Made = TypeVar("_Made")


def once(make: Callable[[], _Made]) -> Callable[[], _Made]:
    """`make`, called by the first who wants its result, while others wait for it.

    With two results at the first use by several threads one would be garbage, and its code gone while it is called.
    """
    made, lock = functools.cache(make), threading.Lock()

    @functools.wraps(make)
    def get() -> _Made:
        with lock:
            return made()

    return get


class Native:
    """A file's functions, compiled. The code lives as long as this object.

    Args:
        file: its name, such as `"proxy.bc"`.
        signatures: result and arguments of the functions that are called from Python, by name.

    Raises:
        BitcodeError: the file is missing.
    """

    def __init__(self, file: str, signatures: Mapping[str, tuple[Any, ...]]) -> None:
        # no small library, and many worlds want none of this
        import llvmlite.binding as llvm

        self.path = bitcode.host_file(file)
        module = llvm.parse_bitcode(self.path.read_bytes())
        module.verify()
        self._engine = llvm.create_mcjit_compiler(module, bitcode.host_machine(2))
        self._engine.finalize_object()
        self.functions: dict[str, Any] = {
            name: ctypes.CFUNCTYPE(*types)(self.address(name)) for name, types in signatures.items()
        }

    def address(self, name: str) -> int:
        """Address of a function, also of one that Python does not call."""
        return self._engine.get_function_address(name)

    def words(self, name: str, count: int) -> list[int]:
        """The first `count` 32-bit words of a constant."""
        return list((ctypes.c_uint32 * count).from_address(self._engine.get_global_value_address(name)))
