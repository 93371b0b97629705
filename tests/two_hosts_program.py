"""One PE of the test of two hosts, under torchrun: all-reduces compared with numpy, then rounds until the link is cut.

Prints lines that start with "PE n:" for the test. The limit of a wait in a kernel is MORI_TRITON_WAIT_TIMEOUT.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton.device import shmem
from mori_triton.device.launch import launch
from mori_triton.errors import PeerTimeout
from mori_triton.host import state

COUNT = 10_000


@triton.jit(do_not_specialize=["rounds"])
def rounds_kernel(ctx, x_ptr, staging_ptr, words_ptr, out_ptr, rounds, COUNT: tl.constexpr):
    """Everybody puts a row to everybody with a signal and waits for all of them, again and again. out: int64 [1]."""
    me, n = shmem.my_pe(ctx), shmem.n_pes(ctx)
    done, i = tl.cast(0, tl.int64), tl.cast(1, tl.int64)
    while i <= rounds:
        for pe in range(n):
            shmem.put_signal(ctx, staging_ptr + me * COUNT, x_ptr, COUNT * 4, words_ptr + me, i, shmem.SIGNAL_SET, pe)
        if shmem.wait_all_ge(ctx, words_ptr, n, i) >= i:
            done = i
            i += 1
        else:
            i = tl.cast(rounds, tl.int64) + 1
        tl.store(out_ptr, done)


def say(text: object) -> None:
    # torchrun's processes write each string at once, and share a pipe: the end of a line apart may come after another's
    print(f"PE {mori.shmem.shmem_mype()}: {text}\n", end="", flush=True)


def exact(pe: int, n: int) -> None:
    """The example's kernel on numbers of our own."""
    path = Path(__file__).parents[1] / "examples" / "03_allreduce.py"
    spec = importlib.util.spec_from_file_location("allreduce", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.all_reduce(pe, "put", COUNT, preload=lambda call: call())

    chunks = -(-COUNT // example.BLOCK)
    x = mori.shmem.mori_shmem_create_tensor((COUNT,), torch.float32)
    staging = mori.shmem.mori_shmem_create_tensor((n, COUNT), torch.float32)
    signal = mori.shmem.mori_shmem_create_tensor((chunks,), torch.int64)
    vectors = [np.random.default_rng(q).integers(-999, 999, COUNT).astype(np.float32) for q in range(n)]
    x.copy_(torch.from_numpy(vectors[pe]))
    staging.fill_(float("nan"))
    signal.zero_()
    out = torch.full((COUNT,), float("nan"))
    mori.shmem.shmem_barrier_all()
    launch(example.put_kernel, (chunks,), mori.shmem.context(), x, staging, signal, out, COUNT, BLOCK=example.BLOCK)
    mori.shmem.shmem_barrier_all()
    np.testing.assert_array_equal(out.numpy(), sum(vectors))
    np.testing.assert_array_equal(staging.numpy(), vectors)
    here = state.current()
    far = [q for q in range(n) if not here.heap.reaches(q)]
    say(f"exact; not mapped: {far}; by {here.provider}")


class Progress(threading.Thread):
    """Looks at a word that a running kernel writes: when it changed last."""

    def __init__(self, word: torch.Tensor) -> None:
        super().__init__(daemon=True)
        self._word, self.last = word, time.monotonic()

    def run(self) -> None:
        seen = 0
        while True:
            if self._word.item() != seen:
                if seen == 0:
                    say("running")
                seen, self.last = self._word.item(), time.monotonic()
            time.sleep(0.01)


def until_cut(pe: int, n: int) -> None:
    x = mori.shmem.mori_shmem_create_tensor((COUNT,), torch.float32)
    staging = mori.shmem.mori_shmem_create_tensor((n, COUNT), torch.float32)
    words = mori.shmem.mori_shmem_create_tensor((n,), torch.int64)
    words.zero_()
    out = torch.zeros(1, dtype=torch.int64)
    arguments = mori.shmem.context(), x, staging, words, out
    mori.shmem.shmem_barrier_all()
    launch(rounds_kernel, (1,), *arguments, 0, COUNT=COUNT)
    mori.shmem.shmem_barrier_all()
    progress = Progress(out)
    progress.start()
    launch(rounds_kernel, (1,), *arguments, 1_000_000_000, COUNT=COUNT)
    took = time.monotonic() - progress.last
    try:
        state.current().check_errors()
        say("no error")
    except PeerTimeout as error:
        text = " | ".join(str(error).splitlines())
        say(f"PeerTimeout after {out.item()} rounds, {took:.1f} s after the last one: {text}")


def main() -> None:
    torch.distributed.init_process_group("gloo")
    mori.shmem.shmem_torch_process_group_init("default")
    pe, n = mori.shmem.shmem_mype(), mori.shmem.shmem_npes()
    exact(pe, n)
    until_cut(pe, n)
    # nobody can meet the others any more
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
