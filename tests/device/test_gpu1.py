"""The device library's nvptx bitcode on one GPU: several PEs, each with a heap, a context and a stream of its own.

Every kernel is launched once before it may wait, since loading a module waits for the kernels that run.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import abi
from mori_triton.device import shmem
from mori_triton.device.launch import launch
from mori_triton.host.context import empty_error_log, pack_context, unpack_error_log

pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"),
]

NUM_PES = (1, 2, 3, 5, 8)
HEAP_BYTES = 1 << 20
ROUNDS = 20


@triton.jit(do_not_specialize=["epoch"])
def exchange_kernel(ctx, rows_ptr, signals_ptr, out_ptr, epoch, BLOCK: tl.constexpr):
    """Write a row to every PE, signal all, wait for all, copy what came; then a barrier, so that rows may be reused."""
    offs = tl.arange(0, BLOCK)
    me = shmem.my_pe(ctx)
    for pe in range(shmem.n_pes(ctx)):
        there = tl.multiple_of(shmem.remote_ptr(ctx, rows_ptr, pe), 16) + me * BLOCK
        tl.store(there + offs, 1000 * epoch + 100 * me + pe + offs)
    shmem.signal_set_all(ctx, signals_ptr + me, epoch)
    if shmem.wait_all_ge(ctx, signals_ptr, shmem.n_pes(ctx), epoch) >= epoch:
        for pe in range(shmem.n_pes(ctx)):
            tl.store(out_ptr + pe * BLOCK + offs, tl.load(rows_ptr + pe * BLOCK + offs))
    shmem.barrier_all(ctx)


@triton.jit
def count_kernel(ctx, counter_ptr, out_ptr, BLOCK: tl.constexpr):
    """One add a program at PE 0; what it fetched is in every thread."""
    old = shmem.atomic_fetch_add(ctx, counter_ptr, 1, 0)
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + offs, tl.zeros([BLOCK], tl.int32) + old)


@triton.jit
def wait_kernel(ctx, signal_ptr, out_ptr, value):
    tl.store(out_ptr, shmem.wait_ge(ctx, signal_ptr, value, 0, 0))


class Pes:
    """`n` PEs on the current GPU; heap: barrier words, then 64 signal words, then rows."""

    def __init__(self, n: int, timeout_s: float = 20.0) -> None:
        self.n = n
        self.heaps = [torch.full((HEAP_BYTES,), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(n)]
        for heap in self.heaps:
            heap[: 8 * (abi.BARRIER_WORDS + 64)] = 0
        self.peers = torch.tensor([h.data_ptr() for h in self.heaps], dtype=torch.int64, device="cuda")
        self.logs = [self._bytes(empty_error_log()) for _ in range(n)]
        self.contexts = [
            self._bytes(
                pack_context(
                    pe=pe,
                    n_pes=n,
                    heap_base=self.heaps[pe].data_ptr(),
                    heap_size=HEAP_BYTES,
                    peer_bases=self.peers.data_ptr(),
                    sync=self.heaps[pe].data_ptr(),
                    errors=self.logs[pe].data_ptr(),
                    timeout_ticks=int(timeout_s * 1e9),
                )
            ).view(torch.int64)
            for pe in range(n)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(n)]
        torch.cuda.synchronize()

    @staticmethod
    def _bytes(data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()

    def signals(self, pe: int) -> torch.Tensor:
        return self.heaps[pe][8 * abi.BARRIER_WORDS :][: 8 * 64].view(torch.int64)

    def rows(self, pe: int) -> torch.Tensor:
        return self.heaps[pe][8 * (abi.BARRIER_WORDS + 64) :][: 8 * 1024 * 4].view(torch.int32)

    def errors(self, pe: int) -> list[str]:
        records, _ = unpack_error_log(self.logs[pe].cpu().numpy().tobytes(), hex)
        return [str(record) for record in records]


@pytest.mark.parametrize("num_warps", [1, 4, 8])
@pytest.mark.parametrize("n", NUM_PES)
def test_rows_signals_waits_and_barriers(n: int, num_warps: int) -> None:
    alone, pes, width = Pes(1), Pes(n), 1024

    def go(who: Pes, pe: int, epoch: int, out: torch.Tensor) -> None:
        arguments = who.contexts[pe], who.rows(pe), who.signals(pe), out, epoch
        launch(exchange_kernel, (1,), *arguments, BLOCK=width, num_warps=num_warps)

    go(alone, 0, 1, torch.empty(width, dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
    outs = [[torch.full((n, width), -1, dtype=torch.int32, device="cuda") for _ in range(ROUNDS)] for _ in range(n)]
    torch.cuda.synchronize()
    for index in range(ROUNDS):
        # the PE that starts last differs from round to round
        for pe in sorted(range(n), key=lambda p: (p + index) % n):
            with torch.cuda.stream(pes.streams[pe]):
                go(pes, pe, index + 1, outs[pe][index])
    torch.cuda.synchronize()
    assert [pes.errors(pe) for pe in range(n)] == [[]] * n
    column = torch.arange(width, dtype=torch.int32)
    for pe in range(n):
        for index in range(ROUNDS):
            wanted = torch.stack([1000 * (index + 1) + 100 * source + pe + column for source in range(n)])
            assert torch.equal(outs[pe][index].cpu(), wanted), (pe, index)


def test_barriers_from_two_streams_of_a_pe_in_turn() -> None:
    n, width = 3, 1024
    alone, pes = Pes(1), Pes(n)
    streams = [[torch.cuda.Stream() for _ in range(2)] for _ in range(n)]
    first = torch.empty(width, dtype=torch.int32, device="cuda")
    launch(exchange_kernel, (1,), alone.contexts[0], alone.rows(0), alone.signals(0), first, 1, BLOCK=width)
    outs = [[torch.full((n, width), -1, dtype=torch.int32, device="cuda") for _ in range(ROUNDS)] for _ in range(n)]
    torch.cuda.synchronize()
    for index in range(ROUNDS):
        for pe in range(n):
            mine, other = streams[pe][index % 2], streams[pe][1 - index % 2]
            mine.wait_stream(other)
            with torch.cuda.stream(mine):
                arguments = pes.contexts[pe], pes.rows(pe), pes.signals(pe), outs[pe][index], index + 1
                launch(exchange_kernel, (1,), *arguments, BLOCK=width)
    torch.cuda.synchronize()
    assert [pes.errors(pe) for pe in range(n)] == [[]] * n
    column = torch.arange(width, dtype=torch.int32)
    for pe in range(n):
        for index in range(ROUNDS):
            wanted = torch.stack([1000 * (index + 1) + 100 * source + pe + column for source in range(n)])
            assert torch.equal(outs[pe][index].cpu(), wanted), (pe, index)


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
def test_a_fetch_happens_once_and_reaches_every_thread(num_warps: int) -> None:
    pes, programs, width = Pes(2), 64, 512
    counter = pes.signals(1)[:1]
    out = torch.full((programs, width), -1, dtype=torch.int32, device="cuda")
    launch(count_kernel, (programs,), pes.contexts[1], counter, out, BLOCK=width, num_warps=num_warps)
    assert pes.signals(0)[0].item() == programs  # PE 0's word, not the caller's own
    assert counter.item() == 0
    got = out.cpu()
    assert bool((got == got[:, :1]).all())
    assert sorted(got[:, 0].tolist()) == list(range(programs))


def test_a_wait_ends_at_its_limit_with_a_record() -> None:
    pes = Pes(1, timeout_s=0.2)
    pes.signals(0)[3] = 6
    out = torch.full((1,), -1, dtype=torch.int64, device="cuda")
    launch(wait_kernel, (1,), pes.contexts[0], pes.signals(0)[3:], out, 7)
    assert out.item() == 6
    (record,) = pes.errors(0)
    assert f"{pes.signals(0)[3:].data_ptr():#x}, expected >= 7, saw 6" in record
