"""launch(): one place that links the library; on the emulated device."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import abi, bitcode
from mori_triton.device import launch as launching
from mori_triton.device import shmem
from mori_triton.device.launch import get_extern_libs, launch
from mori_triton.errors import BitcodeError
from tests.device.pes import Pes

pytestmark = pytest.mark.cpu


@triton.jit
def who_kernel(ctx, out):
    tl.store(out, shmem.my_pe(ctx) * 100 + shmem.n_pes(ctx))


@triton.jit
def plain_kernel(out):
    tl.store(out, 5)


def test_launch_links_for_the_active_target_and_returns_the_kernel() -> None:
    pes = Pes(3, "gfx942")
    with pes.current(2) as ctx:
        assert get_extern_libs() == {abi.LIBRARY: str(bitcode.specialize("gfx942", provider="p2p"))}
        out = torch.full((1,), -1, dtype=torch.int32)
        compiled = launch(who_kernel, (1,), ctx, out, num_warps=1)
        assert int(out[0]) == 203
        assert launching.unresolved(compiled.asm) == []
        # a context's address as an integer is as good as the tensor
        out[0] = -1
        launch(who_kernel, (1,), ctx.data_ptr(), out, num_warps=1)
        assert int(out[0]) == 203


def test_a_kernel_without_externs_and_a_users_own_library_are_fine() -> None:
    pes = Pes(1, "gfx1201")
    with pes.current(0):
        out = torch.full((1,), -1, dtype=torch.int32)
        other = {"other": str(bitcode.find_bitcode("gfx1201"))}
        launch(plain_kernel, (1,), out, num_warps=1, extern_libs=other)
        assert int(out[0]) == 5


def test_what_is_left_unresolved_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pes = Pes(1, "gfx1201")
    with pes.current(0):
        monkeypatch.setattr(launching, "unresolved", lambda asm: ["mori_shmem_gone"])
        monkeypatch.setattr(launching, "_linked", set())
        out = torch.full((1,), -1, dtype=torch.int32)
        with pytest.raises(BitcodeError, match="plain_kernel: unresolved mori_shmem_gone"):
            launch(plain_kernel, (1,), out, num_warps=1)


@pytest.mark.skipif(triton.__version__.startswith("3.6."), reason="Triton 3.6 aborts over an unknown symbol")
def test_a_kernel_launched_without_the_library_says_how_to_link_it() -> None:
    pes = Pes(1, "gfx1201")
    with pes.current(0) as ctx:
        out = torch.full((1,), -1, dtype=torch.int32)
        with pytest.raises(BitcodeError, match=r"who_kernel calls mori_shmem_ctx_\w+, which is not linked.*launch\("):
            who_kernel[(1,)](ctx, out, num_warps=1)
        assert int(out[0]) == -1
