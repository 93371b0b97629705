"""`EpDispatchPlan` and `EpCombinePlan`: one kind of call on an arena, with arguments bound for good or for one launch.

A plan says how (launch shape, type of rows), an `EpArena` where and for what problem, a launch with what. docs/ep_v2.md
has the protocol of a dispatch.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from mori_triton.errors import StateError, check_tensor, require
from mori_triton.ops.buffers import EpBufferLayout
from mori_triton.ops.calls import CombineCall
from mori_triton.ops.combine import plan_combine
from mori_triton.ops.config import PAYLOAD_DTYPES
from mori_triton.ops.dispatch import check_dispatch
from mori_triton.ops.dispatch_combine_v2.arena import EpArena
from mori_triton.ops.dispatch_combine_v2.config import (
    check_blocks,
    check_programs,
    check_warps,
    num_blocks,
    num_columns,
)
from mori_triton.ops.dispatch_combine_v2.staging import allocate_staging, check_staging, host_bytes
from mori_triton.ops.dispatch_combine_v2.steps import StagedCall, send_step, stage_steps
from mori_triton.ops.plans import Plan, plan_key
from mori_triton.ops.routing import check_handle

# where a PE keeps the staging buffers of its unbound plans
_SHARED = "ops.dispatch_combine_v2: default staging"


class EpPlan:
    """What both plans are. Made by its subclasses."""

    # what `bind` and `launch` take
    ARGUMENTS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, arena: EpArena, block_num: int | None, warp_per_block: int | None) -> None:
        require(isinstance(arena, EpArena), "arena", "an EpArena", type(arena).__name__)
        check_warps("warp_per_block", warp_per_block)
        self._arena, self._block_num, self._warp_per_block = arena, block_num, warp_per_block
        self._bound: dict[str, Any] = {}
        self._closed = False

    def bind(self, **args: Any) -> None:
        """Give launch arguments for all later launches; one of a launch itself wins over it, there alone.

        Raises:
            TypeError: an argument that `launch` does not take.
            StateError: the plan is closed.
            StagingError: a `staging_base` that no dispatch can use.
        """
        self._check(args)
        self._bound |= args

    def close(self) -> None:
        """Let go of all that the plan holds. Idempotent; not collective: kernels of this PE that run are waited for."""
        if self._closed:
            return
        self._closed = True
        self._bound.clear()
        arena = self._arena
        if not arena._state.heap.closed:
            arena._state.driver.synchronize()
        arena._plans = {key: plan for key, plan in arena._plans.items() if key[0] is not self}

    def _check(self, args: Mapping[str, Any]) -> None:
        if self._closed:
            raise StateError(f"the {type(self).__name__} is closed")
        for name in args:
            if name not in self.ARGUMENTS:
                raise TypeError(f"{type(self).__name__}: {name}: want one of {', '.join(self.ARGUMENTS)}")

    def _merged(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._check(args)
        return {**dict.fromkeys(self.ARGUMENTS), **self._bound, **args}

    def _on(self, stream: Any) -> Any:
        """Where `stream` is current."""
        if stream is None:
            return contextlib.nullcontext()
        require(not self._arena._on_host, "stream", "None: the emulated device has none", stream)
        if isinstance(stream, int):
            stream = torch.cuda.ExternalStream(stream, device=self._arena.device)
        return torch.cuda.stream(stream)


class EpDispatchPlan(EpPlan):
    """Dispatches of one launch shape on an arena. Collective to launch: every PE, same order.

    Ids, weights, sources and scales are gathered by destination in a staging buffer of this PE, `info["staging_bytes"]`
    long (as `ep_staging_bytes` says), and go to each peer in runs; payload rows go straight from the caller's memory.

    The caller binds the buffer, as `staging_base`: a tensor, or an address and, if they are to be checked,
    `staging_bytes`. It must stay allocated while the plan is used, which a plan sees to where it is a tensor. Plans may
    share one if they run one after another. A plan that is launched without one gets a buffer of this PE, shared with
    its other unbound plans of the same layout until the last of them is closed, and warns.

    Args:
        arena: what the plan runs on.
        dtype: of payload rows, `arena.cfg.hidden_dim` elements each; None: `arena.cfg.dispatch_dtype`.
        block_num: blocks of tokens, at most 512; None: by the number of tokens.
        warp_per_block: warps of a program, None: as `ops.tuning` has it.

    Raises:
        ArgumentError: a `ValueError`: an argument out of range, or of a type that is not supported or does not fit the
            arena's rows.
    """

    ARGUMENTS = ("input", "weights", "scales", "indices", "routing", "staging_base", "staging_bytes")

    def __init__(
        self,
        arena: EpArena,
        *,
        dtype: torch.dtype | None = None,
        block_num: int | None = None,
        warp_per_block: int | None = None,
    ) -> None:
        super().__init__(arena, block_num, warp_per_block)
        check_blocks("block_num", block_num)
        cfg = arena.cfg
        self._dtype = cfg.dispatch_dtype if dtype is None else dtype
        require(self._dtype in PAYLOAD_DTYPES, "dtype", " or ".join(map(str, PAYLOAD_DTYPES)), dtype)
        want = f"rows of {cfg.dispatch_token_nbytes} bytes, as {cfg.dispatch_dtype} has"
        num_bytes = num_columns(cfg.hidden_dim, self._dtype) * self._dtype.itemsize
        require(num_bytes == cfg.dispatch_token_nbytes, "dtype", want, dtype)
        self._default: torch.Tensor | None = None

    @property
    def info(self) -> dict[str, Any]:
        """What the plan is, and of the staging buffer its bytes and its regions: name to (offset, bytes)."""
        arena, layout = self._arena, self._arena.staging
        return {
            "kernels": ("dispatch_stage_kernel", "dispatch_send_kernel"),
            "dtype": self._dtype,
            "max_recv": arena.config.max_recv,
            "block_num": self._block_num,
            "warp_per_block": self._warp_per_block,
            "staging_bytes": layout.num_bytes,
            "staging_layout": {region.name: (region.offset, region.num_bytes) for region in layout.regions},
        }

    def bind(self, **args: Any) -> None:
        """As `EpPlan.bind`."""
        given = self._merged(args)
        if "staging_base" in args or "staging_bytes" in args:
            check_staging(given["staging_base"], given["staging_bytes"], self._arena.staging, self._arena.device)
        super().bind(**args)

    def launch(self, stream: Any = None, **args: Any) -> tuple[Any, ...]:
        """Dispatch. Asynchronous on a GPU.

        Args:
            stream: a torch stream or its handle, None: the current one.
            args: `input`, `weights`, `scales`, `indices`: as of `ops.EpDispatchCombineOp.dispatch`, `input` 16-byte
                aligned and `hidden_dim` wide; `routing`: an `arena.new_routing(n)` to fill in, None: one of the arena's
                own; `staging_base`, `staging_bytes`: see the class.

        Returns:
            out, out_weights, out_scales (None without scales), out_indices, total_recv: views of the arena.

        Raises:
            TypeError: an argument of another name.
            StagingError: `staging_base` is null, not aligned to 128 bytes, or known to be too short. Nothing was
                launched.
            StateError: the plan or the arena is closed, or broken by an earlier failure; or a graph is captured and
                there is no staging buffer, which cannot be allocated meanwhile.
            ArgumentError, ReceiveOverflow, PeerTimeout: as `ops.EpDispatchCombineOp.dispatch`.
        """
        given = self._merged(args)
        with self._on(stream):
            self._arena._check_usable()
            staging = self._staging(given["staging_base"], given["staging_bytes"])
            return self._launch(given, staging)

    def close(self) -> None:
        """As `EpPlan.close`; the shared staging buffer is freed with the last plan that uses it."""
        super().close()
        self._default = None

    def _staging(self, base: Any, num_bytes: int | None) -> torch.Tensor | int:
        """The staging buffer of one launch as a kernel argument."""
        arena, layout = self._arena, self._arena.staging
        if base is None:
            if self._default is None:
                self._default = _shared(arena)
                warnings.warn(
                    f"EpDispatchPlan.launch: no staging_base is bound: using a buffer of {layout.num_bytes} bytes that "
                    "all unbound plans of this layout share; bind one of ep_staging_bytes(...) bytes instead",
                    FutureWarning,
                    # the caller of launch
                    stacklevel=3,
                )
            base, num_bytes = self._default, None
        address = check_staging(base, num_bytes, layout, arena.device)
        # on the emulated device a kernel may touch exactly these bytes
        return host_bytes(address, layout.num_bytes) if arena._on_host else address

    def _launch(self, given: dict[str, Any], staging: torch.Tensor | int) -> tuple[Any, ...]:
        arena = self._arena
        capturing = arena._begin("dispatch")
        tokens, weights, scales, indices = (given[name] for name in ("input", "weights", "scales", "indices"))
        key = self, "dispatch", plan_key(tokens), plan_key(weights), plan_key(scales), plan_key(indices)
        plan = arena._plans.get(key)
        if plan is None:
            plan = self._plan(key, tokens, weights, scales, indices)
        for name in ("input", "weights", "scales", "indices"):
            if given[name] is not None:
                arena._buffers.check_outside(name, given[name])
        n = len(indices)
        routing = given["routing"]
        if routing is not None:
            check_handle(routing, arena.config, arena.device, n)
        where = arena._own_routing if routing is None else routing
        given = {"tokens": arena._argument(tokens), "weights": arena._argument(weights)}
        given |= {"scales": arena._argument(scales), "indices": arena._argument(indices)}
        given |= {
            "staging": staging,
            "forward": arena._argument(where.disp_dest_tok_id_map),
            "total": arena._argument(where.total_recv_token_num),
        }
        arena._run("dispatch", plan, given, capturing)
        arena._routing, arena._num_tokens, arena._last = where, n, "dispatch"
        if routing is not None:
            where.disp_tok_id_to_src_tok_id_local.copy_(arena._own_routing.disp_tok_id_to_src_tok_id_local)
        if arena._on_host:
            arena._raise_errors()
        return (*plan.result, where.total_recv_token_num)

    def _plan(
        self,
        key: Any,
        tokens: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
    ) -> Plan:
        arena = self._arena
        cfg, problem = arena.cfg, arena.config
        data = check_dispatch(problem, arena.device, tokens, weights, scales, indices)
        check_tensor("input", tokens, self._dtype, (None, cfg.dispatch_columns), arena.device)
        require(tokens.data_ptr() % 16 == 0, "input", "16-byte aligned memory", hex(tokens.data_ptr()))
        n = len(tokens)
        shape = arena._shape(
            "dispatch", n, cfg.dispatch_columns, self._dtype, -1,
            -1 if self._warp_per_block is None else self._warp_per_block,
        )  # fmt: skip
        call = StagedCall(
            problem, arena._buffers, arena._state.heap.ctx, arena._own_routing, shape, True, arena._step,
            data=data, replay=False, layout=arena.staging, num_blocks=num_blocks(self._block_num, n),
            source_scale_bytes=cfg.scale_bytes,
        )  # fmt: skip
        result = (
            arena.recv_tokens(self._dtype),
            arena.recv_weights(),
            None if data.scales is None else arena.recv_scales(data.scales.dtype),
            arena.recv_indices(),
        )
        return arena._keep(key, Plan([*stage_steps(call), send_step(call)], result))


class EpCombinePlan(EpPlan):
    """Combines of one launch shape on an arena. Collective to launch: every PE, same order. Stages nothing.

    Args:
        arena: what the plan runs on.
        block_num: programs of its kernels, None: as `ops.tuning` has it.
        warp_per_block: warps of a program, None: as `ops.tuning` has it.

    Raises:
        ArgumentError: a `ValueError`: an argument out of range.
    """

    ARGUMENTS = ("input", "weights", "routing")

    def __init__(self, arena: EpArena, *, block_num: int | None = None, warp_per_block: int | None = None) -> None:
        super().__init__(arena, block_num, warp_per_block)
        check_programs("block_num", block_num)

    @property
    def info(self) -> dict[str, Any]:
        """What the plan is. It needs no staging buffer."""
        return {
            "kernels": ("combine_copy_kernel", "combine_reduce_kernel"),
            "dtype": self._arena.cfg.combine_dtype,
            "max_recv": self._arena.config.max_recv,
            "block_num": self._block_num,
            "warp_per_block": self._warp_per_block,
            "staging_bytes": 0,
        }

    def launch(self, stream: Any = None, **args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring the rows back and sum them by token. Asynchronous on a GPU.

        Args:
            stream: a torch stream or its handle, None: the current one.
            args: `input`: `[>= total_recv, columns]`, row r belongs to row r of dispatch's outputs;
                `arena.combine_in_view()` is used as it is, anything else is copied. `weights`: `[>= total_recv, k]`
                float32 to be summed alike, or None. `routing`: of the dispatch whose rows these are.

        Returns:
            out `[n, columns]`: for each token the float32 sum of its rows over its distinct PEs, in the order of its
            ids, rounded once; out_weights `[n, k]` float32 or None. Views, good until the next combine.

        Raises:
            TypeError: an argument of another name.
            StateError: closed or broken; or a second combine in a row is given `combine_in_view`, which peers may
                still be reading.
            ArgumentError, PeerTimeout: as `ops.EpDispatchCombineOp.combine`.
        """
        given = self._merged(args)
        with self._on(stream):
            return self._launch(given["input"], given["weights"], given["routing"])

    def _launch(
        self, rows: torch.Tensor, weights: torch.Tensor | None, routing: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        arena = self._arena
        cfg, problem = arena.cfg, arena.config
        capturing = arena._begin("combine")
        check_handle(routing, problem, arena.device)
        check_tensor("input", rows, cfg.combine_dtype, (None, cfg.combine_columns), arena.device)
        if weights is not None:
            check_tensor("weights", weights, torch.float32, (None, problem.num_experts_per_token), arena.device)
        n = routing.cur_rank_num_token
        region = arena._buffers.region_of(rows.data_ptr()) if rows.numel() else None
        in_place = region == "combine_in"
        is_start = rows.data_ptr() == arena.combine_in_view().data_ptr()
        require(not in_place or is_start, "input", "combine_in_view() from its start, or other memory", "a part of it")
        if in_place and arena._last == "combine" and arena._knows_last(capturing):
            raise StateError("combine: peers may still read combine_in_view(): a combine came last, not a dispatch")
        if arena._on_host:
            total = int(routing.total_recv_token_num[0])
            for name, tensor in (("input", rows), ("weights", weights)):
                if tensor is not None:
                    want = f">= total_recv = {total}, the rows that dispatch received"
                    require(len(tensor) >= total, f"{name}.shape[0]", want, len(tensor))
        key = self, "combine", n, region, plan_key(rows), plan_key(weights)
        plan = arena._plans.get(key)
        if plan is None:
            shape = arena._shape(
                "combine", n, cfg.combine_columns, rows.dtype,
                -1 if self._block_num is None else self._block_num,
                -1 if self._warp_per_block is None else self._warp_per_block,
                zero_copy=in_place,
            )  # fmt: skip
            call = CombineCall(
                problem, arena._buffers, arena._state.heap.ctx, arena._own_routing, shape, True, arena._step,
                rows=rows, weights=weights, num_tokens=n, region=region,
            )  # fmt: skip
            send, reduce = plan_combine(call)
            plan = arena._keep(key, Plan([*send, *reduce], call.result()))
        given = {
            "rows": arena._argument(rows),
            "weights": arena._argument(weights),
            "forward": arena._argument(routing.disp_dest_tok_id_map),
            "total": arena._argument(routing.total_recv_token_num),
        }
        arena._run("combine", plan, given, capturing)
        arena._last = "combine"
        if arena._on_host:
            arena._raise_errors()
        out, out_weights = plan.result
        return out[:n], None if out_weights is None else out_weights[:n]


def _shared(arena: EpArena) -> torch.Tensor:
    """The staging buffer of this PE's unbound plans of `arena`'s layout, made for the first of them.

    Only plans hold it: it is freed with the last of them that lets go.
    """
    buffers: MutableMapping[EpBufferLayout, torch.Tensor]
    buffers = arena._state.extensions.setdefault(_SHARED, WeakValueDictionary())
    buffer = buffers.get(arena.staging)
    if buffer is None:
        if arena._is_captured():
            raise StateError(
                "EpDispatchPlan.launch: no staging_base is bound, and none can be allocated while a graph is captured: "
                "bind one, or launch the plan once before"
            )
        buffer = buffers[arena.staging] = allocate_staging(arena.staging, arena.device)
    return buffer
