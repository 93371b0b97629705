"""EpDispatchCombineOp: MORI's dispatch/combine over the symmetric heap.

Every call follows a plan that the first call of its kind made: `ops.plans`. docs/protocol.md says why one set of
buffers is enough.
"""

from __future__ import annotations

from typing import Any

import torch

from mori_triton.errors import StateError, require
from mori_triton.ops.calls import CombineCall, DispatchCall
from mori_triton.ops.combine import check_combine, check_contents, recv_step
from mori_triton.ops.dispatch import check_dispatch, is_absent
from mori_triton.ops.local_expert_count import local_expert_count
from mori_triton.ops.op_base import EpOpBase
from mori_triton.ops.plans import Plan, plan_key
from mori_triton.ops.routing import EpDispatchRoutingHandle, check_handle, new_handle

_Combined = tuple[torch.Tensor, torch.Tensor | None]


class EpDispatchCombineOp(EpOpBase):
    """Sends tokens to the PEs of their experts and the experts' outputs back.

    Collective to construct, to call, to `reset` and to `close`: every PE, same order. Several ops may live at once,
    each with its own buffers. Outputs are views of the op's buffers: dispatch's are valid until the next call of the
    op, for a peer that has the rows back may already send the next ones, and combine's until the next combine.

    Calls are asynchronous on a GPU, and after the first of a kind (shapes, types) they neither compile, allocate nor
    wait for the device, so they can be captured in a graph. An error of a kernel is raised by the next call that looks:
    any of the op's that is not captured, `shmem_barrier_all`, finalize. On the emulated device the call itself raises.

    Args:
        config: the problem, equal on every PE but for `rank`.

    Raises:
        StateError: shmem is not initialised.
        ArgumentError: rank or world size are not this PE's, a peer is not reachable by load/store, or PEs' configs
            differ.
        HeapError: the symmetric heap has no room; the message says how many bytes this config needs.
    """

    # -- dispatch --------------------------------------------------------------------------------------------

    def dispatch(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
        return_routing: bool = False,
    ) -> tuple[Any, ...]:
        """Send every token once to each distinct PE of its experts. Collective; `h` and dtype are the same on every PE.

        Args:
            input: `[n, h]` of one of `PAYLOAD_DTYPES`, contiguous, `0 <= n <= M`, `h <= hidden_dim`. Travels bit for
                bit.
            weights: `[n, k]` float32, or None (on every PE, except where `n` is 0).
            scales: `[n, scale_dim]` of `scale_type_size` bytes an entry, or None; travels unread.
            indices: `[n, k]` int32 global expert ids. Ids outside `[0, world_size * num_experts_per_rank)` are dropped,
                a PE named twice in a row gets the token once.
            block_num, rdma_block_num, warp_per_block: launch shape, see `get_launch_config`.
            call_local_expert_count: also fill `self.local_expert_count`, int32 `[num_experts_per_rank]`.
            routing: a handle: send to the same PEs and slots as the dispatch that made it, whatever `indices` say. On
                every PE or on none.
            return_routing: also return a new handle, which stays good when the op dispatches again. Allocates.

        Returns:
            out `[R, h]`, out_weights `[R, k]` float32, out_scales `[R, scale_dim]` (None without scales), out_indices
            `[R, k]` int32, total_recv `[1]` int32, and with `return_routing` an `EpDispatchRoutingHandle`. Rows from
            total_recv on hold anything, and so does out_weights when the senders gave none. Rows come in no particular
            order unless the config is `deterministic`: `get_dispatch_src_token_pos` tells whose each is. All but
            total_recv, which is good until the next dispatch, may be overwritten once the op is called again.

        Raises:
            ArgumentError: an argument is not as above; nothing was launched.
            StateError: closed, finalized, broken by an earlier failure, or something sent waits for its `_recv`.
            ReceiveOverflow: more than `R` rows came (`max_total_recv_tokens` is too small); those beyond were dropped,
                the round can go on with combine. On a GPU a later call raises it, before it launches anything.
            PeerTimeout: a peer's rows did not come in time; `reset` makes the op usable again. Or a wait of the
                caller's own kernels did not end: then nothing was launched.
        """
        launch = block_num, warp_per_block
        result = self._dispatch("dispatch", input, weights, scales, indices, launch, routing, return_routing)
        self._arrived("dispatch", call_local_expert_count)
        return result

    def dispatch_send(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
    ) -> tuple[Any, ...]:
        """The sending half of `dispatch`: waits for no rows (`deterministic`: for counts). Then comes `dispatch_recv`.

        Args and errors: as `dispatch`; `call_local_expert_count` is for `dispatch_recv` to do.

        Returns:
            What `dispatch` returns; it holds what came when `dispatch_recv` is through.
        """
        return self._dispatch(
            "dispatch_send", input, weights, scales, indices, (block_num, warp_per_block), None, False
        )

    def dispatch_recv(
        self, block_num: int = -1, warp_per_block: int = -1, call_local_expert_count: bool = False
    ) -> None:
        """The waiting half. Collective. It takes nothing of the caller's: what `dispatch_send` was given may be gone.

        Args:
            block_num, warp_per_block: not used, one program waits.
            call_local_expert_count: also fill `self.local_expert_count`.

        Raises:
            StateError: no `dispatch_send` waits for it, closed, finalized, or broken.
            ReceiveOverflow, PeerTimeout: as `dispatch`.
        """
        self._receive("dispatch")
        self._arrived("dispatch", call_local_expert_count)

    def _dispatch(
        self,
        what: str,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        launch: tuple[int, int],
        routing: EpDispatchRoutingHandle | None,
        return_routing: bool,
    ) -> tuple[Any, ...]:
        require(routing is None or not return_routing, "routing", "None with return_routing", routing)
        capturing = self._begin(what)
        replay = routing is not None
        key = what, launch, replay, plan_key(input), plan_key(weights), plan_key(scales), plan_key(indices)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan_dispatch(key, what == "dispatch", input, weights, scales, indices, launch, replay)
        given = {
            "tokens": self._outside("input", input),
            "weights": self._outside("weights", weights),
            "scales": self._outside("scales", scales),
            "indices": self._outside("indices", indices),
        }
        n = indices.shape[0]
        if return_routing:
            routing = new_handle(self.config, self.device, n, indices.clone() if self._on_host else None)
        elif routing is not None:
            check_handle(routing, self.config, self.device, n)
        where = routing or self._own_routing
        given["forward"] = self._argument(where.disp_dest_tok_id_map)
        given["total"] = self._argument(where.total_recv_token_num)
        self._run("dispatch", plan, given, capturing)
        self._routing, self._num_tokens = where, n
        self._dispatched = indices.clone() if self._on_host else None
        if plan.rest is not None:
            self._pending = "dispatch", plan.rest, {"forward": given["forward"], "total": given["total"]}
        elif return_routing:
            where.disp_tok_id_to_src_tok_id_local.copy_(self._own_routing.disp_tok_id_to_src_tok_id_local)
        result = (*plan.result, where.total_recv_token_num)
        return (*result, where) if return_routing else result

    def _plan_dispatch(
        self,
        key: Any,
        wait: bool,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        launch: tuple[int, int],
        replay: bool,
    ) -> Plan:
        """The plan of a dispatch; raises `ArgumentError` for what `dispatch` cannot take."""
        config = self.config
        data = check_dispatch(config, self.device, input, weights, scales, indices)
        (n, h), dtype = input.shape, input.dtype
        call = DispatchCall(
            config, self._buffers, self._state.heap.ctx, self._own_routing,
            self._shape("dispatch", n, h, dtype, *launch), wait, self._step,
            data=data, replay=replay,
        )  # fmt: skip
        rows, k = config.max_recv, config.num_experts_per_token
        out_scales = None
        if data.scales is not None:
            out_scales = call.view("recv_scales", rows, config.scale_dim, dtype=data.scales.dtype)
        result = (
            call.view("recv_tokens", rows, h, dtype=dtype),
            call.view("recv_weights", rows, k, dtype=torch.float32),
            out_scales,
            call.view("recv_indices", rows, k, dtype=torch.int32),
        )
        rest = None if wait else Plan(self._pipeline.dispatch_rest(call))
        return self._keep(key, Plan(self._pipeline.dispatch(call), result, rest))

    def _arrived(self, kind: str, count_experts: bool = False) -> None:
        """The launches of a call are through, or on a GPU on their way."""
        self._last = kind
        if count_experts:
            assert self._routing is not None
            ids = self._buffers.view(
                "recv_indices", torch.int32, self.config.max_recv, self.config.num_experts_per_token
            )
            local_expert_count(self.config, ids, self._routing.total_recv_token_num, self.local_expert_count)
        if self._on_host:
            self._raise_errors()

    # -- combine ---------------------------------------------------------------------------------------------

    def combine(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring the rows back and sum them by token, unweighted. Collective: `h`, dtype, weights or none on every PE.

        Args:
            input: `[>= total_recv, h]`, row r belongs to row r of dispatch's outputs. Dtype and `h` may differ from
                dispatch's. The buffer of `get_registered_combine_input_buffer` is used as it is, anything else is
                copied.
            weights: `[>= total_recv, k]` float32, or None.
            indices: `[n, k]` int32, the tensor given to dispatch, not what dispatch returned. Checked, not used: the
                routing of dispatch is what counts.
            block_num, rdma_block_num, warp_per_block: launch shape, see `get_launch_config`.
            use_external_inp_buf: -1: as configured; 0: `input` must be the registered buffer.
            call_reset: `reset` afterwards.
            routing: the handle of the dispatch whose rows these are; None: of the last dispatch that was called or
                captured, which is not that of a graph replayed since.

        Returns:
            out `[M, h]`: for each token the float32 sum of its rows over its distinct PEs, in the order of its ids,
            rounded once (0 for a token that went nowhere), and out_weights `[M, k]` float32, summed alike, or None.
            Rows from n on hold anything, also rows of earlier rounds: slice by n.

        Raises:
            ArgumentError: an argument is not as above; nothing was launched.
            StateError: closed, finalized, broken, something sent waits for its `_recv`, there was no dispatch, or a
                second combine in a row is given the registered buffer, which peers may still be reading.
            PeerTimeout: a peer's rows did not come in time; `reset` makes the op usable again. Or a wait of the
                caller's own kernels did not end: then nothing was launched.
        """
        launch = block_num, warp_per_block
        if call_reset:
            self._check_not_captured("combine with call_reset")
        result = self._combine("combine", input, weights, indices, launch, use_external_inp_buf, routing)
        self._arrived("combine")
        if call_reset:
            self.reset()
        return result

    def combine_send(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sending half of `combine`: waits for no peer. The next call of the op has to be `combine_recv`.

        Args and errors: as `combine`.

        Returns:
            What `combine` returns; it holds the sums when `combine_recv` is through.
        """
        return self._combine("combine_send", input, weights, indices, (block_num, warp_per_block), -1, None)

    def combine_recv(self, block_num: int = -1, warp_per_block: int = -1) -> None:
        """The waiting and summing half. Collective. It takes nothing of the caller's.

        Args:
            block_num, warp_per_block: not used: the launch shape is that of `combine_send`.

        Raises:
            StateError: no `combine_send` waits for it, closed, finalized, or broken.
            PeerTimeout: as `combine`.
        """
        self._receive("combine")
        self._arrived("combine")

    def _combine(
        self,
        what: str,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        launch: tuple[int, int],
        use_external_inp_buf: int,
        routing: EpDispatchRoutingHandle | None,
    ) -> _Combined:
        capturing = self._begin(what)
        if routing is not None:
            check_handle(routing, self.config, self.device)
        where = routing or self._routing
        if where is None:
            raise StateError(f"{what}: no dispatch came before, and no routing is given")
        n = self._num_tokens if routing is None else routing.cur_rank_num_token
        has_rows = isinstance(input, torch.Tensor) and input.numel() > 0
        region = self._buffers.region_of(input.data_ptr()) if has_rows else None
        in_place = region == "combine_in"
        key = what, launch, use_external_inp_buf, region, n, plan_key(input), plan_key(weights), plan_key(indices)
        plan = self._plans.get(key)
        if plan is None:
            brought = input, weights, indices
            plan = self._plan_combine(key, what == "combine", region, n, use_external_inp_buf, launch, *brought)
        given = {"rows": self._argument(input), "weights": self._argument(weights)}
        if in_place and input.data_ptr() != self._buffers.address("combine_in"):
            require(False, "input", "the registered buffer from its start, or other memory", "a part from within it")
        if self._on_host:
            total = int(where.total_recv_token_num[0])
            dispatched = self._dispatched if routing is None else routing.indices
            check_contents(input, None if is_absent(weights, 0) else weights, indices, dispatched, total)
        is_read = in_place and self._pipeline.peers_read_input
        if is_read and self._last == "combine" and self._knows_last(capturing):
            raise StateError(f"{what}: peers may still read the registered buffer: a combine came last, not a dispatch")
        given["forward"] = self._argument(where.disp_dest_tok_id_map)
        given["total"] = self._argument(where.total_recv_token_num)
        given["sources"] = self._argument(where.disp_tok_id_to_src_tok_id_local)
        self._run("combine", plan, given, capturing)
        if plan.rest is not None:
            self._pending = "combine", plan.rest, {"forward": given["forward"]}
        return plan.result

    def _plan_combine(
        self,
        key: Any,
        wait: bool,
        region: str | None,
        num_tokens: int,
        use_external_inp_buf: int,
        launch: tuple[int, int],
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
    ) -> Plan:
        """The plan of a combine; raises `ArgumentError` for what `combine` cannot take."""
        config = self.config
        require(use_external_inp_buf in (-1, 0, 1), "use_external_inp_buf", "-1, 0 or 1", use_external_inp_buf)
        if is_absent(weights, 0):
            weights = None
        check_combine(config, self.device, rows, weights, indices, num_tokens=num_tokens)
        external = config.use_external_inp_buf if use_external_inp_buf == -1 else use_external_inp_buf
        want = "the buffer of get_registered_combine_input_buffer, as use_external_inp_buf is off"
        in_place = region == "combine_in"
        require(bool(external) or in_place or rows.numel() == 0, "input", want, f"a tensor at {rows.data_ptr():#x}")
        shape = self._shape("combine", num_tokens, rows.shape[1], rows.dtype, *launch, zero_copy=in_place)
        call = CombineCall(
            config, self._buffers, self._state.heap.ctx, self._own_routing, shape, wait, self._step,
            rows=rows, weights=weights, num_tokens=num_tokens, region=region,
        )  # fmt: skip
        send, reduce = self._pipeline.combine(call)
        if wait:
            return self._keep(key, Plan([*send, *reduce], call.result()))
        return self._keep(key, Plan(send, call.result(), Plan([recv_step(call), *reduce])))

    # -- inside ----------------------------------------------------------------------------------------------

    def _outside(self, name: str, tensor: torch.Tensor | None) -> Any:
        """As `_argument`; raises `ArgumentError` for memory that peers write during a dispatch."""
        if tensor is not None:
            self._buffers.check_outside(name, tensor)
        return self._argument(tensor)

    def _receive(self, kind: str) -> None:
        """Run the rest of a call that was sent."""
        capturing = self._begin(f"{kind}_recv")
        if self._pending is None:
            raise StateError(f"{kind}_recv: there was no {kind}_send")
        _, plan, given = self._pending
        self._pending = None
        self._run(kind, plan, given, capturing, is_rest=True)
