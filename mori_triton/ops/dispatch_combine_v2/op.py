"""`EpDispatchCombineOp` of EPv2: an arena, a staging buffer, and plans that share both."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from mori_triton.errors import ArgumentError, NotSupported, StateError, require
from mori_triton.ops.dispatch_combine_v2.arena import EpArena
from mori_triton.ops.dispatch_combine_v2.config import BACKENDS, EpDispatchCombineConfig
from mori_triton.ops.dispatch_combine_v2.plans import EpCombinePlan, EpDispatchPlan
from mori_triton.ops.dispatch_combine_v2.staging import allocate_staging, scale_stride_bytes
from mori_triton.ops.routing import EpDispatchRoutingHandle


class EpDispatchCombineOp:
    """Sends tokens to the PEs of their experts and the experts' outputs back, small rows through a staging buffer.

    Collective to construct, to call, to `reset` and to `close`: every PE, same order. Calls are asynchronous on a GPU
    and may be captured in a graph after the first of their kind. Outputs are views: dispatch's are good until the next
    call, combine's until the next combine. Usable as a context manager.

    Args:
        cfg: the problem, equal on every PE but for `rank`.
        comm: as of `EpArena`; None will do.

    Raises: as `EpArena`.
    """

    backend_name = "triton"

    def __init__(self, cfg: EpDispatchCombineConfig, comm: Any = None) -> None:
        require(isinstance(cfg, EpDispatchCombineConfig), "cfg", "an EpDispatchCombineConfig", type(cfg).__name__)
        self.cfg, self.comm = cfg, comm
        self.arena = EpArena(cfg, comm)
        self._staging = allocate_staging(self.arena.staging, self.arena.device)
        rows = (*(cfg.schedule or ()), (cfg.max_num_inp_token_per_rank, cfg.dispatch_block_num, cfg.warp_num_per_block))
        # by the most tokens; one runs at a time, so one buffer does for all
        self._dispatch_plans = [
            (most, EpDispatchPlan(self.arena, block_num=blocks, warp_per_block=warps)) for most, blocks, warps in rows
        ]
        for _, plan in self._dispatch_plans:
            plan.bind(staging_base=self._staging)
        self.last_routing: EpDispatchRoutingHandle | None = None
        """The handle of the last dispatch that was to return one, also if it raised `ReceiveOverflow` instead."""
        self._combine_plan = EpCombinePlan(
            self.arena, block_num=cfg.combine_block_num, warp_per_block=cfg.combine_warp_num_per_block
        )

    @classmethod
    def available_backends(cls) -> tuple[str, ...]:
        """Values of `kernel_backend`."""
        return BACKENDS

    @property
    def capabilities(self) -> frozenset[str]:
        """What this op can do of that in which MORI's backends differ."""
        return frozenset({"gather", "scales", "recv_cap", "asymmetric_dtype", "routing_handles"})

    @property
    def scale_stride_bytes(self) -> int:
        """Bytes from one row of `recv_scales` to the next."""
        return scale_stride_bytes(self.cfg.scale_bytes)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the op's staging buffer."""
        return self.arena.staging.num_bytes

    def dispatch(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        *,
        routing: EpDispatchRoutingHandle | None = None,
        return_routing: bool = False,
    ) -> tuple[Any, ...]:
        """Send every token once to each distinct PE of its experts. Collective.

        Args:
            input: `[n, columns]` of `cfg.dispatch_dtype`, contiguous, 16-byte aligned, `0 <= n <= M`. Travels bit for
                bit.
            weights: `[n, k]` float32, or None (on every PE, except where `n` is 0).
            scales: `[n, scale_dim]` of `scale_type_size` bytes an entry, or None; travels unread.
            indices: `[n, k]` int32 global expert ids; ids of no expert are dropped.
            routing: None: rows are not sent along an earlier routing.
            return_routing: also return the handle that combine needs. Allocates.

        Returns:
            out `[R, columns]`, out_weights `[R, k]` float32, out_scales `[R, scale_dim]` (None without scales),
            out_indices `[R, k]` int32, total_recv `[1]` int32, and with `return_routing` an `EpDispatchRoutingHandle`.
            Rows from total_recv on hold anything.

        Raises:
            ArgumentError: a `ValueError`: an argument is not as above; nothing was launched.
            NotSupported: a `NotImplementedError`: `routing` is given.
            StateError: closed, finalized, or broken by an earlier failure.
            ReceiveOverflow: more than `R` rows came; those beyond were dropped. The round can go on with combine and
                `last_routing`. On a GPU a later call raises it, before it launches anything.
            PeerTimeout: a peer's rows did not come in time; `reset` makes the op usable again.
        """
        require(routing is None or not return_routing, "routing", "None with return_routing", routing)
        if routing is not None:
            raise NotSupported("routing: want None: EPv2 replays no routing; ops.EpDispatchCombineOp does")
        require(isinstance(indices, torch.Tensor), "indices", "a torch.Tensor", type(indices).__name__)
        n, most = len(indices), self.cfg.max_num_inp_token_per_rank
        if n > most:
            raise ArgumentError(f"indices.shape[0]: want <= max_num_inp_token_per_rank = {most}, got {n}")
        plan = next(plan for fits, plan in self._dispatch_plans if n <= fits)
        handle = self.last_routing = self.arena.new_routing(n) if return_routing else None
        result = plan.launch(input=input, weights=weights, scales=scales, indices=indices, routing=handle)
        return result if handle is None else (*result, handle)

    def combine(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | bool | None = None,
        indices: torch.Tensor | None = None,
        *,
        routing: EpDispatchRoutingHandle,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring the rows back and sum them by token, unweighted. Collective.

        Args:
            input: `[>= total_recv, columns]` of `cfg.combine_dtype`, row r belongs to row r of dispatch's outputs.
                `combine_in_view()` is used as it is, anything else is copied.
            weights: a request: anything but None and False also sums the weights that dispatch brought. Where peers
                dispatched without weights the sums are of what the buffer held.
            indices: not looked at: `routing` counts.
            routing: the handle of the dispatch whose rows these are.

        Returns:
            out `[n, columns]`: for each token the float32 sum of its rows over its distinct PEs, in the order of its
            ids, rounded once, and out_weights `[n, k]` float32, summed alike, or None.

        Raises:
            ArgumentError: an argument is not as above; nothing was launched.
            StateError: closed, finalized, or broken; weights are asked for that a later dispatch has overwritten; or a
                second combine in a row is given `combine_in_view()`, which peers may still be reading.
            PeerTimeout: a peer's rows did not come in time; `reset` makes the op usable again.
        """
        forwarded = None
        if weights is not None and weights is not False:
            last = self.arena._routing
            if last is not None and last is not routing and isinstance(routing, EpDispatchRoutingHandle):
                same = last.disp_dest_tok_id_map.data_ptr() == routing.disp_dest_tok_id_map.data_ptr()
                if not same:
                    raise StateError("combine: weights that dispatch brought are gone: another dispatch came later")
            forwarded = self.recv_weights()
        return self._combine_plan.launch(input=input, weights=forwarded, routing=routing)

    def recv_tokens(self) -> torch.Tensor:
        """`[R, columns]` of `cfg.dispatch_dtype`: the rows that dispatch brought."""
        return self.arena.recv_tokens()

    def recv_weights(self) -> torch.Tensor:
        """`[R, k]` float32."""
        return self.arena.recv_weights()

    def recv_indices(self) -> torch.Tensor:
        """`[R, k]` int32."""
        return self.arena.recv_indices()

    def recv_scales(self) -> torch.Tensor | None:
        """`[R, scale bytes]` uint8, rows `scale_stride_bytes` apart; None without scales."""
        return self.arena.recv_scales()

    def combine_in_view(self) -> torch.Tensor:
        """`[R, columns]` of `cfg.combine_dtype`: experts' outputs written here, after dispatch, need no copy."""
        return self.arena.combine_in_view()

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """Whose rows dispatch brought, int32 `[total_recv]`, `source PE * M + token`; between dispatch and combine."""
        return self.arena.get_dispatch_src_token_pos()

    def reset(self) -> None:
        """As after construction: forget the round in progress and any failure. Collective, waits for kernels."""
        self.arena.reset()

    def close(self) -> None:
        """Give plans, staging buffer and arena back. Collective, idempotent."""
        self._close_plans()
        self.arena.close()

    def _close_plans(self) -> None:
        for plan in (*(plan for _, plan in self._dispatch_plans), self._combine_plan):
            plan.close()
        self._staging = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> EpDispatchCombineOp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._close_plans()
        # which knows what may be given back after an error
        self.arena.__exit__(kind, error, trace)
