"""`put_size_imm_nbi_thread` to a PE that is not mapped: its few bytes travel in the request, from any memory."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton import shmem
from mori_triton.errors import KernelFault
from mori_triton.ir import triton as mori_device
from tests.host.proxy.ucx import needs_ucx

pytestmark = pytest.mark.cpu


@triton.jit(do_not_specialize=["num_bytes", "peer"])
def small_kernel(dst, value, num_bytes, peer, out):
    tl.store(out, mori_device.put_size_imm_nbi_thread(dst, value, num_bytes, peer, 0))
    mori_device.quiet_thread()


@pytest.mark.parametrize("transport", ["mlx5", pytest.param("proxy", marks=needs_ucx)])
@pytest.mark.parametrize("num_bytes", [1, 2, 4, 8, 3])
def test_a_small_put_takes_its_operand_from_any_memory(num_bytes: int, transport: str) -> None:
    """Sizes that no element has are copies, whose source a card does not reach outside the heap."""
    mori_device.install_hook()
    value = torch.arange(1, 9, dtype=torch.uint8)

    def program(pe: int) -> tuple[list[int], int]:
        here = shmem.mori_shmem_create_tensor((16,), torch.uint8)
        here.fill_(0xA5)
        out = torch.full((1,), 7, dtype=torch.int32)
        shmem.shmem_barrier_all()
        libs = mori_device.get_extern_libs()
        # not aligned
        small_kernel[(1,)](here[3:], value, num_bytes, 1 - pe, out, extern_libs=libs)
        shmem.shmem_barrier_all()
        return here.tolist(), int(out[0])

    world = mori.local_world(2, transport=transport, timeout_s=20)
    if num_bytes == 3 and transport != "proxy":
        with pytest.raises(KernelFault, match="3 bytes of the local side refused"):
            world.run(program)
    else:
        wanted = [0xA5] * 3 + list(range(1, num_bytes + 1)) + [0xA5] * (13 - num_bytes)
        assert world.run(program) == [(wanted, 0)] * 2
