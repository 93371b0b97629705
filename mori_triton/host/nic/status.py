"""What a card's status of a request that failed means, in the vendor's words, by the number in its completion."""

from __future__ import annotations

from collections.abc import Mapping

# completion error syndromes of mlx5
_MLX5 = {
    0x01: "local length error",
    0x02: "local queue pair operation error",
    0x04: "local protection error",
    0x05: "flushed, for an earlier request failed",
    0x06: "memory window bind error",
    0x10: "bad response",
    0x11: "local access error",
    0x12: "remote invalid request",
    0x13: "remote access error",
    0x14: "remote operation error",
    0x15: "transport retries exceeded",
    0x16: "receiver-not-ready retries exceeded",
    0x22: "remote aborted",
}
# requester completion status of bnxt_re
_BNXT_RE = {
    1: "bad response",
    2: "local length error",
    3: "local queue pair operation error",
    4: "local protection error",
    5: "memory management operation error",
    6: "remote invalid request",
    7: "remote access error",
    8: "remote operation error",
    9: "receiver-not-ready retries exceeded",
    10: "transport retries exceeded",
    11: "flushed, for an earlier request failed",
}
# completion status of ionic
_IONIC = {
    1: "local length error",
    2: "local queue pair operation error",
    3: "local protection error",
    4: "flushed, for an earlier request failed",
    5: "memory management operation error",
    6: "bad response",
    7: "local access error",
    8: "remote invalid request",
    9: "remote access error",
    10: "remote operation error",
    11: "transport retries exceeded",
    12: "receiver-not-ready retries exceeded",
    13: "XRC violation",
}
_WORDS: Mapping[str, Mapping[int, str]] = {"mlx5": _MLX5, "bnxt_re": _BNXT_RE, "ionic": _IONIC}


def describe(provider: str, seen: int) -> str:
    """`seen` of a record of `abi.ERROR_NETWORK_FAILED`: the status in bits 0 to 7, the vendor's syndrome above."""
    status, syndrome = seen & 0xFF, seen >> 8
    word = _WORDS.get(provider, {}).get(status, "a status without a name")
    return f"status {status:#x}, {word}" + (f", vendor syndrome {syndrome:#x}" if syndrome else "")
