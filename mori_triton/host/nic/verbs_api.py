"""libibverbs' C interface, as far as it is used. Pure data; tests compare it with verbs.h.

Handles that nobody looks into are types of their own, so that one cannot be given for another. Of structs that the
library makes and that only it may extend, the first fields are enough (`_prefix_`).
"""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

from mori_triton.host.drivers.library import Function

ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_ATOMIC = 1, 2, 4, 8
QPT_RC = 2
QPS_RESET, QPS_INIT, QPS_RTR, QPS_RTS = range(4)
MTU_256, MTU_512, MTU_1024, MTU_2048, MTU_4096 = range(1, 6)
PORT_ACTIVE = 4
ATOMIC_NONE = 0
LINK_LAYER_INFINIBAND, LINK_LAYER_ETHERNET = 1, 2
QP_STATE, QP_ACCESS_FLAGS, QP_PKEY_INDEX, QP_PORT = 1 << 0, 1 << 3, 1 << 4, 1 << 5
QP_AV, QP_PATH_MTU, QP_TIMEOUT, QP_RETRY_CNT = 1 << 7, 1 << 8, 1 << 9, 1 << 10
QP_RNR_RETRY, QP_RQ_PSN, QP_MAX_QP_RD_ATOMIC, QP_MIN_RNR_TIMER = 1 << 11, 1 << 12, 1 << 13, 1 << 15
QP_SQ_PSN, QP_MAX_DEST_RD_ATOMIC, QP_DEST_QPN = 1 << 16, 1 << 17, 1 << 20


class Device(c_void_p):
    _struct_ = "ibv_device"


class Context(c_void_p):
    _struct_ = "ibv_context"


class Pd(c_void_p):
    _struct_ = "ibv_pd"


class Cq(c_void_p):
    _struct_ = "ibv_cq"


class Srq(c_void_p):
    _struct_ = "ibv_srq"


class CompChannel(c_void_p):
    _struct_ = "ibv_comp_channel"


class Gid(Structure):
    """16 bytes in the network's order, aligned as numbers: make it with `Gid.from_buffer_copy`."""

    _fields_ = (("subnet_prefix", c_uint64), ("interface_id", c_uint64))


class DeviceAttr(Structure):
    _fields_ = (
        ("fw_ver", c_char * 64),
        ("node_guid", c_uint64),
        ("sys_image_guid", c_uint64),
        ("max_mr_size", c_uint64),
        ("page_size_cap", c_uint64),
        ("vendor_id", c_uint32),
        ("vendor_part_id", c_uint32),
        ("hw_ver", c_uint32),
        ("max_qp", c_int),
        ("max_qp_wr", c_int),
        ("device_cap_flags", c_uint),
        ("max_sge", c_int),
        ("max_sge_rd", c_int),
        ("max_cq", c_int),
        ("max_cqe", c_int),
        ("max_mr", c_int),
        ("max_pd", c_int),
        ("max_qp_rd_atom", c_int),
        ("max_ee_rd_atom", c_int),
        ("max_res_rd_atom", c_int),
        ("max_qp_init_rd_atom", c_int),
        ("max_ee_init_rd_atom", c_int),
        ("atomic_cap", c_int),
        ("max_ee", c_int),
        ("max_rdd", c_int),
        ("max_mw", c_int),
        ("max_raw_ipv6_qp", c_int),
        ("max_raw_ethy_qp", c_int),
        ("max_mcast_grp", c_int),
        ("max_mcast_qp_attach", c_int),
        ("max_total_mcast_qp_attach", c_int),
        ("max_ah", c_int),
        ("max_fmr", c_int),
        ("max_map_per_fmr", c_int),
        ("max_srq", c_int),
        ("max_srq_wr", c_int),
        ("max_srq_sge", c_int),
        ("max_pkeys", c_uint16),
        ("local_ca_ack_delay", c_uint8),
        ("phys_port_cnt", c_uint8),
    )


class PortAttr(Structure):
    """What `ibv_query_port` fills ends with `link_layer`."""

    _fields_ = (
        ("state", c_int),
        ("max_mtu", c_int),
        ("active_mtu", c_int),
        ("gid_tbl_len", c_int),
        ("port_cap_flags", c_uint32),
        ("max_msg_sz", c_uint32),
        ("bad_pkey_cntr", c_uint32),
        ("qkey_viol_cntr", c_uint32),
        ("pkey_tbl_len", c_uint16),
        ("lid", c_uint16),
        ("sm_lid", c_uint16),
        ("lmc", c_uint8),
        ("max_vl_num", c_uint8),
        ("sm_sl", c_uint8),
        ("subnet_timeout", c_uint8),
        ("init_type_reply", c_uint8),
        ("active_width", c_uint8),
        ("active_speed", c_uint8),
        ("phys_state", c_uint8),
        ("link_layer", c_uint8),
        ("flags", c_uint8),
        ("port_cap_flags2", c_uint16),
    )


class Mr(Structure):
    _prefix_ = True
    _fields_ = (
        ("context", Context),
        ("pd", Pd),
        ("addr", c_void_p),
        ("length", c_size_t),
        ("handle", c_uint32),
        ("lkey", c_uint32),
        ("rkey", c_uint32),
    )


class Qp(Structure):
    _prefix_ = True
    _fields_ = (
        ("context", Context),
        ("qp_context", c_void_p),
        ("pd", Pd),
        ("send_cq", Cq),
        ("recv_cq", Cq),
        ("srq", Srq),
        ("handle", c_uint32),
        ("qp_num", c_uint32),
        ("state", c_int),
        ("qp_type", c_int),
    )


class QpCap(Structure):
    _fields_ = (
        ("max_send_wr", c_uint32),
        ("max_recv_wr", c_uint32),
        ("max_send_sge", c_uint32),
        ("max_recv_sge", c_uint32),
        ("max_inline_data", c_uint32),
    )


class QpInitAttr(Structure):
    _fields_ = (
        ("qp_context", c_void_p),
        ("send_cq", Cq),
        ("recv_cq", Cq),
        ("srq", Srq),
        ("cap", QpCap),
        ("qp_type", c_int),
        ("sq_sig_all", c_int),
    )


class CqInitAttrEx(Structure):
    _fields_ = (
        ("cqe", c_uint32),
        ("cq_context", c_void_p),
        ("channel", CompChannel),
        ("comp_vector", c_uint32),
        ("wc_flags", c_uint64),
        ("comp_mask", c_uint32),
        ("flags", c_uint32),
        ("parent_domain", Pd),
    )


class GlobalRoute(Structure):
    _fields_ = (
        ("dgid", Gid),
        ("flow_label", c_uint32),
        ("sgid_index", c_uint8),
        ("hop_limit", c_uint8),
        ("traffic_class", c_uint8),
    )


class AhAttr(Structure):
    _fields_ = (
        ("grh", GlobalRoute),
        ("dlid", c_uint16),
        ("sl", c_uint8),
        ("src_path_bits", c_uint8),
        ("static_rate", c_uint8),
        ("is_global", c_uint8),
        ("port_num", c_uint8),
    )


class QpAttr(Structure):
    _fields_ = (
        ("qp_state", c_int),
        ("cur_qp_state", c_int),
        ("path_mtu", c_int),
        ("path_mig_state", c_int),
        ("qkey", c_uint32),
        ("rq_psn", c_uint32),
        ("sq_psn", c_uint32),
        ("dest_qp_num", c_uint32),
        ("qp_access_flags", c_uint),
        ("cap", QpCap),
        ("ah_attr", AhAttr),
        ("alt_ah_attr", AhAttr),
        ("pkey_index", c_uint16),
        ("alt_pkey_index", c_uint16),
        ("en_sqd_async_notify", c_uint8),
        ("sq_draining", c_uint8),
        ("max_rd_atomic", c_uint8),
        ("max_dest_rd_atomic", c_uint8),
        ("min_rnr_timer", c_uint8),
        ("port_num", c_uint8),
        ("timeout", c_uint8),
        ("retry_cnt", c_uint8),
        ("rnr_retry", c_uint8),
        ("alt_port_num", c_uint8),
        ("alt_timeout", c_uint8),
        ("rate_limit", c_uint32),
    )


def _row(restype: Any, symbol: str, *argtypes: Any) -> Function:
    return Function(symbol, argtypes, restype)


FUNCTIONS = {
    "get_device_list": _row(POINTER(Device), "ibv_get_device_list", POINTER(c_int)),
    "free_device_list": _row(None, "ibv_free_device_list", POINTER(Device)),
    "get_device_name": _row(c_char_p, "ibv_get_device_name", Device),
    "open_device": _row(Context, "ibv_open_device", Device),
    "close_device": _row(c_int, "ibv_close_device", Context),
    "query_device": _row(c_int, "ibv_query_device", Context, POINTER(DeviceAttr)),
    "query_port": _row(c_int, "ibv_query_port", Context, c_uint8, POINTER(PortAttr)),
    "query_gid": _row(c_int, "ibv_query_gid", Context, c_uint8, c_int, POINTER(Gid)),
    "alloc_pd": _row(Pd, "ibv_alloc_pd", Context),
    "dealloc_pd": _row(c_int, "ibv_dealloc_pd", Pd),
    "reg_mr": _row(POINTER(Mr), "ibv_reg_mr", Pd, c_void_p, c_size_t, c_int),
    "reg_dmabuf_mr": _row(POINTER(Mr), "ibv_reg_dmabuf_mr", Pd, c_uint64, c_size_t, c_uint64, c_int, c_int),
    "dereg_mr": _row(c_int, "ibv_dereg_mr", POINTER(Mr)),
    "create_cq": _row(Cq, "ibv_create_cq", Context, c_int, c_void_p, CompChannel, c_int),
    "destroy_cq": _row(c_int, "ibv_destroy_cq", Cq),
    "create_qp": _row(POINTER(Qp), "ibv_create_qp", Pd, POINTER(QpInitAttr)),
    "destroy_qp": _row(c_int, "ibv_destroy_qp", POINTER(Qp)),
    "modify_qp": _row(c_int, "ibv_modify_qp", POINTER(Qp), POINTER(QpAttr), c_int),
}
# since rdma-core 34
OPTIONAL = {"reg_dmabuf_mr"}
