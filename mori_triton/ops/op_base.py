"""What a dispatch/combine op is besides its calls: buffers, life from constructor to close, errors of its kernels."""

from __future__ import annotations

import dataclasses
import enum
import json
import struct
from types import TracebackType
from typing import Any

import torch

from mori_triton.errors import ArgumentError, HeapError, StateError, require
from mori_triton.host import context
from mori_triton.host import state as host_state
from mori_triton.host.drivers.base import MemoryKind
from mori_triton.host.shared_memory import SharedMemory
from mori_triton.ops.buffers import CLEARED, EpBuffers, ep_buffer_layout
from mori_triton.ops.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_triton.ops.kernels.finish import COMBINED, DISPATCHED, LAST, STATUS, sync_kernel
from mori_triton.ops.pipelines import pipeline_of
from mori_triton.ops.plans import Plan, Step, StepMaker
from mori_triton.ops.routing import EpDispatchRoutingHandle
from mori_triton.ops.tuning import EpLaunchConfig, device_names, launch_config, tables_for
from mori_triton.wait_sites import register_wait_site

SYNC_TAG = register_wait_site("EpDispatchCombineOp: meeting between two calls of a kind (sync_kernel)")
# plans kept; a caller whose token counts never repeat would otherwise fill the memory
_MOST_PLANS = 4096


class Phase(enum.Enum):
    """Whether an op can be called."""

    READY = "ready"
    BROKEN = "broken by a failed launch or wait; call reset() on every PE"
    CLOSED = "closed"


class EpOpBase:
    """The life of an op. Collective to construct, `reset` and `close`: every PE, same order."""

    def __init__(self, config: EpDispatchCombineConfig) -> None:
        self._phase = Phase.CLOSED
        state = host_state.current()
        require(
            config.world_size == state.n_pes,
            "config.world_size",
            f"{state.n_pes}, the number of PEs",
            config.world_size,
        )
        require(config.rank == state.pe, "config.rank", f"{state.pe}, this PE", config.rank)
        self.device = state.heap.ctx.device
        config = self._chosen(config, state)
        self.config, self._state = config, state
        self._pipeline = pipeline_of(config)
        self._check_same_config()
        far = [pe for pe in range(config.world_size) if not state.heap.reaches(pe)]
        got = f"{config.kernel_type.name}, but PEs {far} are not reachable by load/store"
        require(not far, "kernel_type", "one that crosses nodes", got)
        # before anything is allocated: a table may be malformed
        self._tables = tables_for(state, self.device, config.kernel_type.name)
        self._layout = ep_buffer_layout(config)
        need = self._layout.num_bytes
        try:
            self._address = state.heap.malloc(need, name="EpDispatchCombineOp")
        except HeapError as error:
            raise HeapError(
                f"EpDispatchCombineOp needs {need} bytes of every PE's symmetric heap for {config}: {error}"
            ) from error
        self._payload = self._share_payload()
        payload_base = 0 if self._payload is None else self._payload.base
        self._buffers = EpBuffers(self._layout, self._address, state.driver, payload_base)
        self._on_host = self.device.type == "cpu"
        self._step = StepMaker()
        self._plans: dict[Any, Plan] = {}
        self._launch_override: dict[str, EpLaunchConfig] = {}
        self.local_expert_count = torch.zeros(config.num_experts_per_rank, dtype=torch.int32, device=self.device)
        self._own_routing = EpDispatchRoutingHandle(
            self._buffers.region("forward").view(-1, config.num_experts_per_token),
            torch.empty(0, dtype=torch.int32, device=self.device),
            torch.empty(0, dtype=torch.int32, device=self.device),
            self._buffers.region("total_recv"),
            self._buffers.region("recv_sources"),
            0,
        )
        self._errors_seen = state.heap.errors_taken
        self._in_graphs = False  # whether any call was captured
        self._forget()
        # a fast peer's first write must not meet this PE's zeros: clear, finish, and only then let anyone go on
        self._clear()
        state.bootstrap.barrier("EpDispatchCombineOp: buffers are clear")
        self._phase = Phase.READY

    def _chosen(self, config: EpDispatchCombineConfig, state: host_state.PeState) -> EpDispatchCombineConfig:
        """The config, with the kernel type that the environment asks for on this device."""
        if not state.settings.rdna4_ep or config.kernel_type is not EpDispatchCombineKernelType.IntraNode:
            return config
        arch, _ = device_names(self.device, state.settings.arch)
        if arch != "gfx1201":
            return config
        try:
            return dataclasses.replace(config, kernel_type=EpDispatchCombineKernelType.IntraNodeRDNA4)
        except ArgumentError as error:
            what = "MORI_RDNA4_EP=1 asks for the RDNA4 pipelines, unset it for others"
            raise ArgumentError(f"{what}: {error}") from error

    def _share_payload(self) -> SharedMemory | None:
        """The payload memory, if the layout has any. Collective; tells the kernels where it is on each PE."""
        num_bytes = self._layout.payload_bytes
        if num_bytes == 0:
            return None
        try:
            memory = self._state.share(num_bytes, MemoryKind.CACHED, "EpDispatchCombineOp payload")
        except HeapError:
            self._state.heap.free(self._address)
            raise
        bases = self._layout["payload_bases"]
        packed = struct.pack(f"<{len(memory.bases)}Q", *memory.bases)
        self._state.driver.write(self._address + bases.offset, packed)
        return memory

    def _forget(self) -> None:
        """No round is in progress, and none was."""
        self._last: str | None = None  # "dispatch" or "combine": what finished last
        self._pending: tuple[str, Plan, dict[str, Any]] | None = None  # what was sent and not received
        self._routing: EpDispatchRoutingHandle | None = None  # of the last dispatch, whose count may be another's
        self._num_tokens = 0  # of the last dispatch
        self._dispatched: torch.Tensor | None = None  # a copy of its indices, where the host compares them
        self._capture = 0  # of the last call, see `_capture_id`

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
        """The (programs, RDMA programs, warps) that the largest call with these arguments uses.

        -1 leaves the choice to `ops.tuning`. A launch shape never changes a result, and any number of programs is fine.

        Raises:
            ArgumentError: `block_num` not -1 or >= 1, `warp_per_block` not -1 or a power of two up to 16.
        """
        config = self.config
        shape = self._shape(
            "dispatch" if is_dispatch else "combine", config.max_num_inp_token_per_rank, config.hidden_dim,
            config.data_type, block_num, warp_per_block, zero_copy=not config.use_external_inp_buf,
        )  # fmt: skip
        return shape.num_programs, 0, shape.num_warps

    def _shape(
        self,
        phase: str,
        num_tokens: int,
        hidden: int,
        dtype: torch.dtype,
        block_num: int,
        warp_per_block: int,
        *,
        zero_copy: bool = False,
    ) -> EpLaunchConfig:
        config = self.config
        shape = launch_config(
            self.device.type, phase, num_tokens, hidden * dtype.itemsize, dtype=dtype,
            top_k=config.num_experts_per_token, zero_copy=zero_copy, quant_type=config.quant_type,
            kernel_type=config.kernel_type.name, tables=self._tables,
            block_num=block_num, warp_per_block=warp_per_block,
        )  # fmt: skip
        return self._launch_override.get(phase, shape)

    def _set_launch(self, phase: str, shape: EpLaunchConfig | None) -> None:
        """Make every later "dispatch" or "combine" use `shape`, None: what is configured. For tuning."""
        self._plans.clear()
        if shape is None:
            self._launch_override.pop(phase, None)
        else:
            self._launch_override[phase] = shape

    # -- calls -----------------------------------------------------------------------------------------------

    def _begin(self, what: str) -> bool:
        """Raise what keeps `what` from being called, errors of earlier kernels among it. Whether it is captured."""
        self._check_usable()
        # what a captured stream will do has not happened yet
        capturing = self._is_captured()
        if not capturing:
            self._raise_errors()
        if self._phase is Phase.BROKEN:
            raise StateError(f"{what}: the op is {self._phase.value}")
        if self._pending is not None and what != f"{self._pending[0]}_recv":
            raise StateError(f"{what}: the op's {self._pending[0]}_send waits for {self._pending[0]}_recv")
        return capturing

    def _is_captured(self) -> bool:
        return not self._on_host and torch.cuda.is_current_stream_capturing()

    def _check_not_captured(self, what: str) -> None:
        if self._is_captured():
            raise StateError(f"{what}: waits for the device, which a captured stream cannot")

    def _capture_id(self) -> int:
        """Which graph the current stream is captured into, not 0."""
        return self._state.driver.capture_id(torch.cuda.current_stream(self.device).cuda_stream)

    def _keep(self, key: Any, plan: Plan) -> Plan:
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        if not self._on_host:
            # nothing may be loaded later, while a graph is captured or a peer waits
            self._meeting("dispatch")
        self._plans[key] = plan
        return plan

    def _run(self, what: str, plan: Plan, given: dict[str, Any], capturing: bool, *, is_rest: bool = False) -> None:
        """Launch the kernels of a "dispatch" or a "combine", or the rest of what was sent.

        Two of a kind in a row have a meeting of all PEs between them.

        A graph may be replayed after any other call, and any call come after a replay: what begins a graph, or is not
        captured though graphs are there, has a meeting that takes place if what ran before was of this kind.
        """
        repeated = not is_rest and (self._last == what or not self._knows_last(capturing))
        first = self._meeting(what) if repeated else None
        self._phase = Phase.BROKEN
        plan.run(what, self._state, given, first)
        self._phase, self._capture = Phase.READY, self._capture_id() if capturing else 0
        self._in_graphs |= capturing

    def _knows_last(self, capturing: bool) -> bool:
        """Whether the call before this one is the one that the host saw last: it sees no replay of a graph."""
        return self._capture == self._capture_id() if capturing else not self._in_graphs

    def _meeting(self, what: str) -> Step:
        kind = DISPATCHED if what == "dispatch" else COMBINED
        buffers = self._buffers
        return self._step(
            sync_kernel, (1,), self._state.heap.ctx, buffers.region("sync_signals"), buffers.region("control"),
            kind.value, TAG=SYNC_TAG, num_warps=1, waits=True,
        )  # fmt: skip

    def _argument(self, tensor: torch.Tensor | None) -> Any:
        """What a kernel gets for a tensor: the address, or on the emulated device, which guards memory, the tensor."""
        return tensor if self._on_host or tensor is None else tensor.data_ptr()

    def _raise_errors(self) -> None:
        """Raise what kernels have recorded. A wait of this op that timed out breaks it; an overflow does not."""
        heap = self._state.heap
        if heap.errors_taken != self._errors_seen:
            # a barrier, or another op, has raised errors: one of them may be a time-out of this op
            self._errors_seen = heap.errors_taken
            self._look_at_status()
        if not heap.errors_pending():
            return
        records, count = heap.take_errors()
        self._errors_seen = heap.errors_taken
        end = self._address + self._layout.num_bytes
        if any(not record.overflowed and self._address <= record.address < end for record in records):
            self._phase = Phase.BROKEN
        elif count > len(records):
            # a time-out may have found the log full
            self._look_at_status()
        raise context.error_of(records, count)

    def _look_at_status(self) -> None:
        """Whether a wait of this op has timed out, asked of the device."""
        if int(self._buffers.region("control")[STATUS.value]) != 0:
            self._phase = Phase.BROKEN

    # -- what a round left behind ----------------------------------------------------------------------------

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """Whose rows dispatch brought: int32 `[total_recv]`, `source PE * M + token`. Waits for the device.

        `decode_send_flat_idx` takes it apart. A view, valid until combine is called; StateError at other times and
        while a graph is captured.
        """
        self._check_not_captured("get_dispatch_src_token_pos")
        self._begin("get_dispatch_src_token_pos")
        dispatched = self._last == "dispatch"
        if dispatched or self._in_graphs:
            self._state.driver.synchronize()
            self._raise_errors()
        if self._in_graphs:
            # a replay may have come last, which only the device knows
            dispatched = int(self._buffers.region("control")[LAST.value]) == DISPATCHED.value
        if not dispatched:
            raise StateError(
                "get_dispatch_src_token_pos: ask between dispatch and combine, at other times peers may be writing"
            )
        routing = self._routing or self._own_routing
        return self._own_routing.disp_tok_id_to_src_tok_id_local[: int(routing.total_recv_token_num[0])]

    def decode_send_flat_idx(self, flat_idx: Any) -> tuple[Any, Any]:
        """(source PE, token) of an entry of `get_dispatch_src_token_pos`; elementwise for a tensor of them."""
        most = self.config.max_num_inp_token_per_rank
        return flat_idx // most, flat_idx % most

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """`[R, hidden_dim]` of the buffer that combine takes as it is: rows written here need no copy. -1: full width.

        Write it between dispatch (in halves: `dispatch_recv`) and combine only; at other times peers may be reading it.
        """
        self._check_usable()
        h = self.config.hidden_dim if hidden_dim == -1 else hidden_dim
        dtypes = self.config.payload_dtypes
        require(dtype in dtypes, "dtype", " or ".join(map(str, dtypes)), dtype)
        require(1 <= h <= self.config.hidden_dim, "hidden_dim", f"in [1, {self.config.hidden_dim}] or -1", h)
        wide = self.config.max_token_type_size
        require(dtype.itemsize <= wide, "dtype", f"at most max_token_type_size = {wide} bytes", dtype)
        return self._buffers.view("combine_in", dtype, self.config.max_recv, h)

    # -- end -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """As after construction: forget the round in progress and any failure. Collective, waits for kernels.

        Raises `StateError` while a graph is captured.
        """
        self._check_usable()
        self._check_not_captured("reset")
        # nobody clears while a peer may still signal, and nobody starts before all have cleared
        self._state.driver.synchronize()
        self._state.bootstrap.barrier("EpDispatchCombineOp.reset: kernels are done")
        self._state.heap.take_errors()
        self._errors_seen = self._state.heap.errors_taken
        self._clear()
        self._state.bootstrap.barrier("EpDispatchCombineOp.reset: buffers are clear")
        self._forget()
        self._phase = Phase.READY

    def close(self) -> None:
        """Give the buffers back. Collective, idempotent; after shmem was finalized there is nothing to give back."""
        if self._phase is Phase.CLOSED:
            return
        self._phase = Phase.CLOSED
        if self._state.heap.closed:
            return
        self._state.driver.synchronize()
        if self._payload is not None:
            self._payload.disconnect()
        # a peer may still be reading rows from here
        self._state.bootstrap.barrier("EpDispatchCombineOp.close")
        self._state.heap.free(self._address)
        if self._payload is not None:
            self._state.unshare(self._payload)

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            # the peers may be anywhere: a barrier could wait for ever, and freed memory could be written
            self._phase = Phase.CLOSED

    def _check_usable(self) -> None:
        if self._phase is Phase.CLOSED:
            raise StateError("the EpDispatchCombineOp is closed")
        if host_state.current() is not self._state:
            raise StateError("the EpDispatchCombineOp belongs to a world that was finalized, or to another PE")

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
        for region in self._layout.regions:
            if region.name in CLEARED:
                self._state.driver.memset(self._buffers.address(region.name), 0, region.num_bytes)
        self._state.driver.synchronize()
