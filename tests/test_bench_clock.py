"""Floors against bytes counted one by one, and phases against times worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench import clock, floor, problem
from bench.problem import Problem

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("dtype", "codec", "wire"),
    [("bf16", "none", 512), ("fp8", "none", 512), ("bf16", "fp8_direct_cast", 256), ("bf16", "fp4_blockwise", 128 + 8)],
)
def test_bytes_are_those_of_rows_and_tokens_counted_one_by_one(dtype: str, codec: str, wire: int) -> None:
    fields = () if codec == "none" else (("quant_type", codec),)
    this = Problem(4, 9, hidden=256, top_k=3, experts=8, dtype=dtype, fields=fields)
    everyone = [problem.inputs(this, pe, torch.device("cpu")) for pe in range(4)]
    payload = 256 * 2 if dtype == "bf16" else 256 + 2 * 4
    dispatch = combine = external = rows = 0
    for mine in everyone:
        for ids in mine.indices.tolist():
            dispatch += payload
            combine += 512
            external += 512
            for _ in {i // 2 for i in ids}:
                rows += 1
                dispatch += payload
                combine += 512
                external += 512 + 2 * wire
    got = this.traffic(everyone)
    assert (got.num_rows, got.num_tokens) == (rows, 36)
    assert [got.bytes_of(what) for what in ("dispatch", "combine", "external combine")] == [dispatch, combine, external]
    assert got.bytes_of("dispatch + external combine") == dispatch + external
    with pytest.raises(KeyError):
        got.bytes_of("dispatch+combine")


def test_written_bytes_are_rows_of_dispatch_and_tokens_of_combine() -> None:
    traffic = floor.Traffic(num_tokens=10, num_rows=30, dispatch_row_bytes=7, combine_row_bytes=11, wire_row_bytes=5)
    assert traffic.written_bytes_of("dispatch") == 30 * 7
    assert traffic.written_bytes_of("combine") == 10 * 11
    assert traffic.written_bytes_of("dispatch + external combine") == 30 * 7 + 30 * 5 + 10 * 11


def test_rates_are_of_bytes_read_and_written() -> None:
    got = floor.rates(torch.device("cpu"), 1 << 22, 5, 2)
    # a copy counts each byte twice; no memory is faster than 100 TB/s, none slower than 10 MB/s
    assert 0.01 < got.fill_gbs < 1e5
    assert 0.01 < got.copy_gbs < 1e5


def test_floor_is_bytes_over_rate() -> None:
    # 4.3 * 10^12 bytes a second
    assert floor.floor_us(4_300_000_000, 4300.0) == pytest.approx(1000.0)


def test_inputs_depend_on_the_arguments_alone() -> None:
    this = Problem(4, 9, hidden=256, top_k=3, experts=8)
    one, again, other = (problem.inputs(this, pe, torch.device("cpu")) for pe in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.args(), again.args(), strict=True) if a is not None)
    assert not torch.equal(one.tokens, other.tokens)
    assert not torch.equal(one.indices, other.indices)
    assert all(len(set(ids)) == 3 and min(ids) >= 0 and max(ids) < 8 for ids in one.indices.tolist())


def test_phases_of_two_pes_that_overlap() -> None:
    # one replay, two rounds of two phases; PE 1 starts 3 us late and is the last to end all phases but one
    stamps = 1000 * np.array([[[0, 10, 20, 30, 45], [3, 12, 24, 31, 40]]])
    first, second = clock.phases(stamps, 2)
    assert first.span.us.tolist() == [12 - 0, 31 - 20]
    assert first.share.us.tolist() == [12 - 0, 31 - 24]
    assert first.skew.us.tolist() == [2, 1]
    assert second.span.us.tolist() == [24 - 10, 45 - 30]
    assert second.share.us.tolist() == [24 - 12, 45 - 31]
    assert second.skew.us.tolist() == [4, 5]
    assert first.share.us.sum() + second.share.us.sum() == 45
    assert clock.chain_times(stamps, 2).us.tolist() == [22.5]


def test_the_first_replays_are_not_counted() -> None:
    calls: list[str] = []
    times = clock.host_times(lambda: calls.append("launch"), 4, lambda: calls.append("after"))
    assert calls == ["launch", "after"] * (clock.WARM_UPS + 4)
    assert len(times.us) == 4
    assert times.median <= times.p90


def test_stamps_on_the_cpu_go_up() -> None:
    stamps = torch.zeros(3, dtype=torch.int64)
    for index in range(3):
        clock.stamp(stamps, index)
    assert bool((stamps.diff() > 0).all())
    assert clock.resolution_ns(torch.device("cpu")) > 0


@pytest.mark.compile
def test_a_stamp_reads_the_clock_that_all_streams_share() -> None:
    from mori_triton.device.launch import cross_compile

    ptx = cross_compile(clock.stamp_kernel, {"stamps_ptr": "*i64", "index": "i32"}, arch="sm_90", num_warps=1).asm[
        "ptx"
    ]
    assert ptx.count("%globaltimer") == 1
    ticks = cross_compile(clock.ticks_kernel, {"stamps_ptr": "*i64"}, {"NUM": 64}, arch="sm_90", num_warps=1).asm["ptx"]
    # read anew in every round of the loop
    assert ticks.index("$L__BB0") < ticks.index("%globaltimer") < ticks.rindex("bra")
