"""Copies of tiles between global memory and LDS by gfx1250's tensor data mover.

Two groups of scalar registers describe one: LDS address, global address, element size, sizes of the tensor and of the
tile, strides, gaps in LDS; two more the third to fifth dimension. A load writes 0 for what lies beyond the tensor; a
store leaves it out and knows no gaps. Copies are complete when the instruction is. Field positions: LLVM's lowering of
`amdgpu.make_dma_descriptor`, and Triton's TDMDescriptor.
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
        if len(ops) not in (2, 4) or any(o.kind != "s" for o in ops) or self.p.arch != "gfx1250":
            raise KeyError("operands")
        first, second, *more = (o.idx for o in ops)
        f = self.f

        def word(register: int) -> Val:
            return f.load(self.sptr(register), 32)

        def low(register: int) -> Val:
            return word(register) & 0xFFFF

        def high(register: int) -> Val:
            return word(register) >> 16

        def pieces(register: int) -> Val:
            """The upper half of a register and the lower half of the next."""
            return high(register) | (word(register + 1) << 16)

        def stride(register: int) -> Val:
            """48 bits from the start of a register."""
            return word(register).zext(64) | (low(register + 1).zext(64) << 32)

        kind, flags = word(first), word(second)
        # bit 0 of the first word: whether there is anything to do; then lists of rows, copies to other workgroups,
        # barriers, repetitions, and without the other groups a third dimension
        known = kind.cmp("ule", 1) & (flags & 0xCFFFF).cmp("eq", 0)
        if not more:
            known = known & high(second + 4).cmp("eq", 0)
        f.store(f.gep("%w", FAULT), known.pick(f.int(0), f.int(UNKNOWN_COPY)))
        f.store(f.gep("%w", FAULT_PC), f.int(self.pos))
        self.guarded(known.zext(32))
        # of each dimension: elements of the tile, 0: it has none; elements of the tensor; distance
        columns, width = high(second + 3), pieces(second + 1)
        outer = [(low(second + 4), pieces(second + 2), stride(second + 5))]
        if more:
            third, fourth = more
            distance = high(second + 6).zext(64) | (word(second + 7).zext(64) << 16)
            outer.append((high(second + 4), word(third), distance))
            outer.append((high(third + 3), word(third + 1), stride(third + 2)))
            outer.append((high(fourth + 2), pieces(fourth + 1), stride(fourth)))
        used = [(n.cmp("eq", 0).pick(1, n), n.cmp("eq", 0).pick(1, limit), step) for n, limit, step in outer]
        size = (flags >> 16) & 3
        total = columns * kind
        for count, _, _ in used:
            total = total * count
        address = f.load(self.sptr(first + 2), 64) & ((1 << 57) - 1)

        def lanes(start: Val) -> None:
            e = f.vec(range(self.W)) + start.trunc(32)
            active = e.cmp("ult", total)
            x, rest = e % columns, e / columns
            inside, where = active & x.cmp("ult", width), x.zext(64)
            for i, (count, limit, step) in enumerate(used):
                # the last of them needs no division
                place, rest = (rest % count, rest / count) if i + 1 < len(used) else (rest, rest)
                inside, where = inside & place.cmp("ult", limit), where + place.zext(64) * step
            where = (where << size.zext(64)) + address
            f.store(self.vptr(self.spare), where.trunc(32))
            f.store(self.vptr(self.spare + 1), (where >> 32).trunc(32))
            at = e << size
            if load:
                # after each so many bytes a gap
                interval, gap = ((flags >> 22) & 7) + 3, ((flags >> 25) + 1) << 2
                at = at + (flags & 1 << 20).cmp("ne", 0).pick((at >> interval) * gap, f.vec([0] * self.W))
            f.store(self.vptr(self.spare + 2), at + word(first + 1))
            for n, bits in enumerate(_SIZES):
                move = functools.partial(self._move, bits, inside.lanes_to_bits(), active.lanes_to_bits(), load)
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
