"""Life of a PE: init, finalize, again; who is current; exit."""

import dataclasses
import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from mori_triton import wait_sites
from mori_triton.errors import ArgumentError, DriverError, PeerTimeout, StateError
from mori_triton.host import state
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CpuDriver, cuda, default_device, hip, open_driver
from mori_triton.host.drivers import cpu as cpu_driver
from tests.host.worlds import SETTINGS, error_of, run_threads, run_world

pytestmark = pytest.mark.cpu


def num_mappings():
    gc.collect()
    return len(cpu_driver._live)


def test_i1_i4_open_and_close_again_leaves_nothing():
    before = num_mappings(), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        tensors = run_world(3, lambda here: here.heap.tensor((4,), torch.int32))
        assert num_mappings() > before[0], "a held tensor keeps its pages"
        del tensors
    after = num_mappings(), len(os.listdir("/proc/self/fd")), threading.active_count()
    # fewer: what an earlier test left has ended meanwhile
    assert all(now <= then for now, then in zip(after, before, strict=True))


def test_current_by_thread_and_process(monkeypatch):
    monkeypatch.setattr(state, "_process", None)
    with pytest.raises(StateError, match="not initialised"):
        state.current()
    assert state.find() is None
    group = ThreadGroup(1)
    process = state.open_state(group.bootstrap(0), CpuDriver(), SETTINGS, owns_bootstrap=False)
    other = state.open_state(group.bootstrap(0), CpuDriver(), SETTINGS, owns_bootstrap=False)
    monkeypatch.setattr(state, "_process", process)
    assert state.current() is process
    state.bind(other)
    try:
        assert state.current() is other
        assert run_threads(1, lambda pe: state.current()) == [process]
        other.close()
        with pytest.raises(StateError, match="finalized"):
            state.current()
        assert state.find() is None
    finally:
        state.unbind()
    assert state.current() is process
    monkeypatch.setattr(process, "pid", os.getpid() + 1)
    with pytest.raises(StateError, match="forked"):
        state.current()
    assert state.find() is None
    process.close()
    assert process.closed


def test_close_runs_callbacks_before_the_barrier_and_the_heap_after():
    log = []

    class Noting(CpuDriver):
        def free(self, address):
            log.append("free")
            super().free(address)

    def attach(here):
        log.append("attach")
        assert here.heap.regions()
        return lambda: log.append("detach")

    group = ThreadGroup(1)
    here = state.open_state(group.bootstrap(0), Noting(), SETTINGS, attach=attach)
    here.on_close += [lambda: log.append("first"), lambda: log.append("second")]
    here.extensions["layers"] = object()
    barrier = here.bootstrap.barrier
    here.bootstrap.barrier = lambda what: (log.append(what), barrier(what))
    here.close()
    here.close()
    assert log == ["attach", "second", "first", "shmem finalize", "detach", "free", "free", "free", "free"]
    assert here.extensions == {}
    with pytest.raises(StateError, match="closed"):
        here.bootstrap.allgather(b"")


def test_peers_are_unmapped_before_anybody_frees():
    log = []

    class Noting(CpuDriver):
        def close_import(self, address):
            log.append("unmap")
            super().close_import(address)

        def free(self, address):
            log.append("free")
            super().free(address)

    group = ThreadGroup(2)

    def program(pe):
        state.open_state(group.bootstrap(pe), Noting(), SETTINGS).close()

    run_threads(2, program)
    assert log == ["unmap"] * 2 + ["free"] * 8


def test_a_device_that_takes_nothing_back():
    """The rest is given back all the same: bootstrap and driver."""

    class Broken(CpuDriver):
        closed = False

        def free(self, address):
            raise DriverError("the device is gone")

        def close(self):
            self.closed = True
            super().close()

    here = state.open_state(ThreadGroup(1).bootstrap(0), Broken(), SETTINGS)
    with pytest.raises(DriverError, match="the device is gone"):
        here.close(failed=True)
    assert here.driver.closed
    with pytest.raises(StateError, match="closed"):
        here.bootstrap.barrier()


def test_failed_attach_closes_the_heap():
    def attach(here):
        raise RuntimeError("no device")

    before = num_mappings()
    with pytest.raises(RuntimeError, match="no device"):
        state.open_state(ThreadGroup(1).bootstrap(0), CpuDriver(), SETTINGS, attach=attach)
    assert num_mappings() == before


def test_close_with_a_peer_that_never_comes():
    """The barrier times out with an error that names the peer; local memory is given back all the same."""
    group = ThreadGroup(2, timeout_s=1)
    ran = []

    def program(pe):
        here = state.open_state(group.bootstrap(pe), CpuDriver(), SETTINGS)
        here.on_close.append(lambda: ran.append(pe))
        if pe == 1:
            here.closed = True  # forgets to finalize, and stays
            return None
        return error_of(here.close), here.heap.closed, here.driver._owned

    error, closed, owned = run_threads(2, program)[0]
    assert isinstance(error, PeerTimeout)
    assert "shmem finalize" in str(error)
    assert "PE 1" in str(error)
    assert closed
    assert owned == {}
    # a close of a failed world runs no callbacks and waits for nobody
    here = state.open_state(ThreadGroup(1).bootstrap(0), CpuDriver(), SETTINGS)
    here.on_close.append(lambda: ran.append("never"))
    here.close(failed=True)
    assert ran == [0]


def test_a_pe_whose_peers_are_still_at_work_leaves_its_memory_to_the_world():
    group = ThreadGroup(2, timeout_s=5.0)
    states, failed = {}, threading.Event()

    def run(pe):
        here = states[pe] = state.open_state(group.bootstrap(pe), CpuDriver(), SETTINGS, owns_bootstrap=False)
        here.bootstrap.barrier()
        if pe == 1:
            group.abort(ValueError("a bug"))
            failed.set()
            return None
        failed.wait(5.0)
        return error_of(here.close)

    error, _ = run_threads(2, run)
    assert isinstance(error, StateError)
    # PE 1's kernels may be writing to it
    assert states[0].closed
    assert not states[0].heap.closed
    for here in states.values():
        here.close(failed=True)
        here.close(failed=True)
        assert here.heap.closed


def test_fields():
    def program(here):
        return here.pe, here.n_pes, here.node, here.gpus_per_node, here.timeout_s

    assert run_world(4, program, gpus_per_node=2, transport="p2p")[3] == (3, 4, 1, 2, 5.0)
    assert run_world(2, program)[1] == (1, 2, 0, 2, 5.0)


def test_heap_type_is_the_memory_kind():
    kinds = []

    class Noting(CpuDriver):
        def alloc(self, num_bytes, **options):
            kinds.append(options["kind"].value)
            return super().alloc(num_bytes, **options)

    for heap_type in ("normal", "uncached"):
        run_world(1, lambda here: None, driver=Noting, heap_type=heap_type)
    # the heap, the context, the error log, the log of operations
    logs = ["fine_grained"] * 2
    assert kinds == ["cached", "cached", *logs, "uncached", "cached", *logs]


def test_i12_node_identity():
    node = state.node_identity
    assert node(None, "boot-a", "host") != node(None, "boot-b", "host")
    assert node(None, "boot-a", "one") == node(None, "boot-a", "two")
    assert node("x", "boot-a", "one") == node("x", "boot-b", "two") != node("y", "boot-a", "one")
    assert node(None, "", "one") != node(None, "", "two")
    # a given id is not taken for a boot id
    assert node("boot-a", "z", "h") != node(None, "boot-a", "h")
    assert node(None) == node(None)


def test_i10_settings_stay(monkeypatch):
    def program(here):
        monkeypatch.setenv("MORI_NUM_QP_PER_PE", "9")
        monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", "1")
        return here.settings.num_qp_per_pe, here.heap.num_bytes

    assert run_world(1, program) == [(4, 1 << 20)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SETTINGS.arch = "gfx942"


def test_open_driver():
    assert open_driver("cpu").shared
    with pytest.raises(ArgumentError, match='device: want "auto", "cpu", "cuda" or "hip", got \'tpu\''):
        open_driver("tpu")


def test_open_driver_takes_the_gpu_that_torch_is_for(monkeypatch):
    found = {"cuda": 0, "hip": 0}
    monkeypatch.setattr(cuda, "device_count", lambda: found["cuda"])
    monkeypatch.setattr(hip, "device_count", lambda: found["hip"])
    for built_for, seen, chosen in (
        ("cuda", {"cuda": 2, "hip": 2}, "cuda"),
        ("hip", {"cuda": 2, "hip": 2}, "hip"),
        (None, {"cuda": 2, "hip": 2}, "cpu"),
        ("cuda", {"cuda": 0, "hip": 2}, "cpu"),
    ):
        monkeypatch.setattr(torch.version, "cuda", "13.0" if built_for == "cuda" else None)
        monkeypatch.setattr(torch.version, "hip", "7.1" if built_for == "hip" else None)
        found |= seen
        assert default_device() == chosen
    for device in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, device, None)
        with pytest.raises(StateError, match=f"device '{device}': this torch .* was built without"):
            open_driver(device)


def test_wait_sites():
    tag = wait_sites.register_wait_site("some kernel")
    assert tag == wait_sites.register_wait_site("some kernel") != wait_sites.register_wait_site("another kernel")
    assert 0 < tag < 2**31
    assert wait_sites.wait_site_name(tag) == "some kernel"
    assert wait_sites.wait_site_name(-1) == "barrier_all"
    assert wait_sites.wait_site_name(5) == "wait site 5"
    for name in ("", None, 5):
        with pytest.raises(ArgumentError):
            wait_sites.register_wait_site(name)
    # found by search: crc32("plumless") == crc32("buckeroo")
    wait_sites.register_wait_site("plumless")
    with pytest.raises(ArgumentError, match="'buckeroo' has the tag of 'plumless'"):
        wait_sites.register_wait_site("buckeroo")


EXIT_PROGRAM = """
    import atexit, sys
    from mori_triton.host import state
    from mori_triton.host.bootstrap import tcp
    from mori_triton.host.drivers import CpuDriver
    from mori_triton import env
    import dataclasses
    settings = dataclasses.replace(env.snapshot({}), heap_bytes=1 << 20)

    def start():
        boot = tcp.TcpBootstrap(tcp.new_unique_id(), 0, 1, timeout_s=5)
        here = state.open_state(boot, CpuDriver(shared=True), settings)
        state.set_process_state(here)
        return here

    for _ in range(3):
        here = start()
        here.heap.malloc(64)
        here.close()
    here = start()
    # runs after the package's own exit function, which closed it already
    atexit.register(lambda: None)
    if "close" in sys.argv:
        here.close()
    if "closed heap" in sys.argv:
        here.heap.close()
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("words", [[], ["close"], ["closed heap"]])
def test_i3_exit_without_finalize(words):
    """Exit code 0 and nothing on stderr, whether finalize was forgotten or not."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(EXIT_PROGRAM), *words],
        cwd=root, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_i3_no_finalizer_waits_for_peers():
    """Dropping states and tensors runs no collective: there is no peer to answer one."""
    group = ThreadGroup(2, timeout_s=5)
    kept = run_threads(2, lambda pe: state.open_state(group.bootstrap(pe), CpuDriver(), SETTINGS))
    tensors = run_threads(2, lambda pe: kept[pe].heap.tensor((5,), torch.float32))
    before = num_mappings()
    kept[1] = tensors[1] = None
    assert num_mappings() == before - 3, "the other PE still maps its heap; its context and its two logs are gone"
    kept.clear()
    tensors.clear()
    assert num_mappings() <= before - 5
