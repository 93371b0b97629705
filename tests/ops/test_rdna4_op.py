"""What an op of kernel type IntraNodeRDNA4 refuses, where its memory is, what becomes of it when something fails."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from mori_triton import ops
from mori_triton.errors import ArgumentError, DriverError, HeapError, PeerTimeout, ReceiveOverflow, StateError
from mori_triton.host import state as host_state
from mori_triton.host.drivers.base import MemoryKind
from mori_triton.host.drivers.cpu import CpuDriver
from mori_triton.ops.buffers import LEAST_PAYLOAD_BYTES
from mori_triton.ops.kernels.finish import STATUS
from tests.ops.cases import (
    SENTINEL,
    Case,
    check_combine,
    combine_round,
    config_of,
    control,
    dispatch_round,
    experts,
    inputs_on,
    poison,
    round_of,
    start,
    to_numpy,
)
from tests.ops.test_rdna4 import BOTH, EP2, EP4, world

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("case", BOTH, ids=["ep2", "ep4"])
def test_more_rows_than_fit(case: Case) -> None:
    """Those of the last slots are dropped, there and in the sums; nothing is written behind the rows that fit."""
    this = dataclasses.replace(case, tokens="full", routing="to_one", max_tokens=4)

    def program(pe: int) -> tuple[int, list[Any], int]:
        op = start(this, pe, max_total_recv_tokens=case.num_pes)
        mine = round_of(this, pe, 0)
        given = inputs_on(op, this, mine)
        if pe == 0:
            with pytest.raises(ReceiveOverflow, match=str(4 * case.num_pes)):
                op.dispatch(*given)
            total = int(op._own_routing.total_recv_token_num[0])
        else:
            total = int(op.dispatch(*given)[4][0])
        sources = op.get_dispatch_src_token_pos().tolist()
        rows = op._buffers.view("recv_tokens", torch.bfloat16, op.config.max_recv, case.hidden)
        for row, flat in zip(rows[:total], sources, strict=True):
            source, token = op.decode_send_flat_idx(flat)
            assert to_numpy(row).tobytes() == round_of(this, source, 0).tokens[token].tobytes()
        sums = to_numpy(op.combine(experts(pe, rows[:total]), None, given[3])[0])
        host_state.current().bootstrap.barrier("summed")
        op.close()
        return total, sources, int((sums[:4] != 0).any(1).sum())

    results = world(this).run(program)
    assert [total for total, *_ in results] == [case.num_pes] + [0] * (case.num_pes - 1)
    kept = results[0][1]
    assert len(set(kept)) == case.num_pes
    assert sum(summed for *_, summed in results) == case.num_pes


def test_a_pe_without_tokens_need_not_bring_weights() -> None:
    def program(pe: int) -> None:
        op = start(EP4, pe)
        tokens = torch.full((2, EP4.hidden), 1.0, dtype=torch.bfloat16)
        # all of PE 1 to all of PE 0
        ids = torch.zeros(2, EP4.top_k, dtype=torch.int32)
        weights = torch.rand(2, EP4.top_k, generator=torch.Generator().manual_seed(3))
        if pe == 1:
            op.dispatch(tokens, weights, None, ids)
        else:
            _, out_weights, _, out_ids, total = op.dispatch(tokens[:0], None, None, ids[:0])
            assert int(total) == (2 if pe == 0 else 0)
            if pe == 0:
                order = [op.decode_send_flat_idx(flat)[1] for flat in op.get_dispatch_src_token_pos().tolist()]
                assert torch.equal(out_weights[:2], weights[order])
                assert not out_ids[:2].any()
        op.close()

    world(EP4).run(program)


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payload is cached, of its own, of 2 MiB at least, and gone with the op; control words are on the heap."""
    made: list[tuple[MemoryKind, int]] = []
    real = CpuDriver.alloc

    def alloc(driver: CpuDriver, num_bytes: int, **options: Any) -> int:
        made.append((options.get("kind", MemoryKind.CACHED), num_bytes))
        return real(driver, num_bytes, **options)

    def program(pe: int) -> None:
        here = host_state.current()
        before, free = here.regions(), here.heap.free_bytes
        here.bootstrap.barrier("looked")
        made.clear()
        here.bootstrap.barrier("cleared")
        op = ops.EpDispatchCombineOp(config_of(EP2, pe))
        layout = ops.ep_buffer_layout(op.config)
        assert layout.payload_bytes == LEAST_PAYLOAD_BYTES == 2 * 2**20
        assert made == [(MemoryKind.CACHED, 2 * 2**20)] * 2
        bases = op._buffers.region("payload_bases").tolist()
        assert bases == here._shared[0].bases
        assert not any(here.heap.contains(base) for base in bases)
        for region in layout.regions:
            on_heap = here.heap.contains(op._buffers.address(region.name), region.num_bytes)
            payload = ("recv_tokens", "staging", "staging_weights", "combine_in", "combine_out")
            assert on_heap == (region.name not in payload), region.name
            assert op._buffers.region_of(op._buffers.address(region.name)) == region.name
        op.close()
        assert (here.regions(), here.heap.free_bytes) == (before, free)
        # one that is not closed goes with the world
        ops.EpDispatchCombineOp(config_of(EP2, pe))
        here.bootstrap.barrier("made")

    monkeypatch.setattr(CpuDriver, "alloc", alloc)
    world(EP2).run(program)
    big = config_of(dataclasses.replace(EP4, hidden=7168, max_tokens=512), 0)
    layout = ops.ep_buffer_layout(big)
    assert layout.payload_bytes >= (3 * 4 + 1) * 512 * 7168 * 2
    spans = sorted((r.is_payload, r.offset, r.offset + r.num_bytes) for r in layout.regions)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))


def test_no_room_on_the_heap_or_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(pe: int) -> None:
        here = host_state.current()
        free = here.heap.free_bytes
        with pytest.raises(HeapError, match="EpDispatchCombineOp payload could not be set up"):
            ops.EpDispatchCombineOp(config_of(EP2, pe))
        assert here.heap.free_bytes == free

    real = CpuDriver.alloc

    def alloc(driver: CpuDriver, num_bytes: int, **options: Any) -> int:
        if num_bytes == LEAST_PAYLOAD_BYTES:
            raise DriverError("out of memory")
        return real(driver, num_bytes, **options)

    monkeypatch.setattr(CpuDriver, "alloc", alloc)
    world(EP2).run(program)


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"world_size": 3}, "world_size 3"),
        ({"data_type": torch.float32, "max_token_type_size": 4}, "data_type torch.float32"),
        ({"data_type": torch.float8_e4m3fn}, "data_type torch.float8_e4m3fn"),
        ({"num_experts_per_token": 65}, "num_experts_per_token 65"),
        ({"scale_dim": 4, "scale_type_size": 4}, "scale_dim 4"),
        ({"quant_type": "fp8_direct_cast"}, "quant_type 'fp8_direct_cast'"),
        ({"deterministic": True, "world_size": 8}, "world_size 8, deterministic True"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(changes: dict[str, Any], got: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        config_of(EP2, 0, **changes)
    assert str(caught.value).endswith(f"got {got}")
    for word in (
        "world_size 2 or 4",
        "torch.bfloat16 or torch.float16",
        "1 to 64",
        "scales",
        "'none'",
        "deterministic",
    ):
        assert word in str(caught.value).split("got")[0]


def test_calls_of_other_dtypes_are_refused() -> None:
    def program(pe: int) -> None:
        op = start(EP2, pe, max_token_type_size=4)
        given = inputs_on(op, EP2, round_of(EP2, pe, 0))
        with pytest.raises(ArgumentError, match=r"input\.dtype"):
            op.dispatch(given[0].float(), *given[1:])
        out = op.dispatch(*given)[0]
        with pytest.raises(ArgumentError, match=r"input\.dtype"):
            op.combine(out.float(), None, given[3])
        with pytest.raises(ArgumentError, match="dtype"):
            op.get_registered_combine_input_buffer(torch.float32)
        op.combine(out, None, given[3])

    world(EP2).run(program)


def kind_of(pe: int, case: Case) -> str:
    return ops.EpDispatchCombineOp(config_of(case, pe)).config.kernel_type.name


def test_the_environment_chooses_on_gfx1201_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Case(num_pes=2, hidden=72)
    assert set(world(plain).run(kind_of, plain)) == {"IntraNode"}
    monkeypatch.setenv("MORI_RDNA4_EP", "1")
    assert set(world(plain).run(kind_of, plain)) == {"IntraNodeRDNA4"}
    assert set(world(plain, arch="gfx942").run(kind_of, plain)) == {"IntraNode"}
    few = dataclasses.replace(plain, config=(("kernel_type", ops.EpDispatchCombineKernelType.IntraNodeLL),))
    assert set(world(few).run(kind_of, few)) == {"IntraNodeLL"}
    for case, text in (
        (dataclasses.replace(plain, num_pes=3), "world_size 3"),
        (dataclasses.replace(plain, dtype="float32"), "data_type torch.float32"),
    ):
        with pytest.raises(ArgumentError, match=f"MORI_RDNA4_EP=1 .*world_size 2 or 4.*{text}"):
            world(case).run(kind_of, case)


@pytest.mark.parametrize("case", BOTH, ids=["ep2", "ep4"])
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_peer_that_does_not_come(case: Case, phase: str) -> None:
    """The waits name themselves and the peer, the op is broken until a reset, and a replay of a handle stays silent."""

    def program(pe: int) -> dict[str, Any]:
        op, mine = start(case, pe), round_of(case, pe, 0)
        given = inputs_on(op, case, mine)
        if phase == "combine":
            out = op.dispatch(*given)[0]
        if pe != 1:
            text = rf"EpDispatchCombineOp.{phase} \(rdna4_\w+_kernel\)[^\n]*PE 1"
            with pytest.raises(PeerTimeout, match=text):
                op.dispatch(*given) if phase == "dispatch" else op.combine(out, None, given[3])
            assert control(op, STATUS) == [1]
            with pytest.raises(StateError, match="reset"):
                op.dispatch(*given)
        op.reset()
        return combine_round(op, case, pe, dispatch_round(op, case, mine))

    for pe, got in enumerate(world(case, timeout_s=1.0).run(program)):
        check_combine(case, pe, got, round_of(case, pe, 0))


def test_broken_ops_write_nothing_to_peers() -> None:
    def program(pe: int) -> None:
        op = start(EP4, pe)
        given = inputs_on(op, EP4, round_of(EP4, pe, 0))
        *_, handle = op.dispatch(*given, return_routing=True)
        op.combine(op.get_registered_combine_input_buffer(torch.bfloat16), None, given[3])
        host_state.current().bootstrap.barrier("a round is over")
        # of a time-out that a GPU's host has not looked at yet
        op._buffers.region("control")[STATUS.value] = 1
        poison(op)
        host_state.current().bootstrap.barrier("poisoned")
        for routing in (None, handle):
            op.dispatch(*given, routing=routing)
            op.combine(
                torch.zeros(op.config.max_recv, EP4.hidden, dtype=torch.bfloat16), None, given[3], routing=routing
            )
        host_state.current().bootstrap.barrier("called")
        for name in ("recv_tokens", "recv_indices", "recv_sources", "staging", "staged_indices", "forward"):
            region = op._buffers.region(name)
            assert (region == (255 if region.dtype == torch.uint8 else SENTINEL)).all(), name
        assert op._buffers.region("dispatch_signals").tolist() == [1] * 4

    world(EP4).run(program)
