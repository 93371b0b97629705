"""One dispatch/combine op per configuration, shared by all layers of a PE.

Layers of one shape take turns on one op: each does dispatch, experts, combine before the next starts, which is the
order that an op demands. An op's buffers are sized by the largest token count of any PE, so the PEs must agree on it:
either `shared_ops(max_tokens=...)` fixes it, or each layer call agrees on it over the bootstrap (a few bytes, but the
host waits for the slowest PE) and makes a larger op when the batch has grown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mori_triton.errors import ArgumentError, StateError, require
from mori_triton.host.state import PeState, current
from mori_triton.ops import EpDispatchCombineConfig, EpDispatchCombineOp

_EXTENSION = "layers"
_SMALLEST_CAPACITY = 16


@dataclass(frozen=True)
class OpShape:
    """What layers must have in common to share an op, besides the capacity."""

    hidden_dim: int
    num_experts_per_rank: int
    num_experts_per_token: int
    dtype: torch.dtype


class SharedOps:
    """The ops of one PE."""

    def __init__(self) -> None:
        self.max_tokens: int | None = None
        self._ops: dict[OpShape, tuple[int, EpDispatchCombineOp]] = {}

    def get(self, state: PeState, shape: OpShape, num_tokens: int) -> EpDispatchCombineOp:
        """The op for `num_tokens` rows of `shape` on this PE. Collective: every PE, same order of shapes.

        Raises:
            ArgumentError: the PEs call layers of different shapes, or `num_tokens` exceeds the fixed `max_tokens`.
            HeapError: the symmetric heap cannot hold the op's buffers.
        """
        if self.max_tokens is None:
            needed = _agree(state, shape, num_tokens)
        else:
            most = self.max_tokens
            require(num_tokens <= most, "tokens of a layer call", f"at most max_tokens={most}", num_tokens)
            needed = self.max_tokens
        capacity, op = self._ops.get(shape, (-1, None))
        if op is None or capacity < needed:
            if op is not None:
                del self._ops[shape]
                op.close()
            # powers of two, so that a generation that grows token by token rebuilds rarely
            capacity = self.max_tokens or max(_SMALLEST_CAPACITY, 1 << (needed - 1).bit_length())
            op = EpDispatchCombineOp(_config(state, shape, capacity))
            self._ops[shape] = (capacity, op)
        return op

    def close(self) -> None:
        """Free every op, in the order in which they were made."""
        while self._ops:
            _, op = self._ops.pop(next(iter(self._ops)))
            op.close()


def ops_of(state: PeState) -> SharedOps:
    """The ops of this PE. They live in its state, and shmem's finalize closes them at the latest."""
    if _EXTENSION not in state.extensions:
        state.extensions[_EXTENSION] = SharedOps()
        state.on_close.append(state.extensions[_EXTENSION].close)
    return state.extensions[_EXTENSION]


def close_ops() -> None:
    """Free the ops that this PE's layers share; the next forward makes new ones. Collective: every PE."""
    ops_of(current()).close()


@contextmanager
def shared_ops(max_tokens: int | None = None) -> Iterator[None]:
    """Layers run inside this block share ops that are freed at its end. Collective: every PE, same `max_tokens`.

    Args:
        max_tokens: the most tokens that any PE gives to one layer call. With it, layers need no agreement on the host.
            None: every layer call agrees on the largest count and ops grow as needed.

    Raises:
        ArgumentError: `max_tokens` is not positive.
        StateError: no PE is initialised on this thread, or inside another block with `max_tokens`.
    """
    require(max_tokens is None or max_tokens > 0, "max_tokens", "None or > 0", max_tokens)
    ops = ops_of(current())
    if ops.max_tokens is not None:
        raise StateError(f"shared_ops(max_tokens={ops.max_tokens}) is already active on this PE; blocks do not nest")
    ops.close()
    ops.max_tokens = max_tokens
    try:
        yield
    finally:
        ops.max_tokens = None
    # only after success: when a PE has failed, its peers do not come to a collective close
    ops.close()


def _agree(state: PeState, shape: OpShape, num_tokens: int) -> int:
    """The largest `num_tokens` of all PEs; also finds PEs whose models differ before they hang on each other."""
    mine = f"{num_tokens} {shape}"
    answers = [
        answer.decode().split(" ", 1)
        for answer in state.bootstrap.allgather(mine.encode(), "mori_ep: tokens of a layer")
    ]
    for pe, (_, theirs) in enumerate(answers):
        if theirs != str(shape):
            raise ArgumentError(f"PEs run different layers: PE {state.pe} calls {shape}, PE {pe} calls {theirs}")
    return max(int(count) for count, _ in answers)


def _config(state: PeState, shape: OpShape, capacity: int) -> EpDispatchCombineConfig:
    return EpDispatchCombineConfig(
        data_type=shape.dtype,
        rank=state.pe,
        world_size=state.n_pes,
        hidden_dim=shape.hidden_dim,
        scale_dim=0,
        scale_type_size=0,
        max_token_type_size=shape.dtype.itemsize,
        max_num_inp_token_per_rank=capacity,
        num_experts_per_rank=shape.num_experts_per_rank,
        num_experts_per_token=shape.num_experts_per_token,
    )
