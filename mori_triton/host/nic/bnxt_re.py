"""Queue pairs of bnxt_re cards with their rings in GPU memory, through Broadcom's direct verbs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

from mori_triton.errors import DriverError
from mori_triton.host.drivers.base import Driver
from mori_triton.host.nic import bnxt_re_api as api
from mori_triton.host.nic import states
from mori_triton.host.nic import verbs_api as verbs
from mori_triton.host.nic.connection import ConnectionFacts, QueuePairEnd
from mori_triton.host.nic.libraries import RdmaLibrary
from mori_triton.host.nic.rings import NO_DMA_BUF, PAGE_SIZES, Ring, RingMemory, register
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
        self._device, self._library = device, library
        self._memory = RingMemory(device, driver)
        self._max_reads: int = device.attributes().max_qp_rd_atom
        region = api.DbRegionAttr()
        library.call("get_default_db_region", device.context, ctypes.byref(region), about=device.name)
        self._doorbell = ctypes.cast(region.dbr, ctypes.c_void_p).value or 0

    def _umem(self, ring: Ring, descriptor: int | None) -> api.Umem:
        """What the library knows a ring by. It may note a dma-buf's descriptor until a queue is made of it."""
        wanted = api.UmemRegAttr(addr=ring.address, size=ring.num_bytes, access_flags=verbs.ACCESS_LOCAL_WRITE)
        about = f"{ring.num_bytes} bytes at {ring.address:#x} for {self._device.name}"
        if descriptor is not None:
            # the address is where in the dma-buf
            wanted.addr, wanted.size, wanted.pgsz_bitmap = ring.offset, ring.page_bytes, PAGE_SIZES
            wanted.comp_mask, wanted.dmabuf_fd = api.DV_UMEM_FLAGS_DMABUF, descriptor
            about += ", a dma-buf"
        return self._library.call("umem_reg", self._device.context, ctypes.byref(wanted), about=about)

    def _completions(self, ring: Ring, descriptor: int | None) -> tuple[verbs.Cq, int | None]:
        """A completion queue of one entry; and the descriptor for other rings, None if it could not be made by that."""
        call, name = self._library.call, self._device.name

        def make(how: int | None) -> tuple[verbs.Cq, int | None]:
            umem = self._umem(ring, how)
            give_back = partial(call, "umem_dereg", umem, about=name)
            wanted = api.CqInitAttr(umem_handle=umem, ncqe=1)
            try:
                cq = call("create_cq", self._device.context, ctypes.byref(wanted), about=name)
            except DriverError:
                give_back()
                raise
            self._device.owns(give_back)
            self._device.owns(partial(call, "destroy_cq", cq, about=name))
            return cq, how

        by_dma_buf = None if descriptor is None else partial(make, descriptor)
        return register(by_dma_buf, partial(make, None), NO_DMA_BUF)

    def create(self, port: int) -> BnxtQueuePair:
        """A reliable connection's queue pair with a completion queue of one entry, in state INIT."""
        with self._memory.take((_CQE_BYTES, SQ_BYTES, RQ_BYTES)) as (rings, descriptor):
            made = self._create(rings, descriptor)
        self._modify(made, states.to_init(port), "INIT")
        return made

    def _create(self, rings: list[Ring], descriptor: int | None) -> BnxtQueuePair:
        call, name = self._library.call, self._device.name
        completions, to_send, to_receive = rings
        cq, descriptor = self._completions(completions, descriptor)
        out, asked = api.DvCq(), api.DvObj()
        asked.cq.in_, asked.cq.out = cq, ctypes.pointer(out)
        call("init_obj", ctypes.byref(asked), api.DV_OBJ_CQ, about=name)

        sq_umem, rq_umem = self._owned(to_send, descriptor), self._owned(to_receive, descriptor)
        wqe_bytes = _SLOTS_PER_WQE * _SLOT_BYTES
        attributes = api.QpInitAttr(
            qp_type=verbs.QPT_RC, max_send_wr=NUM_WQES, max_recv_wr=NUM_WQES, max_send_sge=1, max_recv_sge=1,
            max_inline_data=_MAX_INLINE_BYTES, send_cq=cq, recv_cq=cq, sq_umem_handle=sq_umem, sq_len=SQ_BYTES,
            sq_slots=NUM_SLOTS, sq_wqe_sz=wqe_bytes, sq_psn_sz=_PSN_BYTES, sq_npsn=NUM_PSNS, rq_umem_handle=rq_umem,
            rq_len=RQ_BYTES, rq_slots=NUM_SLOTS, rq_wqe_sz=wqe_bytes,
        )  # fmt: skip
        handle = call("create_qp", self._device.pd, ctypes.byref(attributes), about=name)
        self._device.owns(partial(call, "destroy_qp", handle, about=name))
        table = to_send.address + SQ_BYTES - NUM_PSNS * _PSN_BYTES
        number = handle.contents.qp_num
        return BnxtQueuePair(
            number, out.cqn, to_send.address, table, self._doorbell, completions.address, handle
        )  # fmt: skip

    def _owned(self, ring: Ring, descriptor: int | None) -> api.Umem:
        umem = self._umem(ring, descriptor)
        self._device.owns(partial(self._library.call, "umem_dereg", umem, about=self._device.name))
        return umem

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
