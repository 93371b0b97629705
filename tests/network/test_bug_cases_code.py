"""Reported faults of caches, bitcode linking and AMD code (docs/bug_cases.md, groups L, M and N)."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import llvmlite.binding as llvm
import pytest
import triton
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.language import core

from mori_triton import abi, bitcode, ir
from mori_triton.bitcode import files
from mori_triton.device import externs, launch, probe
from mori_triton.device.launch import cross_compile, unresolved
from mori_triton.errors import ArgumentError, BitcodeError, NotSupported
from tests.device import network_kernels
from tests.device.test_compile import lines
from tests.device.test_queue_compile import SIGNATURE

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
FAMILIES = ("amdgcn", "nvptx64")


def library_text(family: str) -> str:
    """The library as it was built, as text."""
    return str(llvm.parse_bitcode((ROOT / "bitcode" / family / bitcode.DEVICE_LIBRARY).read_bytes()))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's library, in an empty cache."""
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "own.bc"
    monkeypatch.setenv("MORI_SHMEM_BC", str(path))
    return path


# --------------------------------------------------------------------------------------------------------------- caches


def test_l1_a_library_that_is_built_again_is_another_to_triton(own: Path) -> None:
    """In one process, behind one path, of one size, and with the time of the old one, as copies may have."""
    text = library_text("amdgcn")
    keys, found, stat = [], [], None
    for flag in ("@mori_shmem_debug", "@mori_shmem_profiler"):
        # one variable or the other is on: other code, as many bytes
        data = llvm.parse_assembly(re.sub(rf"^({flag} = .*global i32) 0", r"\1 1", text, flags=re.M)).as_bitcode()
        own.write_bytes(data)
        if stat is None:
            stat = own.stat()
        os.utime(own, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert (own.stat().st_size, own.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
        path = bitcode.find_bitcode("gfx1201")
        assert path.read_bytes() == data
        found.append(path)
        special = bitcode.specialize("gfx1201", provider="p2p")
        for library in (path, special):
            options = HIPBackend(GPUTarget("hip", "gfx1201", 32)).parse_options(
                {"extern_libs": {abi.LIBRARY: str(library)}}
            )
            keys.append(options.hash())
    assert len(set(keys)) == 4
    assert found[0] != found[1]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bitcode/build.py over a copy of the sources."""
    spec = importlib.util.spec_from_file_location("bitcode_build_of_a_copy", ROOT / "bitcode" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module, path = importlib.util.module_from_spec(spec), list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    shutil.copytree(ROOT / "hip_src", tmp_path / "hip_src")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_l2_every_source_and_header_counts_and_time_does_not(build: ModuleType) -> None:
    def hashes() -> dict[str, str]:
        return {name: build.source_hash(name) for name in build.TARGETS}

    before, counted = hashes(), set()
    for path in sorted((build.ROOT / "hip_src").rglob("*")):
        if path.is_dir():
            continue
        os.utime(path, ns=(1, 1))
        assert hashes() == before, path
        data = path.read_bytes()
        path.write_bytes(data + b"// \n")
        changed = {name for name, digest in hashes().items() if digest != before[name]}
        counted |= changed
        assert changed, path
        # C++ includes it where the hash says so: what the compiler is given has no other file of ours in it
        path.write_bytes(data)
    assert counted == set(build.TARGETS)
    assert hashes() == before


@pytest.mark.parametrize("step", ["write", "replace"])
def test_l4_a_file_that_cannot_be_written_leaves_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if step == "write":
        opened = os.fdopen

        def fdopen(handle: int, mode: str):
            file = opened(handle, mode)
            file.close()
            full()

        monkeypatch.setattr(files.os, "fdopen", fdopen)
    else:
        monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        bitcode.find_bitcode("gfx942")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    monkeypatch.undo()


def test_l6_what_the_variable_names_counts_at_every_call(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = ROOT / "bitcode/amdgcn" / bitcode.DEVICE_LIBRARY
    shutil.copy(packaged, own)
    assert bitcode.find_bitcode("gfx942").read_bytes() == packaged.read_bytes()
    own.unlink()
    for call in (
        bitcode.find_bitcode,
        bitcode.specialize,
        launch.get_extern_libs,
        lambda arch: ir.find_bitcode(arch=arch),
    ):
        with pytest.raises(BitcodeError, match=rf"{own} cannot be read: No such file"):
            call("gfx942")
    shutil.copy(ROOT / "bitcode/nvptx64" / bitcode.DEVICE_LIBRARY, own)
    with pytest.raises(BitcodeError, match="target triple of MORI_SHMEM_BC for gfx942"):
        bitcode.find_bitcode("gfx942")
    assert bitcode.find_bitcode("sm_90").read_bytes() == own.read_bytes()
    monkeypatch.delenv("MORI_SHMEM_BC")
    assert bitcode.find_bitcode("gfx942").read_bytes() == packaged.read_bytes()


def test_l7_every_path_that_was_searched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "mori_triton"
    monkeypatch.setattr(files, "__file__", str(package / "bitcode" / "files.py"))
    with pytest.raises(BitcodeError) as refused:
        bitcode.find_bitcode("gfx942")
    for path in (package / "_bitcode", package.parent / "bitcode"):
        assert str(path) in str(refused.value)
    (package / "_bitcode").mkdir(parents=True)
    (package / "_bitcode" / "manifest.json").write_text("{}")
    with pytest.raises(BitcodeError, match=str(package / "_bitcode" / "amdgcn" / bitcode.DEVICE_LIBRARY)):
        bitcode.find_bitcode("gfx942")


# -------------------------------------------------------------------------------------------------------------- linking


def test_m1_a_triton_without_the_keyword_is_refused_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(lib_name, lib_path, args, arg_type_symbol_dict, is_pure, _builder=None):
        raise AssertionError

    monkeypatch.setattr(core, "extern_elementwise", old)
    spec = importlib.util.spec_from_file_location("externs_of_an_old_triton", externs.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(NotSupported, match=rf"Triton {triton.__version__}: want 3.6 or newer"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("arch", ["gfx950", "gfx1201", "gfx1250", "sm_90"])
def test_m3_m5_n1_code_with_everything_in_it(arch: str) -> None:
    """All providers, debug and profiler builds: linked, inlined, and on gfx12 waits of gfx12 alone."""
    library = bitcode.specialize(arch, provider="any", debug=True, profiler=True)
    compiled = cross_compile(network_kernels.each_kernel, SIGNATURE, arch=arch, library=library, num_warps=4)
    assert unresolved(compiled.asm) == []
    assert not re.search(r"^declare [^\n]*@(?!llvm\.)", compiled.asm["llir"], re.MULTILINE)
    text = compiled.asm["ptx" if arch == "sm_90" else "amdgcn"]
    assert not re.search(r"\bcall(\.uni)?\s|swappc", text)
    if arch.startswith("gfx12"):
        assert len(re.findall(r"\bs_wait_(load|store|ds|km)cnt", text)) > 10
        assert not old_waits(text)


OLD_WAIT = re.compile(r"\b(s_waitcnt\w*|buffer_(gl[01]_inv|wbl2|inv)|s_barrier)\b(?!_)")


def old_waits(text: str) -> list[str]:
    """Instructions that gfx12 has no more, though its assembler takes some of them."""
    return [line for line in text.splitlines() if OLD_WAIT.search(line.split("//")[0].split(";")[0])]


@pytest.mark.parametrize("arch", ["gfx1201", "gfx1250"])
@pytest.mark.parametrize("name", ["send", "receive", "put"])
def test_n1_waits_of_gfx12_alone(arch: str, name: str) -> None:
    text = "\n".join(lines(arch, name))
    assert re.search(r"\bs_wait_(load|store|ds|km)cnt", text)
    assert not old_waits(text)
    # and what looks for them finds them
    assert old_waits("\n".join(lines("gfx942", name)))


# ------------------------------------------------------------------------------------------------------ memory of gfx12


def test_n3_no_kernel_leaves_the_scope_of_an_atomic_to_triton() -> None:
    """Before 3.7 `tl.atomic_cas` takes no scope, so there is none of it; every other atomic says its own."""
    num_calls = 0
    for folder in ("mori_triton", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            # by whatever name Triton's language goes there
            written = re.findall(r"\b(?:tl|core|language)\.(atomic_\w+)", text)
            if not written:
                continue
            calls = [
                node
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in written
                and ast.unparse(node.func.value) in ("tl", "core", "language")
            ]
            assert len(calls) == len(written), path
            assert "atomic_cas" not in written, path
            for call in calls:
                assert {"sem", "scope"} <= {word.arg for word in call.keywords}, (path, call.lineno)
            num_calls += len(calls)
    assert num_calls >= 3


def test_n3_atomics_of_the_library_reach_other_gpus() -> None:
    """Only the counter by which the programs of one launch meet is the GPU's own."""
    function, narrow = "", []
    num_wide = 0
    for line in library_text("amdgcn").splitlines():
        function = (re.match(r'define .*?@"?([\w.]+)', line) or [None, function])[1]
        if not re.search(r"\b(atomicrmw|cmpxchg|store atomic)\b", line):
            continue
        scope = re.search(r'syncscope\("([\w-]+)"\)', line)
        if scope is None or scope[1] == "one-as":
            num_wide += 1
        else:
            narrow.append((scope[1], re.sub(r"^_ZN4moriL\d+([a-z_]+)EN.*", r"\1", function)))
    assert num_wide > 40
    assert narrow == [("agent-one-as", "arrive_last"), ("agent-one-as", "signal_set_all_last")]
    function, narrow, num_wide = "", [], 0
    for line in library_text("nvptx64").splitlines():
        function = (re.match(r'define .*?@"?([\w.]+)', line) or [None, function])[1]
        for word in re.findall(r'"((?:atom|st|red)\.[^ ]*)', line):
            num_wide += ".sys." in word
            if ".sys." not in word:
                narrow.append((word, re.sub(r"^_ZN4moriL\d+([a-z_]+)EN.*", r"\1", function)))
    assert num_wide > 40
    arrival = "atom.release.gpu.global.add.u32"
    assert narrow == [(arrival, "arrive_last"), (arrival, "signal_set_all_last")]


def test_n6_wave_sizes() -> None:
    # from the vendors' instruction sets
    assert launch.TARGETS == {"gfx942": 64, "gfx950": 64, "gfx1201": 32, "gfx1250": 32, "sm_90": 32}
    for arch, wave in {"gfx942": 64, "gfx950": 64, "gfx1201": 32, "gfx1250": 32}.items():
        compiled = cross_compile(probe.ring_kernel, probe.RING_SIGNATURE, arch=arch, num_warps=4)
        assert f".wavefront_size: {wave}" in re.sub(r" +", " ", compiled.asm["amdgcn"])
        assert re.search(rf"\.max_flat_workgroup_size: +{4 * wave}\b", compiled.asm["amdgcn"])
    # not guessed from the beginning of a name
    for arch in ("gfx90a", "gfx1030", "gfx1100", "gfx1151", "gfx1200", "gfx12"):
        with pytest.raises(ArgumentError, match="arch: want one of gfx942"):
            launch.gpu_target(arch)


def test_n12_what_orders_stores_on_amd_gpus_is_the_compilers() -> None:
    """No instruction is written by hand: the waits that a GPU needs before a release are not ours to know."""
    written = re.findall(r'\basm (?:sideeffect |alignstack |inteldialect )*"([^"]*)"', library_text("amdgcn"))
    assert written
    assert set(written) == {""}
    # in Triton kernels neither, but for what is compiled for NVIDIA GPUs alone
    by_hand = {}
    for path in (ROOT / "mori_triton").rglob("*.py"):
        found = re.findall(r'inline_asm_elementwise\(\s*"(\w+)', path.read_text())
        by_hand |= {path.name: set(found)} if "inline_asm_elementwise" in path.read_text() else {}
    assert by_hand == {"launches.py": {"griddepcontrol"}}
