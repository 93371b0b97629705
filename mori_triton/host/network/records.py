"""The structs `Network` and `Queue` of hip_src/network.h as bytes (layout: `abi`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mori_triton import abi
from mori_triton.host.structs import pack, unpack

# what is not zero in the part of a queue that kernels write
_ALL_FREE = 2**64 - 1


def pack_network(*, provider: str, num_qp_per_pe: int, queues: int, ring: int) -> bytes:
    """`Network`. `provider`: of `abi.PROVIDERS`. `queues`, `ring`: addresses, 0 for a transport without."""
    values = {"provider": abi.PROVIDERS[provider], "num_qp_per_pe": num_qp_per_pe, "queues": queues, "ring": ring}
    return pack(abi.NETWORK_FIELDS, abi.NETWORK_SIZE, values)


def pack_queues(queues: Sequence[Mapping[str, int] | None]) -> bytes:
    """The table of `Queue`: nothing posted yet. None: all zero."""
    return b"".join(
        bytes(abi.QUEUE_SIZE)
        if one is None
        else pack(abi.QUEUE_FIELDS, abi.QUEUE_SIZE, {**one, "free_results": _ALL_FREE})
        for one in queues
    )


def unpack_queue(table: bytes, nth: int) -> dict[str, int]:
    """All fields of queue `nth` of a table."""
    return unpack(abi.QUEUE_FIELDS, table, nth * abi.QUEUE_SIZE)
