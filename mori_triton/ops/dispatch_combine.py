"""EpDispatchCombineOp: MORI's dispatch/combine over the symmetric heap, as a host state machine around five kernels.

Rounds alternate strictly: dispatch, combine, dispatch, combine. docs/protocol.md says why one
set of buffers is then enough.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from types import TracebackType
from typing import Any

import torch

from mori_triton.errors import ArgumentError, HeapError, ReceiveOverflow, StateError, require
from mori_triton.host import state as host_state
from mori_triton.ops.buffers import EpBuffers, ep_buffer_layout
from mori_triton.ops.combine import check_combine, launch_combine
from mori_triton.ops.config import PAYLOAD_DTYPES, EpDispatchCombineConfig
from mori_triton.ops.dispatch import check_dispatch, is_absent, launch_dispatch
from mori_triton.ops.local_expert_count import local_expert_count
from mori_triton.ops.tuning import EpLaunchConfig, launch_config

# what a new or reset op starts from; the other buffers are written before they are read
_CONTROL_WORDS = (
    "dispatch_signals",
    "combine_signals",
    "recv_slots",
    "total_recv",
    "overflow",
    "epoch",
    "dispatch_arrivals",
    "combine_arrivals",
)


class _Phase(enum.Enum):
    IDLE = "waiting for dispatch"
    DISPATCHED = "waiting for combine"
    BROKEN = "broken by a failed launch or wait; call reset() on every PE"
    CLOSED = "closed"


class EpDispatchCombineOp:
    """Sends tokens to the PEs of their experts and the experts' outputs back.

    Collective to construct, to call, to `reset` and to `close`: every PE, same order. Several ops may live at once,
    each with its own buffers. Outputs are views of the op's buffers: dispatch's are valid until combine is called, for
    a peer that has the rows back may already send the next ones, and combine's until the next combine.

    Args:
        config: the problem, equal on every PE but for `rank`.

    Raises:
        StateError: shmem is not initialised.
        ArgumentError: rank or world size are not this PE's, a peer is not reachable by load/store, or PEs' configs
            differ.
        HeapError: the symmetric heap has no room; the message says how many bytes this config needs.
    """

    def __init__(self, config: EpDispatchCombineConfig) -> None:
        self._phase = _Phase.CLOSED
        state = host_state.current()
        require(
            config.world_size == state.n_pes,
            "config.world_size",
            f"{state.n_pes}, the number of PEs",
            config.world_size,
        )
        require(config.rank == state.pe, "config.rank", f"{state.pe}, this PE", config.rank)
        self.config, self._state = config, state
        self._check_same_config()
        far = [pe for pe in range(config.world_size) if not state.heap.reaches(pe)]
        require(
            not far,
            "kernel_type",
            "one that crosses nodes",
            f"IntraNode, but PEs {far} are not reachable by load/store",
        )
        self._layout = ep_buffer_layout(config)
        need = self._layout.num_bytes
        try:
            self._address = state.heap.malloc(need, name="EpDispatchCombineOp")
        except HeapError as error:
            raise HeapError(
                f"EpDispatchCombineOp needs {need} bytes of every PE's symmetric heap for {config}: {error}"
            ) from error
        self._buffers = EpBuffers(self._layout, self._address, state.driver)
        self.device = state.heap.ctx.device
        self.local_expert_count = torch.zeros(config.num_experts_per_rank, dtype=torch.int32, device=self.device)
        self._dispatched = torch.empty(0, config.num_experts_per_token, dtype=torch.int32)
        self._num_tokens = 0
        # a fast peer's first write must not meet this PE's zeros: clear, finish, and only then let anyone go on
        self._clear()
        state.bootstrap.barrier("EpDispatchCombineOp: buffers are clear")
        self._phase = _Phase.IDLE

    # -- sizes -----------------------------------------------------------------------------------------------

    def max_num_tokens_to_recv(self) -> int:
        """Rows of dispatch's outputs, `R`."""
        return self.config.max_recv

    def max_num_tokens_to_recv_per_rank(self) -> int:
        """Rows counted on from one PE."""
        return self.config.max_recv_per_rank

    def max_num_tokens_to_send(self) -> int:
        """The most (token, destination PE) pairs of one PE."""
        return self.config.world_size * self.config.max_num_inp_token_per_rank

    def max_num_tokens_to_send_per_rank(self) -> int:
        """The most tokens of one call, `M`."""
        return self.config.max_num_inp_token_per_rank

    def get_launch_config(
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]:
        """The (programs, RDMA programs, warps) that a call with these arguments uses.

        -1 leaves the choice to `ops.tuning`. A launch shape never changes a result, and any number of programs is fine.

        Raises:
            ArgumentError: `block_num` not -1 or >= 1, `warp_per_block` not -1 or a power of two up to 16.
        """
        shape = self._shape(block_num, warp_per_block)
        return shape.num_programs, 0, shape.num_warps

    def _shape(self, block_num: int, warp_per_block: int) -> EpLaunchConfig:
        require(block_num == -1 or block_num >= 1, "block_num", "-1 or >= 1", block_num)
        require(warp_per_block in (-1, 1, 2, 4, 8, 16), "warp_per_block", "-1, 1, 2, 4, 8 or 16", warp_per_block)
        shape = launch_config(self.device.type)
        return dataclasses.replace(
            shape,
            num_programs=shape.num_programs if block_num == -1 else block_num,
            num_warps=shape.num_warps if warp_per_block == -1 else warp_per_block,
        )

    # -- one round -------------------------------------------------------------------------------------------

    @torch.no_grad()
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
        routing: Any = None,
        return_routing: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Send every token once to each distinct PE of its experts. Collective; `h` and dtype are the same on every PE.

        Args:
            input: `[n, h]` float32, bfloat16 or float16, contiguous, `0 <= n <= M`, `h <= hidden_dim`.
            weights: `[n, k]` float32, or None (on every PE, except where `n` is 0).
            scales: `[n, scale_dim]` of `scale_type_size` bytes an entry, or None; travels unread.
            indices: `[n, k]` int32 global expert ids. Ids outside `[0, world_size * num_experts_per_rank)` are dropped,
                a PE named twice in a row gets the token once.
            block_num, rdma_block_num, warp_per_block: launch shape, see `get_launch_config`.
            call_local_expert_count: also fill `self.local_expert_count`, int32 `[num_experts_per_rank]`.
            routing, return_routing: MORI's routing handles, not supported yet.

        Returns:
            out `[R, h]`, out_weights `[R, k]` float32, out_scales `[R, scale_dim]` (None without scales), out_indices
            `[R, k]` int32 and total_recv `[1]` int32. Rows from total_recv on hold anything, and so does out_weights
            when the senders gave none. Rows come in no particular order: `get_dispatch_src_token_pos` tells whose each
            is. All but total_recv, which is good until the next dispatch, may be overwritten once combine is called.

        Raises:
            ArgumentError: an argument is not as above; nothing was launched.
            StateError: closed, finalized, or the last dispatch still waits for its combine; nothing was launched.
            ReceiveOverflow: more than `R` rows came (`max_total_recv_tokens` is too small); those beyond were dropped,
                the round can go on with combine.
            PeerTimeout: a peer's rows did not come in time; `reset` makes the op usable again. Or a wait of the
                caller's own kernels did not end: then nothing was launched.
        """
        self._check_usable()
        if self._phase is not _Phase.IDLE:
            raise StateError(f"dispatch: the op is {self._phase.value}; dispatch and combine alternate")
        require(
            routing is None and not return_routing, "routing", "None: routing handles are not supported yet", routing
        )
        shape = self._shape(block_num, warp_per_block)
        given = check_dispatch(self.config, self.device, input, weights, scales, indices)
        for name, tensor in (("input", input), ("weights", weights), ("scales", scales), ("indices", indices)):
            region = self._region_of(tensor)
            mine = region is None or not region.startswith("recv_")
            require(mine, name, "memory that peers do not write meanwhile", f"dispatch's own output ({region})")
        self._check_errors()
        self._phase = _Phase.BROKEN
        launch_dispatch(self._buffers, self._state.heap.ctx, self.config, given, shape)
        self._check_errors()
        self._phase = _Phase.DISPATCHED
        self._num_tokens = len(indices)
        self._dispatched = indices.clone() if self._on_host() else indices[:0]
        rows, k = self.config.max_recv, self.config.num_experts_per_token
        out_indices = self._buffers.view("recv_indices", torch.int32, rows, k)
        total = self._buffers.view("total_recv", torch.int32, 1)
        if call_local_expert_count:
            local_expert_count(self.config, out_indices, total, self.local_expert_count)
        self._check_overflow()
        out_scales = None
        if given.scales is not None:
            out_scales = self._buffers.view("recv_scales", given.scales.dtype, rows, self.config.scale_dim)
        return (
            self._buffers.view("recv_tokens", input.dtype, rows, input.shape[1]),
            self._buffers.view("recv_weights", torch.float32, rows, k),
            out_scales,
            out_indices,
            total,
        )

    @torch.no_grad()
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
        routing: Any = None,
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
            routing: MORI's routing handles, not supported yet.

        Returns:
            out `[M, h]`: for each token the float32 sum of its rows over its distinct PEs, in the order of its ids,
            rounded once (0 for a token that went nowhere), and out_weights `[M, k]` float32, summed alike, or None.
            Rows from n on hold anything, also rows of earlier rounds: slice by n.

        Raises:
            ArgumentError: an argument is not as above; nothing was launched.
            StateError: closed, finalized, or no dispatch waits for a combine; nothing was launched.
            PeerTimeout: a peer's rows did not come in time; `reset` makes the op usable again. Or a wait of the
                caller's own kernels did not end: then nothing was launched.
        """
        self._check_usable()
        if self._phase is not _Phase.DISPATCHED:
            raise StateError(f"combine: the op is {self._phase.value}; dispatch and combine alternate")
        require(routing is None, "routing", "None: routing handles are not supported yet", routing)
        require(use_external_inp_buf in (-1, 0, 1), "use_external_inp_buf", "-1, 0 or 1", use_external_inp_buf)
        shape = self._shape(block_num, warp_per_block)
        if is_absent(weights, 0):
            weights = None
        check_combine(
            self.config, self.device, input, weights, indices,
            dispatched=self._dispatched, num_tokens=self._num_tokens, num_received=self._num_received(),
        )  # fmt: skip
        external = self.config.use_external_inp_buf if use_external_inp_buf == -1 else use_external_inp_buf
        registered = self._address + self._layout["combine_in"].offset
        in_place = input.data_ptr() == registered or input.numel() == 0
        want = "the buffer of get_registered_combine_input_buffer, as use_external_inp_buf is off"
        require(bool(external) or in_place, "input", want, f"a tensor at {input.data_ptr():#x}, not {registered:#x}")
        apart = in_place or self._region_of(input) != "combine_in"
        require(apart, "input", "the registered buffer from its start, or other memory", "a part from within it")
        self._check_errors()
        self._phase = _Phase.BROKEN
        ctx = self._state.heap.ctx
        results = launch_combine(self._buffers, ctx, self.config, input, weights, self._num_tokens, shape)
        self._check_errors()
        self._phase = _Phase.IDLE
        if call_reset:
            self.reset()
        return results

    def reset(self) -> None:
        """As after construction: forget the round in progress and any failure. Collective, waits for kernels."""
        self._check_usable()
        # nobody clears while a peer may still signal, and nobody starts before all have cleared
        self._state.driver.synchronize()
        self._state.bootstrap.barrier("EpDispatchCombineOp.reset: kernels are done")
        self._state.heap.take_errors()
        self._clear()
        self._state.bootstrap.barrier("EpDispatchCombineOp.reset: buffers are clear")
        self._dispatched, self._num_tokens = self._dispatched[:0], 0
        self._phase = _Phase.IDLE

    # -- what a round left behind ----------------------------------------------------------------------------

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """Whose rows dispatch brought: int32 `[total_recv]`, `source PE * M + token`. Waits for the device.

        `decode_send_flat_idx` takes it apart. A view, valid until combine is called; StateError at other times.
        """
        self._check_usable()
        if self._phase is not _Phase.DISPATCHED:
            raise StateError(
                f"get_dispatch_src_token_pos: the op is {self._phase.value}; ask between dispatch and combine, "
                "afterwards peers may be writing the next round's"
            )
        self._state.driver.synchronize()
        total = int(self._buffers.view("total_recv", torch.int32, 1)[0])
        return self._buffers.view("recv_sources", torch.int32, self.config.max_recv)[:total]

    def decode_send_flat_idx(self, flat_idx: Any) -> tuple[Any, Any]:
        """(source PE, token) of an entry of `get_dispatch_src_token_pos`; elementwise for a tensor of them."""
        most = self.config.max_num_inp_token_per_rank
        return flat_idx // most, flat_idx % most

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """`[R, hidden_dim]` of the buffer that peers read in combine: rows written here need no copy. -1: full width.

        Write it between dispatch and combine only; at other times peers may be reading it.
        """
        self._check_usable()
        h = self.config.hidden_dim if hidden_dim == -1 else hidden_dim
        require(dtype in PAYLOAD_DTYPES, "dtype", " or ".join(map(str, PAYLOAD_DTYPES)), dtype)
        require(1 <= h <= self.config.hidden_dim, "hidden_dim", f"in [1, {self.config.hidden_dim}] or -1", h)
        wide = self.config.max_token_type_size
        require(dtype.itemsize <= wide, "dtype", f"at most max_token_type_size = {wide} bytes", dtype)
        return self._buffers.view("combine_in", dtype, self.config.max_recv, h)

    # -- end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the buffers back. Collective, idempotent; after shmem was finalized there is nothing to give back."""
        if self._phase is _Phase.CLOSED:
            return
        self._phase = _Phase.CLOSED
        if self._state.heap.closed:
            return
        self._state.driver.synchronize()
        # a peer may still be reading rows from here
        self._state.bootstrap.barrier("EpDispatchCombineOp.close")
        self._state.heap.free(self._address)

    def __enter__(self) -> EpDispatchCombineOp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            # the peers may be anywhere: a barrier could wait for ever, and freed memory could be written
            self._phase = _Phase.CLOSED

    # -- inside ----------------------------------------------------------------------------------------------

    def _on_host(self) -> bool:
        """Whether launches are over when they return and memory is read without waiting: the emulated device."""
        return self.device.type == "cpu"

    def _check_errors(self) -> None:
        """Raise what kernels have recorded; before a launch too, so that a caller's own failure spoils no round."""
        if self._on_host():
            self._state.heap.check_errors()

    def _region_of(self, tensor: torch.Tensor | None) -> str | None:
        """The op's buffer that a tensor begins in, None for other memory."""
        if tensor is None or tensor.numel() == 0:
            return None
        offset = tensor.data_ptr() - self._address
        return next((r.name for r in self._layout.regions if r.offset <= offset < r.offset + r.num_bytes), None)

    def _num_received(self) -> int | None:
        return int(self._buffers.view("total_recv", torch.int32, 1)[0]) if self._on_host() else None

    def _check_usable(self) -> None:
        if self._phase is _Phase.CLOSED:
            raise StateError("the EpDispatchCombineOp is closed")
        if host_state.current() is not self._state:
            raise StateError("the EpDispatchCombineOp belongs to a world that was finalized, or to another PE")

    def _check_overflow(self) -> None:
        if self._on_host():
            lost = int(self._buffers.view("overflow", torch.int64, 1)[0])
            if lost:
                self._buffers.view("overflow", torch.int64, 1).zero_()
                rows = self.config.max_recv
                raise ReceiveOverflow(
                    f"PE {self.config.rank} was sent {rows + lost} rows, {lost} more than its buffers hold "
                    f"(R = {rows}, from max_total_recv_tokens = {self.config.max_total_recv_tokens}); they were dropped"
                )

    def _check_same_config(self) -> None:
        fields = {
            f.name: str(getattr(self.config, f.name)) for f in dataclasses.fields(self.config) if f.name != "rank"
        }
        everyone = self._state.bootstrap.allgather(json.dumps(fields).encode(), "EpDispatchCombineOp: config")
        for name in fields:
            values = [json.loads(other)[name] for other in everyone]
            if len(set(values)) > 1:
                each = ", ".join(f"PE {pe}: {value}" for pe, value in enumerate(values))
                raise ArgumentError(f"config.{name}: want one value on every PE, got {each}")

    def _clear(self) -> None:
        for name in _CONTROL_WORDS:
            region = self._layout[name]
            self._state.driver.memset(self._address + region.offset, 0, region.num_bytes)
        self._state.driver.synchronize()
