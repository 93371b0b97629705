"""Plans: what the host does in a call after the first of its kind, and in one that is captured."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from mori_triton import local_world, ops
from mori_triton.errors import StateError
from mori_triton.host import state as host_state
from mori_triton.host.drivers.cpu import CpuDriver
from mori_triton.host.heap import SymmetricHeap
from mori_triton.ops import op_base, plans
from mori_triton.ops.buffers import EpBuffers
from mori_triton.ops.kernels.finish import LAST, SYNC_EPOCH
from tests.ops.cases import Case, check_rounds, combine_round, control, dispatch_round, round_of, start, to_torch

pytestmark = pytest.mark.cpu

CASE = Case(num_pes=2, tokens="full", scales=(5, 4), rounds=4)


class Watch:
    """What the PEs do, by thread, while `on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, self.lock, self.seen = False, threading.Lock(), []
        monkeypatch.setattr(plans, "prepare", self.noting("prepare", plans.prepare))
        monkeypatch.setattr(plans.Step, "launch", self.noting("launch", plans.Step.launch))
        monkeypatch.setattr(host_state.PeState, "meet", self.noting("meet", host_state.PeState.meet))

    def noting(self, what: str, real: Any) -> Any:
        def call(first: Any, *args: Any, **named: Any) -> Any:
            if self.on:
                with self.lock:
                    self.seen.append((threading.get_ident(), what, first))
            return real(first, *args, **named)

        return call

    def mine(self) -> list[str]:
        """What this thread did, in order, launches by their kernel."""
        mine = [(what, first) for thread, what, first in self.seen if thread == threading.get_ident()]
        return [first.prepared.name.removesuffix("_kernel") if what == "launch" else what for what, first in mine]


def repeated(pe: int, watch: Watch) -> list[list[dict[str, Any]]]:
    op, outcomes, state = start(CASE, pe), [], host_state.current()
    first: list[Any] = []
    for index in range(CASE.rounds):
        got = dispatch_round(op, CASE, round_of(CASE, pe, index))
        kept = [got["out"], got["out_weights"]]
        outcomes.append(combine_round(op, CASE, pe, got))
        assert all(a is b for a, b in zip(first or kept, kept, strict=True)), "views are made once"
        first = first or kept
        state.bootstrap.barrier("a round is over")
        watch.on = True
    return outcomes


def test_later_calls_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    results = local_world(2, heap_size="16M").run(repeated, watch)
    check_rounds(CASE, [[round_of(CASE, pe, i) for pe in range(2)] for i in range(CASE.rounds)], results)
    done = [what if what != "launch" else first.prepared.name for _, what, first in watch.seen]
    assert "prepare" not in done
    assert done.count("dispatch_route_kernel") == done.count("combine_reduce_kernel") == 2 * (CASE.rounds - 1)
    # no round needs more than four launches
    assert done.count("meet") + 2 * (CASE.rounds - 1) * 4 == len(done)


def test_waiting_launches_are_between_meetings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may load a kernel, or do anything else, between the meeting and the launch that peers wait for."""
    watch = Watch(monkeypatch)

    def program(pe: int) -> list[str]:
        op, mine = start(CASE, pe), round_of(CASE, pe, 0)
        combine_round(op, CASE, pe, dispatch_round(op, CASE, mine))
        host_state.current().bootstrap.barrier("warm")
        watch.on = True
        combine_round(op, CASE, pe, dispatch_round(op, CASE, mine))
        dispatch_round(op, CASE, mine)
        dispatch_round(op, CASE, mine)
        return watch.mine()

    dispatched = ["dispatch_route", "dispatch_copy", "meet"]
    wanted = ["meet", *dispatched, "meet", "combine_copy", "meet", "combine_reduce"]
    wanted += ["meet", *dispatched, "meet", "sync", "meet", *dispatched]
    for done in local_world(2, heap_size="16M").run(program):
        # the meeting's kernel is loaded at its first use here; on a GPU with the first plan
        assert [what for what in done if what != "prepare"] == wanted


def captured(pe: int, watch: Watch) -> list[list[dict[str, Any]]]:
    """As on a GPU, with the caller's memory on the heap, where the emulated device takes addresses too."""
    op, state = start(CASE, pe), host_state.current()
    mine = [round_of(CASE, pe, index) for index in range(2)]
    heap = state.heap

    def on_heap(tensor: torch.Tensor) -> torch.Tensor:
        copy = heap.tensor(tuple(tensor.shape), tensor.dtype)
        copy.copy_(tensor)
        return copy

    outcome = combine_round(op, CASE, pe, dispatch_round(op, CASE, mine[0]))
    given = [on_heap(to_torch(mine[1].tokens)), on_heap(torch.from_numpy(mine[1].indices))]
    rows = op.get_registered_combine_input_buffer(torch.bfloat16)
    state.bootstrap.barrier("warm")
    op._on_host = False
    watch.on = True
    for _ in range(2):
        op.dispatch(given[0], None, None, given[1])
        op.combine(rows, None, given[1])
    reset_too = partial(op.combine, rows, None, given[1], call_reset=True)
    for refused in (op.reset, op.get_dispatch_src_token_pos, reset_too):
        with pytest.raises(StateError, match="waits for the device, which a captured stream cannot"):
            refused()
    assert [what for what in watch.mine() if what not in ("prepare", "meet")] == [
        *("sync", "dispatch_route", "dispatch_copy", "combine_copy", "combine_reduce"),
        *("dispatch_route", "dispatch_copy", "combine_copy", "combine_reduce"),
    ]
    # what ran before was a combine: no meeting took place
    assert control(op, SYNC_EPOCH, LAST) == [0, 2]
    state.bootstrap.barrier("captured")
    watch.on, op._on_host = False, True
    return [outcome]


def test_e1_a_captured_call_looks_at_nothing_and_begins_with_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    monkeypatch.setattr(op_base.torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(op_base.EpOpBase, "_capture_id", lambda self: 5)

    def unless_captured(real: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            assert not watch.on, "a captured call may not look at the device"
            return real(self, *args)

        return call

    for owner, name in ((CpuDriver, "synchronize"), (CpuDriver, "read"), (SymmetricHeap, "errors_pending")):
        monkeypatch.setattr(owner, name, unless_captured(getattr(owner, name)))
    results = local_world(2, heap_size="16M").run(captured, watch)
    check_rounds(CASE, [[round_of(CASE, pe, 0) for pe in range(2)]], results)


def pretend_to_capture(monkeypatch: pytest.MonkeyPatch, capturing: threading.local) -> None:
    """What is launched while `capturing.now` also runs, as in the graph `capturing.id` that is replayed at once."""
    monkeypatch.setattr(op_base.EpOpBase, "_is_captured", lambda self: getattr(capturing, "now", False))
    monkeypatch.setattr(op_base.EpOpBase, "_capture_id", lambda self: capturing.id)


def test_calls_that_a_replay_may_come_before_begin_with_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph of one phase, and every eager call once there is a graph: a replay of any graph is not seen."""
    watch = Watch(monkeypatch)
    capturing = threading.local()
    pretend_to_capture(monkeypatch, capturing)

    def program(pe: int) -> list[str]:
        op, state = start(CASE, pe), host_state.current()
        mine = round_of(CASE, pe, 0)
        tokens, indices = to_torch(mine.tokens), torch.from_numpy(mine.indices)
        rows = op.get_registered_combine_input_buffer(torch.bfloat16)
        combine_round(op, CASE, pe, dispatch_round(op, CASE, mine))
        state.bootstrap.barrier("warm")
        watch.on = True
        graphs = (
            lambda: op.dispatch(tokens, None, None, indices),
            lambda: op.combine(rows, None, indices),
            # right behind the graph that only combines, which may have been replayed before a dispatch
            lambda: op.combine(rows, None, indices),
        )
        for index, call in enumerate(graphs):
            capturing.now, capturing.id = True, 5 + index
            call()
            capturing.now = False
        op.dispatch(tokens, None, None, indices)
        op.combine(rows, None, indices)
        state.bootstrap.barrier("done")
        return [what for what in watch.mine() if what not in ("prepare", "meet")]

    dispatched = ["sync", "dispatch_route", "dispatch_copy"]
    combined = ["sync", "combine_copy", "combine_reduce"]
    wanted = [*dispatched, *combined, *combined, *dispatched, *combined]
    assert local_world(2, heap_size="16M").run(program) == [wanted] * 2


def test_whose_rows_a_replayed_dispatch_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = threading.local()
    pretend_to_capture(monkeypatch, capturing)

    def program(pe: int) -> None:
        op, state = start(CASE, pe), host_state.current()
        mine = round_of(CASE, pe, 0)
        tokens, indices = to_torch(mine.tokens), torch.from_numpy(mine.indices)
        capturing.now, capturing.id = True, 5
        op.dispatch(tokens, None, None, indices)
        capturing.now = False
        # what the host saw last was the combine before the replay
        op._last = "combine"
        assert len(op.get_dispatch_src_token_pos()) == int(op._buffers.region("total_recv"))
        state.bootstrap.barrier("asked")
        op.combine(torch.zeros(10, CASE.hidden, dtype=torch.bfloat16), None, indices)
        op._last = "dispatch"
        with pytest.raises(StateError, match="between dispatch and combine"):
            op.get_dispatch_src_token_pos()

    local_world(2, heap_size="16M").run(program)


def test_plans_tell_apart_what_they_depend_on() -> None:
    """Type, shape, layout and alignment; not contents, nor where memory is otherwise."""
    base = torch.zeros(64, 8, dtype=torch.float32)
    same = {plans.plan_key(base[:4]), plans.plan_key(base[4:8]), plans.plan_key(torch.ones(4, 8))}
    assert len(same) == 1
    flat = torch.zeros(65)
    others = (base[:5], base[:4].double(), base[:4, :4], flat[1:33].view(4, 8), base[:4].to("meta"), None, [1.0])
    assert len({plans.plan_key(tensor) for tensor in others} | same) == len(others) + 1


def test_a_view_in_somebodys_graph_is_not_given_out_again() -> None:
    class Driver:
        def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

    config = ops.EpDispatchCombineConfig(torch.float32, 0, 1, 8, 0, 0, 4, 2, 1, 1)
    buffers = EpBuffers(ops.ep_buffer_layout(config), 0, Driver())
    view = buffers.view("combine_in", torch.float32, 2, 8)
    assert buffers.view("combine_in", torch.float32, 2, 8) is view
    view[:1] = torch.ones(1, 8, requires_grad=True)
    assert not buffers.view("combine_in", torch.float32, 2, 8).requires_grad
