"""The C++ part of the emulated device, `hip_src/emulator/memory.cpp`: linked into the process once, from bitcode."""

from __future__ import annotations

import functools

from mori_triton.emulator import hostcalls, jit

_BITCODE = "emulator_memory.bc"


@functools.cache
def ensure() -> None:
    """Link the functions that kernels call. About a second when the object is not cached."""
    jit.load_bitcode(_BITCODE)
    hostcalls.ensure()
