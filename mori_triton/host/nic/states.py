"""The states of a reliable connection for cards whose queue pairs verbs can change: attributes and their masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mori_triton.errors import require
from mori_triton.host.nic import verbs_api as api
from mori_triton.host.nic.connection import ConnectionFacts, QueuePairEnd
from mori_triton.host.nic.verbs import ACCESS


@dataclass(frozen=True)
class Habits:
    """What differs between makers of cards. `service_level`: unless the user says another."""

    service_level: int
    hop_limit: int
    timeout: int  # of an answer, 4.096 us times two to this
    max_reads: int  # that may be under way


# as the makers' own software sets them
HABITS = {"bnxt_re": Habits(1, 255, 20, 7), "ionic": Habits(0, 1, 14, 15)}
_RETRIES, _RNR_TIMER = 7, 12


def to_init(port: int) -> tuple[api.QpAttr, int]:
    """RESET to INIT."""
    require(0 < port < 256, "port", "1 to 255", port)
    attributes = api.QpAttr(qp_state=api.QPS_INIT, pkey_index=0, port_num=port, qp_access_flags=ACCESS)
    return attributes, api.QP_STATE | api.QP_PKEY_INDEX | api.QP_PORT | api.QP_ACCESS_FLAGS


def to_receive(
    own: ConnectionFacts,
    peer: ConnectionFacts,
    there: QueuePairEnd,
    *,
    max_reads: int,
    service_level: int | None = None,
    traffic_class: int | None = None,
) -> tuple[api.QpAttr, int]:
    """INIT to RTR. `there`: the peer's end. `max_reads`: how many of its reads and atomics the card answers at once."""
    habits = HABITS[own.provider]
    attributes = api.QpAttr(
        qp_state=api.QPS_RTR,
        path_mtu=min(own.mtu, peer.mtu),
        dest_qp_num=there.number,
        rq_psn=there.psn,
        max_dest_rd_atomic=min(max_reads, 255),
        min_rnr_timer=_RNR_TIMER,
    )
    way = attributes.ah_attr
    way.port_num = own.port
    way.sl = habits.service_level if service_level is None else service_level
    if own.link_layer == "InfiniBand":
        way.dlid = peer.lid
    else:
        way.is_global = 1
        way.grh.dgid = api.Gid.from_buffer_copy(peer.gid)
        way.grh.sgid_index = own.gid_index
        way.grh.hop_limit = habits.hop_limit
        way.grh.traffic_class = traffic_class or 0
    mask = api.QP_STATE | api.QP_AV | api.QP_PATH_MTU | api.QP_DEST_QPN | api.QP_RQ_PSN
    return attributes, mask | api.QP_MAX_DEST_RD_ATOMIC | api.QP_MIN_RNR_TIMER


def to_send(own: ConnectionFacts, here: QueuePairEnd) -> tuple[api.QpAttr, int]:
    """RTR to RTS. `here`: this PE's end."""
    habits = HABITS[own.provider]
    attributes = api.QpAttr(
        qp_state=api.QPS_RTS,
        sq_psn=here.psn,
        max_rd_atomic=habits.max_reads,
        timeout=habits.timeout,
        retry_cnt=_RETRIES,
        rnr_retry=_RETRIES,
    )
    mask = api.QP_STATE | api.QP_SQ_PSN | api.QP_MAX_QP_RD_ATOMIC | api.QP_TIMEOUT
    return attributes, mask | api.QP_RETRY_CNT | api.QP_RNR_RETRY


def connect(
    modify: Callable[[tuple[api.QpAttr, int], str], None],
    own: ConnectionFacts,
    peer: ConnectionFacts,
    ends: tuple[QueuePairEnd, QueuePairEnd],
    *,
    max_reads: int,
    service_level: int | None = None,
    traffic_class: int | None = None,
) -> None:
    """From INIT to RTS by `modify(state, its name)`. `ends`: this PE's and the peer's; the rest as for `to_receive`."""
    here, there = ends
    receive = to_receive(
        own, peer, there, max_reads=max_reads, service_level=service_level, traffic_class=traffic_class
    )  # fmt: skip
    modify(receive, "RTR")
    modify(to_send(own, here), "RTS")
