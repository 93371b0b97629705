"""Two hosts on one machine: network namespaces joined by a veth pair, for tests of what crosses hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _runs(name: str) -> bool:
    shown = subprocess.run(
        ["ip", "-n", name, "-br", "link", "show", "dev", name], check=True, capture_output=True, text=True
    )
    return shown.stdout.split()[1] == "UP"


def address(host: int) -> str:
    return f"10.213.77.{host + 1}"


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Names of the namespaces; each has an interface of that name, with `address(host)`. Skips without the rights."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts: there is no `ip` (iproute2) here")
    names = [f"mori{os.getpid()}{side}" for side in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"two hosts: no rights to make network namespaces: {getattr(error, 'stderr', error)}")
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"{address(i)}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        # an interface that is up counts as running a little later, and UCX takes running ones only
        limit = time.monotonic() + 10
        while not all(_runs(name) for name in names):
            assert time.monotonic() < limit, "the interfaces do not come up"
            time.sleep(0.05)
        yield names
    finally:
        for name in names:
            # what a test started there may have started more, in sessions of their own
            listed = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
