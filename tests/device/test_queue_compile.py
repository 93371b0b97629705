"""Posting to queue pairs as code of GPUs: nothing on the stack, no call, and stores that a card sees in their order."""

from __future__ import annotations

import re

import pytest

from mori_triton import bitcode
from mori_triton.device.launch import cross_compile
from tests.device import network_kernels as kernels
from tests.device.queue_pairs import PROVIDERS

pytestmark = pytest.mark.compile

SIGNATURE = {"ctx": "*i64", "out": "*i64", "data": "*i32", "words": "*i64"}
# letter -> a store of 4 or 8 bytes to the system, a release to it, any other store to memory
LETTERS = {
    "gfx9": {
        "4": r"global_store_dword .*sc0 sc1",
        "8": r"global_store_dwordx2 .*sc0 sc1",
        "R": r"buffer_wbl2 sc0 sc1",
        "s": r"global_store_",
    },
    "gfx12": {
        "4": r"global_store_b32 .*SCOPE_SYS",
        "8": r"global_store_b64 .*SCOPE_SYS",
        "R": r"global_wb scope:SCOPE_SYS",
        "s": r"global_store_",
    },
    "sm_90": {
        "4": r"st\.relaxed\.sys\.global\.u32",
        "8": r"st\.relaxed\.sys\.global\.u64",
        "R": r"fence\.acq_rel\.sys",
        "s": r"st\.global",
    },
}
# what has to be there, in this order and nothing between: of all, then of one card
COMMIT = "sR+8R"  # request, its ready word; the release before who comes to ring
ORDERS = {
    "mlx5": [COMMIT, "4R8R"],  # record, doorbell
    "bnxt_re": [COMMIT, "88", "8R8R"],  # a packet number and the next one, a loop; doorbell
    "ionic": ["sR4R8R"],  # request, its color, its ready word
}


def letters(arch: str, text: str) -> str:
    """The stores and releases of a kernel, one letter each. Branches are left out."""
    table = LETTERS[arch if arch == "sm_90" else "gfx9" if arch.startswith("gfx9") else "gfx12"]
    found = []
    for line in text.splitlines():
        found += next(([letter] for letter, pattern in table.items() if re.search(pattern, line)), [])
    return "".join(found)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("arch", ["gfx950", "gfx1201", "gfx1250", "sm_90"])
def test_stores_to_a_card_keep_their_order(arch: str, provider: str) -> None:
    library = bitcode.specialize(arch, provider=provider)
    asm = cross_compile(kernels.each_kernel, SIGNATURE, arch=arch, library=library, num_warps=4).asm
    text = asm["ptx" if arch == "sm_90" else "amdgcn"]
    for pattern in ORDERS[provider]:
        assert re.search(pattern, letters(arch, text)), pattern
    # bytes that are passed on in memory of the thread, or a function that was not inlined
    assert not re.search(r"\.local\s|\bcall(\.uni)?\s+\(|scratch_(load|store)|swappc", text)
    if arch != "sm_90":
        assert re.search(r"private_segment_fixed_size:? +0\b", text)
