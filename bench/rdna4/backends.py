"""What is compared: the op, and dense all-gather + reduce-scatter. All make the same tokens of the same input.

A backend is made for one point and one PE. `pair` is what is timed: dispatch and combine of rows that lie there, or
both collectives. `check` does both from poisoned outputs, with the experts between, and compares every element.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.multi_gpu.ways import Collectives
from bench.rdna4.dense import HeapCollectives
from mori_triton import ops
from mori_triton.host import state as host_state
from tests.ops import rdna4_checks as checks
from tests.ops.rdna4_checks import DTYPES, Point, Sent

# of each kernel of a baseline in one GPU's world, all PEs together: two for each of its processors
_PROGRAMS_EACH = 2


class Team:
    """This PE among the others: threads of a world, or processes."""

    def __init__(self) -> None:
        self.state = host_state.current()
        self.rank, self.size, self.device = self.state.pe, self.state.n_pes, self.state.heap.ctx.device

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by PE."""
        everyone = self.state.bootstrap.allgather(pickle.dumps(value), "bench_rdna4_ep")
        return [pickle.loads(value) for value in everyone]

    def agree(self, compare: Callable[[], None]) -> None:
        """Run a comparison of each PE's. Collective: what one PE finds wrong, all raise, and none waits for it in vain.

        Raises: AssertionError, that of the first PE that has one.
        """
        try:
            compare()
            said = None
        except AssertionError as error:
            said = str(error) or "wrong"
        found = next((other for other in self.gather(said) if other), None)
        assert found is None, found

    def meet(self) -> None:
        """Return when everything that PEs have launched is done everywhere."""
        self.state.driver.synchronize()
        self.state.bootstrap.barrier("bench_rdna4_ep")


@dataclass(frozen=True)
class Moved:
    """Bytes of rows in one pair, all PEs together; ids and weights (8 * k a row) are not counted."""

    memory: int  # read and written
    links: int  # from one PE to another


class Backend(ABC):
    """One way; collective to make, to call and to close."""

    name: str
    moved: Moved

    @abstractmethod
    def pair(self) -> None: ...

    @abstractmethod
    def check(self) -> None:
        """Raises: AssertionError on all PEs, if anything is wrong on any."""

    @abstractmethod
    def close(self) -> None: ...


class Op(Backend):
    """`EpDispatchCombineOp`; the experts' rows are in the caller's memory."""

    name = "mori"

    def __init__(self, team: Team, point: Point, everyone: list[Sent]) -> None:
        self.team, self.point, self.everyone = team, point, everyone
        self.mine, self.moved = everyone[team.rank], moved_by_op(point, everyone)
        self.op = ops.EpDispatchCombineOp(point.config(team.rank))
        most = self.op.max_num_tokens_to_recv()
        self.rows = torch.zeros(most, point.hidden, dtype=DTYPES[point.dtype], device=team.device)
        self.weights = torch.zeros(most, point.top_k, device=team.device) if point.weights else None

    def pair(self) -> None:
        self.op.dispatch(*self.mine.args())
        self.op.combine(self.rows, self.weights, self.mine.ids)

    def check(self) -> None:
        team, point, rank = self.team, self.point, self.team.rank
        checks.poison(self.op)
        out = self.op.dispatch(*self.mine.args())
        team.meet()
        sources = self.op.get_dispatch_src_token_pos()
        team.agree(lambda: checks.check_dispatch(point, rank, self.everyone, out, sources, poisoned=True))
        total = int(out[4])
        for start in range(0, total, checks.CHUNK_ROWS):
            part = slice(start, min(start + checks.CHUNK_ROWS, total))
            self.rows[part] = checks.expert(rank, out[0][part], 0)
        if self.weights is not None:
            self.weights[:total] = checks.expert_weights(rank, out[1][:total], 0)
        team.meet()
        combined = self.op.combine(self.rows, self.weights, self.mine.ids)
        team.meet()
        team.agree(lambda: checks.check_combine(point, self.mine, combined, 0))

    def close(self) -> None:
        self.op.close()


class Dense(Backend):
    """All-gather of the tokens and reduce-scatter of all PEs' rows of them, zero where a PE has no expert of it."""

    def __init__(self, team: Team, point: Point, everyone: list[Sent], wire: Any, *, exact: bool, moved: Moved) -> None:
        self.team, self.point, self.everyone, self.wire = team, point, everyone, wire
        self.mine, self.exact, self.moved = everyone[team.rank], exact, moved
        self.name = wire.name

    def pair(self) -> None:
        self.wire.all_gather(self.mine.tokens.view(-1))
        self.wire.reduce_scatter()

    def check(self) -> None:
        team, point, wire = self.team, self.point, self.wire
        team.meet()
        for tensor in (wire.gathered, wire.partial, wire.out):
            tensor.view(torch.uint8).fill_(0xFF)
        team.meet()
        wire.all_gather(self.mine.tokens.view(-1))
        team.meet()
        shape = team.size, point.capacity, point.hidden
        gathered, partial = wire.gathered.view(shape), wire.partial.view(shape)
        team.agree(lambda: self._check_gathered(gathered))
        for pe, sent in enumerate(self.everyone):
            rows = checks.expert(team.rank, gathered[pe], 0)
            goes = (checks.owners(point, sent.ids) == team.rank).any(1)
            partial[pe] = torch.where(goes[:, None], rows, torch.zeros_like(rows))
        team.meet()
        wire.reduce_scatter()
        team.meet()
        team.agree(lambda: self._check_sums(wire.out.view(shape[1:])))

    def _check_gathered(self, gathered: torch.Tensor) -> None:
        for pe, sent in enumerate(self.everyone):
            same = torch.equal(gathered[pe].view(torch.int16), sent.tokens.view(torch.int16))
            assert same, f"PE {self.team.rank}: {self.name}: gathered tokens of PE {pe} are wrong"

    def _check_sums(self, out: torch.Tensor) -> None:
        team, point = self.team, self.point
        owners = checks.owners(point, self.mine.ids)
        want = torch.zeros(out.shape, device=team.device)
        magnitude = torch.zeros_like(want)
        for pe in range(team.size):
            goes = (owners == pe).any(1)[:, None]
            row = torch.where(goes, checks.expert(pe, self.mine.tokens, 0).float(), 0.0)
            want, magnitude = want + row, magnitude + row.abs()
        if self.exact:
            right = torch.equal(out, want.to(out.dtype))
        else:
            # a library may round each of up to `PEs` additions, and add in any order
            bound = magnitude * team.size * torch.finfo(out.dtype).eps / 2
            right = bool(((out.float() - want).abs() <= bound).all())
        assert right, f"PE {team.rank}: {self.name}: sums are wrong"

    def close(self) -> None:
        self.wire.close()


class ProcessCollectives:
    """torch.distributed's collectives with the calls of `HeapCollectives`."""

    def __init__(self, wire: Collectives, num: int, dtype: torch.dtype, device: torch.device) -> None:
        self.wire, self.name = wire, f"{wire.name} all-gather + reduce-scatter"
        self.gathered, self.partial = (torch.empty(wire.size * num, dtype=dtype, device=device) for _ in range(2))
        self.out = torch.empty(num, dtype=dtype, device=device)

    def all_gather(self, x: torch.Tensor) -> None:
        self.wire.all_gather(self.gathered, x)

    def reduce_scatter(self) -> None:
        self.wire.reduce_scatter(self.out, self.partial)

    def close(self) -> None:
        """Its memory is torch's."""


def dense_in_heaps(team: Team, point: Point, everyone: list[Sent], form: str) -> Dense:
    """The baseline of a world in one process, as `form` of `dense.FORMS`."""
    processors = 1
    if team.device.type != "cpu":
        gpus = torch.cuda.device_count()
        processors = torch.cuda.get_device_properties(team.device).multi_processor_count * gpus
    programs = max(1, processors * _PROGRAMS_EACH // team.size)
    wire = HeapCollectives(form, point.capacity * point.hidden, DTYPES[point.dtype], programs)
    return Dense(team, point, everyone, wire, exact=True, moved=moved_by_dense(point, form))


def dense_of_processes(team: Team, point: Point, everyone: list[Sent], collectives: Collectives) -> Dense:
    """The baseline under torchrun."""
    wire = ProcessCollectives(collectives, point.capacity * point.hidden, DTYPES[point.dtype], team.device)
    return Dense(team, point, everyone, wire, exact=False, moved=moved_by_dense(point, "push"))


# --------------------------------------------------------------------------------------------------------------- bytes
def moved_by_op(point: Point, everyone: list[Sent]) -> Moved:
    """Dispatch: tokens read, rows written. Combine: remote rows read and written, all rows read, tokens written."""
    tokens = sum(len(sent.ids) for sent in everyone)
    rows = remote = 0
    for source, sent in enumerate(everyone):
        owner = checks.owners(point, sent.ids)
        rows += int((owner >= 0).sum())
        remote += int(((owner >= 0) & (owner != source)).sum())
    row_bytes = 2 * point.hidden
    return Moved((tokens + rows + 2 * remote + rows + tokens) * row_bytes, 2 * remote * row_bytes)


def moved_by_dense(point: Point, form: str) -> Moved:
    """All-gather: tokens read, written once on every PE. Reduce-scatter: all rows read, tokens written; "push": those
    of other PEs' tokens read and written before.
    """
    pes, tokens, row_bytes = point.world_size, point.world_size * point.capacity, 2 * point.hidden
    pushed = 2 * (pes - 1) * tokens if form == "push" else 0
    return Moved(
        (tokens + pes * tokens + pushed + pes * tokens + tokens) * row_bytes, 2 * (pes - 1) * tokens * row_bytes
    )
