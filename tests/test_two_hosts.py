"""2 x 2 PEs on two hosts under torchrun: load and store within a host, the proxy across; then the link is cut."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.host.proxy.ucx import needs_ucx
from tests.two_hosts import address, ip, two_hosts  # noqa: F401

pytestmark = [pytest.mark.cpu, pytest.mark.slow, needs_ucx]

ROOT = Path(__file__).parents[1]
LIMIT_S = 6


class Host:
    """torchrun on one host: a thread collects what its PEs print."""

    def __init__(self, names: list[str], host: int, program: list[str]) -> None:
        name = names[host]
        settings = {
            "MORI_TRITON_TRANSPORT": "auto",
            "MORI_TRITON_WAIT_TIMEOUT": str(LIMIT_S),
            "MORI_SHMEM_HEAP_SIZE": "4M",
            "MORI_NODE_ID": name,
            "MORI_SOCKET_IFNAME": name,
            "GLOO_SOCKET_IFNAME": name,
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": name,
            "OMP_NUM_THREADS": "1",
        }
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}", "--nproc-per-node=2",
            f"--master-addr={address(0)}", "--master-port=29517", "--max-restarts=0",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", name, *torchrun, *program],
            cwd=ROOT, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._new = threading.Condition()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._new:
                self.lines.append(line.rstrip())
                self._new.notify_all()
        with self._new:
            self.lines.append("END")
            self._new.notify_all()

    def wait_for(self, text: str, count: int, timeout_s: float) -> list[str]:
        """The first `count` lines that contain `text`."""

        def found() -> list[str]:
            return [line for line in self.lines if text in line]

        with self._new:
            self._new.wait_for(lambda: len(found()) >= count or "END" in self.lines, timeout_s)
            assert len(found()) >= count, "\n".join(self.lines)
            return found()[:count]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self, timeout_s: float) -> tuple[int, list[str]]:
        """The exit status, and all that was printed."""
        status = self.process.wait(timeout_s)
        self._thread.join()
        return status, self.lines


@pytest.fixture
def start(two_hosts: list[str]):  # noqa: F811
    hosts: list[Host] = []

    def start(*program: str) -> list[Host]:
        hosts.extend(Host(two_hosts, host, list(program)) for host in range(2))
        return hosts

    yield start
    for host in hosts:
        host.kill()


def test_the_example_as_it_is(start) -> None:
    hosts = start("examples/03_allreduce.py")
    for mine, host in zip(((0, 1), (2, 3)), hosts, strict=True):
        # what torchrun says is that of its PEs: 1 if one of them has a wrong sum or has failed
        status, lines = host.end(300)
        assert status == 0, lines
        # two PEs may write to one line
        assert sorted(re.findall(r"PE \d of 4: [\w ]+?(?=PE|$)", "\n".join(lines), re.MULTILINE)) == [
            f"PE {pe} of 4: the sum is exact" for pe in mine
        ]


def test_an_all_reduce_is_exact_and_cutting_the_link_names_the_peers(start, two_hosts: list[str]) -> None:  # noqa: F811
    # one start for both, since starting takes most of the time
    hosts = start("-m", "tests.two_hosts_program")
    for mine, far, host in zip(((0, 1), (2, 3)), ([2, 3], [0, 1]), hosts, strict=True):
        # six processes start, which takes a busy machine its time
        lines = sorted(host.wait_for(": exact", 2, 240))
        assert lines == [f"PE {pe}: exact; not mapped: {far}; by proxy" for pe in mine]
        host.wait_for("running", 2, 120)
    ip("-n", two_hosts[0], "link", "set", two_hosts[0], "down")
    for far, host in zip(((2, 3), (0, 1)), hosts, strict=True):
        for line in host.wait_for("PeerTimeout", 2, 3 * LIMIT_S):
            match = re.search(r"PeerTimeout after (\d+) rounds, ([\d.]+) s after the last one: (.*)", line)
            assert match is not None, line
            assert int(match[1]) > 0, line
            assert float(match[2]) < LIMIT_S + 2, line
            assert any(f"waiting for PE {pe}" in match[3] for pe in far), line
