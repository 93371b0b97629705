"""One PE's part of tuning: inputs, an op whose launch shapes can be set, a clock, and the check of what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from mori_triton.host import state as host_state
from mori_triton.ops import formats
from mori_triton.ops.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_triton.ops.dispatch_combine import EpDispatchCombineOp
from mori_triton.ops.tune.search import Call
from mori_triton.ops.tune.timing import time_step_us
from mori_triton.ops.tuning import EpLaunchConfig
from mori_triton.ops.tuning_tables import DTYPE_NAMES
from mori_triton.world import current_world

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# dtypes that combine sums
SUMMED = ("bf16", "fp16", "fp32")
# rows compared at a time
_ROWS = 4096
# tokens of a combine through a codec that are compared
_CODEC_TOKENS = 64


@dataclass(frozen=True)
class Problem:
    """What is tuned for: every combination of `dtypes`, `num_tokens`, phases and codecs."""

    kernel_type: str
    ep_size: int
    hidden: int  # elements of a row
    topk: int
    num_experts: int  # of all PEs
    num_tokens: tuple[int, ...]  # of each PE
    dtypes: tuple[str, ...]  # of dispatch; combine's are those of them that can be summed
    quant_types: tuple[str, ...] = ("none",)
    phases: tuple[str, ...] = ("dispatch", "combine")
    seed: int = 0

    def config(self, pe: int, quant_type: str) -> EpDispatchCombineConfig:
        """Of the op of this PE."""
        return EpDispatchCombineConfig(
            data_type=torch.bfloat16,
            rank=pe,
            world_size=self.ep_size,
            hidden_dim=self.hidden,
            scale_dim=0,
            scale_type_size=0,
            max_token_type_size=max(2, *(DTYPES[name].itemsize for name in self.dtypes)),
            max_num_inp_token_per_rank=max(self.num_tokens),
            num_experts_per_rank=self.num_experts // self.ep_size,
            num_experts_per_token=self.topk,
            kernel_type=EpDispatchCombineKernelType[self.kernel_type],
            quant_type=quant_type,
        )


def row_shape(dtype: str, hidden: int) -> tuple[int, int]:
    """(elements, bytes) of a row of `hidden` numbers; two fp4 numbers are one element."""
    columns = hidden // 2 if dtype == "fp4" else hidden
    return columns, columns * DTYPES[dtype].itemsize


class PeBench:
    """What one PE measures with. Every method is collective.

    Args:
        problem: the same on every PE.
        board: one dict for all PEs of this process, where each leaves its inputs for the others' checks.
    """

    def __init__(self, problem: Problem, board: dict[int, dict[str, Any]]) -> None:
        self.problem, self.board = problem, board
        self.state, self.world = host_state.current(), current_world()
        self.pe, self.device = self.state.pe, self.state.heap.ctx.device
        self.ops = {quant: EpDispatchCombineOp(problem.config(self.pe, quant)) for quant in problem.quant_types}
        # of the combine that is being tuned: its input, and what it last returned
        self._rows, self._results = torch.empty(0), ()
        # the combine's external input, made when it is first needed
        self._external: torch.Tensor | None = None
        board[self.pe] = self._inputs()
        # others read them on streams of their own
        self.state.driver.synchronize()
        self.state.bootstrap.barrier("tune: inputs are there")

    def _inputs(self) -> dict[str, Any]:
        problem, most = self.problem, max(self.problem.num_tokens)
        draw = torch.Generator(self.device).manual_seed(problem.seed * 1000 + self.pe)
        # every id of a token is another expert
        scores = torch.rand(most, problem.num_experts, device=self.device, generator=draw)
        inputs: dict[str, Any] = {
            "indices": scores.topk(problem.topk, 1).indices.to(torch.int32),
            "weights": torch.rand(most, problem.topk, device=self.device, generator=draw),
        }
        for name in problem.dtypes:
            columns, _ = row_shape(name, problem.hidden)
            if name == "fp4":
                values = torch.randint(0, 256, (most, columns), dtype=torch.uint8, device=self.device, generator=draw)
                inputs[name] = values.view(DTYPES[name])
            else:
                values = torch.randn(most, columns, dtype=torch.bfloat16, device=self.device, generator=draw)
                inputs[name] = values.to(DTYPES[name])
        return inputs

    def num_rows(self, num_tokens: int) -> int:
        """(token, distinct PE) pairs of all PEs."""
        return sum(int(self._owned(pe, num_tokens).any(1).sum()) for pe in range(self.problem.ep_size))

    def _owned(self, by: int, num_tokens: int) -> torch.Tensor:
        """bool `[ep * num_tokens, k]`: which ids of which tokens, of all PEs, name an expert of PE `by`."""
        each = self.problem.num_experts // self.problem.ep_size
        ids = [self.board[pe]["indices"][:num_tokens].to(self.device) for pe in range(self.problem.ep_size)]
        return torch.cat(ids) // each == by

    # ------------------------------------------------------------------------------------------------------ one call
    def _step(self, call: Call, op: EpDispatchCombineOp) -> tuple[Any, ...]:
        """What is timed: the call, and before a combine in place the dispatch without which it may not be repeated."""
        if call.phase == "dispatch" or call.zero_copy:
            results = self._dispatch(call, op)
        if call.phase == "combine":
            results = self._results = self._combine(call, op)
        return results

    def _dispatch(self, call: Call, op: EpDispatchCombineOp) -> tuple[Any, ...]:
        mine, n = self.board[self.pe], call.num_tokens
        return op.dispatch(mine[call.dtype][:n], mine["weights"][:n], None, mine["indices"][:n])

    def _combine(self, call: Call, op: EpDispatchCombineOp) -> tuple[Any, ...]:
        return op.combine(self._rows, None, self.board[self.pe]["indices"][: call.num_tokens])

    def _op(self, call: Call) -> EpDispatchCombineOp:
        # dispatch is the same whatever combine's codec is
        return self.ops[call.quant_type or self.problem.quant_types[0]]

    def start(self, call: Call) -> None:
        """Get ready for a call's measurements: a combine needs rows that a dispatch has brought."""
        if call.phase == "dispatch":
            return
        op = self._op(call)
        out, _, _, _, total = self._dispatch(call, op)
        self.state.driver.synchronize()
        num_rows = int(total[0])
        if call.zero_copy:
            rows = op.get_registered_combine_input_buffer(out.dtype, out.shape[1])
        else:
            if self._external is None or self._external.dtype != out.dtype:
                self._external = torch.empty_like(out)
            rows = self._external
        for start in range(0, num_rows, _ROWS):
            part = slice(start, min(start + _ROWS, num_rows))
            rows[part] = _expert(self.pe, out[part])
        self._rows = rows
        self.state.driver.synchronize()
        self.state.bootstrap.barrier("tune: rows are there")

    def measure(
        self, call: Call, shape: EpLaunchConfig, rounds: int, repeats: int, give_up_us: float = float("inf")
    ) -> list[float]:
        """Microseconds of one call in each of `repeats` chains of `rounds`, on PE 0 (no times for a shape that does not
        compile); elsewhere empty. Of a combine in place: of a dispatch and the combine.

        Two calls of one phase in a row make the PEs meet in between; that is counted.
        """
        op = self._op(call)
        op._set_launch(call.phase, shape)
        try:
            # compiles
            self._step(call, op)
            failed = ""
        except (CompilationError, OutOfResources) as error:
            # before anything was launched, and on every PE alike
            failed = str(error)
        if any(self.state.bootstrap.allgather(failed.encode(), "tune: kernels are compiled")):
            op._set_launch(call.phase, None)
            return []
        graph = self.world.graph(lambda: [self._step(call, op) for _ in range(rounds)])
        times = time_step_us(graph, self.state, self.device, repeats, give_up_us * rounds)
        op._set_launch(call.phase, None)
        # nobody launches anything while a graph is taken apart
        del graph
        self.state.bootstrap.barrier("tune: the graph is gone")
        return [us / rounds for us in times]

    # --------------------------------------------------------------------------------------------------------- check
    def verify(self, call: Call, shape: EpLaunchConfig) -> str | None:
        """Run the call once with a shape over poisoned outputs and compare with torch; what is wrong, or None."""
        op = self._op(call)
        op._set_launch(call.phase, shape)
        is_dispatch = call.phase == "dispatch"
        if not is_dispatch:
            self.start(call)
        for tensor in self._dispatch(call, op) if is_dispatch else self._results:
            if isinstance(tensor, torch.Tensor):
                _as_bytes(tensor).fill_(255)
        self.state.driver.synchronize()
        self.state.bootstrap.barrier("tune: outputs are poisoned")
        results = self._dispatch(call, op) if is_dispatch else self._combine(call, op)
        self.state.driver.synchronize()
        wrong = self._wrong_dispatch(call, op, results) if is_dispatch else self._wrong_combine(call, results)
        op._set_launch(call.phase, None)
        # nobody goes on to send while a peer still compares
        everyone = self.state.bootstrap.allgather((wrong or "").encode(), "tune: results are compared")
        return next((f"PE {pe}: {text.decode()}" for pe, text in enumerate(everyone) if text), None)

    def _wrong_dispatch(self, call: Call, op: EpDispatchCombineOp, results: tuple[Any, ...]) -> str | None:
        out, weights, _, indices, total = results
        n, most = call.num_tokens, max(self.problem.num_tokens)
        sources = op.get_dispatch_src_token_pos().long()
        pes, tokens = sources // most, sources % most
        wanted = self._owned(self.pe, n).any(1).nonzero().flatten()
        if int(total[0]) != len(wanted) or len(sources) != len(wanted):
            return f"{int(total[0])} rows came, not {len(wanted)}"
        if not torch.equal((pes * n + tokens).sort().values, wanted):
            return "rows of other tokens came"
        for pe in range(self.problem.ep_size):
            theirs = self.board[pe]
            for rows in (pes == pe).nonzero().flatten().split(_ROWS):
                for name, got in ((call.dtype, out), ("weights", weights), ("indices", indices)):
                    sent = _as_bytes(theirs[name])[tokens[rows].to(theirs[name].device)].to(self.device)
                    if not torch.equal(_as_bytes(got)[rows], sent):
                        return f"{name} from PE {pe} are not what it sent"
        return None

    def _wrong_combine(self, call: Call, results: tuple[Any, ...]) -> str | None:
        out, mine, n = results[0], self.board[self.pe], call.num_tokens
        if call.quant_type != "none":
            n = min(n, _CODEC_TOKENS)
        owners = mine["indices"] // (self.problem.num_experts // self.problem.ep_size)
        for start in range(0, n, _ROWS):
            part = slice(start, min(start + _ROWS, n))
            tokens, to = mine[call.dtype][part], owners[part]
            sums = torch.zeros(tokens.shape, dtype=torch.float32, device=self.device)
            bound = torch.zeros(tokens.shape, dtype=torch.float64, device=self.device)
            for k in range(to.shape[1]):
                first = (to[:, :k] != to[:, k : k + 1]).all(1, keepdim=True)
                rows = torch.where(first, _expert(to[:, k : k + 1], tokens), 0.0)
                sums += rows.float()
                if call.quant_type != "none":
                    bound += formats.codec_error_bound(rows, call.quant_type or "none")
            if call.quant_type == "none":
                if not torch.equal(_as_bytes(out[part]), _as_bytes(sums.to(out.dtype))):
                    return "sums are not those of the rows"
            else:
                # the codec's own error, the additions' and the last rounding's
                bound = bound + (sums.double().abs() + bound) * 2.0**-7
                if not bool(((out[part].double() - sums.double()).abs() <= bound).all()):
                    return "sums are further from those of the rows than the codec allows"
        return None

    def close(self) -> None:
        """Give the ops' buffers back."""
        for op in self.ops.values():
            op.close()


def _expert(pe: int | torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What the experts of a PE, or of one PE for each row, make of rows: different on each, rounded once."""
    factor = 1 + pe % 4
    return rows * (factor.to(rows.dtype) if isinstance(factor, torch.Tensor) else factor)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor
