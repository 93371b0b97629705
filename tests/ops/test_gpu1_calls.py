"""On one GPU: split calls, routing handles, overflow, repetition, refusals. In small forms on the emulated device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton

from mori_triton import local_world, ops
from mori_triton.errors import ArgumentError, PeerTimeout, ReceiveOverflow, StateError
from mori_triton.host import state as host_state
from tests.ops import hashed
from tests.ops.hashed import Problem, Round, all_sources, one_round, run_experts, wrong_in_combine
from tests.ops.on_both import (
    DETERMINISTIC,
    HIDDEN,
    LL,
    TOP_K,
    every_way,
    heap_bytes,
    needs_gpu,
    on_both,
    run,
    small,
    start,
)


def split_program(pe: int, problem: Problem) -> int:
    """Two ops in turn: A sends, B sends, A receives, B receives; inputs are gone before anything is received."""
    with_ops, wrong = [start(pe, problem) for _ in range(2)], []
    for index in range(3):
        rounds = [Round(problem, pe, index + 10 * which, with_ops[0].device) for which in range(2)]
        results = [op.dispatch_send(*mine.given()) for op, mine in zip(with_ops, rounds, strict=True)]
        # recv reads nothing of what send was given
        for op, mine in zip(with_ops, rounds, strict=True):
            host_state.current().driver.synchronize()
            bits = hashed.bits_of(mine.tokens)
            kept, _ = bits.clone(), bits.fill_(-1 if bits.dtype != torch.uint8 else 255)
            op.dispatch_recv()
            bits.copy_(kept)
        combined = []
        for op, mine, result in zip(with_ops, rounds, results, strict=True):
            wrong.append(hashed.wrong_in_dispatch(problem, pe, mine.index, result, all_sources(op)))
            rows = hashed.expert(problem, pe, result[0])
            combined.append(op.combine_send(rows, result[1] if problem.weights else None, mine.ids))
        for op in with_ops:
            op.combine_recv()
        for mine, result in zip(rounds, combined, strict=True):
            wrong.append(wrong_in_combine(problem, mine, result))
    return int(sum(wrong))


@on_both
@every_way
def test_c9_c10_send_and_receive_apart_on_two_ops(config: tuple, device: str) -> None:
    # the config's own dtype is another one: what was sent counts
    config = (*config, ("data_type", torch.bfloat16))
    problem = small(Problem(3, HIDDEN, TOP_K, torch.float16, max_tokens=20, tokens="zero", config=config), device)
    assert run(problem, device, split_program, num_ops=2) == [0] * 3


def handles_program(pe: int, problem: Problem) -> int:
    """Two routings live; other payload goes along each of them again, and comes back along each of them."""
    op, wrong, handles = start(pe, problem), [], []
    for index in range(2):
        mine = Round(problem, pe, index, op.device)
        *result, handle = op.dispatch(*mine.given(), return_routing=True)
        sources = handle.disp_tok_id_to_src_tok_id_local
        wrong.append(hashed.wrong_in_dispatch(problem, pe, index, tuple(result), sources))
        wrong.append(wrong_in_combine(problem, mine, run_experts(op, problem, mine, tuple(result), routing=handle)))
        handles.append(handle)
    for index in (1, 0, 0, 1):
        mine, handle = Round(problem, pe, index, op.device), handles[index]
        result = op.dispatch(*mine.given(), routing=handle)
        sources = handle.disp_tok_id_to_src_tok_id_local
        wrong.append(hashed.wrong_in_dispatch(problem, pe, index, result[:5], sources))
        wrong.append(wrong_in_combine(problem, mine, run_experts(op, problem, mine, result[:5], routing=handle)))
    return int(sum(wrong))


@on_both
@every_way
def test_routing_handles_and_replay(config: tuple, device: str) -> None:
    problem = small(Problem(3, HIDDEN, TOP_K, max_tokens=30, routing="padded", scales=(3, 4), config=config), device)
    assert run(problem, device, handles_program) == [0] * 3


# what a dispatch without weights and scales writes
WRITTEN = (
    "recv_tokens", "recv_indices", "recv_sources", "recv_slots", "total_recv", "forward", "control",
    "dispatch_signals", "count_matrix", "count_signals", "block_counts", "route_bases", "sync_signals",
    "combine_signals",
)  # fmt: skip


def everything(op: ops.EpDispatchCombineOp) -> torch.Tensor:
    """All bytes of an op's allocation, those between its buffers too."""
    return host_state.current().driver.tensor(op._address, (op._layout.num_bytes,), torch.uint8)


def rest_of(op: ops.EpDispatchCombineOp) -> torch.Tensor:
    """A copy of what a dispatch has no business with: its own buffers, to their last byte, are left out."""
    rest = everything(op).clone()
    for region in op._layout.regions:
        if region.name in WRITTEN:
            rest[region.offset : region.offset + region.num_bytes] = 0
    return rest


def overflow_program(pe: int, problem: Problem) -> tuple[str, list[int], list[str], bool]:
    """Everything goes to one PE, which has room for less. What it said, what it received, what came back by token, and
    whether dispatch left alone what lies behind its buffers.
    """
    op, message = start(pe, problem), ""
    mine = Round(problem, pe, 0, op.device)
    before = rest_of(op)
    host_state.current().bootstrap.barrier("copied")
    try:
        op.dispatch(*mine.given())
    except ReceiveOverflow as error:
        message = str(error)
    host_state.current().driver.synchronize()
    host_state.current().bootstrap.barrier("all have sent")
    intact = torch.equal(rest_of(op), before)
    sources = all_sources(op).tolist()
    rows = hashed.expert(
        problem, pe, op._buffers.view("recv_tokens", problem.dtype, op.config.max_recv, problem.hidden)
    )
    try:
        out, _ = op.combine(rows, None, mine.ids)
    except ReceiveOverflow as error:
        # a GPU's report comes with the next call, which has launched nothing
        assert not message
        message = str(error)
        out, _ = op.combine(rows, None, mine.ids)
    wanted = hashed.expert(problem, 0, mine.tokens)
    back = []
    for token in range(mine.n):
        good = torch.equal(hashed.bits_of(out[token]), hashed.bits_of(wanted[token]))
        back.append("whole" if good else "nothing" if not out[token].any() else "wrong")
    return message, sources, back, intact


@on_both
@every_way
def test_a12_more_rows_than_fit(config: tuple, device: str) -> None:
    problem = Problem(
        3, HIDDEN, TOP_K, max_tokens=5, tokens="full", routing="to_one", weights=False,
        config=(*config, ("max_total_recv_tokens", 6)),
    )  # fmt: skip
    (message, kept, *_), *others = results = run(problem, device, overflow_program)
    assert "PE 0 was sent 15 rows, 9 more" in message
    # nothing is written but the slots that there are, on any PE
    assert all(intact for *_, intact in results)
    assert len(set(kept)) == 6
    assert all(said == "" and sources == [-1] * 6 for said, sources, *_ in others)
    if config == DETERMINISTIC:
        assert kept == [0, 1, 2, 3, 4, 5]
    for pe, (_, _, back, _) in enumerate(results):
        assert back == ["whole" if pe * 5 + token in kept else "nothing" for token in range(5)]


def repeat_program(pe: int, problem: Problem) -> list[bytes]:
    op, seen = start(pe, problem), []
    for _ in range(4):
        mine = Round(problem, pe, 0, op.device)
        result = op.dispatch(*mine.given())
        total = int(result[4])
        parts = [hashed.bits_of(t[:total]).cpu().numpy().tobytes() for t in result[:4] if t is not None]
        out, out_weights = run_experts(op, problem, mine, result)
        parts += [hashed.bits_of(t[: mine.n]).cpu().numpy().tobytes() for t in (out, out_weights) if t is not None]
        seen.append(b"|".join(parts))
    return seen


@on_both
def test_deterministic_repeats_bit_for_bit(device: str) -> None:
    problem = small(
        Problem(5, HIDDEN, TOP_K, max_tokens=100, tokens="full", scales=(3, 4), config=DETERMINISTIC), device
    )
    for seen in run(problem, device, repeat_program):
        assert seen == [seen[0]] * 4


def refusals_program(pe: int, problem: Problem) -> int:
    """A call that is refused launches nothing and leaves the op as it was."""
    op = start(pe, problem)
    mine = Round(problem, pe, 0, op.device)
    tokens, weights, scales, ids = mine.given()
    more = torch.cat([tokens, tokens[:1]])
    refused = (
        (more, weights, scales, torch.cat([ids, ids[:1]])),
        (tokens, weights, scales, ids[:-1]),
        (tokens, weights, scales, ids.long()),
        (tokens, weights.double(), scales, ids),
        (tokens.t().contiguous().t(), weights, scales, ids),
        (tokens[:, ::2], weights, scales, ids),
        (tokens.to("meta"), weights, scales, ids),
    )
    if op.device.type == "cuda":
        refused += ((tokens.cpu(), weights, scales, ids), (tokens, weights, scales, ids.cpu()))
    for given in refused:
        with pytest.raises(ArgumentError):
            op.dispatch(*given)
    result = op.dispatch(*mine.given())
    with pytest.raises(ArgumentError):
        op.combine(hashed.expert(problem, pe, result[0]), None, result[3])
    wrong = hashed.wrong_in_dispatch(problem, pe, 0, result, all_sources(op))
    return int(wrong + wrong_in_combine(problem, mine, run_experts(op, problem, mine, result)))


@on_both
def test_a8_b5_c1_g7_g8_what_cannot_be_is_refused(device: str) -> None:
    problem = Problem(2, HIDDEN, TOP_K, max_tokens=9, tokens="full")
    assert run(problem, device, refusals_program) == [0, 0]


# -- a peer that does not come


def missing_program(pe: int, problem: Problem) -> tuple[int, str]:
    """A good round, one that PE 1 stays away from, and after a reset another good one: what PE 0 was told."""
    op, here, message = start(pe, problem), host_state.current(), ""
    mine = Round(problem, pe, 0, op.device)
    wrong = one_round(op, problem, mine)
    here.driver.synchronize()
    here.bootstrap.barrier("a good round")
    # PEs that share a GPU would meet on the host first, and say there who is missing
    meet, here.rendezvous = here.rendezvous, None

    def alone() -> None:
        op.dispatch(*mine.given())
        # on a GPU the next call tells
        here.driver.synchronize()
        op.dispatch(*mine.given())

    if pe == 0:
        with pytest.raises(PeerTimeout) as caught:
            alone()
        message = str(caught.value)
        with pytest.raises(StateError, match="reset"):
            op.combine(mine.tokens, None, mine.ids)
    here.rendezvous = meet
    here.bootstrap.barrier("given up")
    op.reset()
    wrong += one_round(op, problem, mine)
    return int(wrong), message


@on_both
@pytest.mark.parametrize(
    ("config", "kernel"),
    [((), "dispatch_copy_kernel"), (LL, "dispatch_ll_kernel"), (DETERMINISTIC, "dispatch_count_kernel")],
    ids=["IntraNode", "IntraNodeLL", "deterministic"],
)
def test_d20_a_missing_peer_is_named_and_reset_recovers(config: tuple, kernel: str, device: str) -> None:
    problem = small(Problem(2, HIDDEN, TOP_K, max_tokens=20, tokens="full", config=config), device)
    world = local_world(2, device, heap_size=heap_bytes(problem), timeout_s=1.0)
    (wrong, message), other = world.run(missing_program, problem)
    assert (wrong, other) == (0, (0, ""))
    for part in (kernel, "on PE 0 waiting for PE 1", "expected >= 2, saw 1"):
        assert part in message, message


# -- what later calls cost the host


@pytest.fixture
def loads() -> Iterator[list[str]]:
    """Names of kernels loaded since."""
    names: list[str] = []

    def note(module, function, name, group, key) -> None:
        names.append(name)

    triton.knobs.runtime.kernel_load_end_hook.add(note)
    yield names
    triton.knobs.runtime.kernel_load_end_hook.remove(note)


def later_program(pe: int, problem: Problem, loads: list[str]) -> tuple[int, int, bool, list[str]]:
    """Two rounds of each way to call, then three more while the GPU is busy: wrong elements, allocations by torch,
    whether a call waited for the device, kernels loaded.
    """
    op, meet = start(pe, problem), host_state.current().bootstrap.barrier
    mine = Round(problem, pe, 0, op.device)
    tokens, *_, ids = given = mine.given()
    registered = op.get_registered_combine_input_buffer(problem.dtype, problem.hidden)
    gpu = op.device.type == "cuda"

    def rounds() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        op.dispatch(*given, call_local_expert_count=True)
        op.combine(registered, None, ids)
        out, *_ = op.dispatch(*given)
        op.dispatch_send(*given)
        op.dispatch_recv()
        op.combine_send(out, None, ids)
        op.combine_recv()
        out, _, _, out_ids, total = op.dispatch(*given)
        return op.combine(out, None, ids)[0], out_ids, total

    def allocated() -> int:
        return torch.cuda.memory_stats(op.device)["allocation.all.allocated"] if gpu else 0

    rounds(), rounds()
    if gpu:
        torch.cuda._sleep(1)
        busy = torch.cuda.Event()
        torch.cuda.synchronize()
    meet("all is loaded")
    before, known = allocated(), len(loads)
    meet("looked")
    if gpu:
        # half a second and more: the calls take some milliseconds
        torch.cuda._sleep(1_000_000_000)
        busy.record()
    for _ in range(3):
        back, out_ids, total = rounds()
    waited = gpu and busy.query()
    more, new = allocated() - before, loads[known:]
    meet("counted")
    # any dispatch of these inputs brings the same ids
    counts = ops.local_expert_count_torch(op.config, out_ids.cpu(), int(total))
    assert int(counts.sum()) > 0
    assert op.local_expert_count.tolist() == counts.tolist()
    # no expert: the same number from each PE
    terms = (hashed.owners(problem, ids) >= 0).sum(1)[:, None]
    wrong = (back[: mine.n].float() != (tokens.float() * terms).to(back.dtype).float()).sum()
    return int(wrong), more, waited, new


@on_both
@every_way
def test_later_calls_allocate_load_and_wait_for_nothing(config: tuple, device: str, loads: list[str]) -> None:
    problem = small(Problem(3, HIDDEN, TOP_K, max_tokens=20, tokens="full", config=config), device)
    assert run(problem, device, later_program, loads) == [(0, 0, False, [])] * 3


# -- life of an op, and what else is alive


def lives_program(pe: int, problem: Problem) -> int:
    """Ops come and go; one that stays works on, and the heap is as before."""
    heap, wrong = host_state.current().heap, []
    stays = start(pe, problem)
    used = heap.used_bytes
    for index in range(5):
        goes = start(pe, problem)
        for op in (goes, stays):
            wrong.append(one_round(op, problem, Round(problem, pe, index, op.device)))
        goes.close()
        assert heap.used_bytes == used
    return int(sum(wrong))


@on_both
def test_i4_ops_made_and_closed_beside_one_that_stays(device: str) -> None:
    problem = small(Problem(3, HIDDEN, TOP_K, max_tokens=20), device)
    assert run(problem, device, lives_program, num_ops=2) == [0] * 3


AFTER_CUDA = """
import torch
torch.ones(3, device=torch.device("cuda", 0)).sum().item()
from mori_triton import local_world
from tests.ops.hashed import Problem, Round, one_round, op_config
from mori_triton import ops
def program(pe):
    problem = Problem(2, 1024, 4)
    op = ops.EpDispatchCombineOp(op_config(problem, pe))
    return int(one_round(op, problem, Round(problem, pe, 0, op.device)))
print(local_world(2, "cuda", heap_size="4M").run(program))
"""


@pytest.mark.gpu1
@needs_gpu
def test_i16_imported_after_the_gpu_was_used() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", AFTER_CUDA]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "[0, 0]", done.stderr[-3000:]
