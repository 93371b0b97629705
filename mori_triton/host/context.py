"""The structs that host and device share, as bytes: the device context of a PE and its error log (layout: `abi`).

Packing and reading only; which memory they live in is the heap's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mori_triton import abi
from mori_triton.errors import KernelFault, MoriError, NetworkError, PeerTimeout, ReceiveOverflow
from mori_triton.host.nic import status as card_status
from mori_triton.host.proxy import status as proxy_status
from mori_triton.host.structs import pack, unpack
from mori_triton.wait_sites import wait_site_name

# `expected` of a refused atomic or signal whose operation code does not exist
_UNKNOWN_OPERATION = 2**64 - 1
# `seen` of a refused copy whose local side it is
_LOCAL_SIDE = 1
_PROVIDER_NAMES = {code: name for name, code in abi.PROVIDERS.items()}


def pack_context(
    *,
    pe: int,
    n_pes: int,
    heap_base: int,
    heap_size: int,
    peer_bases: int,
    sync: int,
    errors: int,
    timeout_ticks: int,
    network: int = 0,
    profile: int = 0,
) -> bytes:
    """The device context, `abi.CONTEXT_BYTES` long. Addresses are the device's; 0 ticks: waits have no limit."""
    values = {"version": abi.ABI_VERSION, "pe": pe, "n_pes": n_pes, "heap_base": heap_base, "heap_size": heap_size}
    values |= {"peer_bases": peer_bases, "sync": sync, "errors": errors, "timeout_ticks": timeout_ticks}
    values |= {"network": network, "profile": profile}
    return pack(abi.CONTEXT_FIELDS, abi.CONTEXT_BYTES, values)


def empty_error_log() -> bytes:
    """An error log that holds nothing and of which nothing was taken, `abi.ERROR_LOG_SIZE` long."""
    return pack(abi.ERROR_LOG_FIELDS, abi.ERROR_LOG_SIZE, {"limit": abi.ERROR_CAPACITY})


@dataclass(frozen=True)
class ErrorRecord:
    """What a kernel recorded; the fields of `abi.ERROR_RECORD_FIELDS`. `where` names `address`."""

    kind: int
    pe: int
    peer: int
    tag: int
    address: int
    expected: int
    seen: int
    compare: int
    symbol: int
    where: str

    @property
    def timed_out(self) -> bool:
        """Whether a wait reached its limit, in a kernel or in the proxy."""
        return self.kind == abi.ERROR_WAIT_TIMEOUT or (
            self.kind == abi.ERROR_NETWORK_FAILED and self._by_proxy and proxy_status.is_timeout(self.seen)
        )

    @property
    def overflowed(self) -> bool:
        """Whether more rows came than there is room for."""
        return self.kind == abi.ERROR_OVERFLOW

    @property
    def failed(self) -> bool:
        """Whether an operation failed on its way through a network."""
        return self.kind == abi.ERROR_NETWORK_FAILED and not self.timed_out

    @property
    def _by_proxy(self) -> bool:
        return self.compare & 0xFF == abi.PROVIDER_PROXY

    def __str__(self) -> str:
        texts = {
            abi.ERROR_WAIT_TIMEOUT: self._timeout_text,
            abi.ERROR_OVERFLOW: self._overflow_text,
            abi.ERROR_REFUSED: self._refusal_text,
            abi.ERROR_NETWORK_FAILED: self._failure_text,
        }
        text = texts.get(self.kind, self._unknown_text)()
        called = abi.symbol_name(self.symbol)
        return text if called is None else f"{text}, in {called}"

    def _unknown_text(self) -> str:
        return f"{wait_site_name(self.tag)} on PE {self.pe}: error of unknown kind {self.kind} at {self.where}"

    def _timeout_text(self) -> str:
        site = f"{wait_site_name(self.tag)} on PE {self.pe}"
        if self.tag == abi.TAG_NETWORK:
            return f"{site} to PE {self.peer}: expected {self.expected} requests done, saw {self.seen}"
        peer = f" waiting for PE {self.peer}" if self.peer >= 0 else " waiting"
        sign = abi.COMPARE_SIGNS.get(self.compare, "?")
        return f"{site}{peer}: {self.where}, expected {sign} {self.expected}, saw {self.seen}"

    def _overflow_text(self) -> str:
        return (
            f"{wait_site_name(self.tag)}: PE {self.pe} was sent {self.seen} rows, {self.seen - self.expected} more "
            f"than its receive buffers hold (R = {self.expected}); they were dropped"
        )

    def _refusal_text(self) -> str:
        start = f"PE {self.pe}, to PE {self.peer}: {self.where}"
        if self.expected == _UNKNOWN_OPERATION:
            return f"{start}: an unknown operation refused"
        if self.seen == _LOCAL_SIDE:
            return f"{start}: {self.expected} bytes of the local side refused (want a place in the PE's own heap)"
        return f"{start}: {self.expected} bytes refused (no such PE, not mapped, outside the heap, or misaligned)"

    def _failure_text(self) -> str:
        provider = _PROVIDER_NAMES.get(self.compare & 0xFF, "network")
        start = f"{provider}, PE {self.pe} to PE {self.peer}"
        if self._by_proxy:
            word = proxy_status.describe(self.seen, self.compare >> 8)
            return f"{start}: {self.where}, request {self.expected}: {word}"
        word = card_status.describe(provider, self.seen)
        return f"{start}: queue pair {self.address:#x}, request {self.expected}: {word}"


class Taken(NamedTuple):
    """What `take_records` found: the records by age, the count of the log, whether every record was whole."""

    records: list[ErrorRecord]
    total: int
    complete: bool


def take_records(log: bytes, taken: int, describe: Callable[[int], str]) -> Taken:
    """The records of a log after the first `taken` errors. Kernels may be writing to it.

    There may have been more errors than records, `total - taken` in all: what found the ring full was dropped. A record
    that is not whole yet is left out, and `complete` False: look again. Once done, the host writes the log's `limit`:
    `total + abi.ERROR_CAPACITY`.

    Args:
        log: a copy of the log, `abi.ERROR_LOG_SIZE` bytes.
        taken: `total` when it was taken last.
        describe: names an address.
    """
    count = unpack(abi.ERROR_LOG_FIELDS, log)["count"]
    records = []
    slots = range(taken, min(count, taken + abi.ERROR_CAPACITY))
    for slot in slots:
        at = abi.ERROR_LOG_FIELDS["records"].offset + slot % abi.ERROR_CAPACITY * abi.ERROR_RECORD_SIZE
        fields = unpack(abi.ERROR_RECORD_FIELDS, log, at)
        # stored last, so the rest is there too
        if fields.pop("sequence") == (slot + 1) % 2**32:
            records.append(ErrorRecord(**fields, where=describe(fields["address"])))
    return Taken(records, count, len(records) == len(slots))


def unpack_error_log(log: bytes, describe: Callable[[int], str]) -> tuple[list[ErrorRecord], int]:
    """The records of a log that nothing was taken of, and how many errors there were in all, which may be more."""
    records, count, _ = take_records(log, 0, describe)
    return records, count


def error_of(records: list[ErrorRecord], num_errors: int) -> MoriError:
    """The exception for what a log held, with a line for each record.

    Records may be of several kinds; the gravest names the exception: `KernelFault` if an operation was refused (code or
    arguments are wrong), else `NetworkError` if one failed on its way through a network, else `PeerTimeout` if a wait
    reached its limit (a round did not take place), else `ReceiveOverflow` (a round took place, rows are missing).
    `KernelFault` too when no record is left to say.
    """
    lines = [str(record) for record in records]
    if num_errors > len(records):
        lines.append(f"and {num_errors - len(records)} more")
    if not all(record.failed or record.timed_out or record.overflowed for record in records) or not records:
        return KernelFault("\n  ".join(["a kernel asked for what cannot be served:", *lines]))
    if any(record.failed for record in records):
        return NetworkError("\n  ".join(["an operation failed on the network:", *lines]))
    if any(record.timed_out for record in records):
        return PeerTimeout("\n  ".join(["a wait in a kernel reached its limit:", *lines]))
    return ReceiveOverflow("\n  ".join(["more rows came than there is room for:", *lines]))
