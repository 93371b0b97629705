"""MORI's table of device functions, the wrappers for Triton, and where the library is found."""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from mori_triton import abi, bitcode, ir
from mori_triton.device.launch import TARGETS, cross_compile, gpu_target, unresolved
from mori_triton.errors import ArgumentError, BitcodeError, NotSupported, StateError
from mori_triton.ir import triton as mori_device

pytestmark = pytest.mark.cpu

MORI = json.loads((Path(__file__).parents[1] / "device" / "mori_device_functions.json").read_text())


def test_the_table_is_moris() -> None:
    assert len(MORI["functions"]) == 89
    ours = ir.MORI_DEVICE_FUNCTIONS
    assert {name: ours[name] for name in MORI["functions"]} == MORI["functions"]
    # and what its library has beside the table
    beside = ["char", "uchar", "short", "ushort", "uint", "long", "ulong", "longlong", "ulonglong"]
    assert set(ours) - set(MORI["functions"]) == {f"{name}_p" for name in beside}
    assert len({entry["symbol"] for entry in ours.values()}) == 98
    assert (ir.SIGNAL_SET, ir.SIGNAL_ADD) == (9, 10)
    assert MORI["constants"] == {"SIGNAL_SET": 9, "SIGNAL_ADD": 10}


def test_the_library_exports_the_table() -> None:
    for arch in ("gfx942", "sm_90"):
        exported = bitcode.signatures(ir.find_bitcode(arch=arch))
        for entry in ir.MORI_DEVICE_FUNCTIONS.values():
            num_args = exported[entry["symbol"]].count(",") + 1 if entry["args"] else 0
            assert num_args == len(entry["args"]), entry


def test_a_wrapper_for_each() -> None:
    for name, entry in ir.MORI_DEVICE_FUNCTIONS.items():
        wrapper = getattr(mori_device, name)
        assert name in mori_device.__all__
        assert wrapper.__name__ == name
        assert entry["symbol"] in wrapper.__doc__
    assert {"get_extern_libs", "install_hook", "SIGNAL_SET", "SIGNAL_ADD"} <= set(mori_device.__all__)
    assert (mori_device.SIGNAL_SET, mori_device.SIGNAL_ADD) == (9, 10)


def test_signatures_of_the_host_functions() -> None:
    assert str(inspect.signature(ir.find_bitcode)) == "(*, cov: 'int | None' = None, arch: 'Any' = None) -> 'str'"
    assert inspect.signature(ir.get_bitcode_path) == inspect.signature(ir.find_bitcode)
    assert list(inspect.signature(mori_device.get_extern_libs).parameters) == ["target"]
    assert not inspect.signature(mori_device.install_hook).parameters


@triton.jit
def add_kernel(x_ptr, pe, OP: tl.constexpr):
    mori_device.uint64_atomic_add_thread(x_ptr, 1, pe, 0)
    mori_device.putmem_nbi_signal_block(x_ptr, x_ptr, 0, x_ptr, 1, mori_device.SIGNAL_ADD, pe, 0)
    mori_device.putmem_nbi_signal_block(x_ptr, x_ptr, 0, x_ptr, 1, OP, pe, 0)


@pytest.mark.compile
@pytest.mark.parametrize("arch", sorted(TARGETS))
def test_anyone_can_cross_compile(arch: str) -> None:
    library = mori_device.get_extern_libs(gpu_target(arch))[abi.LIBRARY]
    signature, constants = {"x_ptr": "*i64", "pe": "i32"}, {"OP": mori_device.SIGNAL_SET}
    compiled = cross_compile(add_kernel, signature, constants, arch=arch, library=library)
    assert unresolved(compiled.asm) == []
    # for whoever runs it, over whatever network
    assert bitcode.provider_of(library) == "any"
    assert library == str(bitcode.specialize(arch, provider="any"))


def test_find_bitcode_gives_the_library_as_it_was_built() -> None:
    for arch, family in (("gfx942", "amdgcn"), ("sm_90", "nvptx64")):
        found = ir.find_bitcode(arch=arch)
        assert Path(found).read_bytes() == (bitcode.directory() / family / bitcode.DEVICE_LIBRARY).read_bytes()
        assert found == ir.get_bitcode_path(arch=gpu_target(arch), cov=6)


def test_find_bitcode_says_what_is_wrong() -> None:
    with pytest.raises(ArgumentError, match=r"cov: want None, 5 or 6, got 4"):
        ir.find_bitcode(cov=4, arch="gfx942")
    with pytest.raises(BitcodeError, match="got 'gfx'"):
        ir.find_bitcode(arch="gfx")
    assert ir.find_bitcode(arch=GPUTarget("hip", "gfx942", 64)) == ir.find_bitcode(arch="gfx942")


def test_no_active_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def get_current_target(self) -> None:
            raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(triton.runtime.driver, "_active", Nothing())
    with pytest.raises(BitcodeError, match=r"no active device \(0 active drivers.*give arch="):
        ir.find_bitcode()


def test_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = Path(ir.find_bitcode(arch="gfx942")).read_bytes()
    # one made for one network and for finding faults
    other = tmp_path / "mine.bc"
    other.write_bytes(bitcode.specialize("gfx942", provider="mlx5", debug=True).read_bytes())
    monkeypatch.setenv("MORI_SHMEM_BC", str(other))
    found = Path(ir.find_bitcode(arch="gfx942"))
    assert found.read_bytes() == other.read_bytes() != data
    assert hashlib.sha256(other.read_bytes()).hexdigest()[:32] in found.parts
    with pytest.raises(NotSupported, match=r"transport any: .* mori_shmem_provider = 1"):
        mori_device.get_extern_libs("gfx942")
    monkeypatch.delenv("MORI_SHMEM_BC")
    for_debugging = bitcode.specialize("gfx942", debug=True)
    other.write_bytes(bitcode.labelled_copy(for_debugging, "test").read_bytes())
    monkeypatch.setenv("MORI_SHMEM_BC", str(other))
    (library,) = mori_device.get_extern_libs("gfx942").values()
    assert "mori_shmem_debug = 1" in Path(library).read_text()


def test_labelled_copies_have_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", str(tmp_path))
    for arch in ("gfx942", "sm_90"):
        found = bitcode.specialize(arch)
        copies = [bitcode.labelled_copy(found, label) for label in ("pe0", "pe1", "pe10")]
        assert [copy.relative_to(found.parent).as_posix() for copy in copies] == [
            f"pe{number}/{found.name}" for number in (0, 1, 10)
        ]
        assert len({copy.read_bytes() for copy in [found, *copies]}) == 4
        for copy in copies:
            assert copy.read_bytes().endswith(found.read_bytes())
            assert bitcode.signatures(copy) == bitcode.signatures(found)
        # somebody empties the cache
        copies[0].unlink()
        assert bitcode.labelled_copy(found, "pe0").is_file()


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(StateError, match="interpreter cannot call the device library"):
        mori_device.get_extern_libs("gfx942")
