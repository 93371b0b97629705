"""Why an operation of the proxy has failed: UCX's status and the kind of failure, in one word as kernels record it."""

from __future__ import annotations

from mori_triton.host.proxy.layout import ErrorKind, Op

# UCS_ERR_UNREACHABLE, TIMED_OUT, REJECTED, NOT_CONNECTED, CONNECTION_RESET, CANCELED; link and endpoint failures
GONE = frozenset({-6, -16, -20, -23, -24, -25, *range(-89, -39)})
# UCS_ERR_INVALID_ADDR, of an operation that the loop has refused
LOCAL = -7
LOCAL_TEXT = (
    "its local side is memory that the host thread cannot touch, such as a GPU's: want memory of the heap, host "
    "memory, or, for a put or get, a UCX that was built for the device, and that in its TLS"
)
# of ucs_status_t, those that say most about a network; UCX's own text needs the library
_WORDS = {
    -1: "no pending message",
    -2: "no resources to start it",
    -3: "input/output error",
    -4: "out of memory",
    -5: "invalid parameter",
    -6: "destination is unreachable",
    -16: "request canceled",
    -20: "timed out",
    -22: "unsupported operation",
    -23: "connection rejected by the peer",
    -24: "not connected",
    -25: "connection reset by the peer",
    -80: "endpoint timeout",
}


def split(reason: int) -> tuple[ErrorKind | int, int]:
    """Kind and status of a `reason`: UCX's status in bits 0-7, the kind in bits 8-15."""
    kind, status = reason >> 8 & 0xFF, reason & 0xFF
    return (ErrorKind(kind) if kind in set(ErrorKind) else kind), status - 256 if status >= 128 else status


def is_timeout(reason: int) -> bool:
    """Whether it is a peer that is gone, or took too long."""
    kind, status = split(reason)
    return kind == ErrorKind.TIMEOUT or (kind == ErrorKind.PEER_FAILED and status in GONE)


def describe(reason: int, op: int) -> str:
    """What an operation of the ring has come to."""
    kind, status = split(reason)
    name = Op(op).name if op in set(Op) else f"operation code {op}"
    if kind == ErrorKind.REFUSED and status == LOCAL:
        return f"{name} refused: {LOCAL_TEXT}"
    if kind == ErrorKind.REFUSED:
        return f"{name} refused: no such operation, PE or place in its heap"
    if kind == ErrorKind.TIMEOUT:
        return f"{name} not finished within the proxy's limit"
    word = f"UCX status {status}"
    if status in _WORDS:
        word += f" ({_WORDS[status]})"
    elif status in GONE:
        word += " (link or endpoint failed)"
    return f"{name} failed: {word}"
