"""Proxies of several processes through the real UCX, over TCP and over shared memory, compared with numpy."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mori_triton.errors import ArgumentError, DriverError, HeapError, StateError
from mori_triton.host.bootstrap.tcp import new_unique_id
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.proxy import Op, Proxy, ucp_api
from mori_triton.host.proxy.endpoints import Endpoints
from tests.host.proxy import programs
from tests.host.proxy.ucx import needs_ucx
from tests.two_hosts import ip, two_hosts  # noqa: F401

pytestmark = [pytest.mark.cpu, needs_ucx]

ROOT = Path(__file__).parents[3]
TLS = {"tcp": "tcp", "shm": "sm,self"}


def start(name: str, unique_id: str, pe: int, n_pes: int, tls: str, before: tuple[str, ...] = ()) -> subprocess.Popen:
    return subprocess.Popen(
        [*before, sys.executable, "-m", "tests.host.proxy.programs", name, unique_id, str(pe), str(n_pes), tls],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(name: str, n_pes: int, tls: str, timeout_s: float = 60) -> dict[int, tuple[int, str, str]]:
    """A program on every PE: exit status, what it printed, what it complained about."""
    unique_id = new_unique_id().hex()
    processes = [start(name, unique_id, pe, n_pes, tls) for pe in range(n_pes)]
    ended: dict[int, tuple[int, str, str]] = {}

    def wait(pe: int) -> None:
        out, err = processes[pe].communicate(timeout=timeout_s)
        ended[pe] = processes[pe].returncode, out, err

    threads = [threading.Thread(target=wait, args=(pe,)) for pe in range(n_pes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes:
        process.kill()
    assert len(ended) == n_pes, "a PE hangs"
    return ended


@pytest.mark.parametrize("tls", TLS)
@pytest.mark.parametrize(
    ("name", "n_pes"),
    [("copies", 2), ("copies", 3), ("atomics", 2), ("signals", 2), ("contention", 4), ("wrap", 2), ("order", 2)],
)
def test_operations(name: str, n_pes: int, tls: str) -> None:
    for pe, (status, out, err) in run(name, n_pes, TLS[tls]).items():
        assert status == 0, f"PE {pe}: {err}"
        # UCX writes its warnings there too
        assert out.endswith("ok\n")


@pytest.mark.parametrize("tls", TLS)
@pytest.mark.parametrize(
    ("name", "n_pes"), [("copies", 3), ("atomics", 2), ("contention", 4), ("wrap", 2), ("order", 2)]
)
def test_operations_of_pes_in_one_process(name: str, n_pes: int, tls: str) -> None:
    group = ThreadGroup(n_pes, timeout_s=30)
    programs.run_threads(
        [lambda pe=pe: programs.run(name, group.bootstrap(pe), TLS[tls]) for pe in range(n_pes)]
    )  # fmt: skip


def test_an_idle_proxy_sleeps() -> None:
    for pe, (status, out, err) in run("idle", 2, "tcp").items():
        assert (status, out) == (0, "ok\n"), f"PE {pe}: {err}"


@pytest.mark.parametrize("tls", TLS)
def test_a_killed_peer_is_named_within_the_limit(tls: str) -> None:
    ended = run("killed", 3, TLS[tls])
    assert ended[1][0] == -9
    for pe in (0, 2):
        status, out, err = ended[pe]
        assert (status, out) == (0, "PeerTimeout\nok\n"), f"PE {pe}: {err}"


@pytest.mark.parametrize("tls", TLS)
@pytest.mark.parametrize("name", ["stopped", "stopped_and_killed"])
def test_everything_on_its_way_to_a_peer_that_hangs_fails_within_the_limit(name: str, tls: str) -> None:
    ended = run(name, 2, TLS[tls])
    assert ended[1][0] == -9
    status, out, err = ended[0]
    assert status == 0, err
    assert out.endswith("ok\n")


def alone(tls: str = "self", **options) -> tuple[Proxy, bytearray]:
    heap = bytearray(4096)
    place = ctypes.addressof(ctypes.c_uint8.from_buffer(heap))
    return Proxy(ThreadGroup(1).bootstrap(0), place, 4096, options={"TLS": tls}, **options), heap


def test_one_pe_opens_and_closes_many_times() -> None:
    before = threading.active_count()
    for _ in range(5):
        proxy, heap = alone()
        proxy.wait(proxy.atomic(Op.SET, 0, 8, 77))
        proxy.quiet()
        assert heap[8] == 77
        proxy.close()
        proxy.close()
    assert threading.active_count() == before
    with pytest.raises(StateError, match="closed"):
        proxy.put(0, 0, 1, 1)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda p: p.put(1, 0, 4096, 8), "PUT of 8 bytes at heap offset 0 of PE 1"),
        (lambda p: p.put(-1, 0, 4096, 8), "of PE -1"),
        (lambda p: p.put(0, 4090, 4096, 8), "heap offset 4090"),
        (lambda p: p.get(0, 1 << 63, 4096, 1 << 63), "GET of"),
        (lambda p: p.put(0, 0, 0, 8), "PUT of 8"),
        (lambda p: p.put_signal(0, 0, 4096, 0, 4, 1), "PUT_SIGNAL_SET"),
        (lambda p: p.put_signal(0, 0, 4096, 0, 4096, 1), "PUT_SIGNAL_SET"),
        (lambda p: p.atomic(Op.ADD, 0, 4, 1), "ADD of 8 bytes at heap offset 4"),
        (lambda p: p.atomic(Op.ADD, 0, 8, 1, num_bytes=2), "ADD of 2 bytes"),
        (lambda p: p.atomic(Op.SWAP, 0, 8, 1), "SWAP"),
    ],
)
def test_what_there_is_not_is_refused(call, named: str) -> None:
    proxy, heap = alone()
    with pytest.raises(ArgumentError) as caught:
        proxy.wait(call(proxy))
    assert named in str(caught.value)
    assert "PE 0: 4096 bytes" in str(caught.value)
    # an error stays, and the proxy goes on
    with pytest.raises(ArgumentError):
        proxy.check()
    proxy.wait(proxy.atomic(Op.ADD, 0, 16, 3))
    proxy.close()
    assert sum(heap) == 3


def test_local_memory_that_this_ucx_does_not_know_is_refused() -> None:
    """No segmentation fault: a page that cannot be read stands for a GPU's."""
    proxy, heap = alone()
    page = mmap.mmap(-1, 4096)
    place = ctypes.addressof(ctypes.c_uint8.from_buffer(page))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(4096), 0) == 0
    try:
        for call in (proxy.put, proxy.get):
            with pytest.raises(ArgumentError, match=r"of 8 bytes .* its local side is memory that the host thread"):
                proxy.wait(call(0, 0, place + 8, 8))
    finally:
        libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(4096), 3)
    source = bytearray(b"abcdefgh")
    proxy.wait(proxy.put(0, 16, ctypes.addressof(ctypes.c_uint8.from_buffer(source)), 8))
    assert heap[16:24] == source
    proxy.close()


@pytest.mark.parametrize("part", ["answer", "_connect"])
def test_a_set_up_that_fails_on_one_pe_late_fails_on_all(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints are made, and no PE waits for ever for the one that has failed."""
    whole = getattr(Endpoints, part)

    def failing(self, *args):
        if self._own == 1:
            raise DriverError("no more handlers")
        return whole(self, *args)

    monkeypatch.setattr(Endpoints, part, failing)
    before, heaps = threading.active_count(), [bytearray(4096) for _ in range(3)]
    group = ThreadGroup(3, timeout_s=30)
    caught: list[str] = []

    def open_one(pe: int) -> None:
        place = ctypes.addressof(ctypes.c_uint8.from_buffer(heaps[pe]))
        with pytest.raises(HeapError) as error:
            Proxy(group.bootstrap(pe), place, 4096, options={"TLS": "tcp"})
        caught.append(str(error.value))

    start = time.monotonic()
    programs.run_threads([lambda pe=pe: open_one(pe) for pe in range(3)])
    assert time.monotonic() - start < 20
    assert len(caught) == 3
    assert all("PE 1: no more handlers" in text for text in caught), caught
    assert threading.active_count() == before


def test_a_setting_that_ucx_does_not_take_is_the_error_of_every_pe() -> None:
    with pytest.raises(HeapError, match=r"PE 0: ucp_.*TLS|PE 0: ucp_init_version"):
        alone(tls="no_such_transport")


def test_time_out_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="timeout_s"):
        alone(timeout_s=0)


@pytest.mark.parametrize("cut", [False, True], ids=["copies", "link cut"])
def test_two_hosts(two_hosts, cut: bool) -> None:  # noqa: F811
    program = "until_cut" if cut else "copies"

    def there(pe: int, unique_id: str) -> subprocess.Popen:
        name = two_hosts[pe]
        settings = ("env", f"UCX_NET_DEVICES={name}", f"MORI_SOCKET_IFNAME={name}")
        return start(program, unique_id, pe, 2, "tcp", ("ip", "netns", "exec", name, *settings))

    processes = [there(0, "new")]
    try:
        assert processes[0].stdout is not None
        unique_id = processes[0].stdout.readline().strip()
        processes.append(there(1, unique_id))
        if cut:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "running\n"
            ip("-n", two_hosts[0], "link", "set", two_hosts[0], "down")
        for pe, process in enumerate(processes):
            out, err = process.communicate(timeout=40)
            assert process.returncode == 0, f"PE {pe}: {err}"
            if cut:
                assert out.startswith("PeerTimeout after ")
                assert float(out.split()[2]) < 5
                assert f"of PE {1 - pe} (operation" in out
            assert out.endswith("ok\n")
    finally:
        for process in processes:
            process.kill()


def test_the_library_says_what_it_is() -> None:
    ucp = ucp_api.Ucp()
    assert ucp.version >= (*ucp_api.API_VERSION, 0)
    assert "Input/output" in ucp.describe(-3)
    assert len({ucp.address(key) for key in ucp_api.FUNCTIONS}) == len(ucp_api.FUNCTIONS)
    with pytest.raises(DriverError, match=r"ucp_config_modify \(A=b\): Invalid parameter \(-5\)"):
        ucp.check(-5, "config_modify", "A=b")
