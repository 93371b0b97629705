"""The machine code of the kernels that move rows, as ptxas makes it for an H200: wide, without spills, loads first.

Read with the disassembler that Triton's wheel carries. Shapes are those of `ops.tuning` for hidden 7168, top-8, bf16.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from mori_triton import ops
from mori_triton.device.launch import cross_compile
from mori_triton.ops import buffers, calls, combine, dispatch, routing, tuning
from tests.ops.cases import Case, config_of

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not (TOOLS / "nvdisasm").exists(), reason="Triton's wheel has no nvdisasm here"),
]

POINTERS = {
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
}
TOKENS = (128, 4096)
ROW_BYTES = 2 * 7168
# a program of combine moves 13 kB; while memory does that a multiprocessor can issue 1,600 instructions for each of its
# 2 warps, and more than half of that is felt
MOST_INSTRUCTIONS = {"dispatch_copy_kernel": 1000, "combine_reduce_kernel": 700}
# of one thread; 65536 in a multiprocessor, which holds 2048 threads: more registers, fewer of them
MOST_REGISTERS = {"dispatch_copy_kernel": 128, "dispatch_ll_kernel": 128, "combine_reduce_kernel": 128}


class HostMemory:
    """Stands for a driver: views of one CPU buffer."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[address : address + num_bytes].view(dtype).view(shape)


class Code:
    """A kernel's machine code."""

    def __init__(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any], folder: Path) -> None:
        named = {name: value for name, value in named.items() if name != "waits"}
        options = {name: named.pop(name) for name in list(named) if name not in kernel.arg_names}
        signature: dict[str, str] = {}
        for name, arg in zip(kernel.arg_names, args, strict=False):
            value = arg.example if isinstance(arg, tuple) else arg
            if value is None:
                named[name] = None
            else:
                signature[name] = POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        file = folder / f"{kernel.__name__}.cubin"
        file.write_bytes(cross_compile(kernel, signature, named, arch="sm_90", **options).asm["cubin"])
        self.lines = self._run("nvdisasm", "-c", str(file)).splitlines()
        usage = re.search(r"REG:(\d+) STACK:(\d+)", self._run("cuobjdump", "-res-usage", str(file)))
        assert usage is not None
        self.num_registers, self.stack_bytes = int(usage[1]), int(usage[2])

    @staticmethod
    def _run(tool: str, *args: str) -> str:
        return subprocess.run([str(TOOLS / tool), *args], capture_output=True, text=True, check=True, timeout=60).stdout

    def at(self, pattern: str) -> list[int]:
        """Numbers of the lines that match."""
        return [number for number, line in enumerate(self.lines) if re.search(pattern, line)]

    def count(self, pattern: str) -> int:
        return len(self.at(pattern))


def recorded(kernel_type: str, num_tokens: int, plan: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """The launches that `plan` makes for a GPU, by kernel: (kernel, arguments, constants and options)."""
    fields = (("kernel_type", ops.EpDispatchCombineKernelType[kernel_type]),)
    config = config_of(Case(num_pes=8, hidden=7168, top_k=8, max_tokens=8, experts_per_pe=32, config=fields), 0)
    layout = buffers.ep_buffer_layout(config)
    made: dict[str, tuple[Any, ...]] = {}

    def step(kernel: Any, grid: Any, *args: Any, **named: Any) -> None:
        made[kernel.__name__] = kernel, args, named

    def shape(phase: str, **more: Any) -> tuning.EpLaunchConfig:
        return tuning.launch_config(
            "cuda", phase, num_tokens, ROW_BYTES, dtype=torch.bfloat16, top_k=8, kernel_type=kernel_type, **more
        )

    views = buffers.EpBuffers(layout, 0, HostMemory(layout.num_bytes))
    handle = routing.new_handle(config, torch.device("cpu"), 8)
    plan(config, views, torch.zeros(16, dtype=torch.int64), handle, shape, step)
    return made


def dispatch_launches(kernel_type: str, num_tokens: int) -> dict[str, tuple[Any, ...]]:
    def plan(config: Any, views: Any, ctx: Any, handle: Any, shape: Any, step: Any) -> None:
        data = calls.DispatchInput(
            torch.zeros(8, 7168, dtype=torch.bfloat16), torch.zeros(8, 8), None, torch.zeros(8, 8, dtype=torch.int32)
        )
        dispatch.plan_dispatch(
            calls.DispatchCall(config, views, ctx, handle, shape("dispatch"), True, step, data=data, replay=False)
        )

    return recorded(kernel_type, num_tokens, plan)


def combine_launches(num_tokens: int, *, in_place: bool) -> dict[str, tuple[Any, ...]]:
    def plan(config: Any, views: Any, ctx: Any, handle: Any, shape: Any, step: Any) -> None:
        rows = torch.zeros(config.max_recv, 7168, dtype=torch.bfloat16)
        chosen = shape("combine", zero_copy=in_place)
        combine.plan_combine(
            calls.CombineCall(
                config,
                views,
                ctx,
                handle,
                chosen,
                True,
                step,
                rows=rows,
                weights=None,
                num_tokens=8,
                region="combine_in" if in_place else None,
            )
        )

    return recorded("IntraNode", num_tokens, plan)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, tuple[Any, ...]], str], Code]:
    folder, done = tmp_path_factory.mktemp("cubin"), {}

    def build(launches: dict[str, tuple[Any, ...]], name: str) -> Code:
        kernel, args, named = launches[name]
        key = name, str(sorted(named.items())), tuple(arg is None for arg in args)
        if key not in done:
            done[key] = Code(kernel, args, dict(named), folder)
        return done[key]

    return build


Build = Callable[[dict[str, tuple[Any, ...]], str], Code]


def check_resources(code: Code, name: str) -> None:
    # a word or two that ptxas parks on the stack outside the row loops costs nothing
    assert code.stack_bytes <= 16
    assert code.num_registers <= MOST_REGISTERS.get(name, 64)
    if name in MOST_INSTRUCTIONS:
        assert code.count(r"/\*[0-9a-f]{4,}\*/") <= MOST_INSTRUCTIONS[name]


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(
    ("kernel_type", "name"), [("IntraNode", "dispatch_copy_kernel"), ("IntraNodeLL", "dispatch_ll_kernel")]
)
def test_dispatch_moves_16_bytes_a_thread(kernel_type: str, name: str, num_tokens: int, code: Build) -> None:
    launches = dispatch_launches(kernel_type, num_tokens)
    this = code(launches, name)
    check_resources(this, name)
    named = launches[name][2]
    # a row that is known to be shorter than a piece takes fewer
    block = min(named["BLOCK"], ROW_BYTES // 4)
    vectors = block * named.get("BLOCK_T", 1) // (32 * named["num_warps"] * 4)
    assert this.count(r"LDG\.E\.128") >= vectors
    assert this.count(r"STG\.E(\.EF)?\.128") >= vectors
    # nothing of a row goes in smaller pieces: what is narrower are words of the protocol, ids and weights
    assert this.count(r"(LDG|STG)\.E\.U?(8|16)\b") == 0


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_route_asks_every_pe_at_once(num_tokens: int, code: Build) -> None:
    this = code(dispatch_launches("IntraNode", num_tokens), "dispatch_route_kernel")
    check_resources(this, "dispatch_route_kernel")
    # one instruction, a lane for each PE: an add takes about a microsecond, and they overlap
    assert this.count(r"ATOMG?\S*\.STRONG\.SYS") == 1


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_combine_copies_16_bytes_a_thread(num_tokens: int, code: Build) -> None:
    launches = combine_launches(num_tokens, in_place=False)
    this = code(launches, "combine_copy_kernel")
    check_resources(this, "combine_copy_kernel")
    assert this.count(r"LDG\.E\.128") >= 1
    assert this.count(r"STG\.E\.128") >= 1
    assert this.count(r"(LDG|STG)\.E\.U?(8|16)\b") == 0


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_zero_copy_moves_nothing_in_the_first_kernel(num_tokens: int, code: Build) -> None:
    this = code(combine_launches(num_tokens, in_place=True), "combine_copy_kernel")
    assert this.count(r"(LDG|STG)\.E\.128") == 0


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_combine_has_all_rows_in_flight_before_the_first_sum(num_tokens: int, code: Build) -> None:
    launches = combine_launches(num_tokens, in_place=True)
    this, named = code(launches, "combine_reduce_kernel"), launches["combine_reduce_kernel"][2]
    check_resources(this, "combine_reduce_kernel")
    # 16 bytes are 8 elements of bfloat16
    loads, vectors = this.at(r"LDG\.E\.128"), named["BLOCK"] // (32 * named["num_warps"] * 8)
    assert len(loads) == named["CHUNK"] * vectors
    adds = [line for line in this.at(r"FADD\b") if line > loads[0]]
    assert len(adds) >= named["CHUNK"] * vectors * 8
    # ptxas is free to sink a load behind the sums of another row, and does where they are not a branch
    assert max(loads) < min(adds)
    assert this.count(r"STG\.E\.128") >= vectors
    assert this.count(r"(LDG|STG)\.E\.U?(8|16)\b") == 0
