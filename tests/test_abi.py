"""abi.py against MORI's published table, the C++ headers' layout as the compiler saw it, and the host's structs."""

from __future__ import annotations

import json
import re
import struct
import zlib
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from mori_triton import abi, bitcode
from mori_triton.host import context

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "bitcode" / family / bitcode.DEVICE_LIBRARY for family in ("amdgcn", "nvptx64")]


def test_moris_functions_are_all_there_with_moris_types() -> None:
    table = json.loads((ROOT / "tests/device/mori_device_functions.json").read_text())
    ours = {
        key: {"symbol": f.symbol, "args": list(f.args), "ret": f.ret, **({"pure": True} if f.pure else {})}
        for key, f in abi.MORI_FUNCTIONS.items()
    }
    assert ours == table["functions"]
    assert {name: getattr(abi, name) for name in table["constants"]} == table["constants"]


def test_m2_the_library_key_is_part_of_every_symbol() -> None:
    assert all(abi.LIBRARY in f.symbol for f in abi.FUNCTIONS.values())
    assert len({f.symbol for f in abi.FUNCTIONS.values()}) == len(abi.FUNCTIONS)


def test_m7_no_table_holds_a_pointer_type() -> None:
    types = {t for f in abi.FUNCTIONS.values() for t in (*f.args, f.ret)}
    assert types <= {"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.parent.name)
def test_layout_in_the_bitcode_is_this_table(path: Path) -> None:
    # read the constant's bytes, independently of bitcode.verify
    text = str(llvm.parse_bitcode(path.read_bytes()).get_global_variable(abi.LAYOUT_SYMBOL))
    words = [int(w) for w in re.findall(r"i32 (\d+)[,\]]", text)]
    assert words == [value for _, value in abi.LAYOUT]


def test_host_packs_what_the_device_reads() -> None:
    values = {"pe": 3, "n_pes": 5, "heap_base": 1 << 40, "heap_size": 1 << 33, "peer_bases": 7 << 20}
    values |= {"sync": 9 << 20, "errors": 11 << 20, "timeout_ticks": 13, "network": 17 << 40, "profile": 19 << 40}
    data = context.pack_context(**values)
    assert len(data) == abi.CONTEXT_BYTES >= abi.CONTEXT_SIZE
    expected = {"version": abi.ABI_VERSION, "flags": 0, **values}
    formats = {"u32": "<I", "i32": "<i", "u64": "<Q"}
    read = {name: struct.unpack_from(formats[f.type], data, f.offset)[0] for name, f in abi.CONTEXT_FIELDS.items()}
    assert read == expected
    assert data[abi.CONTEXT_SIZE :] == bytes(abi.CONTEXT_BYTES - abi.CONTEXT_SIZE)


def test_host_reads_what_the_device_writes() -> None:
    formats = {"u32": "<I", "i32": "<i", "u64": "<Q"}
    log = bytearray(context.empty_error_log())
    assert len(log) == abi.ERROR_LOG_SIZE
    fields = abi.ERROR_LOG_FIELDS
    assert struct.unpack_from("<Q", log, fields["limit"].offset)[0] == abi.ERROR_CAPACITY
    struct.pack_into("<Q", log, fields["count"].offset, abi.ERROR_CAPACITY + 2)
    for i in range(abi.ERROR_CAPACITY):
        at = fields["records"].offset + i * abi.ERROR_RECORD_SIZE
        for j, (name, f) in enumerate(abi.ERROR_RECORD_FIELDS.items()):
            struct.pack_into(formats[f.type], log, at + f.offset, i + 1 if name == "sequence" else 100 * i + j + 1)
    records, count = context.unpack_error_log(bytes(log), hex)
    assert count == abi.ERROR_CAPACITY + 2
    assert len(records) == abi.ERROR_CAPACITY
    for i, record in enumerate(records):
        fields = [(j, name) for j, name in enumerate(abi.ERROR_RECORD_FIELDS) if name != "sequence"]
        assert [getattr(record, name) for _, name in fields] == [100 * i + j + 1 for j, _ in fields]


def test_compare_codes_are_the_headers() -> None:
    header = (ROOT / "hip_src/context.h").read_text()
    compares = dict(re.findall(r"k(Eq|Ne|Gt|Ge|Lt|Le) = (\d+)", header))
    assert {k.upper(): int(v) for k, v in compares.items()} == {
        k: getattr(abi, f"COMPARE_{k}") for k in ("EQ", "NE", "GT", "GE", "LT", "LE")
    }
    assert sorted(abi.COMPARE_SIGNS) == sorted(int(v) for v in compares.values())
    codes = {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "_", n).upper(): int(v)
        for n, v in re.findall(r"^  k(\w+) = (\d+),$", header, re.M)
    }
    ours = {n.removeprefix("ATOMIC_"): v for n, v in vars(abi).items() if n.startswith("ATOMIC_")}
    ours |= {n: getattr(abi, n) for n in ("SIGNAL_SET", "SIGNAL_ADD")}
    assert codes == ours
    tags = {n: int(v) for n, v in re.findall(r"i32 kTag(\w+) = (-\d+)", header)}
    assert tags == {
        "BarrierAll": abi.TAG_BARRIER_ALL,
        "WaitUntil": abi.TAG_WAIT_UNTIL,
        "Network": abi.TAG_NETWORK,
    }
    kinds = re.findall(r"^  k(WaitTimeout|Refused|Overflow|NetworkFailed) = (\d)", header, re.M)
    ours = {"WaitTimeout": abi.ERROR_WAIT_TIMEOUT, "Refused": abi.ERROR_REFUSED, "Overflow": abi.ERROR_OVERFLOW}
    ours |= {"NetworkFailed": abi.ERROR_NETWORK_FAILED}
    assert {name: int(code) for name, code in kinds} == ours
    providers = re.search(r"enum Provider : u32 \{([^}]*)\}", (ROOT / "hip_src/network.h").read_text())[1]
    spelled = {
        "AnyProvider": "any",
        "Mlx5": "mlx5",
        "BnxtRe": "bnxt_re",
        "Ionic": "ionic",
        "Proxy": "proxy",
        "P2p": "p2p",
    }
    assert {spelled[n]: int(v) for n, v in re.findall(r"k(\w+) = (\d+)", providers)} == abi.PROVIDERS


def test_no_two_functions_share_a_code() -> None:
    codes = {zlib.crc32(f.symbol.encode()) for f in abi.FUNCTIONS.values()}
    assert len(codes) == len(abi.FUNCTIONS)
    assert 0 not in codes, "0 says that a record has none"
    assert all(abi.symbol_name(zlib.crc32(f.symbol.encode())) == f.symbol for f in abi.FUNCTIONS.values())
    assert abi.symbol_name(0) is None
