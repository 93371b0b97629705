"""Three protocols that lean on all that a network promises: a ring, an all-reduce, barriers. Checked against numpy.

Several waves of a program write what it sends, PEs run ahead of each other within one launch, and rings of four
requests are full again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from mori_triton import shmem as host
from mori_triton.device import shmem

WIDTH = 128
RING_ROUNDS = 5
REDUCE_ROUNDS = 4
BARRIERS = 6
PIECES = 8


@triton.jit
def ring_kernel(ctx, inbox_ptr, outbox_ptr, signal_ptr, rounds, WIDTH: tl.constexpr):
    """A row goes round, each PE adds its number + 1. inbox, outbox: int32 [rounds, WIDTH]; signal: int64 [1].

    Row 0 of the inbox is there; row r of the outbox goes to row r + 1 of the right neighbour's inbox.
    """
    offs = tl.arange(0, WIDTH)
    me, n = shmem.my_pe(ctx), shmem.n_pes(ctx)
    come = tl.cast(0, tl.int64)
    for r in range(rounds):
        # after a wait that failed there is nothing to send
        if come >= r:
            tl.store(outbox_ptr + r * WIDTH + offs, tl.load(inbox_ptr + r * WIDTH + offs) + me + 1)
            to = inbox_ptr + (r + 1) * WIDTH
            # always the same queue pair: on another one a signal may come before the data of the last round
            shmem.put_signal(
                ctx, to, outbox_ptr + r * WIDTH, WIDTH * 4, signal_ptr, 1, shmem.SIGNAL_ADD, (me + 1) % n, 1
            )
            come = shmem.wait_ge(ctx, signal_ptr, r + 1, (me + n - 1) % n)


@triton.jit
def reduce_kernel(ctx, x_ptr, staging_ptr, signal_ptr, out_ptr, rounds, WIDTH: tl.constexpr):
    """Every round all PEs send a row to all and sum what came. x: int32 [rounds, WIDTH]; out as x.

    staging: int32 [2, n_pes, WIDTH], by the round's parity; signal: int64 [n_pes].
    """
    offs = tl.arange(0, WIDTH)
    me, n = shmem.my_pe(ctx), shmem.n_pes(ctx)
    good = tl.cast(1, tl.int64)
    for r in range(rounds):
        if good > 0:
            tl.store(x_ptr + r * WIDTH + offs, (r + 1) * (offs + me))
            for step in range(n):
                pe = (me + step) % n
                to = staging_ptr + (r % 2) * n * WIDTH + me * WIDTH
                shmem.put_signal(ctx, to, x_ptr + r * WIDTH, WIDTH * 4, signal_ptr + me, r + 1, shmem.SIGNAL_SET, pe)
            if shmem.wait_all_ge(ctx, signal_ptr, n, r + 1) < r + 1:
                good = tl.cast(0, tl.int64)
            else:
                total = tl.zeros([WIDTH], tl.int32)
                for pe in range(n):
                    total += tl.load(staging_ptr + (r % 2) * n * WIDTH + pe * WIDTH + offs)
                tl.store(out_ptr + r * WIDTH + offs, total)


@triton.jit
def barrier_kernel(ctx, mine_ptr, board_ptr, seen_ptr, rounds, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    """Every round all PEs put a row on everybody's board, in pieces, meet, and copy the board.

    mine: int32 [rounds, WIDTH]; board: int32 [2, n_pes, WIDTH], by the round's parity; seen: [rounds, n_pes, WIDTH].
    """
    offs = tl.arange(0, WIDTH)
    me, n = shmem.my_pe(ctx), shmem.n_pes(ctx)
    status = tl.cast(0, tl.int32)
    for r in range(rounds):
        if status == 0:
            tl.store(mine_ptr + r * WIDTH + offs, (r + 1) * (offs * n + me))
            for pe in range(n):
                to = board_ptr + (r % 2) * n * WIDTH + me * WIDTH
                for piece in range(PIECES):
                    part = piece * (WIDTH // PIECES)
                    # each round on another queue pair: a barrier completes them all
                    shmem.put_nbi(ctx, to + part, mine_ptr + r * WIDTH + part, WIDTH // PIECES * 4, pe, r)
            status = shmem.barrier_all(ctx)
            if status == 0:
                for pe in range(n):
                    row = tl.load(board_ptr + (r % 2) * n * WIDTH + pe * WIDTH + offs)
                    tl.store(seen_ptr + (r * n + pe) * WIDTH + offs, row)


def _symmetric(shape: tuple[int, ...], dtype: torch.dtype, value: int) -> torch.Tensor:
    tensor = host.mori_shmem_create_tensor(shape, dtype)
    tensor.fill_(value)
    return tensor


def ring(pe: int, launch: Callable[..., Any]) -> None:
    """AssertionError when a row is not what numpy says."""
    n, rounds = host.shmem_npes(), RING_ROUNDS
    inbox, outbox = (_symmetric((rounds + 1, WIDTH), torch.int32, -1) for _ in range(2))
    signal = _symmetric((1,), torch.int64, 0)
    inbox[0] = torch.arange(WIDTH, dtype=torch.int32) * (pe + 1)
    host.shmem_barrier_all()
    launch(ring_kernel, (1,), host.context(), inbox, outbox, signal, rounds, WIDTH=WIDTH, num_warps=4)
    host.shmem_barrier_all()
    columns = np.arange(WIDTH)
    for r in range(1, rounds + 1):
        # row r began r PEs to the left
        source = (pe - r) % n
        added = sum((source + i) % n + 1 for i in range(r))
        np.testing.assert_array_equal(inbox[r].numpy(), columns * (source + 1) + added, f"ring, round {r}")


def reduce(pe: int, launch: Callable[..., Any]) -> None:
    """AssertionError when a sum is not what numpy says."""
    n, rounds = host.shmem_npes(), REDUCE_ROUNDS
    x, out = _symmetric((rounds, WIDTH), torch.int32, -1), torch.full((rounds, WIDTH), -1, dtype=torch.int32)
    staging, signal = _symmetric((2, n, WIDTH), torch.int32, -1), _symmetric((n,), torch.int64, 0)
    host.shmem_barrier_all()
    launch(reduce_kernel, (1,), host.context(), x, staging, signal, out, rounds, WIDTH=WIDTH, num_warps=4)
    host.shmem_barrier_all()
    for r in range(rounds):
        want = (r + 1) * (np.arange(WIDTH) * n + n * (n - 1) // 2)
        np.testing.assert_array_equal(out[r].numpy(), want, f"all-reduce, round {r}")


def barrier(pe: int, launch: Callable[..., Any]) -> None:
    """AssertionError when a board is not what numpy says."""
    n, rounds = host.shmem_npes(), BARRIERS
    mine, board = _symmetric((rounds, WIDTH), torch.int32, -1), _symmetric((2, n, WIDTH), torch.int32, -1)
    seen = torch.full((rounds, n, WIDTH), -1, dtype=torch.int32)
    host.shmem_barrier_all()
    constants = {"WIDTH": WIDTH, "PIECES": PIECES, "num_warps": 4}
    launch(barrier_kernel, (1,), host.context(), mine, board, seen, rounds, **constants)
    host.shmem_barrier_all()
    for r in range(rounds):
        want = (r + 1) * (np.arange(WIDTH)[None] * n + np.arange(n)[:, None])
        np.testing.assert_array_equal(seen[r].numpy(), want, f"barrier, round {r}")


PROTOCOLS = {"ring": ring, "all-reduce": reduce, "barrier": barrier}


def all_protocols(pe: int, launch: Callable[..., Any]) -> None:
    """One after the other."""
    for protocol in PROTOCOLS.values():
        protocol(pe, launch)
