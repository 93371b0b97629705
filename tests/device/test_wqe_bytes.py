"""The bytes of requests, doorbells and doorbell records of every vendor, field by field at the offset and in the byte
order that the vendor's layout says; memory starts as 0xA5, so a byte that nobody writes shows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch

from mori_triton import abi
from tests.device import network_kernels as kernels
from tests.device.queue_pairs import (
    CQ_DOORBELL_VALUE,
    DOORBELL_VALUE,
    FILL,
    LKEY,
    NUMBER,
    PROVIDERS,
    RESULTS_LKEY,
    RKEY,
    QueuePairs,
)

pytestmark = pytest.mark.cpu

ARCHS = ("gfx1201", "gfx942")  # waves of 32 and of 64
N = 4  # requests of a ring
SRC, DST, SIG = 8192, 4096, 16384  # offsets in the heap
VALUE, COMPARE = 0x0102030405060708, 0x1112131415161718
# the first; the last of a pass, with the highest 16-bit number; the same of 24 bits, past 2^32
STARTS = (0, 0xFFFF, 0x5_00FF_FFFF)


def place(size: int, *fields: tuple[int, str, int]) -> bytes:
    """`size` zero bytes with these fields: offset, format, value."""
    data = bytearray(size)
    for offset, fmt, value in fields:
        assert not any(data[offset : offset + struct.calcsize(fmt)])
        struct.pack_into(fmt, data, offset, value)
    return bytes(data)


# ------------------------------------------------------------------------------------ what a request is for each vendor


def mlx5_head(index: int, opcode: int, ds: int, signaled: bool, remote: int) -> list[tuple[int, str, int]]:
    return [
        (0, ">I", (index & 0xFFFF) << 8 | opcode), (4, ">I", NUMBER << 8 | ds), (11, "B", 0x08 if signaled else 0),
        (16, ">Q", remote), (24, ">I", RKEY),
    ]  # fmt: skip


def mlx5_data(index: int, op: str, signaled: bool, remote: int, local: int, size: int) -> bytes:
    head = mlx5_head(index, {"write": 0x08, "read": 0x10}[op], 3, signaled, remote)
    return place(64, *head, (32, ">I", size), (36, ">I", LKEY), (40, ">Q", local))


def mlx5_inline(index: int, remote: int, value: int, size: int) -> bytes:
    head = mlx5_head(index, 0x08, 3, True, remote)
    return place(64, *head, (32, ">I", 0x80000000 | size), (36, {4: "<I", 8: "<Q"}[size], value))


def mlx5_atomic(index: int, op: str, remote: int, local: int, value: int, compare: int) -> bytes:
    head = mlx5_head(index, {"add": 0x12, "compare_swap": 0x11}[op], 4, True, remote)
    tail = (48, ">I", 8), (52, ">I", RESULTS_LKEY), (56, ">Q", local)
    return place(64, *head, (32, ">Q", value), (40, ">Q", compare), *tail)


def bnxt_data(index: int, op: str, signaled: bool, remote: int, local: int, size: int) -> bytes:
    first = 3 << 16 | int(signaled) << 8 | {"write": 0x04, "read": 0x06}[op]
    tail = (32, "<Q", local), (40, "<I", LKEY), (44, "<I", size)
    return place(48, (0, "<I", first), (8, "<Q", size), (16, "<Q", remote), (24, "<I", RKEY), *tail)


def bnxt_inline(index: int, remote: int, value: int, size: int) -> bytes:
    first = 3 << 16 | (0x01 | 0x10) << 8 | 0x04
    payload = (32, {4: "<I", 8: "<Q"}[size], value)
    return place(48, (0, "<I", first), (8, "<Q", size), (16, "<Q", remote), (24, "<I", RKEY), payload)


def bnxt_atomic(index: int, op: str, remote: int, local: int, value: int, compare: int) -> bytes:
    first = 3 << 16 | 0x01 << 8 | {"add": 0x0B, "compare_swap": 0x08}[op]
    head = (0, "<I", first), (4, "<I", RKEY), (8, "<Q", remote), (16, "<Q", value), (24, "<Q", compare)
    return place(48, *head, (32, "<Q", local), (40, "<I", RESULTS_LKEY), (44, "<I", 8))


def ionic_head(index: int, opcode: int, sges: int, flags: int, remote: int) -> list[tuple[int, str, int]]:
    color = 0x10 if index & N == 0 else 0
    return [
        (0, "<Q", index), (8, "B", opcode), (9, "B", sges), (10, ">H", flags | color),
        (16, ">I", remote >> 32), (20, ">I", remote & 0xFFFFFFFF), (24, ">I", RKEY),
    ]  # fmt: skip


def ionic_data(index: int, op: str, signaled: bool, remote: int, local: int, size: int) -> bytes:
    head = ionic_head(index, {"write": 0x21, "read": 0x02}[op], 1, 0x8 if signaled else 0, remote)
    return place(64, *head, (28, ">I", size), (32, ">Q", local), (40, ">I", size), (44, ">I", LKEY))


def ionic_inline(index: int, remote: int, value: int, size: int) -> bytes:
    head = ionic_head(index, 0x21, 0, 0x8 | 0x4, remote)
    return place(64, *head, (28, ">I", size), (32, {4: "<I", 8: "<Q"}[size], value))


def ionic_atomic(index: int, op: str, remote: int, local: int, value: int, compare: int) -> bytes:
    head = ionic_head(index, {"add": 0x05, "compare_swap": 0x04}[op], 1, 0x8, remote)
    words = (28, ">I", value >> 32), (32, ">I", value & 0xFFFFFFFF)
    words += (36, ">I", compare >> 32), (40, ">I", compare & 0xFFFFFFFF)
    return place(64, *head, *words, (44, ">I", RESULTS_LKEY), (48, ">Q", local))


DATA = {"mlx5": mlx5_data, "bnxt_re": bnxt_data, "ionic": ionic_data}
INLINE = {"mlx5": mlx5_inline, "bnxt_re": bnxt_inline, "ionic": ionic_inline}
ATOMIC = {"mlx5": mlx5_atomic, "bnxt_re": bnxt_atomic, "ionic": ionic_atomic}


def doorbell(provider: str, posted: int, last: bytes) -> bytes:
    """The 8 bytes stored to the register when `posted` requests are the card's, of which `last` is the last one."""
    if provider == "mlx5":
        return last[:8]
    if provider == "bnxt_re":
        epoch = posted // N % 2
        return struct.pack("<II", posted % N * 3 | epoch << 24, NUMBER | 1 << 26)
    return struct.pack("<Q", DOORBELL_VALUE | posted % N)


# ----------------------------------------------------------------------------------------------------------- operations


Run = Callable[[QueuePairs, torch.Tensor, torch.Tensor], None]


def copy(which: int, *, value: int = 0, op: int = 0, size: int = 700) -> Run:
    def go(pairs: QueuePairs, out: torch.Tensor, ctx: torch.Tensor) -> None:
        base = pairs.pes.base(0)
        # a get's own side is its destination
        sides = (base + SRC, base + DST) if which == kernels.GET else (base + DST, base + SRC)
        args = (*sides, size, base + SIG, value, op, 1, 0, which)
        pairs.launch(kernels.copy_kernel, (1,), ctx, out, *args, num_warps=2)

    return go


def atomic(which: int, op: int) -> Run:
    def go(pairs: QueuePairs, out: torch.Tensor, ctx: torch.Tensor) -> None:
        args = (pairs.pes.base(0) + DST, VALUE, COMPARE, op, 1, 0, which)
        pairs.launch(kernels.atomic_kernel, (1,), ctx, out, *args, num_warps=2)

    return go


def expected(provider: str, operation: str, pairs: QueuePairs, index: int) -> list[bytes]:
    """The requests of an operation of which the first has this index."""
    data, inline, at = DATA[provider], INLINE[provider], pairs.remote
    results = pairs.rings[0].address("results")
    here, nobody = pairs.pes.base(0) + SRC, results + 8 * 64
    return {
        "put": lambda: [data(index, "write", True, at(DST), here, 700)],
        "get": lambda: [data(index, "read", True, at(DST), here, 700)],
        "value of 4 bytes": lambda: [inline(index, at(DST), VALUE & 0xFFFFFFFF, 4)],
        "value of 8 bytes": lambda: [inline(index, at(DST), VALUE, 8)],
        "put and set": lambda: [
            data(index, "write", False, at(DST), here, 700), inline(index + 1, at(SIG), VALUE, 8),
        ],
        "put and add": lambda: [
            data(index, "write", False, at(DST), here, 700),
            ATOMIC[provider](index + 1, "add", at(SIG), nobody, VALUE, 0),
        ],
        "set": lambda: [inline(index, at(SIG), VALUE, 8)],
        "add": lambda: [ATOMIC[provider](index, "add", at(DST), nobody, VALUE, 0)],
        "increment": lambda: [ATOMIC[provider](index, "add", at(DST), nobody, 1, 0)],
        "fetch and add": lambda: [ATOMIC[provider](index, "add", at(DST), results, VALUE, 0)],
        "fetch": lambda: [ATOMIC[provider](index, "add", at(DST), results, 0, 0)],
        "compare and swap": lambda: [ATOMIC[provider](index, "compare_swap", at(DST), results, VALUE, COMPARE)],
    }[operation]()  # fmt: skip


OPERATIONS = {
    "put": copy(kernels.PUT_NBI),
    "get": copy(kernels.GET),
    "value of 4 bytes": copy(kernels.VALUE4, value=VALUE),
    "value of 8 bytes": copy(kernels.VALUE8, value=VALUE),
    "put and set": copy(kernels.PUT_SIGNAL, value=VALUE, op=abi.SIGNAL_SET),
    "put and add": copy(kernels.PUT_SIGNAL, value=VALUE, op=abi.SIGNAL_ADD),
    "set": copy(kernels.PUT_SIGNAL, value=VALUE, op=abi.SIGNAL_SET, size=0),
    "add": atomic(kernels.ATOMIC8, abi.ATOMIC_ADD),
    "increment": atomic(kernels.ATOMIC8, abi.ATOMIC_INC),
    "fetch and add": atomic(kernels.FETCH8, abi.ATOMIC_FETCH_ADD),
    "fetch": atomic(kernels.FETCH8, abi.ATOMIC_FETCH),
    "compare and swap": atomic(kernels.FETCH8, abi.ATOMIC_COMPARE_SWAP),
}
# packets of 256 bytes: numbers that a request takes
PACKETS = {"put": [3], "get": [3], "put and set": [3, 1], "put and add": [3, 1]}
WAITS = ("get", "fetch and add", "fetch", "compare and swap")


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("arch", ARCHS)
def test_wqe_of_every_operation_is_the_vendors(arch: str, provider: str, start: int) -> None:
    for operation, run in OPERATIONS.items():
        pairs = QueuePairs(arch, provider, num_wqes=N, start=start, psn=0xFFFFFE, mtu=256)
        rings = pairs.rings[0]
        want = expected(provider, operation, pairs, start)
        if operation in WAITS:
            # complete as soon as it is posted: what a card has said of it lies there already
            rings.u64("results")[0] = 0x2122232425262728
            rings.complete(start, start)
        out = torch.full((1,), -7, dtype=torch.int64)
        with pairs.current() as ctx:
            run(pairs, out, ctx)
        fetched = operation in WAITS and operation != "get"
        assert int(out[0]) == (0x2122232425262728 if fetched else 0), operation
        assert pairs.pes.records(0) == []

        slots = {(start + i) % N: raw for i, raw in enumerate(want)}
        for slot in range(N):
            size = len(want[0])
            found = rings.memory["sq"][slot * size : (slot + 1) * size].tobytes()
            assert found.hex(" ") == slots.get(slot, bytes([FILL] * size)).hex(" "), f"{operation}, slot {slot}"
        posted = start + len(want)
        assert rings.memory["doorbell"].tobytes().hex() == doorbell(provider, posted, want[-1]).hex(), operation

        record = struct.pack(">I", posted & 0xFFFF) if provider == "mlx5" else bytes([FILL] * 4)
        assert rings.memory["record"].tobytes() == record, operation
        table, packets = bytearray([FILL] * 8 * 2 * N), 0xFFFFFE
        if provider == "bnxt_re":
            for index, number in enumerate(PACKETS.get(operation, [1]), start):
                following = (packets + number) & 0xFFFFFF
                entry = packets | following << 24 | index % N * 3 << 48
                struct.pack_into("<Q", table, 8 * (index % (2 * N)), entry)
                packets = following
        assert rings.memory["psn_table"].tobytes().hex(" ", 8) == bytes(table).hex(" ", 8), operation

        rung = operation in WAITS and provider == "ionic"
        back = struct.pack("<Q", CQ_DOORBELL_VALUE | (start + 1) % (2 * N)) if rung else bytes([FILL] * 8)
        assert rings.memory["cq_doorbell"].tobytes() == back, operation
        queue = pairs.queue()
        assert (queue["reserved"], queue["posted"], queue["ringing"], queue["error"]) == (posted, posted, 0, 0)
        assert queue["done"] == (posted if operation in WAITS else start)
        assert queue["free_results"] == 2**64 - 1


def test_value_of_4_bytes_leaves_no_other_bytes() -> None:
    # the argument's upper half is not the value's
    pairs = QueuePairs("gfx1201", "mlx5", num_wqes=N)
    with pairs.current() as ctx:
        copy(kernels.VALUE4, value=-1)(pairs, torch.zeros(1, dtype=torch.int64), ctx)
    assert pairs.rings[0].request(0)[32:48].hex() == "80000004" + "ffffffff" + "00" * 8


def test_long_copies_are_requests_of_a_gibibyte_each() -> None:
    # of a heap that is not there: no card reads it
    size, gib = 2**33, 2**30
    wide = QueuePairs("gfx1201", "mlx5", num_wqes=N)
    wide.pes.contexts[0][abi.CONTEXT_FIELDS["heap_size"].offset // 8] = size
    at = abi.QUEUE_SIZE + abi.QUEUE_FIELDS["remote_bytes"].offset
    wide.queues[at : at + 8].view("u8")[0] = size
    far = 2**32 + 4096
    out, base = torch.full((1,), -7, dtype=torch.int64), wide.pes.base(0)
    with wide.current() as ctx:
        args = (base + DST, base + far, 2 * gib + 5, 0, 0, 0, 1, 0, kernels.PUT_NBI)
        wide.launch(kernels.copy_kernel, (1,), ctx, out, *args, num_warps=2)
    assert int(out[0]) == 0
    assert wide.queue()["reserved"] == 3
    for i, length in enumerate((gib, gib, 5)):
        want = mlx5_data(i, "write", True, wide.remote(DST) + i * gib, base + far + i * gib, length)
        assert wide.rings[0].request(i).hex(" ") == want.hex(" ")

    signaled = QueuePairs("gfx1201", "mlx5", num_wqes=N)
    signaled.pes.contexts[0][abi.CONTEXT_FIELDS["heap_size"].offset // 8] = size
    signaled.queues[at : at + 8].view("u8")[0] = size
    base = signaled.pes.base(0)
    with signaled.current() as ctx:
        args = (base + DST, base + far, gib + 8, base + SIG, VALUE, abi.SIGNAL_SET, 1, 0, kernels.PUT_SIGNAL)
        signaled.launch(kernels.copy_kernel, (1,), ctx, out, *args, num_warps=2)
    remote = signaled.remote(DST)
    want = [mlx5_data(0, "write", True, remote, base + far, gib)]
    want += [mlx5_data(1, "write", False, remote + gib, base + far + gib, 8)]
    want += [mlx5_inline(2, signaled.remote(SIG), VALUE, 8)]
    assert [signaled.rings[0].request(i).hex(" ") for i in range(3)] == [raw.hex(" ") for raw in want]
