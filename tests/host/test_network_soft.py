"""Networks over the soft HCA: what tables hold, what of them is whose, and what is left when something fails."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import struct
import threading
import time

import pytest

from mori_triton.errors import ArgumentError, HeapError, NetworkError, PeerTimeout
from mori_triton.host import state
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CpuDriver
from mori_triton.host.drivers import cpu as cpu_driver
from mori_triton.host.network.soft import Fault, SoftFabric
from mori_triton.host.nic.soft_hca import SoftHca
from tests.host.worlds import SETTINGS, error_of, run_threads

pytestmark = pytest.mark.cpu

PROVIDERS = ("mlx5", "bnxt_re", "ionic")
# struct Queue of hip_src/network.h up to `ready`
QUEUE = struct.Struct("<8Q8I4Q")
NAMES = (
    "sq", "cq", "record", "doorbell", "doorbell_value", "cq_doorbell", "cq_doorbell_value", "psn_table",
    "number", "num_wqes", "num_cqes", "num_psns", "lkey", "rkey", "results_lkey", "mtu",
    "remote_base", "remote_bytes", "results", "ready",
)  # fmt: skip


def run(n: int, fabric: SoftFabric, program, *, gpus_per_node: int = 1, **settings):
    group = ThreadGroup(n, timeout_s=5.0)
    chosen = dataclasses.replace(SETTINGS, gpus_per_node=gpus_per_node, num_qp_per_pe=2, **settings)

    def on(pe: int):
        here = state.open_state(group.bootstrap(pe), CpuDriver(), chosen, fabric=fabric, owns_bootstrap=False)
        try:
            result = program(here)
        except BaseException as error:
            group.abort(error)
            here.close(failed=True)
            raise
        if not here.closed:
            here.close()
        assert here.driver._owned == {}, "everything was given back"
        return result

    return run_threads(n, on)


def queues_of(here: state.PeState) -> dict[tuple[int, int], dict[str, int]]:
    """By peer and connection; read with plain struct offsets. Those that are all zero are left out."""
    read, found = here.driver.read, {}
    (network,) = struct.unpack("<Q", read(here.heap.ctx_address + 64, 8))
    provider, per_pe, table = struct.unpack("<IIQ", read(network, 16))
    assert (provider, per_pe) == (PROVIDERS.index(here.provider) + 1, 2)
    for peer in range(here.n_pes):
        for at in range(per_pe):
            raw = read(table + (peer * per_pe + at) * 320, 320)
            if any(raw):
                assert raw[128:288] == bytes(160)
                assert raw[288:296] == b"\xff" * 8
                found[peer, at] = dict(zip(NAMES, QUEUE.unpack_from(raw), strict=True))
    return found


@pytest.mark.parametrize("provider", PROVIDERS)
def test_tables(provider: str) -> None:
    with SoftHca() as hca:

        def program(here: state.PeState):
            queues = queues_of(here)
            here.bootstrap.barrier()
            return queues, here.heap.base, [(r.address, r.num_bytes) for r in here.regions()]

        worlds = run(3, SoftFabric(provider, hca, num_wqes=16), program)
        assert hca.describe() == hca.errors == []
    numbers = []
    results = sorted(queue["results"] for queues, _, _ in worlds for queue in queues.values())
    assert all(second - first >= 65 * 8 for first, second in itertools.pairwise(results))
    for pe, (queues, _, regions) in enumerate(worlds):
        assert set(queues) == {(peer, at) for peer in range(3) if peer != pe for at in range(2)}
        for (peer, at), queue in queues.items():
            _, there, _ = worlds[peer]
            numbers.append(queue["number"])
            assert (queue["num_wqes"], queue["mtu"]) == (16, 4096)
            assert (queue["remote_base"], queue["remote_bytes"]) == (there, 1 << 20)
            # what the peer may be reached by is what it calls its own heap
            assert queue["rkey"] == worlds[peer][0][pe, at]["lkey"] != queue["lkey"]
            assert queue["results_lkey"] not in (queue["lkey"], queue["rkey"], 0)
            given = {"mlx5": {"record"}, "bnxt_re": {"psn_table", "num_psns"}, "ionic": {
                "doorbell_value", "cq_doorbell", "cq_doorbell_value"}}  # fmt: skip
            every = {name for names in given.values() for name in names}
            assert {name for name in every if queue[name]} == given[provider]
            assert queue["num_cqes"] == (16 if provider == "ionic" else 1)
            sizes = {
                "sq": 16 * (48 if provider == "bnxt_re" else 64), "doorbell": 8, "results": 65 * 8, "ready": 16 * 8,
                "cq": {"mlx5": 64, "bnxt_re": 32, "ionic": 16 * 32}[provider], "record": 4, "cq_doorbell": 8,
                "psn_table": queue["num_psns"] * 8,
            }  # fmt: skip
            spans = sorted((queue[name], queue[name] + size) for name, size in sizes.items() if queue[name])
            for (_, end), (start, _) in itertools.pairwise(spans):
                assert end <= start, "they overlap"
            for start, end in spans:
                assert any(at <= start and end <= at + num_bytes for at, num_bytes in regions), "kernels may touch it"
    assert len(set(numbers)) == len(numbers) == 12


def test_a_card_may_reach_results_as_it_reaches_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a dma-buf too, which is of whole pages: both are memory that may be exported."""
    exportable, alloc = set(), CpuDriver.alloc

    def note(self, num_bytes, **options):
        address = alloc(self, num_bytes, **options)
        if options.get("exportable"):
            exportable.add(address)
        return address

    monkeypatch.setattr(CpuDriver, "alloc", note)

    def program(here: state.PeState) -> set[int]:
        return {here.heap.base, min(queue["results"] for queue in queues_of(here).values())}

    with SoftHca() as hca:
        assert set().union(*run(2, SoftFabric("mlx5", hca), program)) <= exportable


def test_only_peers_that_are_not_mapped_have_queues() -> None:
    with SoftHca() as hca:
        worlds = run(4, SoftFabric("mlx5", hca), lambda here: set(queues_of(here)), gpus_per_node=2)
    far = [(2, 3), (2, 3), (0, 1), (0, 1)]
    assert worlds == [{(peer, at) for peer in peers for at in range(2)} for peers in far]


def test_completions_start_as_the_card_wants_them() -> None:
    def program(here: state.PeState):
        return {
            here.driver.read(queue["cq"], 64 if here.provider == "mlx5" else 32) for queue in queues_of(here).values()
        }

    for provider, fill in (("mlx5", b"\xff" * 64), ("bnxt_re", bytes(32)), ("ionic", bytes(32))):
        with SoftHca() as hca:
            assert run(2, SoftFabric(provider, hca), program) == [{fill}] * 2


def num_mappings() -> int:
    gc.collect()
    return len(cpu_driver._live)


def test_worlds_one_after_the_other_leave_nothing() -> None:
    with SoftHca() as hca:
        hca.start()
        before = num_mappings(), len(os.listdir("/proc/self/fd"))
        for num_bytes in (1 << 20, 1 << 16, 1 << 21):
            run(2, SoftFabric("bnxt_re", hca), lambda here: None, heap_bytes=num_bytes)
            assert hca._queue_pairs == {}
        assert (num_mappings(), len(os.listdir("/proc/self/fd"))) == before


def test_one_pe_that_cannot_is_an_error_on_all() -> None:
    with SoftHca() as hca:
        add, calls = hca.add_queue_pair, []

        def one_too_many(provider, pe, **facts):
            calls.append(pe)
            if calls.count(1) == 3 and pe == 1:
                raise ArgumentError("queue pairs: want at most 2, got 3")
            return add(provider, pe, **facts)

        hca.add_queue_pair = one_too_many
        before, errors = num_mappings(), []
        group = ThreadGroup(3, timeout_s=5.0)

        def program(pe: int):
            settings = dataclasses.replace(SETTINGS, gpus_per_node=1)
            try:
                state.open_state(group.bootstrap(pe), CpuDriver(), settings, fabric=SoftFabric("mlx5", hca))
            except HeapError as error:
                errors.append(str(error))

        run_threads(3, program)
        assert errors == ["the network over mlx5 could not be set up (PE 1: queue pairs: want at most 2, got 3)"] * 3
        assert hca._queue_pairs == {}
        assert num_mappings() == before


def post_nonsense(here: state.PeState) -> int:
    """Ring for a request that was not written; the number of the queue pair. mlx5, of two PEs."""
    (network,) = struct.unpack("<Q", here.driver.read(here.heap.ctx_address + 64, 8))
    (table,) = struct.unpack("<Q", here.driver.read(network + 8, 8))
    queue = dict(zip(NAMES, QUEUE.unpack(here.driver.read(table + 2 * (1 - here.pe) * 320, QUEUE.size)), strict=True))
    here.driver.write(queue["record"], struct.pack(">I", 1))
    here.driver.write(queue["doorbell"], struct.pack(">II", 0, queue["number"] << 8 | 3))
    return queue["number"]


def test_what_no_kernel_has_seen_fail_is_raised_once() -> None:
    with SoftHca() as hca:
        hca.start()

        def program(here: state.PeState):
            if here.pe == 1:
                here.bootstrap.barrier()
                here.check_errors()
                return None
            number = post_nonsense(here)
            until = time.monotonic() + 5
            while not hca.errors and time.monotonic() < until:
                time.sleep(0.001)
            error = error_of(here.check_errors)
            here.check_errors()
            here.bootstrap.barrier()
            return number, error

        (number, error), _ = run(2, SoftFabric("mlx5", hca), program)
    assert isinstance(error, NetworkError)
    assert str(error).startswith("operations over the network failed that no kernel waited for:\n")
    assert f"soft mlx5, queue pair {number:#x} of PE 0 to PE 1, request 0: " in str(error)


def test_what_a_kernel_has_seen_fail_is_not_raised_again() -> None:
    with SoftHca() as hca:
        hca.start()

        def program(here: state.PeState) -> None:
            if here.pe == 0:
                (network,) = struct.unpack("<Q", here.driver.read(here.heap.ctx_address + 64, 8))
                (table,) = struct.unpack("<Q", here.driver.read(network + 8, 8))
                # as a kernel leaves it: `error` of connection 0 with PE 1
                here.driver.write(table + 2 * 320 + 280, struct.pack("<Q", 1 << 63 | 2))
                post_nonsense(here)
                until = time.monotonic() + 5
                while not hca.errors and time.monotonic() < until:
                    time.sleep(0.001)
                assert hca.errors
            here.bootstrap.barrier()
            here.check_errors()

        run(2, SoftFabric("mlx5", hca), program)


def test_the_end_waits_for_what_is_under_way() -> None:
    """And says what it has waited for, when it takes too long."""
    hca = SoftHca()

    def program(here: state.PeState):
        if here.pe == 0:
            post_nonsense(here)
            assert hca.pending()
            threading.Timer(0.3, hca.start).start()
        here.bootstrap.barrier()
        start = time.monotonic()
        error = error_of(here.close)
        return time.monotonic() - start, type(error)

    with hca:
        (waited, kind), _ = run(2, SoftFabric("mlx5", hca), program)
        assert waited > 0.2
        assert kind is NetworkError

    def stuck(here: state.PeState):
        if here.pe == 0:
            post_nonsense(here)
        here.bootstrap.barrier()
        return error_of(here.close)

    with SoftHca() as idle:
        errors = run(2, SoftFabric("mlx5", idle), stuck, wait_timeout_s=0.3)
        assert idle._queue_pairs == {}
    assert isinstance(errors[0], PeerTimeout)
    assert "PE 0: waiting for the soft HCA to be done with what is posted for 0.3 s (soft mlx5" in str(errors[0])


def test_faults_are_for_one_connection() -> None:
    asked = []
    with SoftHca() as hca:
        hca.inject = lambda number, fault, index: asked.append((number, fault, index))
        faults = [Fault(1, 0, qp=1, fault="rnr", index=7), Fault(0, 5)]
        numbers = run(
            2, SoftFabric("ionic", hca, faults=faults), lambda here: queues_of(here)[1 - here.pe, 1]["number"]
        )
    assert asked == [(numbers[1], "rnr", 7)]
