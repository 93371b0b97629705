"""The error log: a record a program, a ring that the host takes from while kernels write, and what it becomes."""

from __future__ import annotations

import struct
import time
import zlib

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import abi
from mori_triton.device import shmem
from mori_triton.device.launch import launch
from mori_triton.errors import KernelFault, NetworkError, PeerTimeout, ReceiveOverflow
from mori_triton.host.context import ErrorRecord, Taken, empty_error_log, error_of, take_records
from mori_triton.wait_sites import register_wait_site
from tests.device.pes import Pes, pack

pytestmark = pytest.mark.cpu

LIMIT_AT = abi.ERROR_LOG_FIELDS["limit"].offset


@triton.jit(do_not_specialize=["tag", "expected", "seen"])
def report_kernel(ctx, address_ptr, out_ptr, tag, expected, seen, BLOCK: tl.constexpr):
    """Program i appends one record with tag + i."""
    program = tl.program_id(0)
    done = shmem.report(ctx, shmem.ERROR_OVERFLOW, -1, tag + program, address_ptr, expected, seen + program)
    offs = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.zeros([BLOCK], tl.int32) + done)


@triton.jit
def wait_kernel(ctx, signals_ptr):
    shmem.wait_ge(ctx, signals_ptr, 5, 1, 9)
    shmem.wait_ge(ctx, signals_ptr + 1, 1, 1, 10)


def take(pes: Pes, pe: int, taken: int, *, make_room: bool = True) -> Taken:
    """As the host does: read, and say how far."""
    found = take_records(bytes(pes.logs[pe].numpy()), taken, hex)
    if make_room:
        limit = struct.pack("<Q", found.total + abi.ERROR_CAPACITY)
        pes.logs[pe][LIMIT_AT : LIMIT_AT + 8] = torch.frombuffer(bytearray(limit), dtype=torch.uint8)
    return found


def report(pes: Pes, ctx: torch.Tensor, programs: int, tag: int, num_warps: int = 2) -> None:
    out = torch.full((programs * 64,), -1, dtype=torch.int32)
    big = 2**63
    launch(report_kernel, (programs,), ctx, pes.base(0) + 8, out, tag, 2**40, big, BLOCK=64, num_warps=num_warps)
    assert bool((out == 0).all())


@pytest.mark.parametrize("num_warps", [1, 4, 8])
@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_one_record_for_each_program(arch: str, num_warps: int) -> None:
    pes = Pes(2, arch)
    with pes.current(0) as ctx:
        report(pes, ctx, 5, 100, num_warps)
    assert pes.count(0) == 5
    records = sorted(pes.records(0), key=lambda record: record["tag"])
    assert sorted(record.pop("sequence") for record in records) == [1, 2, 3, 4, 5]
    assert records == [
        {"kind": 3, "pe": 0, "peer": -1, "tag": 100 + i, "address": pes.base(0) + 8, "expected": 2**40,
         "seen": 2**63 + i, "compare": 0, "symbol": 0} for i in range(5)
    ]  # fmt: skip
    assert pes.count(1) == 0


def test_the_log_is_a_ring_from_which_the_host_takes() -> None:
    pes, size = Pes(1, "gfx1201"), abi.ERROR_CAPACITY
    with pes.current(0) as ctx:
        taken, tag, seen = 0, 0, []
        for programs in (3, size, 1, size, 5):
            report(pes, ctx, programs, tag)
            found = take(pes, 0, taken)
            assert found.complete
            assert found.total == taken + programs
            taken, tag = found.total, tag + programs
            seen += sorted(record.tag for record in found.records)
        assert seen == list(range(tag))
        # more than fit: the oldest are kept, all are counted, and later there is room again
        report(pes, ctx, size, 1000)
        report(pes, ctx, 7, 2000)
        found = take(pes, 0, taken)
        assert found.total == taken + size + 7
        assert sorted(record.tag for record in found.records) == list(range(1000, 1000 + size))
        report(pes, ctx, 2, 3000)
        assert sorted(record.tag for record in take(pes, 0, found.total).records) == [3000, 3001]


def test_a_log_that_nobody_takes_from_stays_in_its_memory() -> None:
    pes, size = Pes(1, "gfx1201"), abi.ERROR_CAPACITY
    with pes.current(0) as ctx:
        report(pes, ctx, size, 0)
        before = bytes(pes.logs[0].numpy())[16:]
        report(pes, ctx, size, 500)
        assert bytes(pes.logs[0].numpy())[16:] == before
        assert take(pes, 0, 0).total == 2 * size


def test_a_record_is_read_while_its_kernel_still_waits() -> None:
    pes = Pes(2, "gfx1201", timeout_s=0.05)
    pes.view(0, 4096, 2, torch.int64)[:] = 0

    def program(pe: int, ctx: torch.Tensor) -> Taken | None:
        if pe == 0:
            launch(wait_kernel, (1,), ctx, pes.base(0) + 4096, num_warps=1)
            return None
        end = time.monotonic() + 20
        while pes.count(0) == 0 and time.monotonic() < end:
            time.sleep(0.001)
        while not take(pes, 0, 0, make_room=False).complete and time.monotonic() < end:
            time.sleep(0.001)
        found = take(pes, 0, 0)
        pes.view(0, 4104, 1, torch.int64)[0] = 1
        return found

    _, found = pes.run(program)
    first = found.records[0]
    assert (first.kind, first.peer, first.tag, first.seen) == (abi.ERROR_WAIT_TIMEOUT, 1, 9, 0)


# ------------------------------------------------------------------------------------------------ the host's side alone


def log_of(*records: tuple[int, int], count: int | None = None) -> bytes:
    """A log with (kind, sequence) records that are otherwise alike; `compare` is mlx5's code for a failed request."""
    raw = bytearray(empty_error_log())
    struct.pack_into("<Q", raw, 0, len(records) if count is None else count)
    for i, (kind, sequence) in enumerate(records):
        at = abi.ERROR_LOG_FIELDS["records"].offset + i % abi.ERROR_CAPACITY * abi.ERROR_RECORD_SIZE
        struct.pack_into("<IiiiQQQII", raw, at, kind, 2, -1, 0, 64, 4, 10, 1, sequence)
    return bytes(raw)


def test_a_record_that_is_not_whole_yet_is_left_out() -> None:
    found = take_records(log_of((1, 1), (1, 0), (3, 3)), 0, hex)
    assert [record.kind for record in found.records] == [1, 3]
    assert found[1:] == (3, False)
    assert take_records(log_of((1, 1), (1, 2), (3, 3)), 0, hex).complete
    # what was there a lap earlier is not it
    stale = log_of(*[(1, i + 1) for i in range(abi.ERROR_CAPACITY)], count=abi.ERROR_CAPACITY + 1)
    assert take_records(stale, abi.ERROR_CAPACITY, hex) == ([], abi.ERROR_CAPACITY + 1, False)
    # nothing new
    assert take_records(stale, abi.ERROR_CAPACITY + 1, hex) == ([], abi.ERROR_CAPACITY + 1, True)


def test_the_count_may_pass_32_bits() -> None:
    slot = 2**32 + 3
    raw = bytearray(log_of((3, 1)))
    raw[16 + 3 * 64 : 16 + 4 * 64] = raw[16 : 16 + 64]
    struct.pack_into("<I", raw, 16 + 3 * 64 + 44, 4)
    struct.pack_into("<Q", raw, 0, slot + 1)
    assert len(take_records(bytes(raw), slot, hex).records) == 1


@pytest.mark.parametrize(
    ("kinds", "error"),
    [
        ((3,), ReceiveOverflow),
        ((3, 3), ReceiveOverflow),
        ((1, 3), PeerTimeout),
        ((3, 1), PeerTimeout),
        ((3, 2), KernelFault),
        ((1, 2, 3), KernelFault),
        ((4, 1, 3), NetworkError),
        ((1, 3, 4), NetworkError),
        ((4, 2), KernelFault),
        ((9, 3), KernelFault),
        ((), KernelFault),
    ],
)
def test_the_gravest_kind_names_the_exception(kinds: tuple[int, ...], error: type[Exception]) -> None:
    records = take_records(log_of(*[(kind, i + 1) for i, kind in enumerate(kinds)]), 0, hex).records
    found = error_of(records, len(kinds) + 2)
    assert type(found) is error
    assert all(str(record) in str(found) for record in records)
    assert str(found).endswith("and 2 more")


def test_what_an_overflow_says() -> None:
    tag = register_wait_site("test_errors dispatch")
    raw = bytearray(log_of((3, 1)))
    struct.pack_into("<i", raw, 16 + 12, tag)
    (record,) = take_records(bytes(raw), 0, hex).records
    assert record.overflowed
    assert not record.timed_out
    assert str(error_of([record], 1)) == (
        "more rows came than there is room for:\n"
        "  test_errors dispatch: PE 2 was sent 10 rows, 6 more than its receive buffers hold (R = 4); they were dropped"
    )


def one_record(**fields: int) -> ErrorRecord:
    """A record that the host has read."""
    raw = bytearray(empty_error_log())
    struct.pack_into("<Q", raw, 0, 1)
    values = {"peer": -1, "sequence": 1, **fields}
    raw[16 : 16 + abi.ERROR_RECORD_SIZE] = pack(abi.ERROR_RECORD_FIELDS, abi.ERROR_RECORD_SIZE, values)
    (record,) = take_records(bytes(raw), 0, hex).records
    return record


def record_of(**fields: int) -> str:
    """The text of one record."""
    return str(one_record(**fields))


@pytest.mark.parametrize(
    ("provider", "seen", "text"),
    [
        (1, 0x13 | 0x52 << 8, "status 0x13, remote access error, vendor syndrome 0x52"),
        (2, 10, "status 0xa, transport retries exceeded"),
        (3, 9, "status 0x9, remote access error"),
        (3, 77, "status 0x4d, a status without a name"),
    ],
)
def test_what_a_failed_request_says(provider: int, seen: int, text: str) -> None:
    name = {1: "mlx5", 2: "bnxt_re", 3: "ionic"}[provider]
    found = record_of(kind=4, pe=2, peer=5, tag=-3, address=0x12AB, expected=70000, seen=seen, compare=provider)
    assert found == f"{name}, PE 2 to PE 5: queue pair 0x12ab, request 70000: {text}"


def test_what_a_failed_operation_of_the_proxy_says() -> None:
    # status -3 of operation code 1; the kind: refused 1, peer failed 2, not in time 3
    named = {"kind": 4, "pe": 2, "peer": 5, "tag": -3, "address": 0x12AB, "expected": 7, "compare": 4 | 1 << 8}
    assert record_of(**named, seen=0xFD | 2 << 8).startswith("proxy, PE 2 to PE 5: 0x12ab, request 7: ")
    assert type(error_of([one_record(**named, seen=0xFD | 2 << 8)], 1)) is NetworkError
    assert type(error_of([one_record(**named, seen=3 << 8)], 1)) is PeerTimeout


def test_what_a_queue_pair_at_its_limit_says() -> None:
    assert record_of(kind=1, pe=0, peer=3, tag=-3, address=0x1000, expected=12, seen=9, compare=4) == (
        "a queue pair on PE 0 to PE 3: expected 12 requests done, saw 9"
    )


def test_a_record_of_a_debug_build_names_the_function() -> None:
    symbol = zlib.crc32(b"mori_shmem_ctx_put_block")
    assert record_of(kind=2, pe=0, peer=3, address=0x10, expected=4, seen=1, symbol=symbol) == (
        "PE 0, to PE 3: 0x10: 4 bytes of the local side refused (want a place in the PE's own heap), "
        "in mori_shmem_ctx_put_block"
    )
