"""The log of operations as the host reads it, and the trace that is made of it."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import pytest

from mori_triton import abi
from mori_triton.host.drivers.cpu import CpuDriver
from mori_triton.host.profile import Operation, ProfileLog, write_chrome_trace

pytestmark = pytest.mark.cpu

PUT, QUIET = (zlib.crc32(name) for name in (b"mori_shmem_ctx_put_block", b"mori_shmem_quiet_thread"))


def test_what_a_log_says_and_that_it_says_it_once() -> None:
    driver = CpuDriver()
    log = ProfileLog(driver, pe=3, capacity=2)
    assert driver.ticks_per_second == 10**8
    assert driver.read(log.address, 16) == struct.pack("<QQ", 0, 2)
    assert log.take() == ([], 0)
    # start, end, bytes, symbol, peer, program, as hip_src/profile.h lays them out
    late = struct.pack("<QQQIiQ", 900, 950, 0, QUIET, -1, 1)
    early = struct.pack("<QQQIiQ", 500, 1300, 2**40, PUT, 7, 2**33)
    driver.write(log.address, struct.pack("<QQ", 5, 2) + late + early)
    assert log.take() == (
        [
            Operation(3, 2**33, "mori_shmem_ctx_put_block", 7, 2**40, pytest.approx(5.0), pytest.approx(13.0)),
            Operation(3, 1, "mori_shmem_quiet_thread", -1, 0, pytest.approx(9.0), pytest.approx(9.5)),
        ],
        3,
    )
    assert log.take() == ([], 0)
    assert log.num_bytes == 16 + 2 * abi.PROFILE_RECORD_SIZE
    log.close()


def test_a_trace_has_a_process_for_each_pe_and_a_row_for_each_program(tmp_path: Path) -> None:
    operations = [
        Operation(1, 4, "mori_shmem_ctx_put_block", 0, 64, 1000.5, 1002.0),
        Operation(0, 0, "mori_shmem_quiet_thread", -1, 0, 1000.0, 1003.0),
    ]
    write_chrome_trace(tmp_path / "trace.json", operations)
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = [(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == [(0, "PE 0"), (1, "PE 1")]
    drawn = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"], e["args"]) for e in drawn] == [
        ("ctx_put_block", 1, 4, 0.5, 1.5, {"peer": 0, "bytes": 64}),
        ("quiet_thread", 0, 0, 0.0, 3.0, {"peer": -1, "bytes": 0}),
    ]


def test_a_trace_of_nothing_is_a_trace(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "trace.json", [])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
