"""The structs that producers, the progress loop and Python share: `hip_src/proxy_ring.h` and `proxy.h` in ctypes.

`words()` lists what the bitcode's `mori_proxy_layout` lists; engine.py compares them before the loop is used.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

VERSION = 3
ERROR_RECORDS = 16
TICKETS = 64
ALL_PES = -1
FAILED = 1 << 63
# of libucp, those that the loop calls
FUNCTIONS = ("put", "get", "am_send", "flush", "close", "progress", "request_free")


class Op(IntEnum):
    """What a descriptor asks for. Atomics from `FETCH_ADD` on write the old value to `local` and to the ticket."""

    PUT = 1
    GET = 2
    PUT_SIGNAL_SET = 3
    PUT_SIGNAL_ADD = 4
    QUIET = 5
    FLUSH = 6
    ADD = 16
    AND = 17
    OR = 18
    XOR = 19
    SET = 20
    FETCH_ADD = 32
    FETCH_AND = 33
    FETCH_OR = 34
    FETCH_XOR = 35
    SWAP = 36
    COMPARE_SWAP = 37


class ErrorKind(IntEnum):
    """Why an operation failed."""

    REFUSED = 1
    PEER_FAILED = 2
    TIMEOUT = 3


class Descriptor(ctypes.Structure):
    """One slot of the ring. `remote` and a signal's `extra` are offsets in the heap of `pe`; `local` is an address.
    `ticket`: 1 + number of the ticket that is told how it ended, 0: none.
    """

    _fields_ = (
        ("ready", ctypes.c_uint64),
        ("done", ctypes.c_uint64),
        ("op", ctypes.c_uint16),
        ("ticket", ctypes.c_uint16),
        ("pe", ctypes.c_int32),
        ("local", ctypes.c_uint64),
        ("remote", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("extra", ctypes.c_uint64),
    )


class Error(ctypes.Structure):
    """One record; `status` is UCX's (0: none), `elapsed_ns` how long the operation had been under way."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("status", ctypes.c_int32),
        ("op", ctypes.c_uint32),
        ("pe", ctypes.c_int32),
        ("index", ctypes.c_uint64),
        ("remote", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("elapsed_ns", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 2),
    )


class Ticket(ctypes.Structure):
    """How one operation ended. `reason`: UCX's status in bits 0-7, `ErrorKind` in bits 8-15."""

    _fields_ = (
        ("done", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("reason", ctypes.c_uint32),
        ("pe", ctypes.c_int32),
        ("reserved", ctypes.c_uint64),
    )


class Ring(ctypes.Structure):
    """Head of the ring, at the start of its memory; the slots follow, and behind them a `RingPeer` for each PE.

    Words that different sides write lie 64 apart.
    """

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("entries", ctypes.c_uint32),
        ("n_pes", ctypes.c_uint32),
        ("reserved0", ctypes.c_uint32 * 13),
        ("tail", ctypes.c_uint64),
        ("broken", ctypes.c_uint64),
        ("_pad_tail", ctypes.c_uint64 * 6),
        ("head", ctypes.c_uint64),
        ("num_gone", ctypes.c_uint64),
        ("_pad_head", ctypes.c_uint64 * 6),
        ("errors", ctypes.c_uint64),
        ("_pad_errors", ctypes.c_uint64 * 7),
        ("free_tickets", ctypes.c_uint64),
        ("_pad_tickets", ctypes.c_uint64 * 7),
        ("records", Error * ERROR_RECORDS),
        ("tickets", Ticket * TICKETS),
    )


class RingPeer(ctypes.Structure):
    """What producers are told of one PE: why it counts as gone (0: it does not), and whether a kernel has said so."""

    _fields_ = (("gone", ctypes.c_uint32), ("reported", ctypes.c_uint32))


class Functions(ctypes.Structure):
    """Addresses of libucp's functions."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in FUNCTIONS)


class Peer(ctypes.Structure):
    """What the loop knows of one PE."""

    _fields_ = (
        ("ep", ctypes.c_uint64),
        ("rkey", ctypes.c_uint64),
        ("base", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("status", ctypes.c_int32),
        ("closed", ctypes.c_uint32),
        ("state", ctypes.c_uint64),
        ("puts", ctypes.c_uint64),
        ("_order", ctypes.c_uint64 * 8),
    )


class Pending(ctypes.Structure):
    """What the loop keeps for one slot. Nobody else reads it; the host makes it, zeroed."""

    _fields_ = (("words", ctypes.c_uint64 * 9),)


class State(ctypes.Structure):
    """The loop's own words. While it runs, the host writes `stop` only."""

    _fields_ = (
        ("ucp", Functions),
        ("worker", ctypes.c_uint64),
        ("ring", ctypes.c_uint64),
        ("peers", ctypes.c_uint64),
        ("pending", ctypes.c_uint64),
        ("pe", ctypes.c_int32),
        ("n_pes", ctypes.c_int32),
        ("timeout_ns", ctypes.c_uint64),
        ("stop", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("oldest", ctypes.c_uint64),
        ("finished", ctypes.c_uint64),
        ("force", ctypes.c_uint64),
        ("sleeps", ctypes.c_uint64),
        ("host_only", ctypes.c_uint64),
    )


def _names(struct: type[ctypes.Structure]) -> list[str]:
    return [field[0] for field in struct._fields_]


def words() -> list[int]:
    """Version, numbers of records and tickets, then of each struct its size and its fields' offsets."""
    found = [VERSION, ERROR_RECORDS, TICKETS]
    for struct in (Descriptor, Error, Ticket, Ring, RingPeer, Functions, Peer, Pending, State):
        found.append(ctypes.sizeof(struct))
        if struct is not Pending:
            found += [getattr(struct, name).offset for name in _names(struct) if not name.startswith("_")]
    return found
