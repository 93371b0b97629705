"""What the device library becomes for five GPUs: linked, inlined, 16-byte copies, system-scope release and acquire."""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.language import core

from mori_triton import abi, bitcode
from mori_triton.device import externs, probe, shmem
from mori_triton.device.launch import TARGETS, check_linked, cross_compile, get_extern_libs, gpu_target, unresolved
from mori_triton.errors import ArgumentError, BitcodeError
from tests.device import kernels, mori_kernels

pytestmark = pytest.mark.compile

ARCHS = tuple(TARGETS)


@triton.jit
def send_kernel(ctx, x_ptr, signal_ptr, pe):
    """Payload, then its signal."""
    offs = tl.arange(0, 1024)
    tl.store(shmem.remote_ptr(ctx, x_ptr, pe) + offs, offs)
    shmem.signal_add(ctx, signal_ptr, 1, pe)


@triton.jit
def receive_kernel(ctx, x_ptr, signal_ptr, out_ptr):
    """Wait, then the payload."""
    offs = tl.arange(0, 1024)
    shmem.wait_ge(ctx, signal_ptr, 1)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def put_kernel(ctx, dst_ptr, src_ptr, num_bytes, pe):
    """A block copy."""
    shmem.put(ctx, dst_ptr, src_ptr, num_bytes, pe)


SEND = {"ctx": "*i64", "x_ptr": "*i32", "signal_ptr": "*i64", "pe": "i32"}
RECEIVE = {"ctx": "*i64", "x_ptr": "*i32", "signal_ptr": "*i64", "out_ptr": "*i32"}
PUT = {"ctx": "*i64", "dst_ptr": "*i32", "src_ptr": "*i32", "num_bytes": "i64", "pe": "i32"}


@lru_cache(maxsize=64)
def lines(arch: str, name: str) -> tuple[str, ...]:
    """Instructions of a kernel with 4 warps, without comments and directives."""
    kernel, signature = {"send": (send_kernel, SEND), "receive": (receive_kernel, RECEIVE), "put": (put_kernel, PUT)}[
        name
    ]
    asm = cross_compile(kernel, signature, arch=arch, num_warps=4).asm
    text = asm["ptx" if arch.startswith("sm_") else "amdgcn"]
    found = (re.split(r"//|;(?=\s)|;$", line)[0].strip() for line in text.splitlines())
    return tuple(line for line in found if line and not line.startswith((".", "$", "{", "}", ")")))


def positions(arch: str, name: str, pattern: str) -> list[int]:
    return [i for i, line in enumerate(lines(arch, name)) if re.search(pattern, line)]


# family -> patterns
ISA: dict[str, dict[str, str]] = {
    "gfx9": {
        "payload store": r"global_store_dword",
        "payload load": r"(global|buffer)_load_dword(?!.*sc1)",
        "device release": r"buffer_wbl2 sc1$",
        "system release": r"buffer_wbl2 sc0 sc1",
        "signal": r"global_atomic_add_x2 .*sc1",
        "barrier": r"s_barrier",
        "poll": r"global_load_dwordx2 .*sc0 sc1",
        "system acquire": r"buffer_inv sc0 sc1",
        "16 byte load": r"global_load_dwordx4",
        "16 byte store": r"global_store_dwordx4",
    },
    "gfx12": {
        "payload store": r"global_store_b",
        "payload load": r"(global|buffer)_load_b(?!.*SCOPE_SYS)",
        # on gfx1201 the first-level cache writes through: waiting for the stores is all
        "device release": r"global_wb scope:SCOPE_DEV|s_wait_storecnt 0x0",
        "system release": r"global_wb scope:SCOPE_SYS",
        "signal": r"global_atomic_add_u64 .*scope:SCOPE_SYS",
        "barrier": r"s_barrier_wait",
        "poll": r"global_load_b64 .*scope:SCOPE_SYS",
        "system acquire": r"global_inv scope:SCOPE_SYS",
        "16 byte load": r"global_load_b128",
        "16 byte store": r"global_store_b128",
    },
    "sm_90": {
        "payload store": r"st\.global\.(v4\.)?b32",
        "payload load": r"ld\.global\.(v4\.)?b32",
        "system release": r"fence\.acq_rel\.sys",
        "signal": r"atom\.relaxed\.sys\.global\.add\.u64",
        "barrier": r"bar\.sync\s+0",
        "poll": r"ld\.acquire\.sys\.global\.u64",
        "16 byte load": r"ld\.global\.v4\.[bu]32",
        "16 byte store": r"st\.global\.v4\.[bu]32",
    },
}


def isa(arch: str) -> dict[str, str]:
    return next(table for prefix, table in ISA.items() if arch.startswith(prefix))


@pytest.mark.parametrize("arch", ARCHS)
def test_n8_signal_releases_at_system_scope_after_the_programs_stores(arch: str) -> None:
    table = isa(arch)
    at = {what: positions(arch, "send", pattern) for what, pattern in table.items()}
    # the refused branch reports through an add on the log's counter too: the signal is the last
    signal = at["signal"][-1]
    release = max(i for i in at["system release"] if i < signal)
    barrier = max(i for i in at["barrier"] if i < signal)
    payload = max(i for i in at["payload store"] if i < barrier)
    assert payload < barrier < release < signal
    if "device release" in table:
        assert any(payload < i < barrier for i in at["device release"])
        # nothing that the release waits for is left in flight
        waits = positions(arch, "send", r"s_waitcnt vmcnt\(0\)|s_wait_storecnt 0x0|s_wait_storecnt_dscnt 0x0")
        assert any(payload < i < barrier for i in waits)
        assert any(release < i < signal for i in waits)


@pytest.mark.parametrize("arch", ARCHS)
def test_n2_wait_acquires_at_system_scope_in_every_wave_before_the_payload(arch: str) -> None:
    table = isa(arch)
    at = {what: positions(arch, "receive", pattern) for what, pattern in table.items()}
    barrier, payload = at["barrier"][-1], at["payload load"]
    payload = min(i for i in payload if i > barrier)
    assert max(at["poll"]) < barrier < payload
    if "system acquire" in table:
        # behind the last barrier, so in every wave, and once: nothing in front of it repeats it
        assert [i for i in at["system acquire"] if i < payload] == [
            i for i in at["system acquire"] if barrier < i < payload
        ]
        assert any(barrier < i < payload for i in at["system acquire"])


@pytest.mark.parametrize("arch", ARCHS)
def test_put_moves_sixteen_bytes(arch: str) -> None:
    table = isa(arch)
    assert len(positions(arch, "put", table["16 byte load"])) >= 4
    assert len(positions(arch, "put", table["16 byte store"])) >= 4


def test_n6_no_wave_size_is_built_in() -> None:
    # the same file, two wave sizes: a warp-scope copy compares the thread with 32 or 64
    for arch in ("gfx942", "gfx1201"):
        signature = {"out": "*i64", "dst": "i64", "src": "i64", "count": "i64", "pe": "i32", "which": "i32"}
        compiled = cross_compile(mori_kernels.put_kernel, signature, arch=arch, num_warps=4)
        assert re.search(rf"icmp (samesign )?ult i32 %\d+, {TARGETS[arch]}\b", compiled.asm["llir"])
        other = 96 - TARGETS[arch]
        assert not re.search(rf"icmp (samesign )?ult i32 %\d+, {other}\b", compiled.asm["llir"])


# ------------------------------------------------------------------------------------------------------------- linking


GROUPS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "ring": (probe.ring_kernel, probe.RING_SIGNATURE, {}),
    "signals": (
        kernels.signal_kernel,
        {"ctx": "*i64", "out": "*i64", "sig": "i64", "value": "i64", "pe": "i32", "which": "i32"},
        {},
    ),
    "fetch": (
        kernels.fetch_kernel,
        {"ctx": "*i64", "out": "*i64", "p32": "*i32", "p64": "*i64", "pe": "i32"},
        {"LANES": 128},
    ),
    "lds": (
        kernels.mixed_lds_kernel,
        {"ctx": "*i64", "x": "*i32", "out": "*i32", "counter": "*i32"},
        {"N": 256},
    ),
    "mori": (mori_kernels.plain_kernel, {"out": "*i64", "addr": "i64", "pe": "i32", "which": "i32"}, {}),
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("arch", ARCHS)
def test_m5_every_call_is_inlined(arch: str, group: str) -> None:
    kernel, signature, constants = GROUPS[group]
    asm = cross_compile(kernel, signature, constants, arch=arch, num_warps=4).asm
    assert unresolved(asm) == []
    assert not re.search(r"(call|declare)\b[^\n]*@_ZN?4mori", asm["llir"])
    if arch.startswith("sm_"):
        assert not re.search(r"\bcall\b", asm["ptx"])
        if group == "lds":
            # static shared memory of a whole kilobyte keeps Triton's own behind it aligned
            assert re.search(r"\.shared \.align 1024 \.b8 mori_shmem_broadcast\[1024\]", asm["ptx"])
    else:
        assert "s_swappc_b64" not in asm["amdgcn"]
        static = int(re.search(r"\.amdhsa_group_segment_fixed_size (\d+)", asm["amdgcn"])[1])
        assert static in (8, 16)
        if group == "mori":
            # visible to the host, which looks it up by name
            assert re.search(rf"\.(globl|protected)\s+{abi.CONTEXT_SYMBOL}", asm["amdgcn"])


def test_a_round_of_the_barrier_has_one_fence_and_arriving_one_acquire_on_nvidia() -> None:
    """No result shows what makes them quick: seven signals behind one fence, caches dropped by the last program."""
    signature = {"ctx": "*i64", "words": "*i64", "bad": "*i32", "rounds": "i32"}
    ptx = cross_compile(kernels.barrier_kernel, signature, arch="sm_90", num_warps=4).asm["ptx"]
    orders = re.findall(r"(fence\.\S+;|st\.relaxed\.sys\S+)", ptx)
    # two barriers in the kernel; the other fences are those of records, whose last word has 32 bits
    signals = [pair for pair in itertools.pairwise(orders) if pair[0].startswith("fence") and pair[1].endswith("u64")]
    assert signals == [("fence.acq_rel.sys;", "st.relaxed.sys.global.u64")] * 2
    signature = {"ctx": "*i64", "out": "*i32", "counter": "*i32", "parts": "*i32"}
    ptx = cross_compile(kernels.last_kernel, signature, {"N": 256}, arch="sm_90", num_warps=4).asm["ptx"]
    orders = re.findall(r"(atom\.\w+\.gpu\.global|fence\.\w+\.gpu|@\S+\s+bra)", ptx)
    at = orders.index("atom.release.gpu.global")
    assert orders[at + 1].startswith("@")
    assert orders[at + 2] == "fence.acq_rel.gpu"
    # once each: the kernel's own atomic is spelled otherwise
    assert len([one for one in orders if not one.startswith("@")]) == 2


@pytest.mark.parametrize("arch", ARCHS)
def test_a_build_that_tells_more_links_too_and_is_another(arch: str) -> None:
    plain, telling = (
        cross_compile(
            probe.ring_kernel,
            probe.RING_SIGNATURE,
            arch=arch,
            library=bitcode.specialize(arch, provider="p2p", debug=tells, profiler=tells),
        )
        for tells in (False, True)
    )
    # every operation reads the clock twice; without, only a wait that is not over at once does
    clock = {"gfx942": "s_memrealtime", "gfx950": "s_memrealtime", "sm_90": "globaltimer"}.get(
        arch, "s_sendmsg_rtn|S_GET|REALTIME"
    )
    texts = [built.asm["ptx" if arch.startswith("sm_") else "amdgcn"] for built in (plain, telling)]
    counts = [len(re.findall(clock, text)) for text in texts]
    assert counts[0] + 4 <= counts[1]


def test_m1_externs_use_the_keyword_of_this_triton() -> None:
    assert "_semantic" in inspect.signature(core.extern_elementwise).parameters
    assert "_semantic" in inspect.signature(externs.ctx_my_pe).parameters
    assert set(externs.__all__) == set(abi.FUNCTIONS)


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_m2_m3_a_library_under_a_wrong_key_is_noticed(arch: str, tmp_path: Path) -> None:
    script = tmp_path / "wrong_key.py"
    script.write_text(
        "import sys\n"
        "import triton\n"
        "from triton.compiler import ASTSource\n"
        "from mori_triton import bitcode\n"
        "from mori_triton.device import probe\n"
        "from mori_triton.device.launch import check_linked, gpu_target\n"
        "source = ASTSource(fn=probe.ring_kernel, signature=probe.RING_SIGNATURE)\n"
        "libs = {'mylib': str(bitcode.find_bitcode(sys.argv[1]))}\n"
        "check_linked(triton.compile(source, target=gpu_target(sys.argv[1]), options={'extern_libs': libs}))\n"
    )
    # Triton 3.6 aborts the process, later ones say nothing: never a success
    run = subprocess.run(
        [sys.executable, str(script), arch],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], env=_environment(tmp_path),
    )  # fmt: skip
    assert run.returncode != 0
    if run.returncode == 1:
        assert "BitcodeError: ring_kernel: unresolved mori_shmem_ctx_barrier_all, mori_shmem_ctx_my_pe" in run.stderr


def _environment(tmp_path: Path, **more: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    cache = str(tmp_path / "cache")
    return {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": root, "TRITON_CACHE_DIR": cache, **more}


def test_check_linked_names_what_is_left() -> None:
    class Left:
        name, hash = "k", None
        asm = {  # noqa: RUF012
            "llir": "declare i32 @mori_shmem_ctx_my_pe(i64)\n  %1 = call i64 @mori_shmem_ptr(i64 %0, i32 1)\n"
        }

    with pytest.raises(BitcodeError, match=r"k: unresolved mori_shmem_ctx_my_pe, mori_shmem_ptr:"):
        check_linked(Left())


@triton.jit
def block_kernel(ctx, counter_ptr):
    shmem.signal_add(ctx, counter_ptr + tl.arange(0, 16), 1, 0)


@triton.jit
def float_kernel(ctx, counter_ptr):
    shmem.signal_add(ctx, counter_ptr, 1.5, 0)


@triton.jit
def narrow_kernel(ctx, counter_ptr):
    shmem.atomic_add(ctx, counter_ptr.to(tl.pointer_type(tl.int16)), 1, 0)


@triton.jit
def narrow_signal_kernel(ctx, counter_ptr):
    shmem.signal_add(ctx, counter_ptr.to(tl.pointer_type(tl.int32)), 1, 0)


@triton.jit
def narrow_wait_kernel(ctx, counter_ptr):
    shmem.wait_ge(ctx, counter_ptr.to(tl.pointer_type(tl.int16)), 1)


@triton.jit
def bit_kernel(ctx, counter_ptr):
    shmem.put_value(ctx, counter_ptr.to(tl.pointer_type(tl.int1)), 1, 0)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (block_kernel, "ctx_signal_add: argument 1: want a scalar"),
        (float_kernel, "ctx_signal_add: argument 2: want an integer or a pointer, got fp32"),
        (narrow_kernel, "atomics are 32 or 64 bits wide"),
        (narrow_signal_kernel, "signals are 64-bit words"),
        (narrow_wait_kernel, "waits look at words of 32 or 64 bits"),
        (bit_kernel, "values are 8, 16, 32 or 64 bits wide"),
    ],
)
def test_m8_what_the_library_cannot_do_once_does_not_compile(kernel: Any, words: str) -> None:
    with pytest.raises(Exception) as refused:  # noqa: PT011
        cross_compile(kernel, {"ctx": "*i64", "counter_ptr": "*i64"}, arch="gfx1201")
    chain, error = "", refused.value
    while error is not None:
        chain, error = chain + str(error), error.__cause__
    assert words in chain


def test_targets() -> None:
    assert {arch: gpu_target(arch).warp_size for arch in ARCHS} == TARGETS
    with pytest.raises(ArgumentError, match="arch: want one of gfx942"):
        gpu_target("gfx900")
    for arch in ARCHS:
        libs = get_extern_libs(gpu_target(arch))
        assert libs == get_extern_libs(arch) == {abi.LIBRARY: str(bitcode.specialize(arch, provider="p2p"))}


def test_m9_interpreter_is_refused_with_a_way_out(tmp_path: Path) -> None:
    script = tmp_path / "interpreted.py"
    script.write_text(
        "from mori_triton.device import probe\n"
        "from mori_triton.device.launch import cross_compile, launch\n"
        "from mori_triton.errors import StateError\n"
        "for call in (lambda: launch(probe.ring_kernel, (1,)),\n"
        "             lambda: cross_compile(probe.ring_kernel, probe.RING_SIGNATURE, arch='gfx942')):\n"
        "    try:\n"
        "        call()\n"
        "    except StateError as e:\n"
        "        assert 'TRITON_INTERPRET=1' in str(e) and 'local_world(n, device=\"cpu\")' in str(e)\n"
        "    else:\n"
        "        raise SystemExit('not refused')\n"
    )
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, check=False, env=_environment(tmp_path, TRITON_INTERPRET="1"),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
