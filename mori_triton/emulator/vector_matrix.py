"""Matrix products of bf16 and fp16, accumulated in fp32 one k after the other.

The order and the rounding within hardware's products are not documented.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.lift_base import LiftBase


@dataclass(frozen=True)
class _Shape:
    """n x n result of depth k; `per_lane` consecutive k elements a lane; `regs` result registers.

    row(r, lane): row of the result element that a lane holds in register r; its column is lane % n.
    """

    n: int
    k: int
    per_lane: int
    row: Callable[[int, int], int]
    regs: int
    fp16: bool = False


def _mfma(n: int, per_lane: int) -> _Shape:
    half = 64 // n
    return _Shape(
        n,
        per_lane * half,
        per_lane,
        lambda r, lane: (r % 4) + 4 * (lane // n) + 4 * half * (r // 4),
        n * n // 64,
    )


MATRIX = {
    "mfma_f32_32x32x8_bf16": _mfma(32, 4),
    "mfma_f32_32x32x16_bf16": _mfma(32, 8),
    "mfma_f32_16x16x16_bf16": _mfma(16, 4),
    "mfma_f32_16x16x32_bf16": _mfma(16, 8),
    "wmma_f32_16x16x16_bf16": _Shape(16, 16, 8, lambda r, lane: r + 8 * (lane // 16), 8),
}
MATRIX |= {name.replace("bf16", "f16"): replace(shape, fp16=True) for name, shape in MATRIX.items()}


class Matrix(LiftBase):
    """Part of the lifter."""

    def matrix(self, ops: list[str], k: str) -> None:
        m, W = MATRIX[k], self.W
        d, a, b, c = (self.op(o) for o in ops)
        args = [("ptr", self.vptr(o.idx)) for o in (d, a, b)] + [self.pass_(c)]

        def build(f: Fn, p: list) -> None:
            def element(src: str, i: int, index: Callable[[int], int]) -> Val:
                """Element i of the row or column index(lane)."""
                e = i % m.per_lane
                reg = f.load(f.gep(src, 4 * W * (e // 2)), 32, W)
                if m.fp16:
                    x = (reg >> (16 * (e % 2))).trunc(16).f().fconv(32)
                else:
                    x = (reg & 0xFFFF0000 if e % 2 else reg << 16).f()
                return x.shuffle([index(l) + m.n * (i // m.per_lane) for l in range(W)])

            cols = [element(p[2], i, lambda l: l % m.n) for i in range(m.k)]
            sums = []
            for r in range(m.regs):
                acc = f.load(f.gep(p[3], 4 * W * r), 32, W).f() if c.kind == "v" else p[3].f().splat(W)
                for i in range(m.k):
                    acc = element(p[1], i, functools.partial(m.row, r)).intr("fma", cols[i], acc)
                sums.append(acc)
            # the destination may overlap a source
            for r, x in enumerate(sums):
                f.store(f.gep(p[0], 4 * W * r), x.i())
            f.emit("ret void")

        self.call(f"{k}_{c.kind}", "void", args, build)
