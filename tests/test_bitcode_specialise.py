"""`bitcode.specialize`: what it fixes is fixed, the rest is as it was built, and its cache never holds half a file."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from mori_triton import abi, bitcode
from mori_triton.bitcode import specialisation
from mori_triton.device import probe
from mori_triton.device.launch import TARGETS, cross_compile
from mori_triton.errors import ArgumentError, BitcodeError, MoriError, NotSupported
from tests.device import kernels

pytestmark = pytest.mark.compile

NETWORKS = ("mlx5", "bnxt_re", "ionic", "proxy")
# "define ... @name(...) ... #3 {" and its body
FUNCTION = re.compile(r'^define [^\n]*?@"?([\w.]+)"?\([^\n]*\{\n(.*?)^\}', re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def built(family: str) -> str:
    """The library as it was built, as text."""
    return str(llvm.parse_bitcode((bitcode.directory() / family / bitcode.DEVICE_LIBRARY).read_bytes()))


def with_constants(family: str, values: tuple[int, int, int], path: Path) -> Path:
    """The library as built but for the three variables' values: whoever links it folds them, we have folded nothing."""
    text = built(family)
    for name, value in zip(abi.SWITCHES, values, strict=True):
        text, count = re.subn(
            rf"^@{name} = protected (.*?)global i32 0", rf"@{name} = internal \1constant i32 {value}", text, flags=re.M
        )
        assert count == 1
    # two words that only the LLVM that has written them knows
    text = re.sub(r", target_mem\d: \w+| nocreateundeforpoison", "", text)
    text = text.replace(" local_unnamed_addr addrspace(1) constant", " addrspace(1) constant")
    # Triton may know libraries by their path alone
    path /= f"{hashlib.sha256(text.encode()).hexdigest()}.bc"
    path.write_text(text)
    return path


@pytest.mark.parametrize("family", ["amdgcn", "nvptx64"])
@pytest.mark.parametrize("provider", abi.PROVIDERS)
def test_the_three_variables_are_constants_that_nobody_loads(family: str, provider: str) -> None:
    target = {"amdgcn": "gfx942", "nvptx64": "sm_90"}[family]
    for debug, profiler in ((False, False), (True, True)):
        path = bitcode.specialize(target, provider=provider, debug=debug, profiler=profiler)
        text = path.read_text()
        wanted = abi.PROVIDERS[provider], int(debug), int(profiler)
        for name, value in zip(abi.SWITCHES, wanted, strict=True):
            (line,) = re.findall(rf"^@{name} = (.*)$", text, re.MULTILINE)
            assert f"constant i32 {value}, align 4" in line
            assert text.count(f"@{name}") == 1
        assert bitcode.provider_of(path) == provider
        # checked against abi once more, and the same functions are exported
        assert bitcode.signatures(path) == bitcode.signatures(bitcode.find_bitcode(target))


@pytest.mark.parametrize("family", ["amdgcn", "nvptx64"])
def test_what_a_provider_does_not_need_is_gone(family: str) -> None:
    target = {"amdgcn": "gfx942", "nvptx64": "sm_90"}[family]
    defined = {
        (provider, profiler): {name for name, _ in FUNCTION.findall(bitcode.specialize(target, **options).read_text())}
        for provider in abi.PROVIDERS
        for profiler in (False, True)
        for options in [{"provider": provider, "profiler": profiler}]
    }
    everything = {name for name, _ in FUNCTION.findall(built(family))}

    def of(word: str, provider: str) -> set[str]:
        return {name for name in defined[provider, False] if word in name}

    # nothing but mapped memory
    for word in ("network", "mlx5", "bnxt", "ionic", "proxy"):
        assert not of(word, "p2p"), word
    # of the cards only one's; `network_put` and so on serve them all
    for provider in NETWORKS:
        others = {name[:5] for name in NETWORKS} - {provider[:5]}
        for other in others:
            assert not of(other, provider), (provider, other)
    assert len(defined["p2p", False]) < min(len(defined[provider, False]) for provider in NETWORKS)
    for names in defined.values():
        assert names <= everything
    assert defined["any", True] == everything


@pytest.mark.parametrize("family", ["amdgcn", "nvptx64"])
def test_every_function_is_inlined_and_nothing_else_is_rewritten(family: str) -> None:
    target = {"amdgcn": "gfx942", "nvptx64": "sm_90"}[family]
    before = dict(FUNCTION.findall(built(family)))
    # what has to stay as it was built, word for word
    telling = re.compile(r"fence .*|.* asm .*|.*(?:atomicrmw|cmpxchg|atomic ).*|.*volatile.*")

    def words(body: str) -> list[str]:
        # values are numbered anew, and each LLVM counts attributes and metadata for itself
        lines = (re.sub(r"%[\w.]+|#\d+|![\w.]+", "_", line.strip()) for line in body.splitlines())
        return [line for line in lines if telling.fullmatch(line)]

    text = bitcode.specialize(target, profiler=True, debug=True).read_text()
    attributes = dict(re.findall(r"^attributes (#\d+) = \{(.*)\}$", text, re.MULTILINE))
    assert len(attributes) > 3
    for line in re.findall(r"^define .*$", text, re.MULTILINE):
        (group,) = re.findall(r" (#\d+) ", line)
        assert "alwaysinline" in attributes[group], line
        assert "noinline" not in attributes[group]
    for name, body in FUNCTION.findall(text):
        assert words(body) == words(before[name]), name
    assert sum(len(words(body)) for body in before.values()) > 50
    # in amdgcn these choose how far a fence reaches and which cache a store goes through
    for word in ("syncscope", "addrspace(3)", "addrspace(4)", "llvm.loop.unroll.disable"):
        if word in built(family):
            assert word in text, word


def assembly(compiled: object) -> str:
    """Generated code without what names files and hashes."""
    asm = compiled.asm  # type: ignore[attr-defined]
    text = asm["ptx"] if "ptx" in asm else asm["amdgcn"]
    # comments have the names of blocks, which count how often a name came before
    text = re.sub(r"^\s*\.(file|loc|ident|reg|section\s+\.debug).*$|//.*$|\s*; .*$", "", text, flags=re.MULTILINE)
    # who folds after linking keeps the data of what it has folded away
    text = re.sub(r"^\.visible \.shared .*$", "", text, flags=re.MULTILINE)
    # PTX has as many registers as it likes: numbered as they come
    known: dict[str, str] = {}
    return re.sub(
        r"%[a-z]+\d+", lambda found: known.setdefault(found[0], f"%{len(known)}"), re.sub(r"\n\s*\n+", "\n", text)
    )


KERNELS = {
    "ring": (probe.ring_kernel, probe.RING_SIGNATURE, {}),
    "ping": (
        kernels.ping_kernel,
        {"ctx": "*i64", "data": "*i64", "sig": "*i64", "bad": "*i32", "rounds": "i32"},
        {"N": 64},
    ),
    "atomics": (kernels.nonfetch_kernel, {"ctx": "*i64", "p32": "*i32", "p64": "*i64", "pe": "i32"}, {}),
}


@pytest.mark.parametrize("arch", sorted(TARGETS))
@pytest.mark.parametrize(("provider", "debug"), [("p2p", False), ("any", False), ("mlx5", True)])
def test_kernels_come_out_as_if_triton_had_folded_the_constants(arch, provider, debug, tmp_path: Path) -> None:
    family = "nvptx64" if arch.startswith("sm_") else "amdgcn"
    special = bitcode.specialize(arch, provider=provider, debug=debug)
    plain = with_constants(family, (abi.PROVIDERS[provider], int(debug), 0), tmp_path)
    # the fewest where nothing but time differs
    for name in KERNELS if provider == "p2p" else ("ring",):
        kernel, signature, constants = KERNELS[name]
        ours, theirs = (
            cross_compile(kernel, signature, constants, arch=arch, library=library, num_warps=4)
            for library in (special, plain)
        )
        assert assembly(ours) == assembly(theirs), name
        assert not any(switch in assembly(ours) for switch in abi.SWITCHES)


def test_only_what_every_llvm_since_the_compilers_knows_is_written() -> None:
    compiler = {"alwaysinline", "convergent", "mustprogress", "nobuiltin", "nofree", "norecurse", "nosync", "nounwind"}
    compiler |= {"willreturn", "speculatable", "noreturn", "cold"}
    for target in ("gfx942", "sm_90"):
        text = bitcode.specialize(target).read_text()
        for inside in re.findall(r"^attributes #\d+ = \{(.*)\}$", text, re.MULTILINE):
            words = set(re.sub(r"memory\([^)]*\)", "", inside).split())
            assert words, "an empty group is no IR"
            assert words <= compiler
        for memory in re.findall(r"memory\(([^)]*)\)", text):
            assert re.fullmatch(r"(none|read|write|readwrite)?(, )?((argmem|inaccessiblemem): \w+(, )?)*", memory)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="provider: want any, mlx5, bnxt_re, ionic, proxy, p2p, got 'efa'"):
        bitcode.specialize("gfx942", provider="efa")
    with pytest.raises(BitcodeError, match="want a target like"):
        bitcode.specialize("gfx")
    with pytest.raises(BitcodeError, match="nowhere"):
        bitcode.specialize(tmp_path / "nowhere.bc")
    for_cards = bitcode.specialize("gfx942", provider="mlx5")
    with pytest.raises(NotSupported, match=r"transport ionic: .* mori_shmem_provider = 1: want 3") as refused:
        bitcode.specialize(for_cards, provider="ionic")
    assert isinstance(refused.value, MoriError)
    with pytest.raises(NotSupported, match=r"transport mlx5: .* mori_shmem_debug = 0: want 1"):
        bitcode.specialize(for_cards, provider="mlx5", debug=True)


def test_a_special_library_is_taken_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for_debugging = bitcode.specialize("gfx942", provider="mlx5", debug=True)
    # as a path, and as a user's own file for everything that is linked
    monkeypatch.setenv("MORI_SHMEM_BC", str(for_debugging))
    for asked in (str(for_debugging), "gfx942"):
        again = bitcode.specialize(asked, provider="mlx5")
        assert "@mori_shmem_debug = protected local_unnamed_addr addrspace(1) constant i32 1" in again.read_text()
        assert bitcode.provider_of(again) == "mlx5"
    monkeypatch.delenv("MORI_SHMEM_BC")
    # one that looks its provider up serves all of them, and goes on doing so
    assert bitcode.provider_of(bitcode.specialize(bitcode.specialize("gfx942"), provider="ionic")) == "any"


# ---------------------------------------------------------------------------------------------------------------- cache


def test_the_name_tells_everything_that_the_content_depends_on(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    options = [{"provider": p, "debug": d, "profiler": f} for p in ("p2p", "any") for d in (0, 1) for f in (0, 1)]
    found = [bitcode.specialize(target, **o) for target in ("gfx942", "sm_90") for o in options]
    assert len(set(found)) == len(found)
    assert found == [bitcode.specialize(target, **o) for target in ("gfx1201", "sm_90a") for o in options]
    for path in found:
        assert cache in path.parents
        assert re.fullmatch(r"[0-9a-f]{32}", path.parent.name)
        assert path.name == bitcode.DEVICE_LIBRARY
        assert [p.name for p in path.parent.iterdir()] == [path.name]
    specialisation._specialised.cache_clear()
    monkeypatch.setattr(llvm, "llvm_version_info", (99, 0, 0))
    assert bitcode.specialize("gfx942", provider="p2p") not in found


def test_what_is_damaged_or_gone_is_made_anew(cache: Path) -> None:
    path = bitcode.specialize("gfx942", provider="p2p")
    whole = path.read_bytes()
    for damage in (b"", whole[: len(whole) // 2], b"\0" * 100, whole.replace(b"@mori_shmem_ctx_ptr(", b"@gone(")):
        path.write_bytes(damage)
        specialisation._specialised.cache_clear()
        assert bitcode.specialize("gfx942", provider="p2p") == path
        assert path.read_bytes() == whole
    path.unlink()
    # not only for a process that starts
    assert bitcode.specialize("gfx942", provider="p2p").read_bytes() == whole


def _write(times: int, out: object) -> None:
    for _ in range(times):
        path = bitcode.specialize("gfx942", provider="p2p")
        try:
            out.put(hashlib.sha256(path.read_bytes()).hexdigest())  # type: ignore[attr-defined]
        except FileNotFoundError:
            # another one has just taken it away
            out.put("gone")  # type: ignore[attr-defined]
        path.unlink(missing_ok=True)
        specialisation._specialised.cache_clear()


def _die_writing() -> None:
    # it has written everything, but not under the name yet
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    bitcode.specialize("gfx942", provider="p2p")


def test_processes_never_see_half_a_file_nor_wait_for_a_dead_one() -> None:
    spawn = multiprocessing.get_context("spawn")
    dead = spawn.Process(target=_die_writing)
    dead.start()
    dead.join(60)
    assert dead.exitcode == -signal.SIGKILL
    start = time.monotonic()
    path = bitcode.specialize("gfx942", provider="p2p")
    # what it has left is not in the way
    assert time.monotonic() - start < 10
    whole = hashlib.sha256(path.read_bytes()).hexdigest()
    out = spawn.Queue()
    writers = [spawn.Process(target=_write, args=(8, out)) for _ in range(3)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        try:
            seen.add(hashlib.sha256(path.read_bytes()).hexdigest())
        except FileNotFoundError:
            seen.add("gone")
        time.sleep(0.001)
    for writer in writers:
        writer.join()
    assert seen <= {whole, "gone"}
    assert [writer.exitcode for writer in writers] == [0] * 3
    assert whole in (read := {out.get(timeout=10) for _ in range(24)})
    assert read <= {whole, "gone"}
