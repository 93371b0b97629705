"""libionic's direct verbs as Pensando's own package has them (rdma-core's lack the `get` functions). Pure data."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_bool, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

from mori_triton.host.drivers.library import Function
from mori_triton.host.nic.verbs_api import Context, Cq, CqInitAttrEx, Pd, Qp

# a completion queue of one entry that the card writes over
CQ_INIT_ATTR_MASK_FLAGS, CQ_INIT_ATTR_CCQE = 1, 1


class DvCtx(Structure):
    _fields_ = (
        ("db_page", c_void_p),
        ("db_ptr", POINTER(c_uint64)),
        ("sq_qtype", c_uint8),
        ("rq_qtype", c_uint8),
        ("cq_qtype", c_uint8),
    )


class DvCqInitAttrEx(Structure):
    _fields_ = (("comp_mask", c_uint32), ("flags", c_uint32))


class DvQueue(Structure):
    _fields_ = (
        ("ptr", c_void_p),
        ("size", c_size_t),
        ("db_val", c_uint64),
        ("mask", c_uint16),
        ("depth_log2", c_uint8),
        ("stride_log2", c_uint8),
    )


class DvCq(Structure):
    _fields_ = (("q", DvQueue),)


class DvQp(Structure):
    _fields_ = (("rq", DvQueue), ("sq", DvQueue))


def _row(restype: Any, symbol: str, *argtypes: Any) -> Function:
    return Function(symbol, argtypes, restype)


FUNCTIONS = {
    "get_ctx": _row(c_int, "ionic_dv_get_ctx", POINTER(DvCtx), Context),
    "get_cq": _row(c_int, "ionic_dv_get_cq", POINTER(DvCq), Cq, c_uint8),
    "get_qp": _row(c_int, "ionic_dv_get_qp", POINTER(DvQp), POINTER(Qp)),
    "qp_get_udma_idx": _row(c_uint8, "ionic_dv_qp_get_udma_idx", POINTER(Qp)),
    # what it returns is an ibv_cq too
    "create_cq_ex": _row(Cq, "ionic_dv_create_cq_ex", Context, POINTER(CqInitAttrEx), POINTER(DvCqInitAttrEx)),
    "pd_set_udma_mask": _row(c_int, "ionic_dv_pd_set_udma_mask", Pd, c_uint8),
    "pd_set_sqcmb": _row(c_int, "ionic_dv_pd_set_sqcmb", Pd, c_bool, c_bool, c_bool),
    "pd_set_rqcmb": _row(c_int, "ionic_dv_pd_set_rqcmb", Pd, c_bool, c_bool, c_bool),
}
OPTIONAL = {"create_cq_ex"}
