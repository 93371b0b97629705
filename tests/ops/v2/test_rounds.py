"""EPv2 rounds, bit for bit against numpy, on the emulated GPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mori_triton import local_world
from mori_triton.errors import NotSupported, PeerTimeout, ReceiveOverflow, StateError
from mori_triton.host import state as host_state
from mori_triton.ops.dispatch_combine_v2 import EpArena, EpDispatchCombineOp
from tests.ops import reference
from tests.ops.cases import Case, dispatched, inputs_on, round_of
from tests.ops.v2.rounds import combine_round, config_of, dispatch_round, run, start

pytestmark = pytest.mark.cpu

SCALES = (56, 4)  # 224 bytes a row, which are padded to 256
# numbers of PEs, and whether there are scales, decide which kernels of a dispatch are compiled
MATRIX = (
    Case(num_pes=2, hidden=32, top_k=1, tokens="uneven"),
    Case(num_pes=2, hidden=32, top_k=6, tokens="zero", routing="out_of_range", rounds=4),
    Case(num_pes=2, hidden=32, top_k=8, dtype="float32", tokens="full", routing="duplicates", weights=False),
    Case(num_pes=3, hidden=32, top_k=9, scales=SCALES, tokens="zero", routing="padded", registered=True),
    Case(num_pes=3, hidden=32, top_k=9, scales=SCALES, tokens="uneven", routing="nowhere", rounds=1),
    # rows of 2160 bytes are moved in two pieces
    Case(num_pes=4, hidden=1080, top_k=16, scales=SCALES, tokens="full", routing="to_one", rounds=4),
)
# a PE that had tokens has none in the next round, while the other one sends
SMALL = dataclasses.replace(MATRIX[1], routing="random", rounds=2)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_matrix_gfx1201(case: Case) -> None:
    run(case)


def test_gfx1250() -> None:
    run(MATRIX[3], arch="gfx1250")


@pytest.mark.parametrize("blocks", [1, 2, 512])
def test_any_number_of_blocks(blocks: int) -> None:
    """Also one of a token each; and PEs may differ in it, here by their numbers of tokens."""
    run(SMALL, {"dispatch_block_num": blocks, "schedule": ((2, 2, 2), (4, 3, 2)) if blocks == 2 else None})


@pytest.mark.parametrize("seed", range(12))
def test_seeds(seed: int) -> None:
    """One scheduler decides every interleaving of host threads, programs and waves."""
    run(SMALL, {"dispatch_block_num": 1 + seed % 3}, seed=seed)


@pytest.mark.parametrize("seed", range(8))
def test_weak_memory(seed: int) -> None:
    """Stores become visible late and loads may be stale, as far as the fences allow."""
    run(SMALL, {"dispatch_block_num": 1 + seed % 3}, seed=seed, weak_memory=True)


def test_forty_rounds_on_one_op() -> None:
    run(dataclasses.replace(MATRIX[1], rounds=40, tokens="uneven", routing="random"))


FLOATS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_payloads_of_bytes_travel_bit_for_bit(dtype: torch.dtype) -> None:
    """Every code of the type goes through dispatch; combine has bfloat16 rows."""
    case = dataclasses.replace(SMALL, hidden=512 if dtype == torch.float4_e2m1fn_x2 else 256, tokens="full")
    types = {"dispatch_data_type": dtype, "combine_data_type": torch.bfloat16}

    def program(pe: int) -> None:
        with EpDispatchCombineOp(config_of(case, pe, **types)) as op:
            mine = [round_of(case, p, 0) for p in range(2)]
            indices = torch.from_numpy(mine[pe].indices)
            tokens = torch.arange(256, dtype=torch.uint8).repeat(case.max_tokens, 1)
            tokens[:, 0] = 16 * pe + torch.arange(case.max_tokens)
            out, _, _, _, total, routing = op.dispatch(tokens.view(dtype), None, None, indices, return_routing=True)
            received = out.view(torch.uint8)[: int(total)]
            sources = op.get_dispatch_src_token_pos()
            assert received[:, 0].tolist() == [
                16 * (s // case.max_tokens) + s % case.max_tokens for s in sources.tolist()
            ]
            assert torch.equal(received[:, 1:], tokens[:1, 1:].expand(len(received), -1))
            rows = (1 + sources).to(torch.bfloat16)[:, None].expand(-1, case.hidden).contiguous()
            back, _ = op.combine(rows, routing=routing)
            for token, row in enumerate(mine[pe].indices):
                count = len(reference.owners(row, 2, case.experts_per_pe))
                assert (back[token] == count * (1 + pe * case.max_tokens + token)).all()

    local_world(2, heap_size="4M").run(program)


def test_rows_beyond_the_receive_buffer_are_dropped() -> None:
    """And nothing behind it is written; the tokens that were taken come back."""
    case = dataclasses.replace(SMALL, tokens="full", routing="to_one", max_tokens=9, top_k=6)

    def program(pe: int) -> tuple[Any, ...]:
        op, mine = start(case, pe, max_total_recv_tokens=10), round_of(case, pe, 0)
        given = inputs_on(op.arena, case, mine)
        names = ("recv_tokens", "recv_weights", "recv_indices", "recv_sources")
        if pe == 0:
            with pytest.raises(ReceiveOverflow, match="18"):
                op.dispatch(*given, return_routing=True)
        else:
            op.dispatch(*given, return_routing=True)
        assert op.last_routing is not None
        kept = [op.arena._buffers.region(name).clone() for name in names]
        sources = op.get_dispatch_src_token_pos().tolist()
        rows = op.recv_tokens()[: len(sources)].clone()
        out, _ = op.combine(rows, routing=op.last_routing)
        op.close()
        return sources, kept, rows, out

    (sources, kept, rows, out0), (nothing, kept1, _, out1) = local_world(2, heap_size="4M").run(program)
    # 18 rows were sent to PE 0, which has room for 10
    assert (len(set(sources)), nothing) == (10, [])
    assert [len(region) for region in kept] == [10 * 32 * 2, 10 * 6, 10 * 6, 10]
    sent = [round_of(case, pe, 0) for pe in range(2)]
    for row, source in enumerate(sources):
        assert rows[row].view(torch.int16).numpy().tobytes() == sent[source // 9].tokens[source % 9].tobytes()
    # PE 1 was sent nothing
    assert (kept1[0] == 255).all()
    for pe, out in enumerate((out0, out1)):
        for token in range(9):
            came = pe * 9 + token in sources
            want = torch.from_numpy(sent[pe].tokens[token].view("int16")).view(torch.bfloat16) + 0.0
            assert torch.equal(out[token], want if came else torch.zeros_like(want)), (pe, token)


def test_a_missing_peer_and_reset() -> None:
    """A wait has a limit, the op is broken then, and `reset` makes it as new."""

    def program(pe: int) -> Any:
        op, state = start(SMALL, pe), host_state.current()
        if pe == 0:
            with pytest.raises(PeerTimeout, match=r"EpDispatchPlan\.launch \(dispatch_send_kernel\)"):
                dispatch_round(op, SMALL, round_of(SMALL, pe, 1))
            with pytest.raises(StateError, match="reset"):
                dispatch_round(op, SMALL, round_of(SMALL, pe, 1))
        state.bootstrap.barrier("one has waited in vain")
        op.reset()
        got = combine_round(op, SMALL, pe, dispatch_round(op, SMALL, round_of(SMALL, pe, 1)))
        op.close()
        return got

    results = local_world(2, heap_size="4M", timeout_s=1.0).run(program)
    sent = [round_of(SMALL, pe, 1) for pe in range(2)]
    for pe, got in enumerate(results):
        assert set(got["sources"]) == reference.received([r.indices for r in sent], SMALL.experts_per_pe)[pe]
        want = reference.combined(pe, sent[pe].tokens, sent[pe].indices, 2, SMALL.experts_per_pe)
        assert got["combined"].tobytes() == want.tobytes()


def test_two_handles_of_one_op_are_combined_in_any_order() -> None:
    case = dataclasses.replace(SMALL, tokens="uneven", routing="random")

    def program(pe: int) -> None:
        op, kept = start(case, pe), []
        for index in range(2):
            given = inputs_on(op.arena, case, round_of(case, pe, index))
            got = dispatched(op.arena, given, result := op.dispatch(*given, return_routing=True))
            kept.append((got["out"][: got["total"]].clone(), result[5]))
        for index in (1, 0):
            mine, (rows, routing) = round_of(case, pe, index), kept[index]
            out, _ = op.combine(rows, routing=routing)
            for token, row in enumerate(mine.indices):
                count = len(reference.owners(row, 2, case.experts_per_pe))
                want = torch.from_numpy(mine.tokens[token].view("int16")).view(torch.bfloat16).float() * count
                assert torch.equal(out[token], want.to(torch.bfloat16) + 0.0)
        with pytest.raises(StateError, match="another dispatch came later"):
            op.combine(kept[0][0], True, routing=kept[0][1])
        op.close()

    local_world(2, heap_size="4M").run(program)


def test_what_an_op_is_and_refuses() -> None:
    def program(pe: int) -> None:
        state = host_state.current()

        class Group:
            def __init__(self, rank: int) -> None:
                self.rank, self.size = lambda: rank, lambda: 2

        for comm in (state, Group(pe)):
            EpArena(config_of(SMALL, pe), comm).close()
        for comm, why in ((Group(1 - pe), f"rank {pe} of 2, as shmem has it"), (5, "rank")):
            with pytest.raises(ValueError, match=f"comm: want .*{why}"):
                EpArena(config_of(SMALL, pe), comm)
        op, mine = EpDispatchCombineOp(config_of(SMALL, pe), state), round_of(SMALL, pe, 1)
        failed = EpDispatchCombineOp(config_of(SMALL, pe))
        assert EpDispatchCombineOp.available_backends() == ("triton",)
        assert op.backend_name == "triton"
        assert {"gather", "scales", "recv_cap"} <= op.capabilities
        assert op.recv_scales() is None
        given = inputs_on(op.arena, SMALL, mine)
        routing = op.arena.new_routing(len(mine.indices))
        with pytest.raises(NotImplementedError, match="replays no routing") as error:
            op.dispatch(*given, routing=routing)
        assert isinstance(error.value, NotSupported)
        long = torch.zeros(SMALL.max_tokens + 1, 32, dtype=torch.bfloat16), None, None
        with pytest.raises(ValueError, match="max_num_inp_token_per_rank = 5, got 6"):
            op.dispatch(*long, torch.zeros(6, SMALL.top_k, dtype=torch.int32))
        with pytest.raises(ValueError, match="routing"):
            op.dispatch(*given, routing=routing, return_routing=True)
        with pytest.raises(TypeError, match="routing"):
            op.combine(op.combine_in_view())  # type: ignore[call-arg]
        op.close()
        op.close()
        with pytest.raises(StateError, match="closed"):
            op.dispatch(*given)
        if pe == 0:
            state.bootstrap.barrier("the other PE has failed")
        else:
            # nothing collective, or the barrier would not be the next that both come to
            with pytest.raises(ZeroDivisionError), failed:
                raise ZeroDivisionError
            with pytest.raises(StateError, match="closed"):
                failed.dispatch(*given)
            state.bootstrap.barrier("the other PE has failed")

    local_world(2, heap_size="4M").run(program)
