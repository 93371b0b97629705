"""What kernels are linked with, and what they keep of it: a PE's provider decides, and nothing unused stays behind."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import pytest
import torch
import triton
import triton.language as tl

from mori_triton import abi, bitcode
from mori_triton.device import externs, launch, shmem
from mori_triton.device.launch import TARGETS, cross_compile, get_extern_libs
from mori_triton.device.prepared import prepare
from mori_triton.errors import StateError
from mori_triton.host import state
from mori_triton.ir import triton as mori_device
from mori_triton.ir.triton import runtime
from tests.device.pes import Pes

pytestmark = pytest.mark.compile


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The state of the calling code's PE, as far as linking asks for it."""
    pe = SimpleNamespace(provider="p2p", pid=None, pe=3, owns_bootstrap=True, driver=SimpleNamespace(name="cpu"))
    monkeypatch.setattr(state, "find", lambda: pe)
    return pe


def linked(target: Any = "gfx1201") -> tuple[str, str]:
    """Providers of what launches link, and of what MORI's get_extern_libs() gives."""
    libraries = get_extern_libs(target), mori_device.get_extern_libs(target)
    return bitcode.provider_of(libraries[0][abi.LIBRARY]), bitcode.provider_of(libraries[1][abi.LIBRARY])


def test_the_pes_provider_decides(here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for provider in ("p2p", "mlx5", "bnxt_re", "ionic", "proxy"):
        here.provider = provider
        assert linked() == linked("sm_90") == (provider, provider)
    # who runs as no PE: our own kernels have no network, others' may be for every machine
    monkeypatch.setattr(state, "find", lambda: None)
    assert linked() == ("p2p", "any")


def test_a_library_that_the_caller_names_wins() -> None:
    named = {abi.LIBRARY: str(bitcode.specialize("gfx1201", provider="ionic", debug=True)), "other": "x.bc"}
    assert launch._options({"extern_libs": named}, launch.gpu_target("gfx1201"))["extern_libs"] == named


@triton.jit(do_not_specialize=["ctx", "word_ptr", "pe"])
def signal_kernel(ctx, word_ptr, pe):
    shmem.signal_add(ctx, word_ptr, 1, pe)


@triton.jit(do_not_specialize=["out_ptr"])
def plain_kernel(out_ptr):
    tl.store(out_ptr, 5)


def test_what_is_compiled_for_one_provider_is_not_used_for_another(here: SimpleNamespace) -> None:
    pes = Pes(1, "gfx1201")
    with pes.current(0) as ctx:
        out = torch.zeros(1, dtype=torch.int32)
        prepared, plain = prepare(signal_kernel, ctx, ctx, 0, num_warps=1), prepare(plain_kernel, out, num_warps=1)
        word = pes.view(0, 4096, 1, torch.int64)
        word[0] = 0
        prepared((1,), ctx, word, 0)
        assert int(word[0]) == 1
        here.provider = "mlx5"
        with pytest.raises(StateError, match="signal_kernel was prepared for transport p2p, and this PE's is mlx5"):
            prepared((1,), ctx, word, 0)
        assert int(word[0]) == 1
        # a kernel that calls nothing of the library serves everybody
        plain((1,), out)
        assert int(out[0]) == 5
        # Triton compiles anew, and finds the first one again
        hashes = []
        for provider in ("p2p", "mlx5", "p2p"):
            here.provider = provider
            hashes.append(launch.launch(signal_kernel, (1,), ctx, word, 0, num_warps=1).hash)
        assert hashes[0] == hashes[2] != hashes[1]
        assert int(word[0]) == 4


def test_a_kernel_with_the_library_as_it_was_built_looks_up_what_it_is_for() -> None:
    pes = Pes(1, "gfx1201")
    with pes.current(0) as ctx:
        word = pes.view(0, 4096, 1, torch.int64)
        word[0] = 0
        libraries = {abi.LIBRARY: str(bitcode.find_bitcode("gfx1201"))}
        compiled = launch.launch(signal_kernel, (1,), ctx, word, 0, num_warps=1, extern_libs=libraries)
        assert int(word[0]) == 1
        assert abi.PROVIDER_SYMBOL in compiled.asm["amdgcn"]


def test_the_hook_refuses_a_kernel_for_another_provider(here: SimpleNamespace, tmp_path: Path) -> None:
    def load(library: Path | str) -> None:
        about = tmp_path / "kernel.json"
        about.write_text(f'{{"extern_libs": [["{abi.LIBRARY}", "{library}"]]}}')
        runtime._on_load(object(), object(), "some_kernel", {"kernel.json": str(about)}, "")

    here.provider = "ionic"
    for provider in ("any", "ionic"):
        load(bitcode.specialize("gfx1201", provider=provider))
    load(bitcode.find_bitcode("gfx1201"))
    with pytest.raises(StateError, match=r"some_kernel: loaded by PE 3, .* for transport bnxt_re, want ionic"):
        load(bitcode.labelled_copy(bitcode.specialize("gfx1201", provider="bnxt_re"), "pe3"))


# ------------------------------------------------------------------------------------------------ what is left behind


@triton.jit
def ours_kernel(ctx, word_ptr, pe):
    externs.ctx_signal_add(ctx, word_ptr, 1, pe, 0)


@triton.jit
def moris_kernel(word_ptr, pe):
    externs.uint64_atomic_fetch_add_thread(word_ptr, 1, pe, 0)


@triton.jit
def nothing_kernel(word_ptr, pe):
    tl.store(word_ptr, pe)


ONE = {
    "mori_shmem_ctx_signal_add": (ours_kernel, {"ctx": "*i64", "word_ptr": "*i64", "pe": "i32"}),
    "mori_shmem_uint64_atomic_fetch_add_thread": (moris_kernel, {"word_ptr": "*i64", "pe": "i32"}),
}


# the variables that a call may need: where it finds its context, and where results go round on nvptx64
KEPT = {abi.CONTEXT_SYMBOL, f"{abi.LIBRARY}_broadcast"}


def stripped(library: Path, symbol: str, path: Path) -> Path:
    """`library` with one function and what that needs."""
    module = llvm.parse_assembly(library.read_text(), llvm.create_context())
    for function in module.functions:
        if not function.is_declaration and function.name != symbol:
            function.linkage = "internal"
    for variable in module.global_variables:
        if variable.name not in KEPT:
            variable.linkage = "internal"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(bitcode.host_machine(0), llvm.create_pipeline_tuning_options()))
    text = re.sub(r", target_mem\d: \w+| nocreateundeforpoison", "", str(module))
    assert len(text) < len(library.read_text()) / 3
    # Triton may know libraries by their path alone
    path /= f"{hashlib.sha256(text.encode()).hexdigest()}.bc"
    path.write_text(text)
    return path


def binary(compiled: Any) -> bytes:
    return compiled.asm["cubin" if "cubin" in compiled.asm else "hsaco"]


@pytest.mark.parametrize("arch", sorted(TARGETS))
def test_functions_that_are_not_called_leave_nothing_behind(arch: str, tmp_path: Path) -> None:
    for provider in ("p2p", "any") if arch in ("gfx942", "sm_90") else ("p2p",):
        library = bitcode.specialize(arch, provider=provider)
        for symbol, (kernel, signature) in ONE.items():
            small = stripped(library, symbol, tmp_path)
            whole, alone = (cross_compile(kernel, signature, arch=arch, library=lib) for lib in (library, small))
            assert len(binary(whole)) == len(binary(alone)), (symbol, provider)
            text = whole.asm["ptx" if "ptx" in whole.asm else "amdgcn"]
            mine = set() if kernel is ours_kernel and provider == "p2p" else KEPT
            assert set(re.findall(r"\bmori_shmem\w+", text)) <= mine
            if kernel is ours_kernel and provider == "p2p":
                # nobody needs the workgroup's memory to hand results round
                assert whole.metadata.shared == 0
                assert not re.search(r"\.shared .*\[|group_segment_fixed_size: [1-9]", text)
    calls_nothing, without = (
        cross_compile(nothing_kernel, {"word_ptr": "*i64", "pe": "i32"}, arch=arch, library=lib)
        for lib in (bitcode.specialize(arch, provider="p2p"), bitcode.specialize(arch, provider="any", debug=True))
    )
    assert binary(calls_nothing) == binary(without)
    assert "mori" not in calls_nothing.asm["ptx" if "ptx" in calls_nothing.asm else "amdgcn"]
