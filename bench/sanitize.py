"""A small, exact run of every kernel for compute-sanitizer, with the tool under a minute for one PE:

    python3 bench/sanitize.py                                   # fills Triton's cache; PYTHONPATH=. if not installed
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --error-exitcode 9 python3 bench/sanitize.py
    for n in 1 2 4 3; do compute-sanitizer --tool racecheck --error-exitcode 9 python3 bench/sanitize.py --pes $n; done

A tool may run one kernel at a time, so no kernel may wait for one that starts later. One PE alone waits for itself
only: there every call is made. Several PEs use the split calls: all send, the device finishes, and only then do they
receive. They also take turns, so that one thread at a time loads, launches and allocates: racecheck stood still in a
world of two threads. `--concurrent` makes the calls that wait on several PEs too, and without turns, for
tools that let kernels run side by side. Without the caching allocator every tensor is an allocation of its own, so an
access behind its end is seen. A run that does not end says where each thread is, and the status is 1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import torch
import typer

import mori_triton as mori
from bench import problem
from bench.problem import Inputs, Problem
from bench.report import console
from mori_triton import ops
from mori_triton.errors import require
from mori_triton.host import state as host_state
from mori_triton.ops import dispatch_combine_v2 as v2

# 2049 elements a row: pieces that are not full, and rows that are not aligned to 16 bytes
BASE = Problem(1, 9, hidden=2056, top_k=3, experts=12, seed=5)
VARIANTS: dict[str, Problem] = {
    "bf16": BASE,
    "bf16, odd rows": replace(BASE, hidden=2049),
    "bf16, top-10": replace(BASE, top_k=10),
    "fp8 with scales": replace(BASE, dtype="fp8"),
    "IntraNodeLL": replace(BASE, kernel_type="IntraNodeLL"),
    "IntraNodeLL, fp8": replace(BASE, kernel_type="IntraNodeLL", dtype="fp8"),
    "deterministic": replace(BASE, fields=(("deterministic", True),)),
    "fp8_direct_cast": replace(BASE, fields=(("quant_type", "fp8_direct_cast"),)),
    "fp8_blockwise": replace(BASE, fields=(("quant_type", "fp8_blockwise"),)),
    "fp4_blockwise": replace(BASE, fields=(("quant_type", "fp4_blockwise"),)),
}
# a variant of 2 or of 4 PEs
RDNA4 = replace(BASE, kernel_type="IntraNodeRDNA4")
RDNA4_PES = (2, 4)
# (PEs, variant), in order: what a cut run must not miss comes first
RUNS = (
    (1, "EPv2"),
    *((num_pes, "RDNA4") for num_pes in RDNA4_PES),
    *((num_pes, name) for num_pes in (1, 2, 3) for name in VARIANTS),
)
# their dispatch exchanges counts, so even its sending half waits for every PE
SENDS_WAIT = ("deterministic",)
# a tool makes kernels many times slower. A wait that reaches this says so before the run's own limit ends everything
WAIT_LIMIT_S = 30.0
T = TypeVar("T")


class TurnByTurn:
    """A PE's bootstrap that gives up the turn for every collective call, with the device idle, and then takes it."""

    def __init__(self, here: host_state.PeState, turn: threading.Lock) -> None:
        self._bootstrap, self._driver, self._turn = here.bootstrap, here.driver, turn
        self.pe, self.n_pes, self.timeout_s = here.pe, here.n_pes, here.bootstrap.timeout_s

    def allgather(self, data: bytes, what: str = "allgather") -> list[bytes]:
        return self._let_others(lambda: self._bootstrap.allgather(data, what))

    def broadcast(self, data: bytes, root: int = 0, what: str = "broadcast") -> bytes:
        return self._let_others(lambda: self._bootstrap.broadcast(data, root, what))

    def barrier(self, what: str = "barrier") -> None:
        self._let_others(lambda: self._bootstrap.barrier(what))

    def close(self) -> None:
        self._bootstrap.close()

    def _let_others(self, call: Callable[[], T]) -> T:
        self._driver.synchronize()
        self._turn.release()
        try:
            return call()
        finally:
            self._turn.acquire()


@contextlib.contextmanager
def taking_turns(turn: threading.Lock) -> Iterator[None]:
    """In the block the calling PE goes on while no other does; they change where they meet on the host."""
    here = host_state.current()
    before = here.bootstrap
    with turn:
        here.bootstrap = here.heap.bootstrap = TurnByTurn(here, turn)
        try:
            yield
        finally:
            here.bootstrap = here.heap.bootstrap = before


class Pe:
    """One PE of a small world."""

    def __init__(self, pe: int, this: Problem, shared: dict[int, Inputs], split: bool) -> None:
        self.pe, self.problem, self.shared, self.split = pe, this, shared, split
        self.op = ops.EpDispatchCombineOp(this.config(pe))
        # PEs bring different numbers of tokens, one of them none
        num_tokens = this.tokens - 4 * pe if pe < 2 else 0
        self.mine = problem.inputs(this, pe, self.op.device, num_tokens)
        shared[pe] = self.mine

    def meet(self, what: str) -> None:
        host_state.current().driver.synchronize()
        host_state.current().bootstrap.barrier(what)

    def dispatch(self, **options: Any) -> tuple:
        """`dispatch`, or its halves with everyone's first half done before anyone's second."""
        if not self.split:
            out = self.op.dispatch(*self.mine.args(), **options)
        else:
            out = self.op.dispatch_send(*self.mine.args())
            self.meet("all sent")
            self.op.dispatch_recv(**options)
        self.meet("dispatched")
        return out

    def combine(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not self.split:
            out = self.op.combine(rows, weights, self.mine.indices)[0]
        else:
            out = self.op.combine_send(rows, weights, self.mine.indices)[0]
            self.meet("all sent")
            self.op.combine_recv()
        self.meet("combined")
        return out

    def round(self, *, registered: bool, **options: Any) -> None:
        """A round from poisoned buffers, every element compared."""
        self.meet("before poison")
        problem.poison(self.op)
        self.meet("poisoned")
        out = self.dispatch(**options)
        everyone = [self.shared[pe] for pe in range(self.problem.num_pes)]
        sources = self.op._buffers.view("recv_sources", torch.int32, self.op.max_num_tokens_to_recv())
        problem.check_dispatch(self.problem, everyone, self.pe, sources, out, poisoned=True)
        total, hidden = int(out[4]), self.problem.hidden
        self.count_experts(out[3], out[4])
        if registered:
            rows = self.op.get_registered_combine_input_buffer(torch.bfloat16, hidden)
        else:
            rows = torch.empty(total, hidden, dtype=torch.bfloat16, device=self.op.device)
        problem.run_experts(self.pe, out[0], rows, total)
        combined = self.combine(rows, out[1][:total].clone())
        problem.check_combine(self.problem, self.mine, combined)

    def count_experts(self, indices: torch.Tensor, total: torch.Tensor) -> None:
        """Both ways to count the rows of each local expert."""
        here, config = self.op.device, self.op.config
        want = ops.local_expert_count_torch(config, indices, int(total))
        counts = torch.full_like(want, -1)
        stream = 0 if here.type == "cpu" else torch.cuda.current_stream(here).cuda_stream
        ops.launch_local_expert_count(config, indices, total, counts, 3, 4, stream)
        assert torch.equal(counts, want)
        ops.local_expert_count(config, indices, total, counts.fill_(-1))
        assert torch.equal(counts, want)

    def run(self) -> None:
        self.meet("inputs are there")
        self.round(registered=False)
        if self.problem.codec == "none":
            self.round(registered=True)
        if not self.split:
            self.replay()
        self.op.close()

    def replay(self) -> None:
        """A routing handle, two dispatches in a row, and a dispatch that takes the first one's routing again."""
        first = self.op.dispatch(*self.mine.args(), return_routing=True)
        self.op.dispatch(*self.mine.args())
        out = self.op.dispatch(*self.mine.args(), routing=first[5])
        total = int(out[4])
        rows = problem.expert(self.pe, out[0][:total])
        combined = self.op.combine(rows, None, self.mine.indices, routing=first[5])[0]
        self.meet("combined")
        problem.check_combine(self.problem, self.mine, combined)


def run_staged(device: str) -> None:
    """A round of an EPv2 op on one PE: its dispatch waits. Every element compared; experts give back what they got."""

    def program(pe: int) -> None:
        mine = problem.inputs(BASE, pe, host_state.current().heap.ctx.device)
        config = v2.EpDispatchCombineConfig(
            rank=pe, world_size=1, hidden_dim=BASE.hidden, max_num_inp_token_per_rank=BASE.tokens,
            num_experts_per_rank=BASE.experts, num_experts_per_token=BASE.top_k, scale_dim=5, scale_type_size=4,
        )  # fmt: skip
        scales = torch.arange(5.0 * BASE.tokens, device=mine.tokens.device).view(BASE.tokens, 5)
        with v2.EpDispatchCombineOp(config) as op:
            out = op.dispatch(mine.tokens, mine.weights, scales, mine.indices, return_routing=True)
            total, routing = int(out[4]), out[5]
            source = op.get_dispatch_src_token_pos()[:total].long()
            for got, given in zip(out[:4], (mine.tokens, mine.weights, scales, mine.indices), strict=True):
                assert torch.equal(got[:total], given[source])
            combined, weights = op.combine(out[0], True, routing=routing)
            assert torch.equal(combined, mine.tokens)
            assert torch.equal(weights, mine.weights)

    mori.local_world(1, device=device, heap_size=BASE.heap_bytes(), timeout_s=WAIT_LIMIT_S).run(program)


def run_world(num_pes: int, this: Problem, device: str, split: bool) -> None:
    """One variant on `num_pes` PEs; raises AssertionError on a wrong element."""
    shared: dict[int, Inputs] = {}
    this = replace(this, num_pes=num_pes)
    turn = threading.Lock()

    def program(pe: int) -> None:
        with taking_turns(turn) if split else contextlib.nullcontext():
            Pe(pe, this, shared, split).run()

    mori.local_world(num_pes, device=device, heap_size=this.heap_bytes(), timeout_s=WAIT_LIMIT_S).run(program)


def run_variant(num_pes: int, name: str, device: str, split: bool) -> None:
    """One of `RUNS`."""
    if name == "EPv2":
        run_staged(device)
    else:
        run_world(num_pes, RDNA4 if name == "RDNA4" else VARIANTS[name], device, split)


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the command itself")] = "cuda",
    pes: Annotated[str, typer.Option(help="world sizes")] = "1,2,3,4",
    only: Annotated[str, typer.Option(help="a part of a variant's name, empty: all")] = "",
    concurrent: Annotated[bool, typer.Option(help="several PEs make the calls that wait too")] = False,
    limit_s: Annotated[float, typer.Option(help="of one variant; then all threads' stacks are printed")] = 60.0,
) -> None:
    """Run every variant on every world size once; nothing is timed but the whole."""
    sizes, known = problem.numbers(pes), sorted({num_pes for num_pes, _ in RUNS})
    require(set(sizes) <= set(known), "pes", f"some of {known}", pes)
    for num_pes, name in RUNS:
        if num_pes not in sizes or only not in name:
            continue
        modes = [True, False] if concurrent and name != "EPv2" else [num_pes > 1]
        for split in modes:
            if split and name in SENDS_WAIT:
                continue
            start = time.perf_counter()
            # a thread that hangs in a driver's or a tool's call takes no exception
            faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
            run_variant(num_pes, name, device, split)
            faulthandler.cancel_dump_traceback_later()
            how = "split calls" if split else "whole calls"
            console().print(f"{num_pes} PEs, {name}, {how}: right ({time.perf_counter() - start:.1f} s)")


if __name__ == "__main__":
    typer.run(main)
