"""The staging buffer of a dispatch plan: where a PE gathers the small rows that it sends, by destination PE.

`staging_layout` alone decides its regions. The size that callers allocate and the constants that kernels are compiled
with (`staging_constants`) are both read off it.

Row `slot` of destination PE `d` is the row that becomes row `slot` of that PE's receive buffers, so what a block of
tokens sends to one PE is one run of bytes, here and there:

    indices   int32 [world_size, max_recv * MAX_TOP_K]   rows of k ids, from the start of each PE's part
    weights   float32, likewise
    sources   int32 [world_size, max_recv]               source PE * M + token
    scales    [world_size, max_recv, scale_stride] bytes
    bases     int32 [MAX_BLOCKS, world_size]             first slot of a block's run on each PE
    counts    int32, likewise                            rows of the run

It grows with the square of the world size, for `max_recv` does with the world size too.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from mori_triton.errors import StagingError, require
from mori_triton.ops.buffers import EpBufferLayout, EpRegion

# what the regions have room for, whatever a plan needs
MAX_TOP_K = 16
MAX_BLOCKS = 512
# of the base, of every region and of a row of scales
ALIGNMENT = 128
_INT32_MAX = 2**31 - 1


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def scale_stride_bytes(scale_bytes: int) -> int:
    """Bytes from one scale row to the next, in the staging buffer and in the receive buffer."""
    return _align(scale_bytes)


def staging_layout(world_size: int, max_recv: int, scale_bytes: int, max_tok_per_rank: int) -> EpBufferLayout:
    """The regions of a staging buffer, in order. Arguments and errors as `ep_staging_bytes`."""
    sizes = {"max_recv": max_recv, "scale_bytes": scale_bytes, "max_tok_per_rank": max_tok_per_rank}
    for name, size in sizes.items():
        require(isinstance(size, int) and size >= 0, name, "an int >= 0", repr(size))
    require(isinstance(world_size, int) and world_size >= 1, "world_size", "an int >= 1", repr(world_size))
    known = max_recv > 0 or max_tok_per_rank > 0
    require(known, "max_recv", "an int >= 1, or 0 with max_tok_per_rank >= 1: world_size * max_tok_per_rank", max_recv)
    rows = world_size * (max_recv or world_size * max_tok_per_rank)
    # a row of the pool is numbered by an int32
    require(rows <= _INT32_MAX, "world_size * max_recv", f"<= {_INT32_MAX}", rows)
    regions, offset = [], 0
    for name, num_bytes in (
        ("indices", rows * MAX_TOP_K * 4),
        ("weights", rows * MAX_TOP_K * 4),
        ("sources", rows * 4),
        ("scales", rows * scale_stride_bytes(scale_bytes)),
        ("bases", MAX_BLOCKS * world_size * 4),
        ("counts", MAX_BLOCKS * world_size * 4),
    ):
        regions.append(EpRegion(name, offset, num_bytes))
        offset += _align(num_bytes)
    return EpBufferLayout(tuple(regions), offset)


def ep_staging_bytes(world_size: int, max_recv: int, scale_bytes: int, max_tok_per_rank: int) -> int:
    """Bytes of the staging buffer of a dispatch plan; `EpDispatchPlan.info` has the same number. Needs no device.

    Args:
        world_size: number of PEs.
        max_recv: rows of a receive buffer, `R`; 0: `world_size * max_tok_per_rank`.
        scale_bytes: bytes of a token's scale row, 0 without scales.
        max_tok_per_rank: `M`; only looked at where `max_recv` is 0.

    Raises:
        ArgumentError: a `ValueError`: a number out of range, or `max_recv` and `max_tok_per_rank` both 0.
    """
    return staging_layout(world_size, max_recv, scale_bytes, max_tok_per_rank).num_bytes


def staging_constants(layout: EpBufferLayout) -> dict[str, int]:
    """The constexpr arguments by which both kernels find the regions: INDICES_AT, ..., COUNTS_AT."""
    return {f"{region.name.upper()}_AT": region.offset for region in layout.regions}


def allocate_staging(layout: EpBufferLayout, device: torch.device) -> torch.Tensor:
    """A new buffer, uint8, aligned, its contents undefined: a dispatch reads nothing that it has not written."""
    memory = torch.empty(layout.num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -memory.data_ptr() % ALIGNMENT
    return memory[skip : skip + layout.num_bytes]


def host_bytes(address: int, num_bytes: int) -> torch.Tensor:
    """Host memory as a tensor that owns nothing."""
    return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)


def check_staging(base: Any, num_bytes: int | None, layout: EpBufferLayout, device: torch.device) -> int:
    """The address of a caller's `staging_base`.

    Args:
        base: a contiguous tensor on `device`, or an address.
        num_bytes: bytes there, None: not known, or the tensor's.

    Raises:
        StagingError: null, not aligned to `ALIGNMENT`, known to be shorter than the layout, or elsewhere.
    """
    if isinstance(base, torch.Tensor):
        if base.device != device or not base.is_contiguous():
            raise StagingError(f"staging_base: want contiguous memory on {device}, got {base.device}")
        held = base.numel() * base.itemsize
        num_bytes = held if num_bytes is None else min(num_bytes, held)
        base = base.data_ptr()
    if not isinstance(base, int) or base <= 0:
        raise StagingError(f"staging_base: want the address of {layout.num_bytes} bytes, got {base!r}")
    if base % ALIGNMENT:
        raise StagingError(f"staging_base: want an address aligned to {ALIGNMENT} bytes, got {base:#x}")
    if num_bytes is not None and num_bytes < layout.num_bytes:
        raise StagingError(f"staging_base: want ep_staging_bytes(...) = {layout.num_bytes} bytes, got {num_bytes}")
    return base
