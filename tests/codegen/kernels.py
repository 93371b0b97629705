"""Kernels as outside authors write them, some of which come out badly in one known way."""

import triton
import triton.language as tl

from mori_triton.ir import triton as mori_device


@triton.jit
def copy_kernel(src_ptr, dst_ptr, num_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst_ptr + offs, tl.load(src_ptr + offs, mask=offs < num_elements), mask=offs < num_elements)


@triton.jit
def spilling_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """All rows are loaded before the first is stored: more than there are registers."""
    offs = tl.arange(0, BLOCK)
    rows = ()
    for step in tl.static_range(STEPS):
        rows += (tl.load(x_ptr + step * BLOCK + offs, volatile=True),)
    tl.debug_barrier()
    for step in tl.static_range(STEPS):
        tl.store(out_ptr + step * BLOCK + offs, rows[step])


@triton.jit
def send_kernel(src_ptr, dst_ptr, signal_ptr, num_bytes, pe):
    """A put and its signal, under MORI's names."""
    mori_device.putmem_nbi_signal_block(dst_ptr, src_ptr, num_bytes, signal_ptr, 1, mori_device.SIGNAL_SET, pe, 0)


@triton.jit
def wait_kernel(signal_ptr, out_ptr):
    mori_device.uint64_wait_until_equals(signal_ptr, 1)
    tl.store(out_ptr, tl.load(signal_ptr))


@triton.jit
def acquire_kernel(flag_ptr, data_ptr, out_ptr, BARRIER: tl.constexpr):
    """Triton's own acquire of a word that another device writes, then a load of what it guards."""
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0:
        pass
    if BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr, tl.load(data_ptr))


@triton.jit
def compare_kernel(flag_ptr):
    """Triton's own compare-and-swap at system scope."""
    tl.atomic_cas(flag_ptr, 0, 1, sem="acq_rel", scope="sys")
