"""Dense all-gather and reduce-scatter as copies between PEs' heaps: the baseline of PEs that are no processes.

All-gather: every PE stores its rows to every PE. Reduce-scatter: PE p's output is the float32 sum of all PEs' partial
rows of p's tokens, rounded once. It comes in two forms. "push": every PE stores its partial rows to their owners, which
then sum what has come: the way over PCIe, where a load from a peer waits for the whole way there and back. "pull":
owners load peers' partial rows as they sum: the fewest bytes where all PEs' rows are in one memory.

Signals: word p of `signals` of a PE is the newest epoch of PE p. An all-gather ends when all PEs have ended theirs, so
no PE's rows, partial or landed, are written while another still reads them: the next ones come after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from mori_triton.device import shmem
from mori_triton.device.prepared import prepare
from mori_triton.host import state as host_state

# int64 words of `control`: the epoch, and a counter of the programs that are done
_WORDS = 32
_ARRIVALS = tl.constexpr(16)
_BLOCK = tl.constexpr(4096)
FORMS = ("push", "pull")
_NO_SPECIALIZATION = [
    "ctx", "x_ptr", "gathered_ptr", "partial_ptr", "landing_ptr", "out_ptr", "signals_ptr", "control_ptr", "num_16"
]  # fmt: skip


@triton.jit(do_not_specialize=_NO_SPECIALIZATION)
def all_gather_kernel(
    ctx,  # device context
    x_ptr,  # [16 * num_16] this PE's rows, local
    gathered_ptr,  # symmetric [N_PES * 16 * num_16]
    signals_ptr,  # symmetric int64 [N_PES]
    control_ptr,  # int64 [_WORDS], local
    num_16,  # elements of a PE's rows, in sixteens
    N_PES: tl.constexpr,
):
    """Store my rows to every PE; the last program tells all PEs and waits for all."""
    me = shmem.my_pe(ctx)
    num = num_16 * 16
    for block in range(tl.program_id(0), tl.cdiv(num, _BLOCK), tl.num_programs(0)):
        offs = block.to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
        rows = tl.load(_place(x_ptr, 0, num) + offs, mask=offs < num)
        for other in tl.static_range(N_PES):
            # its own copy last: the others' are on their way meanwhile
            there = shmem.remote_ptr(ctx, gathered_ptr, (me + 1 + other) % N_PES)
            tl.store(_place(there, me, num) + offs, rows, mask=offs < num)
    epoch = tl.load(control_ptr) + 1
    if shmem.arrive_last(ctx, control_ptr + _ARRIVALS, tl.num_programs(0)) != 0:
        shmem.signal_set_all(ctx, signals_ptr + me, epoch)
        shmem.wait_all_ge(ctx, signals_ptr, N_PES, epoch)
        tl.store(control_ptr, epoch)


@triton.jit(do_not_specialize=_NO_SPECIALIZATION)
def push_kernel(
    ctx,
    partial_ptr,  # [N_PES * 16 * num_16] partial rows of every PE's tokens, local
    landing_ptr,  # symmetric, as large, place p for PE p's partial rows of my tokens
    signals_ptr,
    control_ptr,
    num_16,
    N_PES: tl.constexpr,
):
    """Store partial rows to their owners, mine excepted; the last program tells all PEs."""
    me = shmem.my_pe(ctx)
    num = num_16 * 16
    for block in range(tl.program_id(0), tl.cdiv(num, _BLOCK), tl.num_programs(0)):
        offs = block.to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
        for other in tl.static_range(N_PES - 1):
            pe = (me + 1 + other) % N_PES
            rows = tl.load(_place(partial_ptr, pe, num) + offs, mask=offs < num)
            tl.store(_place(shmem.remote_ptr(ctx, landing_ptr, pe), me, num) + offs, rows, mask=offs < num)
    epoch = tl.load(control_ptr) + 1
    if shmem.arrive_last(ctx, control_ptr + _ARRIVALS, tl.num_programs(0)) != 0:
        shmem.signal_set_all(ctx, signals_ptr + me, epoch)


@triton.jit(do_not_specialize=_NO_SPECIALIZATION)
def sum_landed_kernel(ctx, partial_ptr, landing_ptr, out_ptr, signals_ptr, control_ptr, num_16, N_PES: tl.constexpr):
    """Wait for all PEs' partial rows; `out` `[16 * num_16]` = their sum in the order of PEs."""
    me = shmem.my_pe(ctx)
    num = num_16 * 16
    epoch = tl.load(control_ptr) + 1
    shmem.wait_all_ge(ctx, signals_ptr, N_PES, epoch)
    tl.debug_barrier()
    for block in range(tl.program_id(0), tl.cdiv(num, _BLOCK), tl.num_programs(0)):
        offs = block.to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
        total = tl.zeros([_BLOCK], tl.float32)
        for pe in tl.static_range(N_PES):
            # my own are where they were made
            there = tl.where(me == pe, partial_ptr.to(tl.int64), landing_ptr.to(tl.int64)).to(partial_ptr.dtype)
            rows = tl.load(_place(there, pe, num) + offs, mask=offs < num)
            total += rows.to(out_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
        total = total.to(out_ptr.dtype.element_ty).to(tl.int16, bitcast=True)
        tl.store(_place(out_ptr, 0, num) + offs, total, mask=offs < num)
    _next_epoch(ctx, control_ptr, epoch)


@triton.jit(do_not_specialize=_NO_SPECIALIZATION)
def sum_pulled_kernel(ctx, partial_ptr, out_ptr, signals_ptr, control_ptr, num_16, N_PES: tl.constexpr):
    """Tell all PEs that partial rows are there, wait for theirs; `out` = the sum, loaded from peers."""
    me = shmem.my_pe(ctx)
    num = num_16 * 16
    epoch = tl.load(control_ptr) + 1
    if tl.program_id(0) == 0:
        shmem.signal_set_all(ctx, signals_ptr + me, epoch)
    shmem.wait_all_ge(ctx, signals_ptr, N_PES, epoch)
    tl.debug_barrier()
    for block in range(tl.program_id(0), tl.cdiv(num, _BLOCK), tl.num_programs(0)):
        offs = block.to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
        total = tl.zeros([_BLOCK], tl.float32)
        for pe in tl.static_range(N_PES):
            there = shmem.remote_ptr(ctx, partial_ptr, pe)
            rows = tl.load(_place(there, me, num) + offs, mask=offs < num)
            total += rows.to(out_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
        total = total.to(out_ptr.dtype.element_ty).to(tl.int16, bitcast=True)
        tl.store(_place(out_ptr, 0, num) + offs, total, mask=offs < num)
    _next_epoch(ctx, control_ptr, epoch)


@triton.jit
def _place(ptr, place, num):
    """Where the rows of a PE begin among all, as integers: the hint, without which copies are of single elements, needs
    an operation of its own, which the cast is.
    """
    return tl.multiple_of(tl.cast(ptr + tl.cast(place, tl.int64) * num, tl.pointer_type(tl.int16), bitcast=True), 16)


@triton.jit
def _next_epoch(ctx, control_ptr, epoch):
    """By the last program: no program of this launch may load the new epoch."""
    if shmem.arrive_last(ctx, control_ptr + _ARRIVALS, tl.num_programs(0)) != 0:
        tl.store(control_ptr, epoch)


class HeapCollectives:
    """All-gather and reduce-scatter of one number of elements. Collective to make, to call and to close.

    Args:
        form: "push" or "pull", see above.
        num: elements of each PE's rows, a multiple of 16.
        programs: of each kernel; those of all PEs have to fit on their GPU at once.
    """

    def __init__(self, form: str, num: int, dtype: torch.dtype, programs: int) -> None:
        assert form in FORMS, form
        assert num % 16 == 0, num
        self.form, self.num, self.name = form, num, f"dense, {form}"
        self.state = state = host_state.current()
        self.device, self.n_pes = state.heap.ctx.device, state.n_pes
        words = state.heap.tensor((state.n_pes,), torch.int64, "rdna4 baseline: signals")
        words.zero_()
        control = torch.zeros(_WORDS, dtype=torch.int64, device=self.device)
        self.gathered = state.heap.tensor((state.n_pes * num,), dtype, "rdna4 baseline: gathered")
        self.partial = state.heap.tensor((state.n_pes * num,), dtype, "rdna4 baseline: partial rows")
        self.landing = state.heap.tensor(
            (state.n_pes * num if form == "push" else 1,), dtype, "rdna4 baseline: landing"
        )
        self.out = torch.empty(num, dtype=dtype, device=self.device)
        self.words, self.control = words, control
        self.grid = (min(programs, triton.cdiv(num, _BLOCK.value)),)
        # all are loaded before any runs: loading may wait until running kernels end, and those may wait for this PE
        self._gather = self._prepare(all_gather_kernel, self.out, self.gathered)
        if form == "push":
            self._reduce = [
                self._prepare(push_kernel, self.partial, self.landing),
                self._prepare(sum_landed_kernel, self.partial, self.landing, self.out),
            ]
        else:
            self._reduce = [self._prepare(sum_pulled_kernel, self.partial, self.out)]
        state.driver.synchronize()
        state.bootstrap.barrier("rdna4 baseline: ready")

    def _prepare(self, kernel: Any, *tensors: torch.Tensor) -> Callable[..., None]:
        """A launch of `kernel`; its argument is what stands in the place of the first tensor."""
        after = (*tensors[1:], self.words, self.control, self.num // 16)
        ctx = self.state.heap.ctx
        prepared = prepare(kernel, ctx, tensors[0], *after, N_PES=self.n_pes, num_warps=8)
        return lambda first=tensors[0]: prepared(self.grid, ctx, first, *after)

    def all_gather(self, x: torch.Tensor) -> None:
        """`gathered` = the `x` `[num]` of PE 0, 1, …; `x` 16-byte aligned."""
        self._gather(x)

    def reduce_scatter(self) -> None:
        """`out` = the sum over PEs of place `me` of `partial`."""
        for kernel in self._reduce:
            kernel()

    def close(self) -> None:
        """Give the memory back, when all PEs are done with it."""
        self.state.driver.synchronize()
        self.state.bootstrap.barrier("rdna4 baseline: done")
        for tensor in (self.gathered, self.partial, self.landing, self.words):
            self.state.heap.free(tensor.data_ptr())
