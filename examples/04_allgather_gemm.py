"""All-gather and GEMM as one: each PE has rows of A and columns of B, and multiplies every PE's rows as they arrive.

A producer kernel puts my rows to all peers, each with a signal. The GEMM's programs start with my own rows; the others
wait for the signal of the rows that they need, and for nothing else. Exits with 1 when an element is wrong. PEs are
threads of this process on the GPUs, where there are any, or on the emulated AMD device; under torchrun each process is
one PE.
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

BLOCK = 32
TRANSPORTS = ("auto", "p2p", "mlx5", "bnxt_re", "ionic", "proxy")


@triton.jit
def put_kernel(ctx, a_ptr, signal_ptr, shard_bytes):
    """a: float16 [n_pes, rows, K]; signal: int64 [n_pes], 0; both symmetric. Program i sends to PE me + 1 + i."""
    me, n = shmem.my_pe(ctx), shmem.n_pes(ctx)
    mine = (a_ptr.to(tl.int64) + me.to(tl.int64) * shard_bytes).to(tl.pointer_type(tl.int8))
    pe = (me + 1 + tl.program_id(0)) % n
    shmem.put_signal(ctx, mine, mine, shard_bytes, signal_ptr + me, 1, shmem.SIGNAL_SET, pe)


@triton.jit
def gemm_kernel(ctx, a_ptr, b_ptr, c_ptr, signal_ptr, rows, N, K: tl.constexpr, BLOCK: tl.constexpr):
    """b: float16 [K, N]; c: float32 [n_pes * rows, N]. A program computes one block of c, my rows' blocks first."""
    me, n = shmem.my_pe(ctx), shmem.n_pes(ctx)
    down, across = tl.program_id(0) // (N // BLOCK), tl.program_id(0) % (N // BLOCK)
    shard = (me + down // (rows // BLOCK)) % n
    here = True
    if shard != me:
        here = shmem.wait_ge(ctx, signal_ptr + shard, 1, shard) >= 1
    # a wait that has reached its limit has left a record, which the host raises
    if here:
        offs_m = shard * rows + down % (rows // BLOCK) * BLOCK + tl.arange(0, BLOCK)
        offs_n, offs_k = across * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK, BLOCK], tl.float32)
        for k in range(0, K, BLOCK):
            a = tl.load(a_ptr + offs_m[:, None] * K + k + offs_k[None, :])
            b = tl.load(b_ptr + (k + offs_k[:, None]) * N + offs_n[None, :])
            total += tl.dot(a, b)
        tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], total)


def all_gather_gemm(pe: int, rows: int, width: int, depth: int, preload: Callable) -> bool:
    """Whether PE `pe` gets its columns of the product exactly."""
    n = mori.shmem.shmem_npes()
    a = mori.shmem.mori_shmem_create_tensor((n, rows, depth), torch.float16)
    signal = mori.shmem.mori_shmem_create_tensor((n,), torch.int64)
    # small whole numbers, so that every order of summing gives the same
    generator = torch.Generator().manual_seed(0)
    everybodys = torch.randint(-3, 4, (n, rows, depth), generator=generator).half()
    columns = torch.randint(-3, 4, (n, depth, width), generator=generator).half()[pe]
    a.fill_(float("nan"))
    a[pe] = everybodys[pe]
    signal.zero_()
    b, c = columns.to(a.device), torch.full((n * rows, width), float("nan"), device=a.device)
    put = mori.shmem.context(), a, signal, rows * depth * 2
    gemm = mori.shmem.context(), a, b, c, signal, rows, width
    # loading a kernel waits for those that run on the GPU, and a peer's may be waiting for us
    preload(lambda: load(put_kernel, *put))
    preload(lambda: load(gemm_kernel, *gemm, K=depth, BLOCK=BLOCK))
    # every signal is 0
    mori.shmem.shmem_barrier_all()
    if n > 1:
        launch(put_kernel, (n - 1,), *put)
    launch(gemm_kernel, (n * rows // BLOCK * width // BLOCK,), *gemm, K=depth, BLOCK=BLOCK)
    mori.shmem.shmem_barrier_all()
    return torch.equal(c.cpu(), everybodys.flatten(0, 1).float() @ columns.float())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", help="cpu (the emulated AMD device), cuda, hip or auto")
    parser.add_argument("--pes", type=int, default=4)
    parser.add_argument("--arch", help="the AMD target to emulate, gfx942 for example; not on a GPU")
    parser.add_argument("--transport", default="auto", choices=TRANSPORTS, help="torchrun: MORI_TRITON_TRANSPORT")
    parser.add_argument("--shape", type=int, nargs=3, default=(64, 96, 64), help="rows of a PE, columns, depth")
    args = parser.parse_args()
    if any(size < BLOCK or size % BLOCK for size in args.shape):
        parser.error(f"--shape: want multiples of {BLOCK}, got {' '.join(map(str, args.shape))}")

    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
        mori.shmem.shmem_torch_process_group_init("default")
        pe, n = mori.shmem.shmem_mype(), mori.shmem.shmem_npes()
        results = {pe: all_gather_gemm(pe, *args.shape, preload=lambda call: call())}
        mori.shmem.shmem_finalize()
    else:
        try:
            world = mori.local_world(args.pes, device=args.device, arch=args.arch, transport=args.transport)
        except ArgumentError as error:
            parser.error(str(error))
        n, results = args.pes, dict(enumerate(world.run(all_gather_gemm, *args.shape, world.preload)))
    for pe, right in results.items():
        print(f"PE {pe} of {n}: {'the product is exact' if right else 'WRONG'}")
    return int(not all(results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
