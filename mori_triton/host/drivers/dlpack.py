"""Tensors over memory that torch does not own, on a device that is stated and not guessed from the address.

Through DLPack, which builds of torch for CUDA, for ROCm and for the CPU all have. The array interface would ask the
driver whose memory an address is, and put a view of a peer's memory on the peer's device.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CPU, CUDA, ROCM = 1, 2, 10  # DLDeviceType
_UINT8 = 1, 8, 1  # DLDataType: kDLUInt, bits, lanes


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter))

# what each live tensor holds: its struct, its shape, the owner of its memory
_held: dict[int, tuple[Any, ...]] = {}
_numbers = itertools.count(1)


def _let_go(managed: Any, held: dict[int, tuple[Any, ...]] = _held) -> None:
    # the default argument: at the end of a process a tensor may outlive this module's names
    held.pop(managed.contents.manager_ctx, None)


_deleter = _Deleter(_let_go)
# for the same reason the callback itself is never freed
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_deleter))
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes, _new_capsule.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
_NAME = b"dltensor"


def tensor(
    address: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    device_type: int,
    device_index: int,
    holder: Any,
) -> torch.Tensor:
    """A contiguous tensor over at least one byte from `address`; its storage keeps `holder` alive.

    `device_type`: CPU, CUDA or ROCM; torch calls the last two "cuda".
    """
    import torch

    # bytes, since DLPack does not know every type of torch
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    number = next(_numbers)
    size = ctypes.c_int64(num_bytes)
    managed = _Managed(
        _Tensor(address, _Device(device_type, device_index), 1, _DataType(*_UINT8), ctypes.pointer(size), None, 0),
        number,
        _deleter,
    )
    _held[number] = managed, size, holder
    try:
        flat = torch.from_dlpack(_new_capsule(ctypes.addressof(managed), _NAME, None))
    except BaseException:
        del _held[number]
        raise
    return flat.view(dtype).view(shape)
