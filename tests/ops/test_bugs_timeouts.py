"""Fault D20 that users met in public (docs/bug_cases.md): a time-out names what is missing and breaks the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mori_triton import abi, ops
from mori_triton.errors import Deadlock, PeerTimeout, ReceiveOverflow, StateError
from mori_triton.host import state as host_state
from mori_triton.ops.kernels.finish import STATUS
from tests.ops.cases import Case, check_case, combine_round, dispatch_round, inputs_on, poison, round_of, start
from tests.ops.given_ids import with_ids, world

pytestmark = pytest.mark.cpu


def says_who_waits(message: str) -> bool:
    return all(part in message for part in ("dispatch_copy_kernel", "on PE 0", "PE 1", "expected >= 1", "saw 0"))


def test_d20_a_missing_peer_is_named_and_reset_recovers() -> None:
    case = Case(num_pes=2, rounds=1)

    def program(pe: int) -> dict[str, Any]:
        op = start(case, pe)
        if pe == 0:
            with pytest.raises(PeerTimeout) as caught:
                dispatch_round(op, case, round_of(case, pe, 0))
            assert says_who_waits(str(caught.value))
            with pytest.raises(StateError, match="reset"):
                dispatch_round(op, case, round_of(case, pe, 0))
        op.reset()
        poison(op)
        host_state.current().bootstrap.barrier("poisoned")
        return combine_round(op, case, pe, dispatch_round(op, case, round_of(case, pe, 0)))

    results = world(2, timeout_s=1.0).run(program)
    check_case(case, [[[results[pe]]] for pe in range(2)])


def test_d20_a_time_out_that_somebody_else_raised_breaks_the_op_too() -> None:
    case = Case(num_pes=2, rounds=1)

    def program(pe: int) -> dict[str, Any]:
        op, bystander, heap = start(case, pe), start(case, pe), host_state.current().heap
        if pe == 0:
            # as on a GPU, where the call does not wait for its kernels
            op._on_host = False
            op._argument = op._outside = lambda *given: given[-1]  # type: ignore[method-assign]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
                op.dispatch(*inputs_on(op, case, round_of(case, pe, 0)))
                with pytest.raises(PeerTimeout):
                    heap.check_errors()
                with pytest.raises(StateError, match="dispatch: the op is broken"):
                    op.dispatch(*inputs_on(op, case, round_of(case, pe, 0)))
            del op._argument, op._outside
            op._on_host = True
        op.reset()
        # the other op is none the worse
        got = dispatch_round(bystander, case, round_of(case, pe, 0))
        combine_round(bystander, case, pe, got)
        poison(op)
        host_state.current().bootstrap.barrier("poisoned")
        return combine_round(op, case, pe, dispatch_round(op, case, round_of(case, pe, 0)))

    results = world(2, timeout_s=1.0).run(program)
    check_case(case, [[[results[pe]]] for pe in range(2)])


def test_d20_a_time_out_that_found_the_error_log_full_breaks_the_op_too() -> None:
    """Behind replays of a graph that all overflowed, say, and that nobody has looked at."""
    case = Case(num_pes=1, hidden=8, tokens="full", max_tokens=3, config=(("max_total_recv_tokens", 1),))

    def program(pe: int) -> None:
        op, heap = start(case, pe), host_state.current().heap
        given = inputs_on(op, case, with_ids(case, [[[0] * 3] * 3])[0])
        op._on_host = False
        op._argument = op._outside = lambda *given: given[-1]  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            patch.setattr(heap, "errors_pending", lambda: False)
            for _ in range(abi.ERROR_CAPACITY + 1):
                op.dispatch(*given)
            op._buffers.region("control")[STATUS.value] = 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            with pytest.raises(ReceiveOverflow, match="and 1 more"):
                op.dispatch(*given)
            with pytest.raises(StateError, match="dispatch: the op is broken"):
                op.dispatch(*given)

    world(1).run(program)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kernel_type": ops.EpDispatchCombineKernelType.IntraNodeLL},
        {"deterministic": True},
        {"quant_type": "fp8_blockwise"},
    ],
    ids=["IntraNode", "IntraNodeLL", "deterministic", "fp8_blockwise"],
)
def test_d20_kernels_of_a_broken_op_touch_nothing(changes: dict[str, Any], replay: bool) -> None:
    """Whatever a dispatch that failed has left where rows would be addressed from."""
    case = Case(num_pes=2, tokens="full", scales=(5, 4))

    def program(pe: int) -> None:
        op = start(case, pe, **changes)
        given = inputs_on(op, case, round_of(case, pe, 0))
        *_, handle = op.dispatch(*given, return_routing=True)
        rows = torch.ones(10, case.hidden, dtype=torch.bfloat16)
        host_state.current().bootstrap.barrier("dispatched")
        poison(op)
        op._buffers.region("control")[STATUS.value] = 1
        handle.disp_dest_tok_id_map.fill_(2**31 - 1)
        op._buffers.region("forward").fill_(2**31 - 1)
        host_state.current().bootstrap.barrier("broken")
        watched = (
            "recv_tokens",
            "recv_indices",
            "recv_weights",
            "recv_scales",
            "recv_sources",
            "combine_in",
            "control",
        )
        before = {name: op._buffers.region(name).clone() for name in watched}
        op.dispatch(*given, routing=handle if replay else None)
        op.combine(rows, None, given[3], routing=handle)
        host_state.current().bootstrap.barrier("tried")
        for name, tensor in before.items():
            assert torch.equal(op._buffers.region(name).view(torch.uint8), tensor.view(torch.uint8)), name

    world(2).run(program)


def test_d20_a_missing_peer_with_virtual_time() -> None:
    case = Case(num_pes=2, rounds=1)

    def program(pe: int) -> None:
        op = start(case, pe)
        if pe == 0:
            dispatch_round(op, case, round_of(case, pe, 0))
        op.reset()

    with pytest.raises(Deadlock) as caught:
        world(2, seed=3).run(program)
    assert says_who_waits(str(caught.value))
