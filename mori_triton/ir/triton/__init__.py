"""MORI's `mori.ir.triton`: every device function as a Triton extern, and what a launch of kernels with them needs.

from mori_triton.ir import triton as mori_device
from mori_triton.ir.triton import get_extern_libs, install_hook

install_hook()  # once
kernel[grid](..., extern_libs=get_extern_libs())  # `mori_device.my_pe()` in the kernel
"""

from mori_triton.ir.triton import ops
from mori_triton.ir.triton.ops import *  # noqa: F403
from mori_triton.ir.triton.runtime import get_extern_libs, install_hook

__all__ = [*ops.__all__, "get_extern_libs", "install_hook"]  # noqa: PLE0604
