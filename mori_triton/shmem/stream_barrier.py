"""The barrier that waits on a stream and not on the host: a kernel of one program that meets those of all PEs."""

from __future__ import annotations

import operator
from typing import Any

import triton

from mori_triton.device import shmem
from mori_triton.device.prepared import PreparedKernel, prepare
from mori_triton.errors import ArgumentError
from mori_triton.host.state import PeState

_EXTENSION = "stream_barrier"


@triton.jit(do_not_specialize=["ctx"])
def barrier_kernel(
    ctx,  # device context
):
    """All PEs: every store before is visible to every PE after. A time-out leaves a record."""
    shmem.barrier_all(ctx)


def enqueue_barrier(state: PeState, stream: Any) -> None:
    """Put the barrier of this PE on `stream`: None, a torch stream, or its handle. Collective, asynchronous.

    No PE's kernel waits while another PE may have to load it: they meet on the host before and after the launch.
    """
    handle = _handle(stream)
    kernel: PreparedKernel | None = state.extensions.get(_EXTENSION)
    if kernel is None:
        kernel = state.extensions[_EXTENSION] = prepare(barrier_kernel, state.heap.ctx)
    state.meet("shmem_barrier_on_stream")
    kernel((1,), state.heap.ctx, stream=handle)
    state.meet("shmem_barrier_on_stream, enqueued")


def _handle(stream: Any) -> int | None:
    # a torch stream calls it cuda_stream, on every kind of GPU
    stream = getattr(stream, "cuda_stream", stream)
    try:
        return None if stream is None else operator.index(stream)
    except TypeError as error:
        raise ArgumentError(f"stream: want None, a torch stream or its handle, got {type(stream).__name__}") from error
