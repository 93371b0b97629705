"""Queue pairs of mlx5 cards with their rings in GPU memory: DevX commands, as the vendor's reference manual has them.

A command is a block of big-endian 32-bit words; a field is a range of bits of one word. What is not set is zero.
Offsets are from the start of the command's input or output.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from mori_triton.errors import DriverError, require
from mori_triton.host.drivers.base import Driver
from mori_triton.host.nic import mlx5_api as api
from mori_triton.host.nic.connection import ConnectionFacts, QueuePairEnd
from mori_triton.host.nic.libraries import RdmaLibrary
from mori_triton.host.nic.rings import NO_DMA_BUF, PAGE_SIZES, Ring, RingMemory, register
from mori_triton.host.nic.verbs import OpenDevice
from mori_triton.host.nic.verbs_api import ACCESS_LOCAL_WRITE

MAX_MESSAGES = 4096  # that may be under way on one queue pair
_CQE_BYTES = 64
_RQ_STRIDE, _WQE_BYTES, _MESSAGE_BYTES = 16, 64, 256
RQ_BYTES = MAX_MESSAGES * _RQ_STRIDE
SQ_BYTES = MAX_MESSAGES * _MESSAGE_BYTES
SQ_WQES = SQ_BYTES // _WQE_BYTES
_RINGS_BYTES = 1 << (RQ_BYTES + SQ_BYTES - 1).bit_length()
_RECORDS_BYTES = 8
_SEND_RECORD = 4  # of a queue pair's two doorbell records the second

_QUEUE_PAIR_IN, _COMPLETION_IN, _SHORT_OUT = 272, 272, 16


class Field(NamedTuple):
    """Bits `high` to `low` of the word at byte `at`."""

    at: int
    high: int = 31
    low: int = 0


OPCODE = Field(0, 31, 16)
NUMBER = Field(8, 23, 0)  # of a queue, in both directions
CQ = {
    "dbr_umem_valid": Field(0x10, 25, 25),
    "collapsed": Field(0x10, 20, 20),
    "overrun_ignore": Field(0x10, 17, 17),
    "dbr_umem_id": Field(0x14),
    "log_cq_size": Field(0x1C, 28, 24),
    "uar_page": Field(0x1C, 23, 0),
    "c_eqn": Field(0x24, 7, 0),
    "cq_umem_id": Field(0x58),
    "cq_umem_valid": Field(0x5C, 31, 31),
}
QP = {
    "pm_state": Field(0x18, 12, 11),
    "pd": Field(0x1C, 23, 0),
    "mtu": Field(0x20, 31, 29),
    "log_msg_max": Field(0x20, 28, 24),
    "log_rq_size": Field(0x20, 22, 19),
    "log_rq_stride": Field(0x20, 18, 16),
    "log_sq_size": Field(0x20, 14, 11),
    "ts_format": Field(0x20, 7, 6),
    "uar_page": Field(0x24, 23, 0),
    "remote_qpn": Field(0x2C, 23, 0),
    "rlid": Field(0x34, 15, 0),
    "ack_timeout": Field(0x38, 31, 27),
    "src_addr_index": Field(0x38, 23, 16),
    "hop_limit": Field(0x38, 7, 0),
    "dscp": Field(0x50, 21, 16),
    "udp_sport": Field(0x50, 15, 0),
    "eth_prio": Field(0x54, 30, 28),
    "vhca_port_num": Field(0x54, 23, 16),
    "log_sra_max": Field(0x88, 23, 21),
    "retry_count": Field(0x88, 18, 16),
    "rnr_retry": Field(0x88, 15, 13),
    "next_send_psn": Field(0x90, 23, 0),
    "cqn_snd": Field(0x94, 23, 0),
    "log_rra_max": Field(0xA8, 23, 21),
    "atomic_mode": Field(0xA8, 19, 16),
    "rre": Field(0xA8, 15, 15),
    "rwe": Field(0xA8, 14, 14),
    "rae": Field(0xA8, 13, 13),
    "min_rnr_nak": Field(0xAC, 28, 24),
    "next_rcv_psn": Field(0xAC, 23, 0),
    "cqn_rcv": Field(0xB4, 23, 0),
    "dbr_umem_valid": Field(0xE8, 28, 28),
    "dbr_umem_id": Field(0xFC),
    "wq_umem_id": Field(0x108),
    "wq_umem_valid": Field(0x10C, 31, 31),
}
_RGID, _RMAC = 0x40, 0x56
_CREATE_CQ, _CREATE_QP, _RST2INIT, _INIT2RTR, _RTR2RTS = 0x400, 0x500, 0x502, 0x503, 0x504
_QUERY_ROCE_ADDRESS = 0x760
_MIGRATED, _REAL_TIME_STAMPS, _ATOMICS_OF_8_BYTES = 3, 1, 3
_HOP_LIMIT, _ACK_TIMEOUT, _RETRIES, _RNR_TIMER, _LOG_MESSAGE_BYTES = 64, 20, 7, 12, 30
# source ports of RoCE are from here on
_UDP_PORTS = 0xC000


def put(block: bytearray, field: Field, value: int) -> None:
    """Set a field. Raises `ArgumentError` for a value that it cannot hold."""
    bits = field.high - field.low + 1
    require(0 <= value < 1 << bits, f"the field of {bits} bits at byte {field.at:#x}", f"below 2^{bits}", value)
    word = int.from_bytes(block[field.at : field.at + 4], "big") & ~(((1 << bits) - 1) << field.low)
    block[field.at : field.at + 4] = (word | value << field.low).to_bytes(4, "big")


def get(block: bytes | bytearray, field: Field) -> int:
    """The value of a field."""
    word = int.from_bytes(block[field.at : field.at + 4], "big")
    return word >> field.low & (1 << (field.high - field.low + 1)) - 1


def _command(opcode: int, num_bytes: int, fields: dict[str, Field], values: dict[str, int]) -> bytearray:
    block = bytearray(num_bytes)
    put(block, OPCODE, opcode)
    for name, value in values.items():
        put(block, fields[name], value)
    return block


@dataclass(frozen=True)
class Mlx5QueuePair:
    """A queue pair, as the device code that posts to it needs it, and what changes its state."""

    number: int
    sq_address: int  # SQ_WQES blocks of 64 bytes
    record_address: int  # of the send queue's doorbell, 4 bytes big-endian
    doorbell_address: int  # in this process; the GPU has to be given a mapping of it
    cq_address: int  # one collapsed completion of 64 bytes
    handle: api.DevxObj


class Mlx5Device:
    """An open device's DevX commands. What it makes lives until the `OpenDevice` is closed.

    Args:
        device: of provider mlx5.
        library: `libraries.open_provider("libmlx5")`.
        driver: of the GPU that will post; the rings are its memory.
    """

    def __init__(self, device: OpenDevice, library: RdmaLibrary, driver: Driver) -> None:
        self._device, self._library, self._driver = device, library, driver
        self._memory = RingMemory(device, driver)
        pd = api.DvPd()
        wanted = api.DvObj()
        wanted.pd.in_, wanted.pd.out = device.pd, ctypes.pointer(pd)
        library.call("init_obj", ctypes.byref(wanted), api.OBJ_PD, about=device.name)
        self.pd_number: int = pd.pdn
        self._max_reads = max(1, device.attributes().max_qp_rd_atom)

    def _umem(self, ring: Ring, descriptor: int | None) -> int:
        """What the card knows a ring by."""
        call, context = self._library.call, self._device.context
        about = f"{ring.num_bytes} bytes at {ring.address:#x} for {self._device.name}"

        def by_dma_buf() -> ctypes._Pointer[api.DevxUmem]:
            wanted = api.DevxUmemIn(
                addr=ring.offset, size=ring.page_bytes, access=ACCESS_LOCAL_WRITE, pgsz_bitmap=PAGE_SIZES,
                comp_mask=api.UMEM_MASK_DMABUF, dmabuf_fd=descriptor,
            )  # fmt: skip
            return call("umem_reg_ex", context, ctypes.byref(wanted), about=f"{about}, a dma-buf")

        def by_address() -> ctypes._Pointer[api.DevxUmem]:
            return call("umem_reg", context, ring.address, ring.num_bytes, ACCESS_LOCAL_WRITE, about=about)

        there = self._library.has("umem_reg_ex")
        lacks = NO_DMA_BUF if there else "libmlx5 is too old for dma-bufs"
        umem = register(by_dma_buf if there and descriptor is not None else None, by_address, lacks)
        self._device.owns(partial(call, "umem_dereg", umem, about=about))
        return umem.contents.umem_id

    def _create(self, command: bytearray, what: str) -> tuple[api.DevxObj, int]:
        out = bytearray(_SHORT_OUT)
        made = self._run("obj_create", self._device.context, command, out, what)
        self._device.owns(partial(self._library.call, "obj_destroy", made, about=what))
        return made, get(out, NUMBER)

    def _run(self, key: str, target: object, command: bytearray, out: bytearray, what: str) -> api.DevxObj:
        about = f"{what} on {self._device.name}"
        given = (ctypes.c_char * len(command)).from_buffer(command)
        taken = (ctypes.c_char * len(out)).from_buffer(out)
        try:
            return self._library.call(key, target, given, len(command), taken, len(out), about=about)
        except DriverError as error:
            # the card's own reason, where it was the card that refused
            raise DriverError(f"{error} (status {out[0]:#x}, syndrome {get(out, Field(4)):#x})") from error

    def create(self, port: int) -> Mlx5QueuePair:
        """A reliable connection's queue pair with a completion queue of its own, in state INIT."""
        call, context = self._library.call, self._device.context
        uar = call("alloc_uar", context, api.UAR_ALLOC_TYPE_NC, about=self._device.name)
        self._device.owns(partial(call, "free_uar", uar))
        page, eqn = uar.contents.page_id, ctypes.c_uint32()
        call("query_eqn", context, 0, ctypes.byref(eqn), about=self._device.name)

        with self._memory.take((MAX_MESSAGES * _CQE_BYTES, _RECORDS_BYTES, _RINGS_BYTES, _RECORDS_BYTES)) as (
            (completions, cq_records, rings, records),
            descriptor,
        ):
            # nothing has completed yet
            self._driver.memset(completions.address, 0xFF, completions.num_bytes)
            values = {"dbr_umem_valid": 1, "collapsed": 1, "overrun_ignore": 1, "uar_page": page, "c_eqn": eqn.value}
            values |= {"log_cq_size": MAX_MESSAGES.bit_length() - 1, "cq_umem_valid": 1}
            values |= {"cq_umem_id": self._umem(completions, descriptor)}
            values |= {"dbr_umem_id": self._umem(cq_records, descriptor)}
            _, cq = self._create(_command(_CREATE_CQ, _COMPLETION_IN, CQ, values), "CREATE_CQ")

            values = {"pm_state": _MIGRATED, "pd": self.pd_number, "ts_format": _REAL_TIME_STAMPS, "uar_page": page}
            values |= {"log_rq_size": MAX_MESSAGES.bit_length() - 1, "log_rq_stride": 0}
            values |= {"log_sq_size": SQ_WQES.bit_length() - 1, "cqn_snd": cq, "cqn_rcv": cq}
            values |= {"wq_umem_valid": 1, "wq_umem_id": self._umem(rings, descriptor)}
            values |= {"dbr_umem_valid": 1, "dbr_umem_id": self._umem(records, descriptor)}
            handle, number = self._create(_command(_CREATE_QP, _QUEUE_PAIR_IN, QP, values), "CREATE_QP")

        made = Mlx5QueuePair(
            number, rings.address + RQ_BYTES, records.address + _SEND_RECORD, uar.contents.reg_addr,
            completions.address, handle,
        )  # fmt: skip
        values = {"pm_state": _MIGRATED, "atomic_mode": _ATOMICS_OF_8_BYTES, "rre": 1, "rwe": 1, "rae": 1}
        self._modify(made, _RST2INIT, values | {"vhca_port_num": port}, "RST2INIT_QP")
        return made

    def _modify(
        self, queue_pair: Mlx5QueuePair, opcode: int, values: dict[str, int], what: str, *places: tuple[int, bytes]
    ) -> None:
        command = _command(opcode, _QUEUE_PAIR_IN, QP, values)
        put(command, NUMBER, queue_pair.number)
        for at, data in places:
            command[at : at + len(data)] = data
        self._run("obj_modify", queue_pair.handle, command, bytearray(_SHORT_OUT), what)

    def connect(
        self,
        queue_pair: Mlx5QueuePair,
        own: ConnectionFacts,
        peer: ConnectionFacts,
        ends: tuple[QueuePairEnd, QueuePairEnd],
        *,
        service_level: int | None = None,
        traffic_class: int | None = None,
    ) -> None:
        """From INIT to where it can send. `ends`: this PE's and the peer's of the connection."""
        here, there = ends
        log_reads = min(7, self._max_reads.bit_length() - 1)
        values = {"mtu": min(own.mtu, peer.mtu), "log_msg_max": _LOG_MESSAGE_BYTES, "remote_qpn": there.number}
        values |= {"log_rra_max": log_reads, "min_rnr_nak": _RNR_TIMER, "next_rcv_psn": there.psn}
        if own.link_layer == "InfiniBand":
            self._modify(queue_pair, _INIT2RTR, values | {"rlid": peer.lid}, "INIT2RTR_QP")
        else:
            values |= {"src_addr_index": own.gid_index, "hop_limit": _HOP_LIMIT, "dscp": (traffic_class or 0) >> 2}
            # of its own for each, by which the network spreads connections over its paths
            values |= {
                "udp_sport": _UDP_PORTS | here.number & ~_UDP_PORTS & 0xFFFF,
                "eth_prio": (service_level or 0) & 7,
            }
            self._modify(queue_pair, _INIT2RTR, values, "INIT2RTR_QP", (_RGID, peer.gid), (_RMAC, peer.mac))
        values = {"log_sra_max": log_reads, "retry_count": _RETRIES, "rnr_retry": _RETRIES}
        values |= {"next_send_psn": here.psn, "ack_timeout": _ACK_TIMEOUT}
        self._modify(queue_pair, _RTR2RTS, values, "RTR2RTS_QP")

    def mac(self, port: int, gid_index: int) -> bytes:
        """The 6 bytes of the Ethernet address that entry `gid_index` of the port's addresses is sent from."""
        command, out = _command(_QUERY_ROCE_ADDRESS, 16, {}, {}), bytearray(48)
        put(command, Field(8, 31, 16), gid_index)
        put(command, Field(8, 3, 0), port)
        self._run("general_cmd", self._device.context, command, out, "QUERY_ROCE_ADDRESS")
        return bytes(out[0x22:0x28])
