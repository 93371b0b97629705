"""All-reduce in one kernel, two ways: each PE reads its peers' vectors, or puts its own to them with signals.

`read` loads through translated pointers, which needs mapped memory and vectors that are ready. `put` sends chunks, and
a program sums its chunk as soon as all PEs' signals are there. Exits with 1 when a sum is not exact. PEs are threads of
this process on the GPUs, where there are any, or on the emulated AMD device; under torchrun each process is one PE.
"""

import argparse
import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton.device import shmem
from mori_triton.device.launch import launch, load
from mori_triton.errors import ArgumentError

BLOCK = 4096
TRANSPORTS = ("auto", "p2p", "mlx5", "bnxt_re", "ionic", "proxy")


@triton.jit
def read_kernel(ctx, x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """x: float32 [count], symmetric, ready on all PEs; out: float32 [count], local."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for pe in range(shmem.n_pes(ctx)):
        # a translated pointer carries no alignment; symmetric memory has 256 bytes
        theirs = tl.multiple_of(shmem.remote_ptr(ctx, x_ptr, pe), 16)
        total += tl.load(theirs + offs, mask=offs < count, other=0.0)
    tl.store(out_ptr + offs, total, mask=offs < count)


@triton.jit
def put_kernel(ctx, x_ptr, staging_ptr, signal_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """staging: float32 [n_pes, count]; signal: int64 [num_programs], 0; both symmetric. A program does one chunk."""
    me, n = shmem.my_pe(ctx), shmem.n_pes(ctx)
    first = tl.program_id(0) * BLOCK
    num_bytes = tl.minimum(count - first, BLOCK) * 4
    signal = signal_ptr + tl.program_id(0)
    for i in range(n):
        # each PE starts with another peer
        pe = (me + i) % n
        to = staging_ptr + me * count + first
        shmem.put_signal(ctx, to, x_ptr + first, num_bytes, signal, 1, shmem.SIGNAL_ADD, pe)
    if shmem.wait_ge(ctx, signal, n) >= n:
        offs = first + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for pe in range(n):
            total += tl.load(staging_ptr + pe * count + offs, mask=offs < count, other=0.0)
        tl.store(out_ptr + offs, total, mask=offs < count)


def all_reduce(pe: int, way: str, count: int, preload: Callable) -> bool:
    """Whether PE `pe` gets the exact sum of all PEs' vectors."""
    n, chunks = mori.shmem.shmem_npes(), triton.cdiv(count, BLOCK)
    x = mori.shmem.mori_shmem_create_tensor((count,), torch.float32)
    staging = mori.shmem.mori_shmem_create_tensor((n, count), torch.float32)
    signal = mori.shmem.mori_shmem_create_tensor((chunks,), torch.int64)
    # whole numbers, so that every order of summing gives the same
    generators = [torch.Generator().manual_seed(q) for q in range(n)]
    vectors = torch.stack([torch.randint(-99, 99, (count,), generator=generator) for generator in generators])
    x.copy_(vectors[pe])
    staging.fill_(float("nan"))
    signal.zero_()
    out = torch.full((count,), float("nan"), device=x.device)
    kernel, arguments = {
        "read": (read_kernel, (mori.shmem.context(), x, out, count)),
        "put": (put_kernel, (mori.shmem.context(), x, staging, signal, out, count)),
    }[way]
    # loading a kernel waits for those that run on the GPU, and a peer's may be waiting for us
    preload(lambda: load(kernel, *arguments, BLOCK=BLOCK))
    # every x is ready; and every signal is 0
    mori.shmem.shmem_barrier_all()
    launch(kernel, (chunks,), *arguments, BLOCK=BLOCK)
    mori.shmem.shmem_barrier_all()
    return torch.equal(out.cpu(), vectors.sum(0).float())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=("read", "put"), default="put")
    parser.add_argument("--device", default="auto", help="cpu (the emulated AMD device), cuda, hip or auto")
    parser.add_argument("--pes", type=int, default=4)
    parser.add_argument("--arch", help="the AMD target to emulate, gfx942 for example; not on a GPU")
    parser.add_argument("--transport", default="auto", choices=TRANSPORTS, help="torchrun: MORI_TRITON_TRANSPORT")
    parser.add_argument("--count", type=int, default=10_000, help="elements of a vector")
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count: want 1 or more, got {args.count}")
    if args.way == "read" and args.transport not in ("auto", "p2p"):
        parser.error(f"--way read: want mapped memory, got --transport {args.transport}")

    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
        mori.shmem.shmem_torch_process_group_init("default")
        pe, n = mori.shmem.shmem_mype(), mori.shmem.shmem_npes()
        results = {pe: all_reduce(pe, args.way, args.count, preload=lambda call: call())}
        mori.shmem.shmem_finalize()
    else:
        try:
            world = mori.local_world(args.pes, device=args.device, arch=args.arch, transport=args.transport)
        except ArgumentError as error:
            parser.error(str(error))
        n, results = args.pes, dict(enumerate(world.run(all_reduce, args.way, args.count, world.preload)))
    for pe, right in results.items():
        print(f"PE {pe} of {n}: {'the sum is exact' if right else 'WRONG'}")
    return int(not all(results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
