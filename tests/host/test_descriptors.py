"""Descriptors handed to other processes, and libraries loaded by name."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from mori_triton.errors import DriverError
from mori_triton.host.drivers.descriptors import DescriptorServer, receive_descriptor
from mori_triton.host.drivers.library import Function, Library, load, loaded

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_descriptor_reaches_whoever_asks():
    before = num_open()
    with tempfile.TemporaryFile() as file:
        file.write(b"from here")
        file.flush()
        server = DescriptorServer(os.dup(file.fileno()))
        received = [receive_descriptor(server.name) for _ in range(3)]
        program = f"""
import os
from mori_triton.host.drivers.descriptors import receive_descriptor
print(os.pread(receive_descriptor({server.name!r}), 100, 0).decode())
"""
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout == "from here\n", done.stderr
        threads = threading.active_count()
        server.close()
        server.close()
        assert threading.active_count() == threads - 1
        for descriptor in received:
            assert os.pread(descriptor, 4, 0) == b"from"
            # not for programs that this one starts
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
    with pytest.raises(DriverError, match=rf"asking {server.name} for memory: .*refused; its process has ended"):
        receive_descriptor(server.name)
    assert num_open() == before


def test_one_who_goes_away_does_not_keep_others_waiting():
    with tempfile.TemporaryFile() as file:
        server = DescriptorServer(os.dup(file.fileno()))
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as gone:
                gone.connect("\0" + server.name)
        received = receive_descriptor(server.name)
        assert os.path.sameopenfile(received, file.fileno())
        os.close(received)
        server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_gets_nothing():
    program = """
import os, sys
from mori_triton.errors import DriverError
from mori_triton.host.drivers.descriptors import receive_descriptor
os.setuid(65534)
try:
    receive_descriptor(sys.argv[1])
except DriverError as error:
    print(error)
"""
    with tempfile.TemporaryFile() as file:
        server = DescriptorServer(os.dup(file.fileno()))
        command = [sys.executable, "-c", program, server.name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert "refused; its process belongs to another user" in done.stdout, done.stderr
        server.close()


def test_libraries():
    assert load(["libnothing.so.7", "libc.so.6"]) is not None
    with pytest.raises(DriverError, match=r"libnothing.so.7: .*; libnothing.so: "):
        load(["libnothing.so.7", "libnothing.so"])
    (libc,) = loaded("libc.so")
    assert Path(libc).name == "libc.so.6"
    assert loaded("libnothing") == []
    # part of a name is not the start of one
    assert loaded("c.so") == []
    with pytest.raises(DriverError, match="fake has no function missing: the installed driver is too old"):
        Library("fake", object(), {"key": Function("missing", ())}, lambda library, status: "")
