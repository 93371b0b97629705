"""libbnxt_re's direct verbs as Broadcom's own package has them. Pure data.

The library has had several layouts under the same names. This one is of the releases that have
`bnxt_re_dv_umem_reg` and `bnxt_re_dv_get_default_db_region`, which those before and rdma-core's do not; later
releases of them have added fields at the ends of structs, which are zero here and mean nothing to earlier ones.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, c_int, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

from mori_triton.host.drivers.library import Function
from mori_triton.host.nic.verbs_api import Context, Cq, Pd, Qp, QpAttr, Srq

DV_OBJ_QP, DV_OBJ_CQ = 1, 2
DV_UMEM_FLAGS_DMABUF = 1


class Umem(c_void_p):
    """What `umem_reg` returns; void * in the header."""


class UmemRegAttr(Structure):
    _fields_ = (
        ("addr", c_void_p),
        ("size", c_size_t),
        ("access_flags", c_uint32),
        ("pgsz_bitmap", c_uint64),
        ("comp_mask", c_uint64),
        ("dmabuf_fd", c_int),
        ("pa_buf", c_void_p),
        ("pa_buf_sz", c_size_t),
        ("map_pg_sz", c_uint32),
    )


class CqInitAttr(Structure):
    _fields_ = (
        ("cq_handle", c_uint64),
        ("umem_handle", Umem),
        ("cq_umem_offset", c_uint64),
        ("ncqe", c_uint32),
        ("comp_mask", c_uint64),
        ("cqid", c_uint32),
    )


class QpInitAttr(Structure):
    _fields_ = (
        ("qp_type", c_int),
        ("max_send_wr", c_uint32),
        ("max_recv_wr", c_uint32),
        ("max_send_sge", c_uint32),
        ("max_recv_sge", c_uint32),
        ("max_inline_data", c_uint32),
        ("send_cq", Cq),
        ("recv_cq", Cq),
        ("srq", Srq),
        ("qp_handle", c_uint64),
        ("dbr_handle", c_void_p),
        ("sq_umem_handle", Umem),
        ("sq_umem_offset", c_uint64),
        ("sq_len", c_uint32),
        ("sq_slots", c_uint32),
        ("rq_umem_handle", Umem),
        ("rq_umem_offset", c_uint64),
        ("sq_wqe_sz", c_uint32),
        ("sq_psn_sz", c_uint32),
        ("sq_npsn", c_uint32),
        ("rq_len", c_uint32),
        ("rq_slots", c_uint32),
        ("rq_wqe_sz", c_uint32),
        ("comp_mask", c_uint64),
    )


class DbRegionAttr(Structure):
    _fields_ = (("handle", c_uint32), ("dpi", c_uint32), ("umdbr", c_uint64), ("dbr", POINTER(c_uint64)))


class DvCq(Structure):
    _fields_ = (("cqn", c_uint32), ("cqe_size", c_uint32), ("comp_mask", c_uint64))


class _ObjCq(Structure):
    _fields_ = (("in_", Cq), ("out", POINTER(DvCq)))


class _Unused(Structure):
    _fields_ = (("in_", c_void_p), ("out", c_void_p))


class DvObj(Structure):
    _fields_ = (("qp", _Unused), ("cq", _ObjCq), ("srq", _Unused), ("ah", _Unused), ("pd", _Unused))


def _row(restype: Any, symbol: str, *argtypes: Any) -> Function:
    return Function(symbol, argtypes, restype)


FUNCTIONS = {
    "umem_reg": _row(Umem, "bnxt_re_dv_umem_reg", Context, POINTER(UmemRegAttr)),
    "umem_dereg": _row(c_int, "bnxt_re_dv_umem_dereg", Umem),
    "create_cq": _row(Cq, "bnxt_re_dv_create_cq", Context, POINTER(CqInitAttr)),
    "destroy_cq": _row(c_int, "bnxt_re_dv_destroy_cq", Cq),
    "init_obj": _row(c_int, "bnxt_re_dv_init_obj", POINTER(DvObj), c_uint64),
    "create_qp": _row(POINTER(Qp), "bnxt_re_dv_create_qp", Pd, POINTER(QpInitAttr)),
    "destroy_qp": _row(c_int, "bnxt_re_dv_destroy_qp", POINTER(Qp)),
    "modify_qp": _row(c_int, "bnxt_re_dv_modify_qp", POINTER(Qp), POINTER(QpAttr), c_int, c_uint32, c_uint32),
    "get_default_db_region": _row(c_int, "bnxt_re_dv_get_default_db_region", Context, POINTER(DbRegionAttr)),
    "modify_qp_udp_sport": _row(c_int, "bnxt_re_dv_modify_qp_udp_sport", POINTER(Qp), c_uint16),
}
OPTIONAL = {"modify_qp_udp_sport"}
