"""The ways of a round that are compared: this package's op, and two that torch.distributed's collectives allow.

A way is made for one problem. `dispatch` brings the rows to the experts' PEs and `combine` the experts' rows back and
sums them, both on the current stream and capturable in a graph; `check` does one round from poisoned outputs and raises
AssertionError for a wrong element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench import problem as problems
from bench.multi_gpu.group import Group
from bench.problem import Inputs, Problem, expert
from mori_triton import ops


class Way(ABC):
    """One way to do a round; collective to make and to call."""

    name: str

    @abstractmethod
    def dispatch(self) -> Any: ...

    @abstractmethod
    def combine(self) -> Any: ...

    @abstractmethod
    def check(self) -> None: ...

    def close(self) -> None:  # noqa: B027
        """Give back what it holds; nothing, for most."""


class Op(Way):
    """`EpDispatchCombineOp`; the experts' rows are in the registered buffer ("zero copy") or in memory of their own."""

    def __init__(self, group: Group, problem: Problem, everyone: list[Inputs], *, zero_copy: bool) -> None:
        self.name = f"{problem.kernel_type}, {'zero copy' if zero_copy else 'external input'}"
        self.group, self.problem, self.everyone, self.mine = group, problem, everyone, everyone[group.rank]
        self.op = ops.EpDispatchCombineOp(problem.config(group.rank))
        rows = self.op.max_num_tokens_to_recv()
        if zero_copy:
            self.rows = self.op.get_registered_combine_input_buffer(torch.bfloat16, problem.hidden)
        else:
            self.rows = torch.empty(rows, problem.hidden, dtype=torch.bfloat16, device=group.device)

    def dispatch(self) -> Any:
        return self.op.dispatch(*self.mine.args())

    def combine(self) -> Any:
        return self.op.combine(self.rows, None, self.mine.indices)

    def check(self) -> None:
        self.group.meet()
        problems.poison(self.op)
        self.group.meet()
        out = self.dispatch()
        self.group.meet()
        sources = self.op._buffers.view("recv_sources", torch.int32, self.op.max_num_tokens_to_recv())
        problems.check_dispatch(self.problem, self.everyone, self.group.rank, sources, out, poisoned=True)
        problems.run_experts(self.group.rank, out[0], self.rows, int(out[-1]))
        result = self.combine()
        self.group.meet()
        problems.check_combine(self.problem, self.mine, result[0])
        self.group.meet()

    def close(self) -> None:
        self.op.close()


class Collectives:
    """What the other ways need of a backend: NCCL as it is; gloo, which only stands in for it, through the host."""

    def __init__(self, group: Group) -> None:
        self.direct = group.num_gpus == group.size
        self.name = "NCCL" if self.direct else "gloo"
        self.size = group.size
        self.group = dist.new_group(backend="nccl" if self.direct else "gloo")

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """`out[r * len(mine):]` = rank r's `mine`."""
        out, mine = out.view(torch.uint8), mine.view(torch.uint8)
        if self.direct:
            dist.all_gather_into_tensor(out, mine, group=self.group)
            return
        parts = [torch.empty_like(mine, device="cpu") for _ in range(self.size)]
        dist.all_gather(parts, mine.cpu(), group=self.group)
        out.copy_(torch.cat(parts))

    def reduce_scatter(self, out: torch.Tensor, everything: torch.Tensor) -> None:
        """`out` = this rank's part of the sum over ranks of `everything`."""
        if self.direct:
            dist.reduce_scatter_tensor(out, everything, group=self.group)
            return
        total = everything.float().cpu()
        dist.all_reduce(total, group=self.group)
        out.copy_(total.chunk(self.size)[dist.get_rank()])

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, out_rows: list[int], rows: list[int]) -> None:
        """`rows[r]` rows of `mine` to rank r, `out_rows[r]` of `out` from it."""
        out, mine = out.view(torch.uint8), mine.view(torch.uint8)
        if self.direct:
            dist.all_to_all_single(out, mine, out_rows, rows, group=self.group)
            return
        there = torch.empty_like(out, device="cpu")
        dist.all_to_all_single(there, mine.cpu(), out_rows, rows, group=self.group)
        out.copy_(there)


def small_rows(mine: Inputs) -> torch.Tensor:
    """uint8 `[n, bytes]`: ids, weights and scales of each token, which travel together."""
    parts = [mine.indices, mine.weights, *([] if mine.scales is None else [mine.scales])]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


class GatherScatter(Way):
    """All-gather of every token to every PE; reduce-scatter of every PE's sums for every token."""

    def __init__(self, group: Group, problem: Problem, everyone: list[Inputs], wire: Collectives) -> None:
        self.name = f"{wire.name} all-gather + reduce-scatter"
        self.group, self.problem, self.everyone, self.wire = group, problem, everyone, wire
        self.mine, n, device = everyone[group.rank], len(everyone[group.rank].tokens), group.device
        # ids, weights and scales lie together already: in the collectives' favour
        self.small = small_rows(self.mine)
        self.tokens = torch.empty(n * group.size, problem.hidden, dtype=self.mine.tokens.dtype, device=device)
        self.all_small = torch.empty(n * group.size, self.small.shape[1], dtype=torch.uint8, device=device)
        # the sums of this PE's experts, 0 for tokens of others
        self.partial = torch.zeros(n * group.size, problem.hidden, dtype=torch.bfloat16, device=device)
        for pe, theirs in enumerate(everyone):
            here = problems.destinations(problem, theirs.indices)[:, group.rank].nonzero()[:, 0]
            self.partial[pe * n + here] = expert(group.rank, theirs.tokens[here])
        self.out = torch.empty(n, problem.hidden, dtype=torch.bfloat16, device=device)

    def dispatch(self) -> Any:
        self.wire.all_gather(self.tokens, self.mine.tokens)
        self.wire.all_gather(self.all_small, self.small)

    def combine(self) -> Any:
        self.wire.reduce_scatter(self.out, self.partial)

    def check(self) -> None:
        for tensor in (self.tokens, self.all_small, self.out):
            tensor.view(torch.uint8).fill_(255)
        self.dispatch()
        self.combine()
        n = len(self.mine.tokens)
        for pe, theirs in enumerate(self.everyone):
            part = slice(pe * n, (pe + 1) * n)
            assert torch.equal(self.tokens[part].view(torch.uint8), theirs.tokens.view(torch.uint8)), self.name
            assert torch.equal(self.all_small[part], small_rows(theirs)), self.name
        check_sums(self.problem, self.mine, self.out, self.name)


class AllToAll(Way):
    """All-to-all-v of the same rows that the op sends: once to each distinct PE. Splits are known beforehand."""

    def __init__(self, group: Group, problem: Problem, everyone: list[Inputs], wire: Collectives) -> None:
        self.name = f"{wire.name} all-to-all-v"
        self.group, self.problem, self.everyone, self.wire = group, problem, everyone, wire
        self.mine, device = everyone[group.rank], group.device
        self.small = small_rows(self.mine)
        to = [problems.destinations(problem, theirs.indices) for theirs in everyone]
        # rows in the order of their destinations; nobody waits for counts: in the collectives' favour
        self.send = torch.cat([to[group.rank][:, pe].nonzero()[:, 0] for pe in range(group.size)])
        self.send_rows = to[group.rank].sum(0).tolist()
        self.recv_rows = [int(theirs[:, group.rank].sum()) for theirs in to]
        num_recv, h = sum(self.recv_rows), problem.hidden
        self.tokens = torch.empty(num_recv, h, dtype=self.mine.tokens.dtype, device=device)
        self.recv_small = torch.empty(num_recv, self.small.shape[1], dtype=torch.uint8, device=device)
        self.sources = [theirs[:, group.rank].nonzero()[:, 0] for theirs in to]
        sent = [theirs.tokens[rows] for theirs, rows in zip(everyone, self.sources, strict=True)]
        self.rows = expert(group.rank, torch.cat(sent))
        # what comes back, and a row of zeros for the places that hold none
        self.back = torch.zeros(len(self.send) + 1, h, dtype=torch.bfloat16, device=device)
        self.places = self._places(to[group.rank])
        self.out: torch.Tensor | None = None

    def _places(self, to: torch.Tensor) -> torch.Tensor:
        """int64 `[n, PEs]`: where each token's row from each PE comes back, the row of zeros where none does."""
        at = torch.full(to.shape, len(self.send), dtype=torch.int64, device=to.device)
        pe = torch.arange(to.shape[1], device=to.device).repeat_interleave(to.sum(0))
        at[self.send, pe] = torch.arange(len(self.send), device=to.device)
        return at

    def dispatch(self) -> Any:
        # an 8-bit float is no type for index_select everywhere
        tokens = self.mine.tokens.view(torch.uint8 if self.mine.tokens.itemsize == 1 else torch.int16)
        self.wire.all_to_all(self.tokens, tokens.index_select(0, self.send), self.recv_rows, self.send_rows)
        self.wire.all_to_all(
            self.recv_small, self.small.index_select(0, self.send), self.recv_rows, self.send_rows
        )  # fmt: skip

    def combine(self) -> Any:
        self.wire.all_to_all(self.back[:-1], self.rows, self.send_rows, self.recv_rows)
        # gathers and adds in one kernel
        self.out = F.embedding_bag(self.places, self.back, mode="sum", padding_idx=len(self.send))

    def check(self) -> None:
        for tensor in (self.tokens, self.recv_small, self.back[:-1]):
            tensor.view(torch.uint8).fill_(255)
        self.dispatch()
        self.combine()
        sent = [theirs.tokens.view(torch.uint8)[rows] for theirs, rows in zip(self.everyone, self.sources, strict=True)]
        assert torch.equal(self.tokens.view(torch.uint8), torch.cat(sent)), self.name
        sent = [small_rows(theirs)[rows] for theirs, rows in zip(self.everyone, self.sources, strict=True)]
        assert torch.equal(self.recv_small, torch.cat(sent)), self.name
        assert self.out is not None
        check_sums(self.problem, self.mine, self.out, self.name)


def check_sums(problem: Problem, mine: Inputs, out: torch.Tensor, name: str) -> None:
    """Sums in an order, and with roundings, of a library's choice: each of up to `PEs` additions may round to bfloat16.

    Raises: AssertionError.
    """
    owners = mine.indices.long() // problem.experts_per_pe
    want = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    magnitude = torch.zeros_like(want)
    for k in range(problem.top_k):
        first = ~(owners[:, :k] == owners[:, k : k + 1]).any(1)
        row = torch.where(first[:, None], expert(owners[:, k], mine.tokens).float(), 0.0)
        want += row
        magnitude += row.abs()
    bound = magnitude * problem.num_pes * 2.0**-8
    assert bool(((out.float() - want).abs() <= bound).all()), f"{name}: sums are wrong"
