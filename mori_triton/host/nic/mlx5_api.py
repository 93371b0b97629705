"""libmlx5's direct verbs, as far as they are used. Pure data; tests compare it with mlx5dv.h."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from mori_triton.host.drivers.library import Function
from mori_triton.host.nic.verbs_api import Context, Pd

OBJ_PD = 1 << 6
UAR_ALLOC_TYPE_BF, UAR_ALLOC_TYPE_NC = 0, 1
UMEM_MASK_DMABUF = 1


class DevxObj(c_void_p):
    _struct_ = "mlx5dv_devx_obj"


class DevxUmem(Structure):
    _fields_ = (("umem_id", c_uint32),)


class DevxUmemIn(Structure):
    _fields_ = (
        ("addr", c_void_p),
        ("size", c_size_t),
        ("access", c_uint32),
        ("pgsz_bitmap", c_uint64),
        ("comp_mask", c_uint64),
        ("dmabuf_fd", c_int),
    )


class DevxUar(Structure):
    _fields_ = (
        ("reg_addr", c_void_p),
        ("base_addr", c_void_p),
        ("page_id", c_uint32),
        ("mmap_off", c_int64),
        ("comp_mask", c_uint64),
    )


class DvPd(Structure):
    _fields_ = (("pdn", c_uint32), ("comp_mask", c_uint64))


class _Unused(Structure):
    _fields_ = (("in_", c_void_p), ("out", c_void_p))


class _ObjPd(Structure):
    _fields_ = (("in_", Pd), ("out", POINTER(DvPd)))


class DvObj(Structure):
    _fields_ = (
        ("qp", _Unused),
        ("cq", _Unused),
        ("srq", _Unused),
        ("rwq", _Unused),
        ("dm", _Unused),
        ("ah", _Unused),
        ("pd", _ObjPd),
    )


def _row(restype: Any, symbol: str, *argtypes: Any) -> Function:
    return Function(symbol, argtypes, restype)


_IN_OUT = (c_void_p, c_size_t, c_void_p, c_size_t)
FUNCTIONS = {
    "general_cmd": _row(c_int, "mlx5dv_devx_general_cmd", Context, *_IN_OUT),
    "umem_reg": _row(POINTER(DevxUmem), "mlx5dv_devx_umem_reg", Context, c_void_p, c_size_t, c_uint32),
    "umem_reg_ex": _row(POINTER(DevxUmem), "mlx5dv_devx_umem_reg_ex", Context, POINTER(DevxUmemIn)),
    "umem_dereg": _row(c_int, "mlx5dv_devx_umem_dereg", POINTER(DevxUmem)),
    "alloc_uar": _row(POINTER(DevxUar), "mlx5dv_devx_alloc_uar", Context, c_uint32),
    "free_uar": _row(None, "mlx5dv_devx_free_uar", POINTER(DevxUar)),
    "query_eqn": _row(c_int, "mlx5dv_devx_query_eqn", Context, c_uint32, POINTER(c_uint32)),
    "obj_create": _row(DevxObj, "mlx5dv_devx_obj_create", Context, *_IN_OUT),
    "obj_modify": _row(c_int, "mlx5dv_devx_obj_modify", DevxObj, *_IN_OUT),
    "obj_destroy": _row(c_int, "mlx5dv_devx_obj_destroy", DevxObj),
    "init_obj": _row(c_int, "mlx5dv_init_obj", POINTER(DvObj), c_uint64),
}
# for memory that is a dma-buf. Of older libraries, such as Ubuntu 22.04's, it has no `dmabuf_fd`: the mask
# is refused, or the address, which of a dma-buf is an offset
OPTIONAL = {"umem_reg_ex"}
