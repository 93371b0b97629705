"""What a user of MORI has: kernels and host code that know nothing but MORI's documented names.

Puts, gets, an all-reduce that reads its peers, and one by puts with signals; `run` returns what every step brought.
"""

import mori.shmem as ms
import torch
import triton
import triton.language as tl
from mori.ir import triton as mori_device
from mori.ir.triton import get_extern_libs, install_hook
from mori.shmem import mori_shmem_create_tensor, mori_shmem_free_tensor

SIGNAL_ADD = tl.constexpr(10)


@triton.jit
def who_kernel(out_ptr):
    tl.store(out_ptr, mori_device.my_pe())
    tl.store(out_ptr + 1, mori_device.n_pes())


@triton.jit
def ring_put_kernel(buf_ptr, value):
    me = mori_device.my_pe()
    right = (me + 1) % mori_device.n_pes()
    mori_device.int32_p(buf_ptr, value + me, right, 0)
    mori_device.quiet_thread()


@triton.jit
def get_nbi_kernel(dst_ptr, src_ptr):
    right = (mori_device.my_pe() + 1) % mori_device.n_pes()
    mori_device.getmem_nbi_thread(dst_ptr, src_ptr, 4, right, 0)
    mori_device.quiet_thread_pe(right)


@triton.jit
def get_kernel(dst_ptr, src_ptr):
    right = (mori_device.my_pe() + 1) % mori_device.n_pes()
    mori_device.getmem_thread(dst_ptr, src_ptr, 4, right, 0)


@triton.jit
def allreduce_read_kernel(x_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    me = mori_device.my_pe()
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    total = tl.zeros([BLOCK], tl.float32)
    for pe in range(mori_device.n_pes()):
        address = mori_device.ptr_p2p(x_ptr.to(tl.uint64, bitcast=True), me, pe)
        theirs = address.to(tl.pointer_type(tl.bfloat16), bitcast=True)
        total += tl.load(theirs + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, total.to(tl.bfloat16), mask=mask)


@triton.jit
def allreduce_put_kernel(x_ptr, staging_ptr, signal_ptr, out_ptr, numel, expected, BLOCK: tl.constexpr):
    me, n, chunk = mori_device.my_pe(), mori_device.n_pes(), tl.program_id(0)
    first = chunk * BLOCK
    num_bytes = tl.minimum(numel - first, BLOCK).to(tl.uint64) * 2
    for pe in range(n):
        mori_device.putmem_nbi_signal_block(
            staging_ptr + me * numel + first, x_ptr + first, num_bytes, signal_ptr + chunk, 1, SIGNAL_ADD, pe, 0
        )
    mori_device.uint64_wait_until_equals(signal_ptr + chunk, expected)
    offs = first + tl.arange(0, BLOCK)
    mask = offs < numel
    total = tl.zeros([BLOCK], tl.float32)
    for pe in range(n):
        total += tl.load(staging_ptr + pe * numel + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, total.to(tl.bfloat16), mask=mask)


class Buffers:
    def __init__(self, numel, block):
        n, self.numel, self.block, self.chunks = ms.shmem_npes(), numel, block, triton.cdiv(numel, block)
        self.word = mori_shmem_create_tensor((1,), torch.int32)
        self.x = mori_shmem_create_tensor((numel,), torch.bfloat16)
        self.staging = mori_shmem_create_tensor((n, numel), torch.bfloat16)
        self.signal = mori_shmem_create_tensor((self.chunks,), torch.uint64)
        # a network card reads and writes here as well as there
        self.got = mori_shmem_create_tensor((2,), torch.int32)
        self.symmetric = [self.word, self.x, self.staging, self.signal, self.got]
        device = self.x.device
        self.who = torch.full((2,), -9, dtype=torch.int32, device=device)
        self.out = torch.full((2, numel), float("nan"), dtype=torch.bfloat16, device=device)
        me = ms.shmem_mype()
        self.word.fill_(-1)
        self.got.fill_(-9)
        # sums of them are exact
        self.x.copy_((torch.arange(numel, device=device) * (2 * me + 1)) % 13 - 5)
        self.staging.fill_(float("nan"))
        self.signal.view(torch.int64).zero_()

    def launches(self, mapped):
        chunks, sizes = (self.chunks,), {"BLOCK": self.block, "num_warps": 8}
        read = ("read", allreduce_read_kernel, chunks, (self.x, self.out[0], self.numel), sizes)
        return [
            ("who", who_kernel, (1,), (self.who,), {}),
            ("put", ring_put_kernel, (1,), (self.word, 100), {}),
            ("get_nbi", get_nbi_kernel, (1,), (self.got, self.word), {}),
            ("get", get_kernel, (1,), (self.got[1:], self.word), {}),
            *([read] if mapped else []),
            (
                "put_signal",
                allreduce_put_kernel,
                chunks,
                (self.x, self.staging, self.signal, self.out[1], self.numel, ms.shmem_npes()),
                sizes,
            ),
        ]

    def free(self):
        for tensor in self.symmetric:
            mori_shmem_free_tensor(tensor)


def run(numel=1000, block=512, before=None, mapped=True):
    """Every step on the PE that calls it; `before(launches)` is called once all of them are known.

    Peers that are not `mapped` cannot be read by loads: that step is left out.
    """
    install_hook()
    buffers = Buffers(numel, block)
    launches = buffers.launches(mapped)
    if before is not None:
        before(launches)
    ms.shmem_barrier_all()
    for name, kernel, grid, args, meta in launches:
        kernel[grid](*args, extern_libs=get_extern_libs(), **meta)
        if name in ("put", "get"):
            ms.shmem_barrier_all()
    ms.shmem_barrier_all()
    results = {
        "who": buffers.who.tolist(),
        "word": buffers.word.item(),
        "got": buffers.got.tolist(),
        "x": buffers.x.float().cpu().numpy(),
        "read": buffers.out[0].float().cpu().numpy(),
        "put_signal": buffers.out[1].float().cpu().numpy(),
        "signal": buffers.signal.view(torch.int64).tolist(),
    }
    buffers.free()
    return results
