"""The memory of an EPv2 op in the symmetric heap, and its life: what plans run on."""

from __future__ import annotations

from typing import Any

import torch

from mori_triton.errors import require
from mori_triton.host import state as host_state
from mori_triton.ops.buffers import EpBufferLayout
from mori_triton.ops.dispatch_combine_v2.config import EpDispatchCombineConfig
from mori_triton.ops.dispatch_combine_v2.staging import staging_layout
from mori_triton.ops.op_base import EpOpBase
from mori_triton.ops.routing import EpDispatchRoutingHandle, new_handle


class EpArena(EpOpBase):
    """Receive buffers, combine's buffers, signals and control words, in one symmetric allocation.

    Collective to construct, `reset` and `close`: every PE, same order. Any number of plans may run on an arena, one
    call at a time; what `ops.EpDispatchCombineOp` says of errors, graphs and the life of outputs holds for them.

    Args:
        cfg: the problem, equal on every PE but for `rank`.
        comm: who the PEs are: the world that shmem was initialised for. None, the state of this PE
            (`mori_triton.host.state.current()`), or anything with `rank()` and `size()`, such as a torch process group,
            in which this process has the same rank among as many.

    Raises:
        StateError: shmem is not initialised.
        ArgumentError: rank, world size or `comm` are not this PE's, or PEs' configs differ.
        HeapError: the symmetric heap has no room; the message says how many bytes this config needs.
    """

    def __init__(self, cfg: EpDispatchCombineConfig, comm: Any = None) -> None:
        self.cfg = cfg
        self.staging: EpBufferLayout = staging_layout(
            cfg.world_size, cfg.effective_max_recv, cfg.scale_bytes, cfg.max_num_inp_token_per_rank
        )
        _check_comm(comm)
        super().__init__(cfg.problem)

    def _chosen(self, config: Any, state: host_state.PeState) -> Any:
        """The plans' own kernels, whatever the environment asks of `ops.EpDispatchCombineOp`."""
        return config

    def new_routing(self, num_tokens: int) -> EpDispatchRoutingHandle:
        """A handle for a dispatch of `num_tokens` tokens to fill in. Allocates."""
        return new_handle(self.config, self.device, num_tokens)

    def recv_tokens(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`[R, columns]`: rows that dispatch brought, as `dtype`, None: the config's."""
        dtype = dtype or self.cfg.dispatch_dtype
        num_bytes = self.cfg.dispatch_token_nbytes
        require(num_bytes % dtype.itemsize == 0, "dtype", f"one that divides {num_bytes} bytes", dtype)
        return self._buffers.view("recv_tokens", dtype, self.config.max_recv, num_bytes // dtype.itemsize)

    def recv_weights(self) -> torch.Tensor:
        """`[R, k]` float32."""
        return self._buffers.view(
            "recv_weights", torch.float32, self.config.max_recv, self.config.num_experts_per_token
        )

    def recv_indices(self) -> torch.Tensor:
        """`[R, k]` int32 global expert ids, as the senders had them."""
        return self._buffers.view("recv_indices", torch.int32, self.config.max_recv, self.config.num_experts_per_token)

    def recv_scales(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor | None:
        """`[R, scale_bytes]` as `dtype`, rows `scale_stride_bytes` apart; None where the config has no scales."""
        if self.cfg.scale_bytes == 0:
            return None
        rows = self._buffers.view("recv_scales", torch.uint8, self.config.max_recv, self.config.scale_bytes)
        return rows[:, : self.cfg.scale_bytes].view(dtype)

    def combine_in_view(self) -> torch.Tensor:
        """`[R, columns]`, combine's type: rows written here, between dispatch and combine, need no copy."""
        return self._buffers.view("combine_in", self.cfg.combine_dtype, self.config.max_recv, self.cfg.combine_columns)


def _check_comm(comm: Any) -> None:
    state = host_state.current()
    if comm is None or comm is state:
        return
    known = callable(getattr(comm, "rank", None)) and callable(getattr(comm, "size", None))
    want = "None, the state of this PE, or an object with rank() and size()"
    require(known, "comm", want, type(comm).__name__)
    here, given = (state.pe, state.n_pes), (comm.rank(), comm.size())
    require(given == here, "comm", f"rank {here[0]} of {here[1]}, as shmem has it", f"rank {given[0]} of {given[1]}")
