"""What dispatch and combine move between PEs, to the byte: a row once for each (token, remote PE), no local row."""

from __future__ import annotations

import functools
import itertools

import pytest

from bench.rdna4 import backends
from bench.rdna4.traffic import DENSE, PHASES, CountedPair, count_pair, expected_rows, per_token
from bench.report import Column, markdown
from tests.ops import rdna4_checks as checks
from tests.ops.rdna4_checks import Point

pytestmark = pytest.mark.cpu

TOKENS, SEED = 32, 1
# a signal is one 64-bit store
SIGNAL, ID, WEIGHT, SOURCE = 8, 4, 4, 4
NOTHING = (0, 0, 0)
RDNA4 = "IntraNodeRDNA4"


@functools.cache
def counted(kind: str, world_size: int) -> CountedPair:
    return count_pair(Point(world_size, capacity=TOKENS), kind, seed=SEED)


def pairs(count: CountedPair) -> list[tuple[int, int]]:
    return list(itertools.permutations(range(count.point.world_size), 2))


def remote_loads(count: CountedPair, phase: str) -> dict[tuple[int, int], int]:
    return {pair: count.between(phase, *pair, "load").bytes for pair in pairs(count)}


def check_dispatch_stores(count: CountedPair, metadata: int) -> None:
    """Rows with so many bytes of metadata each, and a signal, from every PE to every other."""
    tokens = count.point.capacity
    for source, pe in pairs(count):
        rows = count.rows[source][pe]
        stored = count.between("dispatch", source, pe, "store").bytes
        assert stored == rows * (count.row_bytes + metadata) + SIGNAL, (source, pe)
        # rows given out by programs; a counter has 4 bytes, and a program adds once
        assert count.between("dispatch", source, pe, "atomic").bytes <= 4 * tokens


@pytest.mark.parametrize("world_size", [2, 4])
def test_intranode_moves_a_row_once_each_way(world_size: int) -> None:
    count = counted("IntraNode", world_size)
    ids = count.point.top_k * (ID + WEIGHT)
    check_dispatch_stores(count, ids + SOURCE)
    assert set(remote_loads(count, "dispatch").values()) == {0}
    for source, pe in pairs(count):
        # the source pulls its rows; each of the waves that sum weights loads them, four a program at most
        pulled, rows = count.between("combine", source, pe, "load").bytes, count.rows[source][pe]
        weights = rows * count.point.top_k * WEIGHT
        assert rows * count.row_bytes + weights <= pulled <= rows * count.row_bytes + 4 * weights
        # less than a row is left that could be payload
        assert 4 * weights - weights < rows * count.row_bytes
        assert count.between("combine", source, pe, "store") == (1, SIGNAL, 1)
        assert count.between("combine", source, pe, "atomic") == NOTHING


def test_rdna4_ep2_pushes_everything_once() -> None:
    count = counted(RDNA4, 2)
    check_dispatch_stores(count, count.point.top_k * (ID + WEIGHT) + SOURCE)
    assert set(remote_loads(count, "dispatch").values()) == {0}
    check_combine_pushes(count)


def test_rdna4_ep4_pushes_rows_and_pulls_ids_and_weights_once() -> None:
    count = counted(RDNA4, 4)
    check_dispatch_stores(count, SOURCE)
    ids = count.point.top_k * (ID + WEIGHT)
    # a destination loads, from where a row came from, the row's ids and weights
    assert remote_loads(count, "dispatch") == {
        (pe, source): count.rows[source][pe] * ids for pe, source in pairs(count)
    }
    check_combine_pushes(count)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [256, 300])
@pytest.mark.parametrize("world_size", [2, 4])
def test_rdna4_large(world_size: int, capacity: int) -> None:
    """More ids than a wave has lanes, the longest batches of each launch policy."""
    count = count_pair(Point(world_size, hidden=3072, top_k=33, capacity=capacity), RDNA4)
    ids = count.point.top_k * (ID + WEIGHT)
    check_dispatch_stores(count, SOURCE + (ids if world_size == 2 else 0))
    for pe, source in pairs(count):
        pulled = count.rows[source][pe] * ids if world_size == 4 else 0
        assert count.between("dispatch", pe, source, "load").bytes == pulled
    check_combine_pushes(count)


def check_combine_pushes(count: CountedPair) -> None:
    """Every remote row and its weights once, back to where it came from; no load crosses, and nothing of local rows."""
    for pe, source in pairs(count):
        row = count.row_bytes + count.point.top_k * WEIGHT
        assert count.between("combine", pe, source, "store").bytes == count.rows[source][pe] * row + SIGNAL
        assert count.between("combine", pe, source, "load") == NOTHING
        assert count.between("combine", pe, source, "atomic") == NOTHING


@pytest.mark.parametrize("world_size", [2, 4])
def test_rdna4_copies_no_local_row(world_size: int) -> None:
    """In combine: what a PE stores to memory of its own is less than a row more than the tokens that come out."""
    count = counted(RDNA4, world_size)
    own = count.phase("combine").own_bytes
    assert TOKENS * count.row_bytes <= own < (TOKENS + 1) * count.row_bytes
    assert min(count.rows[pe][pe] for pe in range(world_size)) > 1


@pytest.mark.parametrize("world_size", [2, 4])
def test_dense_moves_every_row_to_every_pe_each_way(world_size: int) -> None:
    count = counted(DENSE, world_size)
    for phase, (source, pe) in itertools.product(PHASES, pairs(count)):
        assert count.between(phase, source, pe, "store").bytes == TOKENS * count.row_bytes + SIGNAL
        assert count.between(phase, source, pe, "load") == NOTHING
        assert count.between(phase, source, pe, "atomic") == NOTHING


def test_the_benchmark_counts_the_same_rows() -> None:
    """`moved.links` of bench_rdna4_ep.py, which knows ids only, beside what kernels did."""
    for kind, world_size in itertools.product(("IntraNode", RDNA4, DENSE), (2, 4)):
        count = counted(kind, world_size)
        point = count.point
        everyone = [checks.draw(point, pe, SEED, TOKENS) for pe in range(world_size)]
        moved = backends.moved_by_dense(point, "push") if kind == DENSE else backends.moved_by_op(point, everyone)
        link = round(sum(count.phase(phase).link_bytes for phase in PHASES) * world_size)
        others = len(pairs(count))
        # what it leaves out: a signal each way, metadata of rows, and what slots are asked for
        rest = link - moved.links - others * 2 * SIGNAL
        if kind == DENSE:
            assert rest == 0
        else:
            forth, back = point.top_k * (ID + WEIGHT) + SOURCE, point.top_k * WEIGHT
            remote = moved.links // (2 * count.row_bytes)
            # weights may be loaded four times, see above
            assert remote * (forth + back) <= rest <= remote * (forth + 4 * back) + others * 4 * TOKENS


def test_expected_rows() -> None:
    # all PEs, no other PE, and 8 ids of 4 experts on each of 2 PEs: both are hit
    assert expected_rows(4, 256, 256) == 3
    assert expected_rows(1, 8, 256) == 0
    assert expected_rows(2, 8, 8) == 1
    # one id: PEs other than mine have (n - 1) / n of the experts
    assert expected_rows(4, 1, 256) == pytest.approx(0.75)
    counts = [counted("IntraNode", world_size) for world_size in (2, 4)]
    for count in counts:
        rows = count.remote_rows / (TOKENS * count.point.world_size)
        most = count.point.world_size - 1
        # a token goes to each other PE with probability p: 4 standard deviations of the mean, PEs taken as independent
        p = expected_rows(count.point.world_size, 8, 256) / most
        assert abs(rows / most - p) <= 4 * (p * (1 - p) / (TOKENS * count.point.world_size * most)) ** 0.5


def test_the_order_of_things_changes_nothing() -> None:
    """With a seed and late stores, EP4: neither operations nor bytes.

    But for waits, which load from memory of their own PE, and messages: the order decides which slots are neighbours.
    """
    point = Point(4, capacity=4)

    def moved(options: dict) -> set:
        count = count_pair(point, RDNA4, seed=SEED, options=options)
        found = [entry for phase in PHASES for entry in count.entries(phase)]
        return {entry[:-1] for entry in found if entry.kind == "store" or entry.dst not in (None, entry.src)}

    parallel = moved({})
    assert len(parallel) > 30
    assert moved({"seed": 7}) == moved({"seed": 4, "weak_memory": True}) == parallel


def test_table() -> None:
    """Bytes and messages of a token, the protocols beside the dense baseline; `pytest -rP` shows it."""
    kinds = ("IntraNode", RDNA4, DENSE)
    rows = [
        {"EP": world_size, "what": kind, **per_token(counted(kind, world_size))}
        for world_size in (2, 4)
        for kind in kinds
    ]
    names = [name for name in rows[0] if name not in ("EP", "what")]
    print(markdown(rows, [Column("EP"), Column("what"), *(Column(name, None, ".2f") for name in names)]))
    by = {(row["EP"], row["what"]): row for row in rows}
    for world_size in (2, 4):
        assert by[world_size, DENSE]["dispatch bytes"] == (world_size - 1) * (2 * 2048 + SIGNAL / TOKENS)
    # fewer rows than the baseline outweigh ids and weights where tokens miss PEs
    for phase in PHASES:
        assert by[4, RDNA4][f"{phase} bytes"] < by[4, DENSE][f"{phase} bytes"]
