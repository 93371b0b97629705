"""Prepared launches and the error log in host memory, on one GPU of NVIDIA."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import abi, ops
from mori_triton.device import shmem
from mori_triton.device.prepared import prepare
from mori_triton.errors import ArgumentError, PeerTimeout, ReceiveOverflow
from mori_triton.host.context import Taken, empty_error_log, error_of, pack_context, take_records
from tests.ops.cases import Case, config_of

pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"),
]

LIMIT_AT = abi.ERROR_LOG_FIELDS["limit"].offset


@triton.jit(do_not_specialize=["out_ptr", "x_ptr", "more_ptr", "count", "big"])
def mix_kernel(out_ptr, x_ptr, count, SCALE: tl.constexpr, big, more_ptr, factor, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + offs, mask=offs < count).to(tl.int64) * SCALE + big + (factor * 2).to(tl.int64)
    if more_ptr is not None:
        value += tl.load(more_ptr + offs, mask=offs < count)
    tl.store(out_ptr + offs, value, mask=offs < count)


@triton.jit(do_not_specialize=["ctx", "address_ptr", "tag", "expected", "seen"])
def report_kernel(ctx, address_ptr, tag, expected, seen):
    program = tl.program_id(0)
    shmem.report(ctx, shmem.ERROR_OVERFLOW, -1, tag + program, address_ptr, expected, seen)


@triton.jit(do_not_specialize=["ctx", "signals_ptr", "out_ptr"])
def two_waits_kernel(ctx, signals_ptr, out_ptr):
    shmem.prefetch(ctx)
    first = shmem.wait_ge(ctx, signals_ptr, 7, 1, 41)
    second = shmem.wait_ge(ctx, signals_ptr + 1, 1, 1, 42)
    tl.store(out_ptr, first)
    tl.store(out_ptr + 1, second)


class Pe:
    """PE 0 of 2 whose error log and heap are pinned memory of the host, which looks while kernels run."""

    def __init__(self, timeout_s: float) -> None:
        self.heap = torch.zeros(1 << 12, dtype=torch.uint8, pin_memory=True)
        self.log = torch.zeros(abi.ERROR_LOG_SIZE, dtype=torch.uint8, pin_memory=True)
        self.log.copy_(torch.frombuffer(bytearray(empty_error_log()), dtype=torch.uint8))
        self.peers = torch.tensor([self.heap.data_ptr(), 0], dtype=torch.int64, device="cuda")
        packed = pack_context(
            pe=0, n_pes=2, heap_base=self.heap.data_ptr(), heap_size=len(self.heap), peer_bases=self.peers.data_ptr(),
            sync=self.heap.data_ptr(), errors=self.log.data_ptr(), timeout_ticks=int(timeout_s * 1e9),
        )  # fmt: skip
        self.context = torch.frombuffer(bytearray(packed), dtype=torch.uint8).cuda().view(torch.int64)
        self.signals = self.heap[2048:].view(torch.int64)
        self.taken = 0
        torch.cuda.synchronize()

    def count(self) -> int:
        return int(self.log[:8].view(torch.int64))

    def take(self, seconds: float = 10.0) -> Taken:
        """What is new, once it is whole."""
        end = time.monotonic() + seconds
        while True:
            found = take_records(self.log.numpy().tobytes(), self.taken, hex)
            if found.complete or time.monotonic() > end:
                break
        self.taken = found.total
        limit = struct.pack("<Q", found.total + abi.ERROR_CAPACITY)
        self.log[LIMIT_AT : LIMIT_AT + 8] = torch.frombuffer(bytearray(limit), dtype=torch.uint8)
        return found


@pytest.fixture
def no_loading() -> Iterator[list[str]]:
    """Names of kernels loaded since."""
    loads: list[str] = []

    def note(module, function, name, group, key) -> None:
        loads.append(name)

    triton.knobs.runtime.kernel_load_end_hook.add(note)
    yield loads
    triton.knobs.runtime.kernel_load_end_hook.remove(note)


def mix_torch(x, count: int, big: int, more) -> torch.Tensor:
    return x[:count].long() * 3 + big + 3 + (0 if more is None else more[:count].long())


@pytest.mark.parametrize("with_more", [False, True])
def test_a_prepared_kernel_serves_every_value(with_more: bool, no_loading: list[str]) -> None:
    word = torch.zeros(4, dtype=torch.int32, device="cuda")
    more = torch.arange(200, dtype=torch.int32, device="cuda") if with_more else None
    prepared = prepare(mix_kernel, word.long(), word, 1, 3, 1 << 40, more, 0.5, BLOCK=32, num_warps=1)
    del no_loading[:]
    for count, big in ((0, 5), (1, 1), (16, 1 << 40), (37, -3), (128, 2**62)):
        # an odd address: nothing may be known of it
        x = torch.randint(-50, 50, (200,), dtype=torch.int32, device="cuda")[1:]
        for as_numbers in (False, True):
            out = torch.full((200,), -1, dtype=torch.int64, device="cuda")
            pointers = (out.data_ptr(), x.data_ptr()) if as_numbers else (out, x)
            prepared(((count + 31) // 32,), *pointers, count, big, more, 1.5)
            assert torch.equal(out[:count], mix_torch(x, count, big, more))
            assert bool((out[count:] == -1).all())
    assert no_loading == []


def test_a_prepared_kernel_on_other_streams_and_in_a_graph() -> None:
    x = torch.arange(64, dtype=torch.int32, device="cuda")
    outs = torch.full((4, 64), -1, dtype=torch.int64, device="cuda")
    prepared = prepare(mix_kernel, outs, x, 64, 3, 1 << 40, None, 0.5, BLOCK=64, num_warps=1)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        prepared((1,), outs[0], x, 64, 0, None, 0.0)
    prepared((1,), outs[1], x, 64, 1, None, 0.0, stream=stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(outs[:2].cpu(), torch.stack([torch.arange(64) * 3, torch.arange(64) * 3 + 1]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared((1,), outs[2].data_ptr(), x.data_ptr(), 64, 2, None, 0.0)
        prepared((1,), outs[3].data_ptr(), outs[2].data_ptr(), 32, 3, None, 0.0)
    assert bool((outs[2:] == -1).all())
    graph.replay()
    assert outs[2].tolist() == [3 * i + 2 for i in range(64)]
    with pytest.raises(ArgumentError, match="mix_kernel: x_ptr: want a tensor on the GPU, got one on the CPU"):
        prepared((1,), outs[0], torch.zeros(64, dtype=torch.int32), 64, 0, None, 0.0)


def test_threads_prepare_one_kernel_at_once(no_loading: list[str]) -> None:
    outs = torch.full((8, 64), -1, dtype=torch.int64, device="cuda")
    x = torch.ones(64, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    start, failures = threading.Barrier(len(outs)), []

    def work(index: int) -> None:
        try:
            start.wait(30)
            with torch.cuda.stream(torch.cuda.Stream()):
                prepared = prepare(mix_kernel, outs, x, 64, 5, 1 << 40, None, 0.5, BLOCK=64, num_warps=2)
                prepared((1,), outs[index], x, 64, index, None, 0.0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(outs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failures
    assert outs[:, 0].tolist() == [5 + index for index in range(len(outs))]
    assert no_loading == ["mix_kernel"]


def test_every_program_reports_once_into_host_memory() -> None:
    pe = Pe(timeout_s=20)
    prepared = prepare(report_kernel, pe.context, pe.signals.data_ptr(), 0, 1 << 40, 1 << 40, num_warps=4)
    where = pe.signals.data_ptr()

    def report(programs: int, tag: int) -> None:
        prepared((programs,), pe.context, where, tag, 4, 10)

    for programs in (1, 5, 16):
        report(programs, 100)
        torch.cuda.synchronize()
        found = pe.take()
        assert found.complete
        assert sorted(record.tag for record in found.records) == list(range(100, 100 + programs))
        assert {(r.pe, r.peer, r.address, r.expected, r.seen) for r in found.records} == {(0, -1, where, 4, 10)}
        assert type(error_of(found.records, programs)) is ReceiveOverflow
    # many at once: all are counted, as many as there is room for are whole, and no two are one
    before = pe.taken
    report(500, 1000)
    torch.cuda.synchronize()
    found = pe.take()
    assert found.total == before + 500
    assert found.complete
    assert len({record.tag for record in found.records}) == abi.ERROR_CAPACITY
    report(2, 7)
    torch.cuda.synchronize()
    assert sorted(record.tag for record in pe.take().records) == [7, 8]


def test_a_time_out_is_read_while_its_kernel_still_spins() -> None:
    pe = Pe(timeout_s=1.0)
    out = torch.full((2,), -1, dtype=torch.int64, device="cuda")
    prepared = prepare(two_waits_kernel, pe.context, pe.signals, out, num_warps=4)
    pe.signals[0] = 5
    torch.cuda.synchronize()
    assert pe.count() == 0
    prepared((1,), pe.context, pe.signals.data_ptr(), out)
    done = torch.cuda.Event()
    done.record()
    end = time.monotonic() + 10
    while pe.count() == 0 and time.monotonic() < end:
        time.sleep(0.001)
    found = pe.take(seconds=0.2)
    still_spins = not done.query()
    pe.signals[1] = 1
    torch.cuda.synchronize()
    assert found.complete
    assert still_spins
    (record,) = found.records
    assert (record.tag, record.peer, record.expected, record.seen, record.compare) == (41, 1, 7, 5, abi.COMPARE_GE)
    assert record.address == pe.signals.data_ptr()
    assert type(error_of(found.records, 1)) is PeerTimeout
    # the second wait saw what the host wrote: no record of it
    assert out.tolist() == [5, 1]
    assert pe.count() == 1


@pytest.mark.parametrize(("experts", "k", "rows"), [(32, 8, 32768), (32, 8, 700), (300, 4, 9000), (1, 1, 1)])
def test_local_experts_are_counted_exactly(experts: int, k: int, rows: int) -> None:
    config = config_of(Case(num_pes=2, top_k=k, experts_per_pe=experts), 1)
    indices = torch.randint(-2, 2 * experts + 3, (rows, k), dtype=torch.int32, device="cuda")
    for received in (0, rows // 3, rows):
        total = torch.tensor([received], dtype=torch.int32, device="cuda")
        want = ops.local_expert_count_torch(config, indices, received).tolist()
        for shape in (None, (1, 4), (80, 16), (3, 5)):
            out = torch.full((experts + 2,), -7, dtype=torch.int32, device="cuda")
            if shape is None:
                ops.local_expert_count(config, indices, total, out[:experts])
            else:
                pointers = indices.data_ptr(), total.data_ptr(), out.data_ptr()
                ops.launch_local_expert_count(config, *pointers, *shape)
            assert out.tolist() == [*want, -7, -7]
