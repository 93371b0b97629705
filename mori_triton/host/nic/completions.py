"""What a card has said of a queue pair's requests, read by the host when no kernel looks any more.

Kernels read the same bytes (hip_src/nic_*.h); this is for the end of a world, which waits for what they have left.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Progress(NamedTuple):
    """Whether all that has been posted is done; `failed`: the card's status of a request that was not, or 0."""

    done: bool
    failed: int


_MLX5_ERRORS = (13, 14)
_IONIC_COLOR, _IONIC_ERROR = 1, 2
CQE_BYTES = {"mlx5": 64, "bnxt_re": 32, "ionic": 32}


def _mlx5(entry: Callable[[int], bytes], queue: Mapping[str, int]) -> Progress:
    cqe = entry(0)
    (last,) = struct.unpack_from(">H", cqe, 60)
    if cqe[63] >> 4 in _MLX5_ERRORS:
        return Progress(False, cqe[55])
    # what no completion has been written to is full of ones, and 0xffff is the one before the first
    return Progress((last + 1 - queue["posted"]) % 2**16 == 0, 0)


def _bnxt_re(entry: Callable[[int], bytes], queue: Mapping[str, int]) -> Progress:
    cqe = entry(0)
    (consumed,) = struct.unpack_from("<I", cqe, 8)
    status = cqe[25]
    return Progress((consumed - queue["posted"]) % queue["num_wqes"] == 0, status)


def _ionic(entry: Callable[[int], bytes], queue: Mapping[str, int]) -> Progress:
    done = queue["done"]
    for at in range(queue["consumed"], queue["consumed"] + queue["num_cqes"]):
        cqe = entry(at % queue["num_cqes"])
        status, flags = struct.unpack_from(">II", cqe, 24)
        # the color of the first round is 1, and changes with every round
        if flags & _IONIC_COLOR == at // queue["num_cqes"] % 2:
            break
        if flags & _IONIC_ERROR:
            return Progress(False, status)
        (done,) = struct.unpack_from(">I", cqe, 4)
    return Progress((done - queue["posted"]) % 2**24 == 0, 0)


_BY_PROVIDER = {"mlx5": _mlx5, "bnxt_re": _bnxt_re, "ionic": _ionic}


def progress(provider: str, queue: Mapping[str, int], read: Callable[[int, int], bytes]) -> Progress:
    """How far the card is. `queue`: fields of `abi.QUEUE_FIELDS`; `read(address, num_bytes)`."""
    size = CQE_BYTES[provider]
    return _BY_PROVIDER[provider](lambda at: read(queue["cq"] + at * size, size), queue)
