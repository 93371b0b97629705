"""What a call's launches are made from: the problem, the op's buffers, what the caller brought.

`ops.dispatch` and `ops.combine`, and the files for their variants, make steps of plans from these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from mori_triton.ops.buffers import EpBuffers
from mori_triton.ops.config import EpDispatchCombineConfig
from mori_triton.ops.plans import Given, StepMaker, as_bytes
from mori_triton.ops.routing import EpDispatchRoutingHandle
from mori_triton.ops.tuning import EpLaunchConfig


def row_alignment(row_bytes: int, *addresses: int) -> int:
    """The widest access, at most 16 bytes, that keeps every row of `row_bytes` at these addresses aligned."""
    return math.gcd(16, row_bytes, *addresses)


def block_k(top_k: int) -> int:
    """The power of two that a row of `top_k` entries is handled in: one compiled kernel serves the usual ones."""
    return max(2, triton.next_power_of_2(top_k))


def chunk(top_k: int) -> int:
    """How many of a token's rows are in flight together."""
    return min(8, triton.next_power_of_2(top_k))


def num_programs(num_rows: int, num_pieces: int, most: int) -> int:
    """Programs for rows in pieces: whole rows of programs where there can be several, as `program_share` wants."""
    if most > num_pieces:
        most -= most % num_pieces
    return max(1, min(num_rows * num_pieces, most))


def inverse_of(capacity: int) -> tuple[int, int]:
    """(inverse, shift) with `entry // capacity == entry * inverse >> 32 + shift`, the inverse as an int32.

    Exact for every entry of `forward`: they are below `world_size * capacity`, which is below 2^31. With
    `e = inverse * capacity - 2^(32 + shift)`, less than `capacity` and so at most `2^(shift + 1)`, the product is too
    large by `entry * e / 2^(32 + shift) / capacity`, less than `1 / capacity`. A capacity of 1 has the entry 0 alone.
    """
    if capacity == 1:
        return 0, 0
    shift = (capacity - 1).bit_length() - 1
    inverse = -(-(1 << (32 + shift)) // capacity)
    return inverse - 2**32 if inverse >= 2**31 else inverse, shift


def piece_grid(num_rows: int, row_bytes: int, piece_bytes: int, most: int) -> tuple[int, int]:
    """Programs (piece, row) for rows in pieces, at most about `most`; each goes on with the rows of later programs."""
    pieces = min(triton.cdiv(row_bytes, piece_bytes), most)
    # CUDA has no more in the second dimension
    return pieces, max(1, min(num_rows, most // pieces, 65535))


@dataclass(frozen=True)
class DispatchInput:
    """A dispatch's arguments after `check_dispatch`: empty weights and scales have become None."""

    tokens: torch.Tensor  # [n, h]
    weights: torch.Tensor | None  # float32 [n, k]
    scales: torch.Tensor | None  # [n, scale_dim]
    indices: torch.Tensor  # int32 [n, k]


@dataclass(frozen=True)
class EpCall:
    """What the launches of either half are made from. `step` makes one."""

    config: EpDispatchCombineConfig
    buffers: EpBuffers
    ctx: torch.Tensor  # int64 [16], `SymmetricHeap.ctx`
    routing: EpDispatchRoutingHandle  # of one call; its types count
    shape: EpLaunchConfig
    wait: bool  # whether the last sending launch waits for the peers
    step: StepMaker

    @property
    def block_k(self) -> int:
        return block_k(self.config.num_experts_per_token)

    @property
    def chunk(self) -> int:
        return chunk(self.config.num_experts_per_token)

    @property
    def capacity(self) -> tuple[int, int, int]:
        """The kernel arguments capacity, inverse and shift."""
        return (self.config.max_recv, *inverse_of(self.config.max_recv))

    def view(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A buffer of the op: its start as `[*shape]` of `dtype`, or without one all of it, flat, of its own type."""
        return self.buffers.region(name) if dtype is None else self.buffers.view(name, dtype, *shape)

    def _routed(self, name: str) -> Given | None:
        if name == "forward":
            return Given(name, self.routing.disp_dest_tok_id_map)
        if name == "total":
            return Given(name, self.routing.total_recv_token_num)
        if name == "sources":
            return Given(name, self.routing.disp_tok_id_to_src_tok_id_local)
        return None


@dataclass(frozen=True)
class DispatchCall(EpCall):
    """A dispatch."""

    data: DispatchInput  # of one call; its shapes, types and alignment count
    replay: bool  # whether `routing` says where rows go, instead of being told

    @property
    def tokens(self) -> torch.Tensor:
        return self.data.tokens

    @property
    def weights(self) -> torch.Tensor | None:
        return self.data.weights

    @property
    def scales(self) -> torch.Tensor | None:
        return self.data.scales

    @property
    def indices(self) -> torch.Tensor:
        return self.data.indices

    @property
    def slots(self) -> torch.Tensor | None:
        """The counter of slots given out, None on a replay, which asks for none."""
        return None if self.replay else self.view("recv_slots")

    def given(self, name: str) -> Given | None:
        """The argument "tokens", "weights", "scales", "indices", "forward" or "total" of each call; None if absent."""
        tensor = getattr(self.data, name, None)
        if tensor is None:
            return self._routed(name)
        # payload and scales are opaque: their dtype may be one that no kernel can name
        return Given(name, as_bytes(tensor) if name in ("tokens", "scales") else tensor)


@dataclass(frozen=True)
class CombineCall(EpCall):
    """A combine."""

    rows: torch.Tensor  # [>= total_recv, h] of one call; shapes, types and alignment count
    weights: torch.Tensor | None  # float32 [>= total_recv, k], likewise
    num_tokens: int  # rows given to dispatch
    region: str | None  # the buffer of the op that `rows` begin in; None: they are elsewhere

    @property
    def in_place(self) -> bool:
        """Whether `rows` are in the registered buffer already."""
        return self.region == "combine_in"

    @property
    def hidden(self) -> int:
        return self.rows.shape[1]

    @property
    def num_rows(self) -> int:
        """The most rows that may be received and are there to be sent; only the device knows how many are."""
        return min([self.config.max_recv, len(self.rows)] + ([] if self.weights is None else [len(self.weights)]))

    @property
    def out(self) -> torch.Tensor:
        most = self.config.max_num_inp_token_per_rank
        return self.view("combine_out", most, self.hidden, dtype=self.rows.dtype)

    def given(self, name: str) -> Given | None:
        """The argument "rows" (bytes, or as "elements"), "weights", "forward", "total" or "sources" of each call; None
        if absent.
        """
        if name == "rows":
            return Given(name, as_bytes(self.rows))
        if name == "elements":
            return Given("rows", self.rows)
        if name == "weights":
            return None if self.weights is None else Given(name, self.weights)
        return self._routed(name)

    def result(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[M, h]` of the dtype of `rows` and `[M, k]` float32 (None without weights), views of this PE's buffers."""
        sizes = self.config.max_num_inp_token_per_rank, self.config.num_experts_per_token
        weights = None if self.weights is None else self.view("combine_out_weights", *sizes, dtype=torch.float32)
        return self.out, weights
