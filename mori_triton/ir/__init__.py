"""MORI's `mori.ir`: the device library for authors of kernels. `mori_triton.ir.triton` has the functions for Triton.

Importing this loads neither torch nor Triton, touches no GPU and installs no hook.
"""

from mori_triton.ir.bitcode import find_bitcode, get_bitcode_path
from mori_triton.ir.ops import MORI_DEVICE_FUNCTIONS, SIGNAL_ADD, SIGNAL_SET

__all__ = ["MORI_DEVICE_FUNCTIONS", "SIGNAL_ADD", "SIGNAL_SET", "find_bitcode", "get_bitcode_path"]
