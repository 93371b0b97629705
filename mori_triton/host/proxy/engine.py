"""The progress loop and the producers' functions: `bitcode/x86_64/proxy.bc`, compiled for this CPU, once a process."""

from __future__ import annotations

import ctypes
from typing import Any

from mori_triton.errors import BitcodeError
from mori_triton.host.native import Native, once
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
        self._code = Native(FILE, _SIGNATURES)
        want = layout.words()
        got = self._code.words(_LAYOUT, len(want))
        if got != want:
            raise BitcodeError(f"{self._code.path}: {_LAYOUT}: want {want}, got {got}")
        self.run, self.post, self.wait = self._code.functions.values()

    def address(self, name: str) -> int:
        """Address of one of the file's functions."""
        return self._code.address(name)


@once
def engine() -> Engine:
    """This process' engine."""
    return Engine()
