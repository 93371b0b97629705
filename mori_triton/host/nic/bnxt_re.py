"""Queue pairs of bnxt_re cards with their rings in GPU memory, through Broadcom's direct verbs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

from mori_triton.host.drivers.base import Driver, MemoryKind
from mori_triton.host.nic import bnxt_re_api as api
from mori_triton.host.nic import states
from mori_triton.host.nic import verbs_api as verbs
from mori_triton.host.nic.connection import ConnectionFacts, QueuePairEnd
from mori_triton.host.nic.libraries import RdmaLibrary
from mori_triton.host.nic.verbs import OpenDevice

NUM_WQES = 4096
_SLOT_BYTES, _SLOTS_PER_WQE, _PSN_BYTES, _CQE_BYTES, _PAGE = 16, 3, 8, 32, 4096
NUM_SLOTS = NUM_WQES * _SLOTS_PER_WQE
# one entry for two slots, of slots rounded up to a power of two
NUM_PSNS = (1 << (NUM_SLOTS - 1).bit_length()) // 2
RQ_BYTES = -(-NUM_SLOTS * _SLOT_BYTES // _PAGE) * _PAGE
SQ_BYTES = -(-(NUM_SLOTS * _SLOT_BYTES + NUM_PSNS * _PSN_BYTES) // _PAGE) * _PAGE
_MAX_INLINE_BYTES = 16


@dataclass(frozen=True)
class BnxtQueuePair:
    """A queue pair, as the device code that posts to it needs it, and what changes its state."""

    number: int
    cq_number: int
    sq_address: int  # NUM_WQES requests of three slots of 16 bytes
    psn_table_address: int  # NUM_PSNS entries of 8 bytes
    doorbell_address: int  # in this process, one page for all queue pairs; the GPU has to be given a mapping of it
    cq_address: int  # one completion of 32 bytes
    handle: ctypes._Pointer[verbs.Qp]


class BnxtDevice:
    """An open device's direct verbs. What it makes lives until the `OpenDevice` is closed.

    Args:
        device: of provider bnxt_re.
        library: `libraries.open_provider("libbnxt_re")`.
        driver: of the GPU that will post; the rings are its memory.
    """

    def __init__(self, device: OpenDevice, library: RdmaLibrary, driver: Driver) -> None:
        self._device, self._library, self._driver = device, library, driver
        self._max_reads: int = device.attributes().max_qp_rd_atom
        region = api.DbRegionAttr()
        library.call("get_default_db_region", device.context, ctypes.byref(region), about=device.name)
        self._doorbell = ctypes.cast(region.dbr, ctypes.c_void_p).value or 0

    def _ring(self, num_bytes: int) -> tuple[int, api.Umem]:
        address = self._driver.alloc(num_bytes, kind=MemoryKind.UNCACHED, alignment=_PAGE)
        self._device.owns(partial(self._driver.free, address))
        wanted = api.UmemRegAttr(addr=address, size=num_bytes, access_flags=verbs.ACCESS_LOCAL_WRITE)
        about = f"{num_bytes} bytes at {address:#x} for {self._device.name}"
        umem = self._library.call("umem_reg", self._device.context, ctypes.byref(wanted), about=about)
        self._device.owns(partial(self._library.call, "umem_dereg", umem, about=about))
        return address, umem

    def create(self, port: int) -> BnxtQueuePair:
        """A reliable connection's queue pair with a completion queue of one entry, in state INIT."""
        call, name = self._library.call, self._device.name
        cq_address, cq_umem = self._ring(_CQE_BYTES)
        wanted = api.CqInitAttr(umem_handle=cq_umem, ncqe=1)
        cq = call("create_cq", self._device.context, ctypes.byref(wanted), about=name)
        self._device.owns(partial(call, "destroy_cq", cq, about=name))
        out, asked = api.DvCq(), api.DvObj()
        asked.cq.in_, asked.cq.out = cq, ctypes.pointer(out)
        call("init_obj", ctypes.byref(asked), api.DV_OBJ_CQ, about=name)

        sq_address, sq_umem = self._ring(SQ_BYTES)
        _, rq_umem = self._ring(RQ_BYTES)
        wqe_bytes = _SLOTS_PER_WQE * _SLOT_BYTES
        attributes = api.QpInitAttr(
            qp_type=verbs.QPT_RC, max_send_wr=NUM_WQES, max_recv_wr=NUM_WQES, max_send_sge=1, max_recv_sge=1,
            max_inline_data=_MAX_INLINE_BYTES, send_cq=cq, recv_cq=cq, sq_umem_handle=sq_umem, sq_len=SQ_BYTES,
            sq_slots=NUM_SLOTS, sq_wqe_sz=wqe_bytes, sq_psn_sz=_PSN_BYTES, sq_npsn=NUM_PSNS, rq_umem_handle=rq_umem,
            rq_len=RQ_BYTES, rq_slots=NUM_SLOTS, rq_wqe_sz=wqe_bytes,
        )  # fmt: skip
        handle = call("create_qp", self._device.pd, ctypes.byref(attributes), about=name)
        self._device.owns(partial(call, "destroy_qp", handle, about=name))
        table = sq_address + SQ_BYTES - NUM_PSNS * _PSN_BYTES
        number = handle.contents.qp_num
        made = BnxtQueuePair(number, out.cqn, sq_address, table, self._doorbell, cq_address, handle)
        self._modify(made, states.to_init(port), "INIT")
        return made

    def _modify(self, queue_pair: BnxtQueuePair, state: tuple[verbs.QpAttr, int], what: str) -> None:
        attributes, mask = state
        about = f"{self._device.name}, to {what}"
        self._library.call("modify_qp", queue_pair.handle, ctypes.byref(attributes), mask, 0, 0, about=about)

    def connect(
        self,
        queue_pair: BnxtQueuePair,
        own: ConnectionFacts,
        peer: ConnectionFacts,
        ends: tuple[QueuePairEnd, QueuePairEnd],
        *,
        service_level: int | None = None,
        traffic_class: int | None = None,
    ) -> None:
        """From INIT to where it can send. `ends`: this PE's and the peer's of the connection."""
        states.connect(
            partial(self._modify, queue_pair), own, peer, ends,
            max_reads=self._max_reads, service_level=service_level, traffic_class=traffic_class,
        )  # fmt: skip
