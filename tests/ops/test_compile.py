"""Every kernel of the package compiles and links for every target, and its assembly holds what the protocol needs."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mori_triton
from mori_triton.device import probe
from mori_triton.device.launch import TARGETS, cross_compile
from mori_triton.ops import buffers, calls, combine, dispatch, pipelines, plans, routing, tuning
from mori_triton.ops.config import EpDispatchCombineKernelType
from mori_triton.ops.kernels import finish
from mori_triton.shmem import stream_barrier
from tests.ops.cases import Case, config_of

pytestmark = pytest.mark.compile

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


class Specimen:
    """A kernel with the argument types and constants of one launch."""

    def __init__(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.kernel, self.name = kernel, kernel.__name__
        self.options = {name: named.pop(name) for name in ("num_warps", "launch_pdl") if name in named}
        self.signature, self.constants = {}, dict(named)
        for name, value in zip(kernel.arg_names, args, strict=False):
            if value is None:
                self.constants[name] = None
            else:
                self.signature[name] = POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"

    def build(self, arch: str) -> Any:
        """As `prepare` would compile it: nothing is known of the arguments but their types."""
        return cross_compile(self.kernel, self.signature, self.constants, arch=arch, **self.options)

    def compile(self, arch: str) -> str:
        built = self.build(arch)
        text = built.asm["ptx" if arch.startswith("sm_") else "amdgcn"]
        # nothing of the library is left to be called, by whatever name
        assert not re.search(r"\bcall\b[^\n]*mori_shmem|^\s*declare[^\n]*mori_shmem", built.asm["llir"], re.MULTILINE)
        assert not re.search(r"\.extern \.func|s_swappc|mori_shmem_ctx", text)
        return text


class HostMemory:
    """Stands for a driver: views of one CPU buffer."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[address : address + num_bytes].view(dtype).view(shape)


def launches(case: Case, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, Specimen]:
    """The launches of one round of `case`, by kernel, as an op makes them, whole and in two halves; none happens."""
    made: dict[str, Specimen] = {}

    def record(kernel: Any, *args: Any, **named: Any) -> Specimen:
        # a half of a round comes first; what is launched for the whole is the larger kernel
        made[kernel.__name__] = Specimen(kernel, args, named)
        return made[kernel.__name__]

    monkeypatch.setattr(plans, "prepare", record)
    config = config_of(case, 0, **changes)
    layout = buffers.ep_buffer_layout(config)
    views = buffers.EpBuffers(layout, 0, HostMemory(max(layout.num_bytes, layout.payload_bytes)))
    ctx, n, k = torch.zeros(16, dtype=torch.int64), case.max_tokens, case.top_k
    tokens = torch.zeros(n, case.hidden, dtype=config.data_type)
    weights = torch.zeros(n, k) if case.weights else None
    scales = torch.zeros(n, case.scales[0]) if case.scales[0] else None
    indices = torch.zeros(n, k, dtype=torch.int32)
    data = dispatch.check_dispatch(config, tokens.device, tokens, weights, scales, indices)
    handle = routing.new_handle(config, tokens.device, n)
    sizes = {"num_tokens": n, "row_bytes": case.hidden * tokens.itemsize, "dtype": tokens.dtype, "top_k": k}
    sizes["kernel_type"] = config.kernel_type.name
    pipeline = pipelines.pipeline_of(config)
    for wait in (False, True):
        shape = tuning.launch_config("cuda", "dispatch", **sizes)
        common = config, views, ctx, handle
        sent = calls.DispatchCall(*common, shape, wait, plans.StepMaker(), data=data, replay=False)
        pipeline.dispatch(sent)
        pipeline.dispatch_rest(sent)
        shape = tuning.launch_config("cuda", "combine", **sizes)
        back = calls.CombineCall(
            *common, shape, wait, plans.StepMaker(), rows=tokens, weights=weights, num_tokens=n, region=None
        )
        pipeline.combine(back)
        combine.recv_step(back)
    words = torch.zeros(64, dtype=torch.int64)
    plans.StepMaker()(finish.sync_kernel, (1,), ctx, words, words, 1, TAG=1, num_warps=1)
    return made


FULL = Case(hidden=2880, top_k=8, scales=(4, 4))
RDNA4 = {"kernel_type": EpDispatchCombineKernelType.IntraNodeRDNA4}


@pytest.fixture
def specimens(monkeypatch: pytest.MonkeyPatch) -> dict[str, Specimen]:
    ring = Specimen(probe.ring_kernel, (), {"num_warps": 4})
    ring.signature = dict(probe.RING_SIGNATURE)
    variants = (
        {"kernel_type": EpDispatchCombineKernelType.IntraNodeLL},
        {"deterministic": True},
        {"quant_type": "fp8_blockwise"},
        {},
    )
    barrier = Specimen(stream_barrier.barrier_kernel, (torch.zeros(16, dtype=torch.int64),), {"num_warps": 1})
    made = {probe.ring_kernel.__name__: ring, stream_barrier.barrier_kernel.__name__: barrier}
    for changes in variants:
        made |= launches(dataclasses.replace(FULL, dtype="bfloat16"), monkeypatch, **changes)
    made |= launches(dataclasses.replace(FULL, dtype="bfloat16", scales=(0, 0), num_pes=4), monkeypatch, **RDNA4)
    return made


def package_kernels() -> set[str]:
    """Every function of the package that is launched: `@triton.jit`, and by our naming, `*_kernel`."""
    found = set()
    for path in Path(mori_triton.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                found.add(node.name)
    return {name for name in found if name.endswith("_kernel")}


# their own test compiles them
ELSEWHERE = {"local_expert_count_kernel", "clear_counts_kernel", "dispatch_stage_kernel", "dispatch_send_kernel"}


def test_no_kernel_is_forgotten(specimens: dict[str, Specimen]) -> None:
    assert package_kernels() - ELSEWHERE == set(specimens) == set(KERNELS)


KERNELS = (
    "barrier_kernel",
    "combine_copy_kernel",
    "combine_decode_kernel",
    "combine_encode_kernel",
    "combine_recv_kernel",
    "combine_reduce_kernel",
    "dispatch_assign_kernel",
    "dispatch_copy_kernel",
    "dispatch_count_kernel",
    "dispatch_ll_kernel",
    "dispatch_recv_kernel",
    "dispatch_route_kernel",
    "rdna4_dispatch_kernel",
    "rdna4_pull_kernel",
    "rdna4_push_kernel",
    "rdna4_sum_kernel",
    "ring_kernel",
    "sync_kernel",
)

# what the assembly calls things: row loads and stores of 16 bytes; what makes a wave's stores reach the device, the
# atomic by which a program arrives; system-scope release, signal, poll and acquire; the fetch_add of route
GFX12 = {
    "load16": r"(global|buffer)_load_b128",
    "store16": r"(global|buffer)_store_b128",
    "device_release": r"global_wb scope:SCOPE_DEV",
    "arrival": r"global_atomic_add_u32 .* scope:SCOPE_DEV",
    "release": r"global_wb scope:SCOPE_SYS",
    "signal": r"global_store_b64 .* scope:SCOPE_SYS",
    "poll": r"global_load_b64 .* scope:SCOPE_SYS",
    "acquire": r"global_inv scope:SCOPE_SYS",
    "add": r"global_atomic_add_u32 .* scope:SCOPE_SYS",
}
GFX9 = {
    "load16": r"(global|buffer)_load_dwordx4",
    "store16": r"(global|buffer)_store_dwordx4",
    "device_release": r"buffer_wbl2 sc1",
    "arrival": r"global_atomic_add v.* sc0$",
    "release": r"buffer_wbl2 sc0 sc1",
    "signal": r"global_store_dwordx2 .* sc0 sc1",
    "poll": r"global_load_dwordx2 .* sc0 sc1",
    "acquire": r"buffer_inv sc0 sc1",
    "add": r"global_atomic_add v.*\bsc1",
}
SM_90 = {
    "load16": r"ld\.global\S*\.v4\.b32",
    "store16": r"st\.global\S*\.v4\.b32",
    # PTX orders through a barrier; the atomic's own release covers the program
    "device_release": r"bar\.sync",
    "arrival": r"atom\.release\.gpu\.global\.add",
    "release": r"fence\.acq_rel\.sys",
    "signal": r"st\.relaxed\.sys\.global\.u64",
    "poll": r"ld\.relaxed\.sys\.global\.u64",
    "acquire": r"fence\.acq_rel\.sys",
    "add": r"atom\.global\.sys\.relaxed\.add\.u32",
}
# its first-level cache writes through, so a wait for the stores is the whole release
GFX1201 = {**GFX12, "device_release": r"s_wait_storecnt 0x0"}
WORDS = {"gfx1201": GFX1201, "gfx1250": GFX12, "gfx942": GFX9, "gfx950": GFX9, "sm_90": SM_90}
SENDS = ("load16", "store16", "device_release", "arrival", "release", "signal", "poll", "acquire")
WAITS = ("poll", "acquire")
NEEDS = {
    "dispatch_route_kernel": ("add",),
    "dispatch_copy_kernel": SENDS,
    "dispatch_ll_kernel": (*SENDS, "add"),
    "dispatch_recv_kernel": WAITS,
    "dispatch_count_kernel": ("device_release", "arrival", "release", "signal", *WAITS),
    "combine_copy_kernel": SENDS,
    "combine_recv_kernel": WAITS,
    "combine_reduce_kernel": ("load16", "store16"),
    "rdna4_dispatch_kernel": (*SENDS, "add"),
    "rdna4_pull_kernel": (),
    "rdna4_push_kernel": SENDS,
    "rdna4_sum_kernel": ("load16", "store16"),
    "sync_kernel": ("release", "signal", *WAITS),
}


@pytest.mark.parametrize("arch", sorted(TARGETS))
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_links_and_orders(name: str, arch: str, specimens: dict[str, Specimen]) -> None:
    lines = specimens[name].compile(arch).splitlines()
    at = {what: [i for i, line in enumerate(lines) if re.search(word, line)] for what, word in WORDS[arch].items()}
    needs = NEEDS.get(name, ())
    for what in needs:
        assert at[what], f"no {what} ({WORDS[arch][what]})"
    if "arrival" in needs:
        arrival, signal = min(at["arrival"]), min(at["signal"])
        # blocks need not stand in the order in which they run: what stands before the arrival also runs before it
        last_row = max((i for i in at["store16"] if i < arrival), default=0)
        assert any(last_row < i < arrival for i in at["device_release"])
        assert any(arrival < i < signal for i in at["release"])
    if "signal" in needs:
        # it waits for the peers when it has told them; an error record reads at system scope too, whence "any"
        assert any(min(at["signal"]) < i for i in at["poll"])
    if "poll" in needs:
        assert any(min(at["poll"]) < i for i in at["acquire"])
    if name in ("combine_reduce_kernel", "rdna4_pull_kernel", "rdna4_sum_kernel"):
        assert not at["poll"]
        assert not at["signal"]


@pytest.mark.parametrize(
    ("hidden", "dtype", "width", "too_wide"),
    [
        (2880, "float32", "b128", ""),
        (12, "bfloat16", "b64", "b128"),
        (6, "bfloat16", "b32", "b(64|128)"),
        (7, "float16", "(b|u)16", "b(32|64|128)"),
    ],
)
def test_row_copies_are_as_wide_as_rows_allow(
    hidden: int, dtype: str, width: str, too_wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = launches(Case(hidden=hidden, dtype=dtype, weights=False), monkeypatch)
    lines = made["combine_copy_kernel"].compile("gfx1201").splitlines()
    # Triton moves rows through a buffer resource; the library's signals and error records go without
    rows = "\n".join(line for line in lines if "buffer_" in line)
    assert re.search(rf"buffer_load_(d16_)?{width}\b", rows)
    assert re.search(rf"buffer_store_{width}\b", rows)
    assert not too_wide or not re.search(rf"buffer_store_{too_wide}\b", rows)


@pytest.mark.parametrize("scales", [(0, 0), (4, 4)], ids=["no scales", "scales"])
@pytest.mark.parametrize("weights", [False, True], ids=["no weights", "weights"])
def test_gfx1250_whatever_arguments_are_absent(
    weights: bool, scales: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.6 preloads arguments there, and where they fill 30 words, the most, its assembler refuses its own text:
    "amdgpu_user_sgpr_count smaller than than implied by enabled user SGPRs". 29 are fine.
    """
    variants: list[dict[str, Any]] = [{}, {"kernel_type": EpDispatchCombineKernelType.IntraNodeLL}]
    for changes in (*variants, *([RDNA4] if scales == (0, 0) else [])):
        made = launches(Case(hidden=24, weights=weights, scales=scales), monkeypatch, **changes)
        for specimen in made.values():
            text = specimen.compile("gfx1250")
            preloaded = re.search(r"\.amdhsa_user_sgpr_kernarg_preload_length (\d+)", text)
            assert preloaded is not None
            assert int(preloaded[1]) < 30, specimen.name
