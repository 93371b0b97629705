"""What tests of `CudaDriver` on an NVIDIA GPU share: when they run, sizes, ways of mapping, what they may hold."""

from __future__ import annotations

import gc

import pytest
import torch

from mori_triton.host.drivers import dlpack, gpu

NEEDS_NVIDIA = [
    pytest.mark.gpu1,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.cuda is None,
        reason="needs an NVIDIA GPU: torch.cuda.is_available() is False",
    ),
]
MB = 1 << 20
MODES = pytest.mark.parametrize("heap_mode", ["static_heap", "vmm"])


@pytest.fixture(scope="module", autouse=True)
def held_before():
    """Numbers of what other tests of this process hold."""
    return set(dlpack._held), set(gpu._live)


def check_held(before):
    """No memory is held that was not before."""
    gc.collect()
    assert set(dlpack._held) <= before[0]
    assert set(gpu._live) <= before[1]
