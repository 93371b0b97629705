"""Queue pairs of ionic cards: made by verbs, with what device code needs to know of them from Pensando's direct verbs.

The rings are host memory that libionic allocates.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

from mori_triton.errors import require
from mori_triton.host.nic import ionic_api as api
from mori_triton.host.nic import states
from mori_triton.host.nic import verbs_api as verbs
from mori_triton.host.nic.connection import ConnectionFacts, QueuePairEnd
from mori_triton.host.nic.libraries import RdmaLibrary
from mori_triton.host.nic.verbs import OpenDevice

NUM_WQES = 4096
NUM_CQES = 2 * NUM_WQES
PIPELINES = 2  # of the card, with a share of the queue pairs each
_MAX_INLINE_BYTES = 32
_DOORBELL_BYTES = 8  # of each type of queue, side by side


@dataclass(frozen=True)
class IonicQueue:
    """A ring, as device code needs it. To ring its doorbell is to store `doorbell_value | index` at its address."""

    address: int
    num_entries: int
    doorbell_address: int  # in this process; the GPU has to be given a mapping of its page
    doorbell_value: int


@dataclass(frozen=True)
class IonicQueuePair:
    """A queue pair, as the device code that posts to it needs it, and what changes its state."""

    number: int
    send: IonicQueue  # requests of 64 bytes
    completions: IonicQueue  # of 32 bytes
    handle: ctypes._Pointer[verbs.Qp]


class IonicDevice:
    """An open device's direct verbs. What it makes lives until the `OpenDevice` is closed.

    Args:
        device: of provider ionic.
        library: `libraries.open_provider("libionic")`.
    """

    def __init__(self, device: OpenDevice, library: RdmaLibrary) -> None:
        self._device, self._library = device, library
        self._max_reads: int = device.attributes().max_qp_rd_atom
        self._context = api.DvCtx()
        library.call("get_ctx", ctypes.byref(self._context), device.context, about=device.name)
        # rings in the card's own memory are for hosts that post
        for key in ("pd_set_sqcmb", "pd_set_rqcmb"):
            library.call(key, device.pd, False, False, False, about=device.name)

    def _queue(self, queue: api.DvQueue, kind: int) -> IonicQueue:
        first = ctypes.cast(self._context.db_ptr, ctypes.c_void_p).value or 0
        return IonicQueue(queue.ptr or 0, queue.mask + 1, first + kind * _DOORBELL_BYTES, queue.db_val)

    def create(self, port: int, pipeline: int) -> IonicQueuePair:
        """A reliable connection's queue pair with a completion queue of its own, in state INIT.

        `pipeline`: which of the card's serves it, 0 to `PIPELINES - 1`; taken in turn they share the load.
        """
        require(0 <= pipeline < PIPELINES, "pipeline", f"0 to {PIPELINES - 1}", pipeline)
        device, name = self._device, self._device.name
        cq = device.library.call("create_cq", device.context, NUM_CQES, None, None, 0, about=name)
        device.owns(partial(device.library.call, "destroy_cq", cq, about=name))
        # counts for the queue pairs that are made from here on
        self._library.call("pd_set_udma_mask", device.pd, 1 << pipeline, about=name)
        capacity = verbs.QpCap(max_send_wr=NUM_WQES, max_send_sge=1, max_inline_data=_MAX_INLINE_BYTES)
        wanted = verbs.QpInitAttr(send_cq=cq, recv_cq=cq, cap=capacity, qp_type=verbs.QPT_RC)
        handle = device.library.call("create_qp", device.pd, ctypes.byref(wanted), about=name)
        device.owns(partial(device.library.call, "destroy_qp", handle, about=name))

        rings, completions = api.DvQp(), api.DvCq()
        self._library.call("get_qp", ctypes.byref(rings), handle, about=name)
        at = self._library.call("qp_get_udma_idx", handle)
        self._library.call("get_cq", ctypes.byref(completions), cq, at, about=name)
        made = IonicQueuePair(
            handle.contents.qp_num,
            self._queue(rings.sq, self._context.sq_qtype),
            self._queue(completions.q, self._context.cq_qtype),
            handle,
        )
        self._modify(made, states.to_init(port), "INIT")
        return made

    def _modify(self, queue_pair: IonicQueuePair, state: tuple[verbs.QpAttr, int], what: str) -> None:
        attributes, mask = state
        about = f"{self._device.name}, to {what}"
        self._device.library.call("modify_qp", queue_pair.handle, ctypes.byref(attributes), mask, about=about)

    def connect(
        self,
        queue_pair: IonicQueuePair,
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
