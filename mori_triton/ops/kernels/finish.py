"""How the kernels of an op begin and end: the status word, the signal of the last program, the wait for all peers.

Shared by every dispatch and combine kernel, so that one place decides what a signal covers and who advances an epoch.
No program waits for another of its own grid: the one that arrives last goes on alone, and one program a PE is all that
ever spins, so PEs that share a GPU cannot keep each other's kernels out.

`control_ptr` is the op's region `control`, int64 words that only its own kernels touch, named below.
"""

import triton
import triton.language as tl

from mori_triton.device import shmem
from mori_triton.device.launches import gdc_launch_dependents, gdc_wait

CONTROL_WORDS = 64
# dispatches, combines and meetings that arrived: each is advanced by its own wait alone
DISPATCH_EPOCH = tl.constexpr(0)
COMBINE_EPOCH = tl.constexpr(1)
SYNC_EPOCH = tl.constexpr(2)
# 0, or 1 after a wait timed out: the op's kernels then do nothing, so that a failed PE neither writes nor signals
STATUS = tl.constexpr(3)
# what finished last: 1 a dispatch, 2 a combine, 0 neither since the last meeting
LAST = tl.constexpr(4)
DISPATCHED = tl.constexpr(1)
COMBINED = tl.constexpr(2)
# programs of the running launch that are done, in the low half of a word; apart, as all programs write there
DISPATCH_ARRIVALS = tl.constexpr(16)
COMBINE_ARRIVALS = tl.constexpr(32)
COUNT_ARRIVALS = tl.constexpr(48)


@triton.jit
def is_broken(control_ptr):
    """Whether a wait of this op has timed out. Behind `gdc_wait`; only earlier kernels write the word: all agree."""
    return tl.load(control_ptr + STATUS) != 0


@triton.jit
def signal_last(ctx, signals_ptr, control_ptr, ARRIVALS: tl.constexpr, EPOCH: tl.constexpr):
    """1 in the program that comes here last of the launch, 0 in the others.

    The last one tells every PE, through word `me` of its `signals_ptr`, that all stores and adds of this launch and of
    what ran before it are done: the word becomes the epoch that comes next.
    """
    # only the end of this launch, or what follows it, advances the epoch; loaded late it would delay the signal
    epoch = tl.load(control_ptr + EPOCH) + 1
    word_ptr = signals_ptr + shmem.my_pe(ctx)
    num_programs = tl.num_programs(0) * tl.num_programs(1)
    return shmem.signal_set_all_last(ctx, word_ptr, epoch, control_ptr + ARRIVALS, num_programs)


@triton.jit
def wait_peers(ctx, signals_ptr, control_ptr, EPOCH: tl.constexpr, TAG: tl.constexpr):
    """One program of a PE: wait for every PE's signal of the next epoch. 1: all came, and that is the epoch now.

    0: time-out; the epoch stays and the op is broken. What peers did before they signalled is visible to this program,
    and to the kernels behind it: it acquires for its device at system scope, they from the device as they start, or in
    `gdc_wait` where they may have started before.
    """
    epoch = tl.load(control_ptr + EPOCH) + 1
    came = (shmem.wait_all_ge(ctx, signals_ptr, shmem.n_pes(ctx), epoch, TAG) >= epoch).to(tl.int32)
    gdc_launch_dependents()
    if came != 0:
        tl.store(control_ptr + EPOCH, epoch)
    else:
        tl.store(control_ptr + STATUS, 1)
    return came


@triton.jit
def finish_dispatch(ctx, signals_ptr, slots_ptr, total_ptr, control_ptr, capacity, TAG: tl.constexpr):
    """One program of a PE: wait for every PE's rows, take their number, free the slots for the next dispatch.

    `slots_ptr` None: a replay, which asks for no slots; the routing's total stays. Nobody asks for a slot here before
    this PE has signalled again, after this kernel, so the counter may be set back by a plain store.
    """
    came = wait_peers(ctx, signals_ptr, control_ptr, DISPATCH_EPOCH, TAG)
    if slots_ptr is not None:
        received = 0
        if came != 0:
            asked = tl.load(slots_ptr)
            # one thread stores 0, below; until then every warp has to have the number
            tl.debug_barrier()
            received = tl.minimum(asked, capacity)
            if asked > capacity:
                shmem.report(ctx, shmem.ERROR_OVERFLOW, -1, TAG, slots_ptr, capacity, asked)
            tl.store(slots_ptr, 0)
        tl.store(total_ptr, received)
    if came != 0:
        tl.store(control_ptr + LAST, DISPATCHED)


@triton.jit
def finish_combine(ctx, signals_ptr, control_ptr, TAG: tl.constexpr):
    """One program of a PE: wait until every PE's rows may be read."""
    if wait_peers(ctx, signals_ptr, control_ptr, COMBINE_EPOCH, TAG) != 0:
        tl.store(control_ptr + LAST, COMBINED)


@triton.jit(do_not_specialize=["ctx", "signals_ptr", "control_ptr", "kind"])
def sync_kernel(
    ctx,  # device context
    signals_ptr,  # symmetric int64 [n_pes]: word p holds PE p's newest meeting
    control_ptr,  # int64 [CONTROL_WORDS], local
    kind,  # DISPATCHED or COMBINED
    TAG: tl.constexpr,  # names this wait in error records
):
    """One program: all PEs meet, if what finished last is of this kind; all PEs have the same answer.

    Between two dispatches, or two combines, nothing else tells a PE that its peers are done with what the first left.
    """
    shmem.prefetch(ctx)
    gdc_wait()
    if not is_broken(control_ptr):  # noqa: SIM102 - two loads, not one condition
        if tl.load(control_ptr + LAST) == kind:
            shmem.signal_set_all(ctx, signals_ptr + shmem.my_pe(ctx), tl.load(control_ptr + SYNC_EPOCH) + 1)
            if wait_peers(ctx, signals_ptr, control_ptr, SYNC_EPOCH, TAG) != 0:
                tl.store(control_ptr + LAST, 0)
