"""Where the device library is, for whoever links it: MORI's names around `mori_triton.bitcode`."""

from __future__ import annotations

from typing import Any

from mori_triton import bitcode
from mori_triton.errors import BitcodeError, require

# the library says none, so it is linked into code objects of either version
_CODE_OBJECT_VERSIONS = (None, 5, 6)


def find_bitcode(*, cov: int | None = None, arch: Any = None) -> str:
    """Path of the verified `libmori_shmem_device.bc`; its directory's name has the content's hash in it.

    Args:
        cov: AMD code object version, 5, 6 or None: one file serves them all.
        arch: `"gfx942"`, `"sm_90"`, ..., or Triton's `GPUTarget`; None: that of the active device.

    Raises:
        ArgumentError: another `cov`.
        BitcodeError: no such target, no active device to ask, or a file that does not match the package
            (`MORI_SHMEM_BC` names another one).
    """
    require(cov in _CODE_OBJECT_VERSIONS, "cov", "None, 5 or 6", repr(cov))
    return str(bitcode.find_bitcode(_active_target() if arch is None else arch))


get_bitcode_path = find_bitcode


def _active_target() -> Any:
    from triton.runtime import driver

    try:
        return driver.active.get_current_target()
    except RuntimeError as error:
        raise BitcodeError(f'device bitcode: no active device ({error}): give arch="gfx942", for example') from error
