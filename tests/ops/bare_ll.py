"""The one-launch dispatch by itself, without an op: buffers, launches, a kernel that reads what came, and the check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from mori_triton.device import shmem
from mori_triton.host import state as host_state
from mori_triton.ops.kernels.dispatch_ll import dispatch_ll_kernel
from tests.ops import reference
from tests.ops.cases import Case, Round, round_of

TAG = 4712
UNTOUCHED = 0xA5
SCALE_BYTES = 6


@triton.jit
def take_kernel(ctx, rows_ptr, total_ptr, out_ptr, num_bytes, BLOCK: tl.constexpr):
    """Copy the rows that came: on the device, so that it sees what a load there may see."""
    offs = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), tl.load(total_ptr), tl.num_programs(0)):
        value = tl.load(rows_ptr + row * num_bytes + offs, mask=offs < num_bytes)
        tl.store(out_ptr + row * num_bytes + offs, value, mask=offs < num_bytes)


@triton.jit
def meet_kernel(ctx):
    """What a combine does for the next dispatch: nobody goes on before all have read their rows."""
    shmem.barrier_all(ctx)


class BareLL:
    """One PE's buffers. Collective to make."""

    def __init__(self, case: Case, capacity: int, *, scales: bool = True, untouched: bool = True) -> None:
        self.state, self.case, self.capacity = host_state.current(), case, capacity
        heap, n = self.state.heap, self.state.n_pes
        self.device = heap.ctx.device
        row_bytes = case.hidden * 4

        def symmetric(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            made = heap.tensor(shape, dtype)
            if untouched:
                made.view(torch.uint8).fill_(UNTOUCHED)
            return made

        self.rows = symmetric(capacity, row_bytes)
        self.scales = symmetric(capacity, SCALE_BYTES) if scales and case.scales[0] else None
        self.ids = symmetric(capacity, case.top_k, dtype=torch.int32)
        self.weights = symmetric(capacity, case.top_k, dtype=torch.float32)
        self.sources = symmetric(capacity, dtype=torch.int32)
        self.signals = symmetric(n, dtype=torch.int64).zero_()
        self.slots = symmetric(1, dtype=torch.int32).zero_()
        self.control = torch.zeros(64, dtype=torch.int64, device=self.device)
        self.total = torch.full((1,), -77, dtype=torch.int32, device=self.device)
        self.forward = torch.full((case.max_tokens, case.top_k), -77, dtype=torch.int32, device=self.device)
        self.state.driver.synchronize()
        self.state.bootstrap.barrier("buffers are clear")

    def launch_dispatch(
        self,
        launch: Callable[..., Any],
        mine: Round,
        *,
        block_t: int = 2,
        block: int = 256,
        num_programs: int = 3,
        num_warps: int = 2,
    ) -> None:
        """The one launch."""
        case, n, ctx = self.case, len(mine.tokens), self.state.heap.ctx
        rows = torch.from_numpy(mine.tokens.view(np.uint8).copy()).to(self.device)
        weights = None if mine.weights is None else torch.from_numpy(mine.weights.copy()).to(self.device)
        scales = None if self.scales is None or mine.scales is None else torch.from_numpy(mine.scales).to(self.device)
        align = int(np.gcd(16, case.hidden * 4))
        launch(
            dispatch_ll_kernel, (max(1, min(num_programs, triton.cdiv(n, block_t))),),
            ctx, rows, torch.from_numpy(mine.indices.copy()).to(self.device), self.forward,
            self.rows, self.ids, self.weights, self.sources, self.signals, self.slots, self.control, self.total,
            n, case.experts_per_pe, self.capacity, case.max_tokens, SCALE_BYTES // 2, weights,
            scales, None if scales is None else self.scales,
            ROW=case.hidden * 4, TOP_K=case.top_k,
            ALIGN=align, BLOCK=block, BLOCK_T=block_t, BLOCK_K=triton.next_power_of_2(case.top_k),
            BLOCK_P=triton.next_power_of_2(case.num_pes), SCALE_ALIGN=2, SCALE_BLOCK=4, WAIT=True, TAG=TAG,
            num_warps=num_warps,
        )  # fmt: skip

    def dispatch(self, launch: Callable[..., Any], mine: Round, **shape: int) -> dict[str, np.ndarray]:
        """A round: the rows that came and what stands with each, and the forward map."""
        self.launch_dispatch(launch, mine, **shape)
        n, ctx = len(mine.tokens), self.state.heap.ctx
        taken = {}
        buffers = {"rows": self.rows, "ids": self.ids, "weights": self.weights, "sources": self.sources}
        if self.scales is not None:
            buffers["scales"] = self.scales
        for name, buffer in buffers.items():
            data = buffer.view(torch.uint8).view(self.capacity, -1)
            out = torch.full_like(data, UNTOUCHED, memory_format=torch.contiguous_format)
            launch(
                take_kernel, (2,), ctx, data, self.total, out, data.shape[1],
                BLOCK=triton.next_power_of_2(data.shape[1]), num_warps=2,
            )  # fmt: skip
            taken[name] = out
        launch(meet_kernel, (1,), ctx, num_warps=1)
        got = {name: out.cpu().numpy().copy() for name, out in taken.items()}
        got["total"] = self.total.cpu().numpy().copy()
        got["forward"] = self.forward[:n].cpu().numpy().copy()
        records, _ = self.state.heap.take_errors()
        got["too_many"] = np.array([record.overflowed for record in records])
        return got


def ll_rounds(
    pe: int, case: Case, capacity: int, launch: Callable[..., Any], shape: dict[str, int]
) -> list[dict[str, np.ndarray]]:
    """What a PE runs."""
    bare = BareLL(case, capacity, scales=case.scales != (0, 0))
    return [bare.dispatch(launch, round_of(case, pe, index), **shape) for index in range(case.rounds)]


def check_ll(case: Case, capacity: int, results: list[list[dict[str, np.ndarray]]]) -> None:
    """Compare the rounds of all PEs, [PE][round], with numpy. Slots come in any order; too many rows leave some out."""
    for index in range(case.rounds):
        sent = [round_of(case, pe, index) for pe in range(case.num_pes)]
        wanted = reference.received([r.indices for r in sent], case.experts_per_pe)
        placed: list[set[tuple[int, int, int]]] = [set() for _ in sent]
        for pe in range(case.num_pes):
            got, total = results[pe][index], min(len(wanted[pe]), capacity)
            assert got["total"].tolist() == [total], (pe, index)
            assert got["too_many"].tolist() == [True] * (len(wanted[pe]) > capacity), (pe, index)
            sources = got["sources"].view(np.int32).reshape(-1)[:total].tolist()
            where = [divmod(source, case.max_tokens) for source in sources]
            assert len(set(where)) == total, (pe, index, "a row twice")
            assert set(where) <= wanted[pe], (pe, index)
            for slot, (source, token) in enumerate(where):
                theirs = sent[source]
                assert got["rows"][slot].tobytes() == theirs.tokens[token].tobytes(), (pe, index, slot)
                assert got["ids"][slot].tobytes() == theirs.indices[token].tobytes(), (pe, index, slot)
                if theirs.weights is not None:
                    assert got["weights"][slot].tobytes() == theirs.weights[token].tobytes(), (pe, index, slot)
                if theirs.scales is not None:
                    assert got["scales"][slot].tobytes() == theirs.scales[token].tobytes(), (pe, index, slot)
                placed[source].add((token, pe, slot))
            for name in ("rows", "ids", "weights", "sources"):
                assert (got[name][total:] == UNTOUCHED).all(), (pe, index, name)
        for pe, mine in enumerate(sent):
            check_forward(case, capacity, mine.indices, results[pe][index]["forward"], placed[pe])


def check_forward(
    case: Case, capacity: int, ids: np.ndarray, forward: np.ndarray, placed: set[tuple[int, int, int]]
) -> None:
    """Each entry stands at the first id of its PE and names the slot where the row arrived; no others."""
    found = set()
    for token, column in zip(*np.nonzero(forward >= 0), strict=True):
        pe, slot = divmod(int(forward[token, column]), capacity)
        owners = [e // case.experts_per_pe if 0 <= e < case.num_pes * case.experts_per_pe else -1 for e in ids[token]]
        assert owners.index(pe) == column, (token, column, owners)
        found.add((int(token), pe, slot))
    assert found == placed
    assert (forward[forward < 0] == -1).all()
