"""Lift a parsed kernel to LLVM IR.

The result is one function `i32 run(ptr wave, i64 budget)` that works on a wave's state in memory (state.py) and can
stop and resume at the start of every block. Scalar instructions are emitted in place; every vector or memory
instruction becomes a call of a small helper function, emitted once per (operation, operand kinds, modifiers): that
keeps both the IR and the compile time small.
"""

from __future__ import annotations

import re

from mori_triton.emulator import isa
from mori_triton.emulator.asm import Inst
from mori_triton.emulator.scalar import Scalar
from mori_triton.emulator.state import (
    BARRIER,
    BUDGET,
    CODE_BASE,
    COUNT,
    DONE,
    EXEC,
    FAULT,
    FAULT_PC,
    FAULTED,
    PC,
    RUNNING,
    SCC,
    SLEEPING,
    VCC,
    unsupported,
)
from mori_triton.emulator.transfers import Transfers
from mori_triton.emulator.vector import Vector

_BRANCH = re.compile(r"s_(c?branch\w*|setpc_b64|swappc_b64|endpgm\w*|barrier|barrier_wait|sleep|sleep_var|trap)$")
_MEMORY = re.compile(r"(global|flat|buffer|scratch)_(load|store|atomic)_")


class Lifter(Vector, Scalar, Transfers):
    """One kernel on its way to IR: `Lifter(prog, entry).lift()` is the module's text."""

    def leaders(self) -> list[int]:
        """Indices of the instructions that start a block.

        Other waves can only notice memory accesses: a wave may be switched before each, and at every branch target.
        """
        insts = self.p.insts
        found = {0, *self.p.labels.values()}
        for i, ins in enumerate(insts):
            if _BRANCH.match(isa.canonical(ins.mn)):
                found.add(i + 1)
            if (_MEMORY.match(ins.mn) and not ins.mn.startswith("scratch")) or ins.mn.startswith("tensor_"):
                found.add(i)
        return sorted(x for x in found if x < len(insts))

    def lift(self) -> str:
        """The module's IR text. UnsupportedInstruction if any instruction or modifier is not known."""
        insts, leaders, f = self.p.insts, self.leaders(), self.f
        f.emit(f"store i64 %budget, ptr {f.gep('%w', BUDGET)}")
        f.emit("br label %dispatch")
        f.label("dispatch")
        pc = f.load(f.gep("%w", PC), 32)
        cases = " ".join(f"i32 {x}, label %B{x}" for x in leaders)
        f.emit(f"switch i32 {pc.name}, label %lost [ {cases} ]")
        for start, end in zip(leaders, [*leaders[1:], len(insts)], strict=True):
            self.block(start, end)
        exits = {"yield": RUNNING, "sleeping": SLEEPING, "finished": DONE, "barrier": BARRIER, "faulted": FAULTED}
        for name, code in exits.items():
            f.label(name)
            self.leave(code)
        f.label("lost")
        f.store(f.gep("%w", FAULT), f.int(4))
        f.store(f.gep("%w", FAULT_PC), f.load(f.gep("%w", PC), 32))
        self.leave(FAULTED)
        return self.module.text() + "\n" + f.text()

    def block(self, start: int, end: int) -> None:
        """Instructions start .. end - 1: leave when the budget is used up, else count them and run."""
        f = self.f
        f.label(f"B{start}")
        left = f.load(f.gep("%w", BUDGET), 64)
        f.store(f.gep("%w", PC), f.int(start))
        f.emit(f"br i1 {left.cmp('slt', 1).name}, label %yield, label %C{start}")
        f.label(f"C{start}")
        f.store(f.gep("%w", BUDGET), left - (end - start))
        ended = False
        for self.pos in range(start, end):
            ended = self.inst(self.p.insts[self.pos])
        if not ended:
            f.emit(f"br label %B{end}" if end < len(self.p.insts) else "br label %lost")

    def leave(self, code: int) -> None:
        """Count the instructions of this quantum and return to the scheduler."""
        f = self.f
        left = f.load(f.gep("%w", BUDGET), 64)
        count = f.gep("%w", COUNT)
        f.store(count, f.load(count, 64) + f.arg("%budget", 64) - left)
        f.emit(f"ret i32 {code}")

    def inst(self, ins: Inst) -> bool:
        """Emit one instruction; true if it ended the block."""
        base = isa.canonical(ins.mn)
        try:
            if _BRANCH.match(base):
                self.branch(ins, base[2:], self.pos + 1)
                return True
            if self.fence(ins, base) or isa.NOP.match(base):
                return False
            for half in (ins, ins.dual) if ins.dual else (ins,):
                unknown = isa.unknown_modifier(isa.canonical(half.mn), half.mods)
                if unknown:
                    raise KeyError(f"modifier {unknown}")
            if ins.mn.startswith("v_"):
                self.v(ins, base)
            elif ins.mn.startswith("s_"):
                self.s(ins, base)
            elif self.transfer(ins, base):
                pass
            elif ins.mn.startswith("ds_"):
                self.ds(ins, base)
            elif _MEMORY.match(base):
                self.memory(ins, base)
            else:
                raise KeyError("no semantics")
        except (LookupError, ValueError, AttributeError, TypeError) as e:
            raise unsupported(ins, e.args[0] if e.args and isinstance(e, KeyError) else str(e)) from e
        return False

    def branch(self, ins: Inst, k: str, nxt: int) -> None:
        """Branches, calls and everything else that ends a block; nxt: the instruction that follows."""
        f = self.f
        if k.startswith("endpgm"):
            self.wave_end()
            f.emit("br label %finished")
        elif k in ("barrier", "barrier_wait"):
            self.require_workgroup_barrier(ins)
            f.store(f.gep("%w", PC), f.int(nxt))
            f.emit("br label %barrier")
        elif k.startswith("sleep"):
            f.store(f.gep("%w", PC), f.int(nxt))
            f.emit("br label %sleeping")
        elif k == "trap":
            f.store(f.gep("%w", FAULT), f.int(8))
            f.store(f.gep("%w", FAULT_PC), f.int(self.pos))
            f.emit("br label %faulted")
        elif k in ("setpc_b64", "swappc_b64"):
            target = self.sread(self.op(ins.ops[-1]), 64)
            if k == "swappc_b64":
                self.swrite(self.op(ins.ops[0]), f.int(CODE_BASE + 4 * nxt, 64))
            f.store(f.gep("%w", PC), ((target - CODE_BASE) >> 2).trunc(32))
            f.emit("br label %dispatch")
        elif k == "branch":
            f.emit(f"br label %B{self.p.labels[ins.ops[0]]}")
        else:
            match = re.match(r"cbranch_(scc|vcc|exec)(0|z|1|nz)$", k)
            if not match:
                raise KeyError("no semantics")
            register, zero = match.groups()
            value = f.load(f.gep("%w", SCC), 32) if register == "scc" else self.mask(VCC if register == "vcc" else EXEC)
            taken = value.cmp("eq" if zero in "0z" else "ne", 0)
            f.emit(f"br i1 {taken.name}, label %B{self.p.labels[ins.ops[0]]}, label %B{nxt}")
