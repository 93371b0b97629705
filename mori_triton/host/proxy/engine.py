"""The progress loop and the producers' functions: `bitcode/x86_64/proxy.bc`, compiled for this CPU, once a process."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import llvmlite.binding as llvm

from mori_triton import bitcode
from mori_triton.errors import BitcodeError
from mori_triton.host.proxy import layout

FILE = "proxy.bc"
_LAYOUT = "mori_proxy_layout"
_U64, _PTR = ctypes.c_uint64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "mori_proxy_run": (_U64, _PTR),
    "mori_proxy_post": (_U64, _PTR, _PTR, _U64, _U64, _PTR),
    "mori_proxy_wait": (ctypes.c_uint32, _PTR, _U64, _U64),
}


class Engine:
    """The functions of the file. All of them run without the interpreter's lock.

    Raises:
        BitcodeError: the file is missing, or was built with other structs than layout.py has.
    """

    def __init__(self) -> None:
        path = bitcode.host_file(FILE)
        module = llvm.parse_bitcode(path.read_bytes())
        module.verify()
        # kept: the code lives as long as it
        self._engine = llvm.create_mcjit_compiler(module, bitcode.host_machine(2))
        self._engine.finalize_object()
        want = layout.words()
        got = list((ctypes.c_uint32 * len(want)).from_address(self._engine.get_global_value_address(_LAYOUT)))
        if got != want:
            raise BitcodeError(f"{path}: {_LAYOUT}: want {want}, got {got}")
        functions = {name: ctypes.CFUNCTYPE(*types)(self.address(name)) for name, types in _SIGNATURES.items()}
        self.run, self.post, self.wait = functions.values()

    def address(self, name: str) -> int:
        """Address of one of the file's functions."""
        return self._engine.get_function_address(name)


@functools.cache
def engine() -> Engine:
    """This process' engine."""
    return Engine()
