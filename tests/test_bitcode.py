"""The checked-in bitcode: verified, reproducible, and refused for each way in which a file can be wrong."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import sys
import types
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from mori_triton import abi, bitcode
from mori_triton.bitcode import files
from mori_triton.errors import BitcodeError

pytestmark = pytest.mark.compile

ROOT = Path(__file__).resolve().parent.parent
BITCODE = ROOT / "bitcode"
AMD, NVIDIA = (BITCODE / family / bitcode.DEVICE_LIBRARY for family in ("amdgcn", "nvptx64"))


def text_of(path: Path) -> str:
    return str(llvm.parse_bitcode(path.read_bytes()))


def write(text: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(llvm.parse_assembly(text).as_bitcode())
    return path


@pytest.fixture(scope="module")
def amd_text() -> str:
    return text_of(AMD)


@pytest.mark.parametrize("path", [AMD, NVIDIA], ids=lambda p: p.parent.name)
def test_checked_in_file_matches_abi(path: Path) -> None:
    bitcode.verify(path)
    expected = {f.symbol for f in abi.FUNCTIONS.values()}
    assert set(bitcode.signatures(path)) == expected


def test_an_unchanged_rewrite_is_accepted(amd_text: str, tmp_path: Path) -> None:
    # so that each refusal below is due to its mutation alone
    bitcode.verify(write(amd_text, tmp_path / "amdgcn" / bitcode.DEVICE_LIBRARY))


def mutate(pattern: str, replacement: str, flags: int = re.MULTILINE):
    def change(text: str) -> str:
        changed, count = re.subn(pattern, replacement, text, count=1, flags=flags)
        assert count == 1, pattern
        return changed

    return change


LAYOUT_LINE = r"(@mori_shmem_abi_layout = [^\n]*)"
# mutation -> (change of the text, what the message must name)
MUTATIONS = {
    "m4 triple of another GPU": (
        mutate(r"^target triple = .*$", 'target triple = "nvptx64-nvidia-cuda"'),
        ["triple", "amdgcn-amd-amdhsa", "nvptx64"],
    ),
    "m4 triple of the host": (
        mutate(r"^target triple = .*$", 'target triple = "x86_64-unknown-linux-gnu"'),
        ["triple", "x86_64"],
    ),
    "m4 no triple": (mutate(r"^target triple = .*\n", ""), ["triple", "''"]),
    "m4 data layout of the host": (
        mutate(
            r"^target datalayout = .*$",
            'target datalayout = "e-m:e-p270:32:32-p271:32:32-p272:64:64-i64:64-f80:128-n8:16:32:64-S128"',
        ),
        ["data layout", "p3:32:32"],
    ),
    "m4 made for one GPU": (mutate(r"^(attributes #0 = \{)", r'\1 "target-cpu"="gfx942"'), ["target-cpu", "gfx942"]),
    "m4 wave size fixed": (
        mutate(r"^(attributes #0 = \{)", r'\1 "target-features"="+wavefrontsize64"'),
        ["target-features"],
    ),
    "m5 argument of another width": (
        mutate(
            r"define (.*i32 @mori_shmem_ctx_my_pe\()i64.*?\{.*?^\}",
            r"define \1i32 %0) {\n ret i32 0\n}",
            re.MULTILINE | re.DOTALL,
        ),
        ["mori_shmem_ctx_my_pe", "i32(i64)", "i32(i32)"],
    ),
    "m5 result of another width": (
        mutate(
            r"define (.*)i32 (@mori_shmem_n_pes\(\).*?)\{.*?^\}",
            r"define \1i64 \2{\n ret i64 0\n}",
            re.MULTILINE | re.DOTALL,
        ),
        ["mori_shmem_n_pes", "i32()", "i64()"],
    ),
    "m5 an argument more": (
        mutate(r"(define .*@mori_shmem_ctx_arrive_last\()", r"\1i32 %more, "),
        ["mori_shmem_ctx_arrive_last", "i32(i64, i64, i32)", "i32(i32, i64, i64, i32)"],
    ),
    "a symbol missing": (
        lambda t: t.replace("@mori_shmem_ctx_ptr(", "@mori_shmem_ctx_pointer("),
        ["mori_shmem_ctx_ptr", "no such function"],
    ),
    "a symbol more": (
        lambda t: t + "\ndefine i32 @mori_shmem_other() { ret i32 0 }\n",
        ["mori_shmem_other", "no such function"],
    ),
    "an undefined function": (
        lambda t: t + "\ndeclare i32 @__ockl_get_local_id(i32)\n@keep = internal global ptr @__ockl_get_local_id\n",
        ["__ockl_get_local_id", "undefined"],
    ),
    "an undefined variable": (
        lambda t: t + "\n@__oclc_ABI_version = external global i32\n",
        ["__oclc_ABI_version", "undefined"],
    ),
    "a variable more": (lambda t: t + "\n@state = global i32 0\n", ["state", "mori_shmem_context"]),
    "context global missing": (lambda t: t.replace("@mori_shmem_context", "@mori_shmem_state"), ["mori_shmem_"]),
    "layout missing": (mutate(r"@mori_shmem_abi_layout = .*\n", ""), ["mori_shmem_abi_layout", "no such constant"]),
    "layout version": (mutate(r"(@mori_shmem_abi_layout = .*\[i32 )2,", r"\g<1>1,"), ["version: expected 2, found 1"]),
    "layout offset": (
        mutate(r"(@mori_shmem_abi_layout = .*?i32 48, i32 )56,", r"\g<1>60,"),
        ["Context.timeout_ticks: expected 56, found 60"],
    ),
    "layout shorter": (
        mutate(rf"\[{len(abi.LAYOUT)} x i32\] \[i32 2, ", f"[{len(abi.LAYOUT) - 1} x i32] ["),
        [f"{len(abi.LAYOUT)} words", f"{len(abi.LAYOUT) - 1} words"],
    ),
    "a variable that chooses code missing": (
        lambda t: t.replace("@mori_shmem_debug", "@mori_shmem_debug_mode"),
        ["mori_shmem_debug"],
    ),
    "a variable that chooses code of another width": (
        lambda t: re.sub(r"(@mori_shmem_profiler = .*global) i32 0, align 4", r"\1 i64 0, align 8", t),
        ["mori_shmem_profiler", "no such variable"],
    ),
    "trap 5 no remote memory": (
        mutate(r"(atomicrmw add ptr addrspace\(1\).*)$", r"\1, !amdgpu.no.remote.memory !{}"),
        ["amdgpu.no.remote.memory"],
    ),
    "trap 5 no fine-grained memory": (
        mutate(r"(atomicrmw add ptr addrspace\(1\).*)$", r"\1, !amdgpu.no.fine.grained.memory !{}"),
        ["amdgpu.no.fine.grained.memory"],
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_file_that_differs_is_refused_by_name(name: str, amd_text: str, tmp_path: Path) -> None:
    change, words = MUTATIONS[name]
    changed = change(amd_text)
    assert changed != amd_text
    with pytest.raises(BitcodeError) as refused:
        bitcode.verify(write(changed, tmp_path / "amdgcn" / bitcode.DEVICE_LIBRARY))
    for word in ("expected", "found", *words):
        assert word in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"not bitcode at all", AMD.read_bytes()[:2000]])
def test_garbage_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.bc"
    path.write_bytes(data)
    with pytest.raises(BitcodeError, match="not LLVM bitcode"):
        bitcode.verify(path)


def test_the_other_familys_file_is_refused_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "amdgcn" / bitcode.DEVICE_LIBRARY
    path.parent.mkdir()
    shutil.copy(NVIDIA, path)
    with pytest.raises(BitcodeError, match="triple: expected amdgcn-amd-amdhsa, found nvptx64"):
        bitcode.verify(path)


# -------------------------------------------------------------------------------------------------------------- finding


@pytest.mark.parametrize(
    ("target", "family"),
    [
        ("gfx942", "amdgcn"),
        ("gfx90a", "amdgcn"),
        ("gfx942:sramecc+:xnack-", "amdgcn"),
        ("gfx1250", "amdgcn"),
        ("sm_90", "nvptx64"),
        ("sm_90a", "nvptx64"),
        (types.SimpleNamespace(backend="hip", arch="gfx1201"), "amdgcn"),
        (types.SimpleNamespace(backend="cuda", arch=90), "nvptx64"),
    ],
)
def test_find_bitcode_by_target(target: object, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", str(tmp_path))
    source = BITCODE / family / bitcode.DEVICE_LIBRARY
    found = bitcode.find_bitcode(target)
    assert found.read_bytes() == source.read_bytes()
    # trap 2: the path changes with the content
    assert hashlib.sha256(source.read_bytes()).hexdigest().startswith(found.parent.name)
    assert len(found.parent.name) >= 16
    assert tmp_path in found.parents
    # a damaged copy is replaced, nothing temporary stays behind
    found.write_bytes(b"damaged")
    files._copy_of.cache_clear()
    assert bitcode.find_bitcode(target) == found
    assert found.read_bytes() == source.read_bytes()
    assert [p.name for p in found.parent.iterdir()] == [found.name]
    # and so is one that is gone
    shutil.rmtree(tmp_path / "bitcode")
    assert bitcode.find_bitcode(target).read_bytes() == source.read_bytes()


@pytest.mark.parametrize("target", ["", "gfx", "rdna4", "cpu", None, 90, types.SimpleNamespace(backend="xpu")])
def test_unknown_targets_are_refused(target: object) -> None:
    with pytest.raises(BitcodeError, match="want a target like"):
        bitcode.find_bitcode(target)


def test_the_wheels_layout_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "mori_triton"
    shutil.copytree(BITCODE, package / "_bitcode", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(files, "__file__", str(package / "bitcode" / "files.py"))
    assert bitcode.directory() == package / "_bitcode"
    shutil.rmtree(package / "_bitcode")
    with pytest.raises(BitcodeError, match=r"no manifest\.json"):
        bitcode.directory()


def test_a_users_own_file_is_verified_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", str(tmp_path / "cache"))
    own = tmp_path / "own.bc"
    monkeypatch.setenv("MORI_SHMEM_BC", str(own))
    with pytest.raises(BitcodeError, match=r"own\.bc cannot be read"):
        bitcode.find_bitcode("gfx942")
    shutil.copy(NVIDIA, own)
    with pytest.raises(BitcodeError, match="MORI_SHMEM_BC"):
        bitcode.find_bitcode("gfx942")
    shutil.copy(AMD, own)
    assert bitcode.find_bitcode("gfx942").read_bytes() == AMD.read_bytes()


# ------------------------------------------------------------------------------------------------------------- building


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("bitcode_build", BITCODE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_manifest_is_of_these_sources_and_files(build) -> None:
    manifest = json.loads((BITCODE / "manifest.json").read_text())
    assert manifest["abi"] == {"version": abi.ABI_VERSION, "hash": abi.abi_hash()}
    assert sorted(manifest["files"]) == sorted(build.TARGETS)
    for name, entry in manifest["files"].items():
        assert entry["source_sha256"] == build.source_hash(name)
        assert hashlib.sha256((BITCODE / name).read_bytes()).hexdigest() == entry["sha256"]
        assert bitcode.signatures(BITCODE / name) == entry["functions"]


def test_files_carry_no_path_and_no_compiler(build) -> None:
    for name in build.TARGETS:
        data = (BITCODE / name).read_bytes()
        text = text_of(BITCODE / name)
        for word in ("/work", "/home", "hip_src", "clang version", "Debian"):
            assert word.encode() not in data
            assert word not in text


def test_a_missing_compiler_is_named(
    build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["build.py", "--check", "--clang", "no-such-clang"])
    with pytest.raises(SystemExit):
        build.main()
    assert "no-such-clang is not installed; clang-19 is wanted" in capsys.readouterr().err


# the emulator's files take five seconds each; `build.py --check` of the CI compares them too
DEVICE = ("amdgcn", "nvptx64")
needs_clang = pytest.mark.skipif(shutil.which("clang++-19") is None, reason="clang-19 is not installed")


@needs_clang
def test_a_rebuild_is_the_same_bytes_and_a_changed_source_is_noticed(
    build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.check("clang++-19", DEVICE) == []
    # the same sources elsewhere give the same bytes
    tree = tmp_path / "elsewhere"
    shutil.copytree(ROOT / "hip_src", tree / "hip_src")
    shutil.copytree(BITCODE, tree / "bitcode")
    monkeypatch.setattr(build, "ROOT", tree)
    assert build.check("clang++-19", DEVICE) == []
    source = tree / "hip_src" / "sync.h"
    source.write_text(source.read_text().replace("step *= kBarrierPeers", "step *= 2 * kBarrierPeers"))
    problems = build.check("clang++-19", DEVICE)
    assert sum("other sources" in p for p in problems) == sum("bytes differ" in p for p in problems) == 2


@needs_clang
def test_another_compiler_compares_symbols_and_links(build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler_version", lambda clang: "99.0.0")
    assert build.check("clang++-19", DEVICE) == []
    monkeypatch.setattr(build, "link_into_kernels", lambda directory: ["gfx942: does not link"])
    assert build.check("clang++-19", DEVICE) == ["gfx942: does not link"]
