"""Copies of tiles between global memory and LDS by gfx1250's tensor data mover.

Two groups of scalar registers describe one: LDS address, global address, element size, sizes of the tensor and of the
tile, strides, gaps in LDS. A load writes 0 for what lies beyond the tensor; a store leaves it out and knows no gaps.
Copies are complete when the instruction is. Field positions: LLVM's lowering of `amdgpu.make_dma_descriptor`.
"""

from __future__ import annotations

import functools

from mori_triton.emulator.accesses import ADDRESS, LOCAL
from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Val
from mori_triton.emulator.memory import Memory
from mori_triton.emulator.state import FAULT, FAULT_PC, UNKNOWN_COPY

_SIZES = ("8", "16", "32", "64")


class TensorCopies(Memory):
    """Part of the lifter."""

    def tensor_copy(self, ins: Inst, *, load: bool) -> None:
        ops = [self.op(o) for o in ins.ops]
        if len(ops) != 2 or self.p.arch != "gfx1250":
            raise KeyError("a tile of more than two dimensions")
        first, second = (o.idx for o in ops)
        f = self.f

        def word(register: int) -> Val:
            return f.load(self.sptr(register), 32)

        def pieces(register: int) -> Val:
            """The upper half of a register and the lower half of the next."""
            return (word(register) >> 16) | (word(register + 1) << 16)

        kind, flags, tile = word(first), word(second), word(second + 4)
        # bit 0 of the first word: whether there is anything to do; then lists of rows, copies to other workgroups,
        # barriers, repetitions, a third dimension
        known = kind.cmp("ule", 1) & (flags & 0xCFFFF).cmp("eq", 0) & (tile >> 16).cmp("eq", 0)
        f.store(f.gep("%w", FAULT), known.pick(f.int(0), f.int(UNKNOWN_COPY)))
        f.store(f.gep("%w", FAULT_PC), f.int(self.pos))
        self.guarded(known.zext(32))
        columns = word(second + 3) >> 16
        rows = tile.cmp("eq", 0).pick(1, tile)
        # of the tensor; a tile of one dimension has one row
        width, height = pieces(second + 1), tile.cmp("eq", 0).pick(1, pieces(second + 2))
        stride = word(second + 5).zext(64) | ((word(second + 6) & 0xFFFF).zext(64) << 32)
        size = (flags >> 16) & 3
        total = columns * rows * kind
        address = f.load(self.sptr(first + 2), 64) & ((1 << 57) - 1)

        def lanes(start: Val) -> None:
            e = f.vec(range(self.W)) + start.trunc(32)
            active = e.cmp("ult", total)
            x, y = e % columns, e / columns
            inside = (active & x.cmp("ult", width) & y.cmp("ult", height)).lanes_to_bits()
            where = ((x.zext(64) + y.zext(64) * stride) << size.zext(64)) + address
            f.store(self.vptr(self.spare), where.trunc(32))
            f.store(self.vptr(self.spare + 1), (where >> 32).trunc(32))
            at = e << size
            if load:
                # after each so many bytes a gap
                interval, gap = ((flags >> 22) & 7) + 3, ((flags >> 25) + 1) << 2
                at = at + (flags & 1 << 20).cmp("ne", 0).pick((at >> interval) * gap, f.vec([0] * self.W))
            f.store(self.vptr(self.spare + 2), at + word(first + 1))
            for n, bits in enumerate(_SIZES):
                move = functools.partial(self._move, bits, inside, active.lanes_to_bits(), load)
                f.when(size.cmp("eq", n), move)

        def chunks() -> None:
            f.loop((total.zext(64) + (self.W - 1)) >> 5, lambda i: lanes(i << 5))

        f.when(total.cmp("ne", 0), chunks)

    def _move(self, bits: str, inside: Val, active: Val, load: bool) -> None:
        far, near, data = self.spare, self.spare + 2, self.spare + 3
        loaded, stored = f"load_{'u' if bits in ('8', '16') else 'b'}{bits}", f"store_b{bits}"
        if load:
            for r in (data, data + 1):
                self.f.store(self.vptr(r), self.f.vec([0] * self.W))
            self.access(loaded, far, data, ADDRESS, lanes=inside)
            self.access(stored, near, data, LOCAL, lanes=active)
        else:
            self.access(loaded, near, data, LOCAL, lanes=inside)
            self.access(stored, far, data, ADDRESS, lanes=inside)
