"""Where a dispatch/combine op keeps things: one symmetric allocation, cut into regions by `ep_buffer_layout` alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mori_triton.ops.config import EpDispatchCombineConfig

# a region never shares a cache line with another one, and every region start takes 16-byte accesses
REGION_ALIGNMENT = 256


@dataclass(frozen=True)
class EpRegion:
    """One buffer: bytes `[offset, offset + num_bytes)` of the op's allocation."""

    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class EpBufferLayout:
    """Every buffer of an op, in order, none overlapping another."""

    regions: tuple[EpRegion, ...]
    num_bytes: int  # of the whole allocation, what the symmetric heap must have free

    def __getitem__(self, name: str) -> EpRegion:
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)


def ep_buffer_layout(config: EpDispatchCombineConfig) -> EpBufferLayout:
    """Sizes of an op's buffers; the op allocates exactly this. Needs no heap and no device.

    Peers write `recv_*` (dispatch), the signal words and `recv_slots`; peers read `combine_in*` (combine). The rest is
    touched by the owner only.
    """
    n, k, rows, tokens = (
        config.world_size,
        config.num_experts_per_token,
        config.max_recv,
        config.max_num_inp_token_per_rank,
    )
    row_bytes = config.hidden_dim * config.max_token_type_size
    sizes = (
        ("recv_tokens", rows * row_bytes),
        ("recv_weights", rows * k * 4),
        ("recv_scales", rows * config.scale_bytes),
        ("recv_indices", rows * k * 4),
        ("recv_sources", rows * 4),  # reverse map: source PE * M + token
        ("combine_in", rows * row_bytes),
        ("combine_in_weights", rows * k * 4),
        ("dispatch_signals", n * 8),  # word p is written by PE p: the epoch of its newest dispatch
        ("combine_signals", n * 8),
        ("recv_slots", 4),  # rows given out so far in this round, by every PE's fetch_add
        ("combine_out", tokens * row_bytes),
        ("combine_out_weights", tokens * k * 4),
        ("forward", tokens * k * 4),  # destination PE * R + slot, -1: not sent
        ("total_recv", 4),
        ("overflow", 8),  # rows that found no slot since construction or reset
        ("epoch", 8),  # rounds whose dispatch arrived
        ("dispatch_arrivals", 4),
        ("combine_arrivals", 4),
    )
    regions, offset = [], 0
    for name, num_bytes in sizes:
        regions.append(EpRegion(name, offset, num_bytes))
        offset += -(-num_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT
    return EpBufferLayout(tuple(regions), offset)


class EpBuffers:
    """Tensor views of an op's allocation at `address`, made on demand."""

    def __init__(self, layout: EpBufferLayout, address: int, driver: Any) -> None:
        self.layout, self.address, self._driver = layout, address, driver

    def view(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The first bytes of region `name` as a contiguous `[*shape]` tensor."""
        region = self.layout[name]
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        assert num_bytes <= region.num_bytes, (name, shape, dtype, region)
        return self._driver.tensor(self.address + region.offset, shape, dtype)
