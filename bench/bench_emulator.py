"""How fast the emulated device runs on one core: `python bench/bench_emulator.py [--arch gfx1201] [--seconds 1]`.

Every launch's result is checked in the same run against numpy: exactly, the reduction within bfloat16's precision. An
instruction is one instruction of one wave (32 or 64 lanes); time is CPU time of the one thread that runs the launch.
Bytes are what must be read and written, each once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
import typer
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mori_triton.emulator.device import ARCHS, default_device
from mori_triton.emulator.launch import Launch
from mori_triton.emulator.machine import Event, Machine
from mori_triton.emulator.module import Module, load_code


@triton.jit
def _copy_rows(src, dst, num_rows, H: tl.constexpr, BLOCK: tl.constexpr):
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        for h in range(0, H, BLOCK):
            offs = row.to(tl.int64) * H + h + tl.arange(0, BLOCK)
            tl.store(dst + offs, tl.load(src + offs))


@triton.jit
def _reduce_rows(src, index, weight, dst, H, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for h in range(0, H, BLOCK):
        offs = h + tl.arange(0, BLOCK)
        mask = offs < H
        acc = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(K):
            source = tl.load(index + row * K + k).to(tl.int64)
            if source >= 0:
                acc += tl.load(weight + row * K + k) * tl.load(src + source * H + offs, mask=mask, other=0.0).to(
                    tl.float32
                )
        tl.store(dst + row * H + offs, acc.to(tl.bfloat16), mask=mask)


@triton.jit
def _gather(src, index, dst, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offs, tl.load(src + tl.load(index + offs)))


@triton.jit
def _count(counters, index, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counters + tl.load(index + offs), 1, sem="relaxed")


@triton.jit
def _arithmetic(x, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs)
    for _ in range(n):
        v = v * 1664525 + 1013904223
    tl.store(x + offs, v)


def compile_text(fn, signature: dict[str, str], constants: dict[str, int], arch: str, num_warps: int) -> str:
    """Assembly text of a kernel; pointers are 16-byte aligned, as torch's are."""
    attrs = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t.startswith("*")}
    source = ASTSource(
        fn=fn,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs={(fn.arg_names.index(k),): v for k, v in constants.items()},
        attrs=attrs,
    )
    target = GPUTarget("hip", arch, ARCHS[arch][0])
    return triton.compile(source, target=target, options={"num_warps": num_warps}).asm["amdgcn"]


@dataclass
class Case:
    """A kernel with its arguments, the bytes it moves and a check of its result."""

    name: str
    fn: object
    signature: dict[str, str]
    constants: dict[str, int]
    grid: int
    args: list
    num_bytes: int
    check: Callable[[], None]
    num_warps: int = 4


def _exact(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got, want)


def _copy(name: str, dtype: torch.dtype, kind: str, block: int) -> Case:
    hidden, rows = 7168, 128
    src = torch.randint(-100, 100, (rows, hidden)).to(dtype)
    dst = torch.full_like(src, float("nan")) if dtype.is_floating_point else torch.full_like(src, -1)
    return Case(
        name, _copy_rows, {"src": kind, "dst": kind, "num_rows": "i32"}, {"H": hidden, "BLOCK": block}, 16,
        [src, dst, rows], 2 * src.nbytes, lambda: _exact(dst.view(torch.uint8).numpy(), src.view(torch.uint8).numpy()),
    )  # fmt: skip


def cases() -> list[Case]:
    rng = np.random.default_rng(0)
    rows, hidden, top = 64, 7168, 8
    src = torch.from_numpy(rng.standard_normal((32, hidden), np.float32)).bfloat16()
    index = torch.from_numpy(rng.integers(-1, 32, (rows, top)).astype(np.int32))
    weight = torch.from_numpy(rng.random((rows, top), np.float32))
    reduced = torch.full((rows, hidden), float("nan"), dtype=torch.bfloat16)

    def check_reduce() -> None:
        total, size = np.zeros((2, rows, hidden), np.float64)
        for k in range(top):
            i = index[:, k].numpy()
            term = np.where(i[:, None] >= 0, weight[:, k, None].double() * src[i].double(), 0)
            total += term
            size += abs(term)
        # products and sums in fp32, the result rounded to the 8 significant bits of bf16
        bound = 2**-8 * abs(total) + (1 + 2**-8) * 2 * top * 2**-24 * size
        assert (abs(reduced.double().numpy() - total) <= bound).all()

    num = 1 << 16
    table = torch.from_numpy(rng.integers(0, 1 << 30, num).astype(np.int32))
    where = torch.from_numpy(rng.integers(0, num, num).astype(np.int32))
    gathered = torch.full((num,), -1, dtype=torch.int32)
    counters, slots = torch.zeros(64, dtype=torch.int32), torch.from_numpy(rng.integers(0, 64, num).astype(np.int32))
    lcg = torch.arange(4096, dtype=torch.int32)
    steps, runs = 500, [0]

    def check_count() -> None:
        runs[0] += 1
        _exact(counters.numpy(), runs[0] * np.bincount(slots.numpy(), minlength=64))

    start = lcg.clone().numpy().astype(np.uint32)

    def check_lcg() -> None:
        nonlocal start
        with np.errstate(over="ignore"):
            for _ in range(steps):
                start = start * np.uint32(1664525) + np.uint32(1013904223)
        _exact(lcg.numpy().view(np.uint32), start)

    def check_gather() -> None:
        _exact(gathered.numpy(), table[where.long()].numpy())

    i32, blocks = "*i32", num // 1024
    reduce_types = {"src": "*bf16", "index": i32, "weight": "*fp32", "dst": "*bf16", "H": "i32"}
    reduce_args = [src, index, weight, reduced, hidden]
    reduce_bytes = int((index >= 0).sum()) * 2 * hidden + reduced.nbytes
    reduce_constants, gather_types = {"K": top, "BLOCK": 1024}, {"src": i32, "index": i32, "dst": i32}
    count_types, steps_types, block = {"counters": i32, "index": i32}, {"x": i32, "n": "i32"}, {"BLOCK": 1024}
    gather_args, count_args = [table, where, gathered], [counters, slots]
    return [
        Case(
            "weighted row reduce, bf16",
            _reduce_rows,
            reduce_types,
            reduce_constants,
            rows,
            reduce_args,
            reduce_bytes,
            check_reduce,
        ),
        _copy("row copy, bf16 (16 bytes a lane)", torch.bfloat16, "*bf16", 1024),
        _copy("row copy, fp32 (8 bytes a lane)", torch.float32, "*fp32", 256),
        _copy("row copy, uint8 (2 bytes a lane)", torch.uint8, "*u8", 256),
        Case("gather, int32", _gather, gather_types, block, blocks, gather_args, 3 * gathered.nbytes, check_gather),
        Case(
            "histogram, 32-bit atomics", _count, count_types, block, blocks, count_args, 2 * slots.nbytes, check_count
        ),
        Case("arithmetic, int32", _arithmetic, steps_types, block, 4, [lcg, steps], 2 * lcg.nbytes, check_lcg),
    ]


def measure(case: Case, arch: str, seconds: float) -> tuple[float, float, int]:
    """(instructions per second, bytes per second, instructions of a launch), the best of the launches in `seconds`."""
    module = Module(load_code(compile_text(case.fn, case.signature, case.constants, arch, case.num_warps)))
    types, machine, best = tuple(case.signature.values()), Machine(), float("inf")
    end = time.perf_counter() + seconds
    while True:
        launch = Launch(
            module,
            (case.grid, 1, 1),
            case.args,
            num_warps=case.num_warps,
            shared=1 << 15,
            types=types,
            device=default_device(arch),
        )
        before = machine.instructions
        machine.submit(launch)
        t = time.thread_time()
        while not launch.control.ended:
            event = machine.run(1 << 40)
            if event == Event.FAULT:
                raise machine.fault()[1]
        best = min(best, time.thread_time() - t)
        count = machine.instructions - before
        case.check()
        if time.perf_counter() > end:
            return count / best, case.num_bytes / best, count


def main(arch: str = "gfx1201", seconds: float = 1.0) -> None:
    table = Table(title=f"Emulated {arch}, one core")
    for name in ("kernel", "M instructions/s", "GB/s", "instructions"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for case in cases():
        rate, byte_rate, count = measure(case, arch, seconds)
        table.add_row(case.name, f"{rate / 1e6:.1f}", f"{byte_rate / 1e9:.2f}", str(count))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
