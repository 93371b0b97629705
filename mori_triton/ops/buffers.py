"""Where a dispatch/combine op keeps things: symmetric memory, cut into regions by `ep_buffer_layout` alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mori_triton.errors import require
from mori_triton.ops.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_triton.ops.formats import BLOCK, CODECS
from mori_triton.ops.kernels.finish import CONTROL_WORDS

# a region never shares a cache line with another one, and every region start takes 16-byte accesses
REGION_ALIGNMENT = 256
# the least payload memory that is allocated: of smaller allocations peers were seen to keep stale lines on gfx1201
LEAST_PAYLOAD_BYTES = 2 << 20
# the fewest tokens that one program of a deterministic dispatch counts
COUNT_TOKENS = 16
# what a new or reset op starts from; the other buffers are written before they are read
CLEARED = (
    "dispatch_signals",
    "combine_signals",
    "sync_signals",
    "count_signals",
    "recv_slots",
    "total_recv",
    "control",
)

_TYPES = {
    **dict.fromkeys(("dispatch_signals", "combine_signals", "sync_signals", "count_signals", "control"), torch.int64),
    "payload_bases": torch.int64,
    **dict.fromkeys(("recv_indices", "recv_sources", "recv_slots", "forward", "total_recv"), torch.int32),
    **dict.fromkeys(("count_matrix", "block_counts", "route_bases", "staged_indices"), torch.int32),
    **dict.fromkeys(("recv_weights", "combine_in_weights", "combine_out_weights", "combine_in_scales"), torch.float32),
    **dict.fromkeys(("staged_weights", "staging_weights"), torch.float32),
}


@dataclass(frozen=True)
class EpRegion:
    """One buffer: bytes `[offset, offset + num_bytes)` of the op's allocation on the heap, or of its payload memory."""

    name: str
    offset: int
    num_bytes: int
    is_payload: bool = False


@dataclass(frozen=True)
class EpBufferLayout:
    """Every buffer of an op, in order, none overlapping another."""

    regions: tuple[EpRegion, ...]
    num_bytes: int  # of the whole allocation, what the symmetric heap must have free
    payload_bytes: int = 0  # of the payload memory beside the heap; 0: there is none

    def __getitem__(self, name: str) -> EpRegion:
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)


def ep_buffer_layout(config: EpDispatchCombineConfig) -> EpBufferLayout:
    """Sizes of an op's buffers; the op allocates exactly this. Needs no heap and no device."""
    if config.kernel_type is EpDispatchCombineKernelType.IntraNodeRDNA4:
        control, payload = _rdna4_sizes(config)
        kept, num_bytes = _cut(control, is_payload=False)
        apart, payload_bytes = _cut(payload, is_payload=True)
        return EpBufferLayout(kept + apart, num_bytes, max(payload_bytes, LEAST_PAYLOAD_BYTES))
    return EpBufferLayout(*_cut(_intranode_sizes(config), is_payload=False))


def _cut(sizes: list[tuple[str, int]], *, is_payload: bool) -> tuple[tuple[EpRegion, ...], int]:
    """Regions of these sizes one behind the other, and where the last one ends."""
    regions, offset = [], 0
    for name, num_bytes in sizes:
        regions.append(EpRegion(name, offset, num_bytes, is_payload))
        offset += -(-num_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT
    return tuple(regions), offset


def _intranode_sizes(config: EpDispatchCombineConfig) -> list[tuple[str, int]]:
    """Peers write `recv_*` (dispatch), `count_matrix` and the signal words; peers read `combine_in*` (combine). The
    rest is touched by the owner only.
    """
    n, k, rows, tokens = (
        config.world_size,
        config.num_experts_per_token,
        config.max_recv,
        config.max_num_inp_token_per_rank,
    )
    row_bytes = config.hidden_dim * config.max_token_type_size
    sizes = [
        ("recv_tokens", rows * row_bytes),
        ("recv_weights", rows * k * 4),
        ("recv_scales", rows * config.scale_bytes),
        ("recv_indices", rows * k * 4),
        ("recv_sources", rows * 4),  # reverse map: source PE * M + token
        ("combine_in", rows * row_bytes),
        ("combine_in_weights", rows * k * 4),
        ("dispatch_signals", n * 8),  # word p is written by PE p: the epoch of its newest dispatch
        ("combine_signals", n * 8),
        ("sync_signals", n * 8),
        ("recv_slots", 4),  # rows given out so far in this round, by every PE's fetch_add
        ("combine_out", tokens * row_bytes),
        ("combine_out_weights", tokens * k * 4),
        ("forward", tokens * k * 4),  # destination PE * R + slot, -1: not sent
        ("total_recv", 4),
        ("control", CONTROL_WORDS * 8),  # the words of kernels/finish.py
    ]
    if config.quant_type != "none" and CODECS[config.quant_type].scaled:
        # the only codecs' rows: bfloat16, at most hidden_dim wide
        sizes.append(("combine_in_scales", rows * -(-config.hidden_dim // BLOCK) * 4))
    if config.deterministic:
        sizes += [
            ("count_matrix", n * n * 4),  # rows from each PE to each PE
            ("count_signals", n * 8),
            ("block_counts", 2 * -(-tokens // COUNT_TOKENS) * n * 4),
            ("route_bases", n * 4),
        ]
    return sizes


def _rdna4_sizes(config: EpDispatchCombineConfig) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(control words and maps on the heap, payload memory).

    Peers write `recv_*` and `staging*`, and the signal words; peers read `staged_*`. The rest is the owner's.
    """
    n, k, rows, tokens = (
        config.world_size,
        config.num_experts_per_token,
        config.max_recv,
        config.max_num_inp_token_per_rank,
    )
    row_bytes = config.hidden_dim * config.max_token_type_size
    control = [
        ("recv_weights", rows * k * 4),
        ("recv_indices", rows * k * 4),
        ("recv_sources", rows * 4),
        ("staged_indices", tokens * k * 4),  # 4 PEs: for the destinations to pull
        ("staged_weights", tokens * k * 4),
        ("payload_bases", n * 8),  # where this PE sees each PE's payload memory
        ("dispatch_signals", n * 8),
        ("combine_signals", n * 8),
        ("sync_signals", n * 8),
        ("recv_slots", 4),
        ("combine_out_weights", tokens * k * 4),
        ("forward", tokens * k * 4),
        ("total_recv", 4),
        ("control", CONTROL_WORDS * 8),
    ]
    payload = [
        ("recv_tokens", rows * row_bytes),
        ("staging", n * tokens * row_bytes),  # combine: row p * M + t is what PE p has for this PE's token t
        ("staging_weights", n * tokens * k * 4),
        ("combine_in", rows * row_bytes),  # the registered buffer, which no peer touches
        ("combine_out", tokens * row_bytes),
    ]
    return control, payload


class EpBuffers:
    """Tensor views of an op's allocation at `address`, and of its payload memory at `payload`, made on demand."""

    def __init__(self, layout: EpBufferLayout, address: int, driver: Any, payload: int = 0) -> None:
        self.layout, self._driver = layout, driver
        self._regions = {region.name: region for region in layout.regions}
        self._addresses = {r.name: (payload if r.is_payload else address) + r.offset for r in layout.regions}
        # both allocations: begin, end, whether it is payload memory
        self._spans = (
            (address, address + layout.num_bytes, False),
            (payload, payload + layout.payload_bytes, True),
        )
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}

    def view(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The first bytes of region `name` as a contiguous `[*shape]` tensor, the same one every time."""
        key = (name, dtype, shape)
        found = self._views.get(key)
        # one that a caller has made part of an autograd graph, by writing to it, is theirs
        if found is not None and not found.requires_grad:
            return found
        region = self._regions[name]
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        assert num_bytes <= region.num_bytes, (name, shape, dtype, region)
        # as bytes first: a driver need not know every payload type
        row = self._driver.tensor(self._addresses[name], (num_bytes,), torch.uint8)
        made = self._views[key] = row.view(dtype).view(shape)
        return made

    def region(self, name: str) -> torch.Tensor:
        """All of region `name`, flat, with the type of its entries; payload and scales are bytes."""
        dtype = _TYPES.get(name, torch.uint8)
        return self.view(name, dtype, self._regions[name].num_bytes // dtype.itemsize)

    def address(self, name: str) -> int:
        """Where region `name` begins."""
        return self._addresses[name]

    def check_outside(self, name: str, tensor: torch.Tensor) -> None:
        """Raise `ArgumentError` for a dispatch's input in memory that peers write meanwhile."""
        region = self.region_of(tensor.data_ptr()) if tensor.numel() else None
        is_output = region is not None and region.startswith("recv_")
        require(not is_output, name, "memory that peers do not write meanwhile", f"dispatch's own output ({region})")

    def region_of(self, address: int) -> str | None:
        """The buffer that an address lies in, None for other memory."""
        for begin, end, is_payload in self._spans:
            if begin <= address < end:
                offset = address - begin
                regions = (r for r in self.layout.regions if r.is_payload == is_payload)
                return next((r.name for r in regions if r.offset <= offset < r.offset + r.num_bytes), None)
        return None
