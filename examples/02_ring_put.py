"""All-gather around a ring: every PE puts a row to its right neighbour, with a signal, until all have all rows.

One kernel does it, with no host in between: a step sends the row that came in the step before, as soon as its signal is
there. Exits with 1 when a row is wrong. PEs are threads of this process on the GPUs, where there are any, or on the
emulated AMD device; under torchrun each process is one PE. Every transport will do.
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

TRANSPORTS = ("auto", "p2p", "mlx5", "bnxt_re", "ionic", "proxy")


@triton.jit
def ring_kernel(
    ctx,  # device context
    rows_ptr,  # float32 [n_pes, N], symmetric; my own row is there, the others come
    signal_ptr,  # int64 [n_pes], symmetric, 0: word i tells that row i has come
    N: tl.constexpr,
):
    me, n = shmem.my_pe(ctx), shmem.n_pes(ctx)
    right, left = (me + 1) % n, (me + n - 1) % n
    for step in range(n - 1):
        # mine first, then what came from the left
        row = (me + n - step) % n
        here = rows_ptr + row * N
        shmem.put_signal(ctx, here, here, N * 4, signal_ptr + row, 1, shmem.SIGNAL_SET, right)
        shmem.wait_eq(ctx, signal_ptr + (me + 2 * n - step - 1) % n, 1, left)


def all_gather(pe: int, row_bytes: int, preload: Callable) -> bool:
    """Whether PE `pe` has every PE's row in the end."""
    n, width = mori.shmem.shmem_npes(), row_bytes // 4
    rows = mori.shmem.mori_shmem_create_tensor((n, width), torch.float32)
    signal = mori.shmem.mori_shmem_create_tensor((n,), torch.int64)
    everybodys = (torch.arange(n)[:, None] * 1000 + torch.arange(width) % 1000).float()
    rows.fill_(float("nan"))
    rows[pe] = everybodys[pe]
    signal.zero_()
    arguments = mori.shmem.context(), rows, signal
    # loading a kernel waits for those that run on the GPU, and a peer's may be waiting for us
    preload(lambda: load(ring_kernel, *arguments, N=width))
    mori.shmem.shmem_barrier_all()
    launch(ring_kernel, (1,), *arguments, N=width)
    # raises what a kernel has recorded, such as a wait that has reached its limit
    mori.shmem.shmem_barrier_all()
    return torch.equal(rows.cpu(), everybodys)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", help="cpu (the emulated AMD device), cuda, hip or auto")
    parser.add_argument("--pes", type=int, default=4)
    parser.add_argument("--arch", help="the AMD target to emulate, gfx942 for example; not on a GPU")
    parser.add_argument("--transport", default="auto", choices=TRANSPORTS, help="torchrun: MORI_TRITON_TRANSPORT")
    parser.add_argument("--row-bytes", type=int, default=1 << 16, help="a multiple of 4")
    args = parser.parse_args()
    if args.row_bytes < 4 or args.row_bytes % 4:
        parser.error(f"--row-bytes: want a multiple of 4, got {args.row_bytes}")

    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
        mori.shmem.shmem_torch_process_group_init("default")
        pe, n = mori.shmem.shmem_mype(), mori.shmem.shmem_npes()
        right = all_gather(pe, args.row_bytes, preload=lambda call: call())
        mori.shmem.shmem_finalize()
        print(f"PE {pe} of {n}: {'all rows are there' if right else 'WRONG'}")
        return int(not right)

    try:
        world = mori.local_world(args.pes, device=args.device, arch=args.arch, transport=args.transport)
    except ArgumentError as error:
        parser.error(str(error))
    results = world.run(all_gather, args.row_bytes, world.preload)
    place = f"the emulated {world.arch}" if world.device == "cpu" else torch.cuda.get_device_name()
    for pe, right in enumerate(results):
        print(f"PE {pe} of {args.pes} on {place}: {'all rows are there' if right else 'WRONG'}")
    return int(not all(results))


if __name__ == "__main__":
    raise SystemExit(main())
