"""Lift a parsed kernel to LLVM IR.

The result is one function `i32 run(ptr wave, i64 budget)` that works on a wave's state in memory (state.py) and can
stop and resume at the start of every block. Scalar instructions are emitted in place; every vector or memory
instruction becomes a call of a small helper function, emitted once per (operation, operand kinds, modifiers): that
keeps both the IR and the compile time small.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mori_triton.emulator import isa
from mori_triton.emulator.asm import Inst, Program
from mori_triton.emulator.ir import Fn, Module, Val
from mori_triton.emulator.memory import Memory
from mori_triton.emulator.scalar import Scalar
from mori_triton.emulator.state import (
    BARRIER,
    BUDGET,
    CODE_BASE,
    COUNT,
    DATA,
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
    VREGS,
    Operand,
    unsupported,
)
from mori_triton.emulator.vector import Vector

_BRANCH = re.compile(r"s_(c?branch\w*|setpc_b64|swappc_b64|endpgm\w*|barrier|barrier_wait|sleep)$")
_MEMORY = re.compile(r"(global|flat|buffer|scratch)_(load|store|atomic)_")
_SYMBOL = re.compile(r"([\w.$]+)@(rel32|gotpcrel32|rel64|gotpcrel|abs32)(?:@(lo|hi))?(?:([+-]\d+))?$")


class Lifter(Vector, Scalar, Memory):
    """One kernel on its way to IR.

    state_size: bytes of a wave's state. num_vregs: vector registers it holds. got: symbol -> offset, past the kernel's
    data image, of an 8-byte slot that the loader fills with the symbol's address.
    """

    def __init__(self, prog: Program, entry: str = "run") -> None:
        self.p, self.W, self.gfx12 = prog, prog.warp_size, prog.arch.startswith("gfx12")
        self.module = Module()
        self.module.fnuz = prog.arch == "gfx942"
        self.module.ieee = not self.gfx12 and prog.directives.get("ieee_mode", "1") == "1"
        text = "\n".join(i.text for i in prog.insts)
        self.areg_base = _top(text, "v") + 1
        # one extra register for dual-issue pairs
        self.temp = self.areg_base + _top(text, "a") + 1
        self.num_vregs = self.temp + 1
        # stack and spills, bytes a lane
        self.private = -(-int(prog.directives.get("private_segment_fixed_size", "0")) // 4) * 4
        self.scratch = VREGS + 4 * self.W * self.num_vregs
        self.state_size = self.scratch + self.W * self.private
        slots = sorted(set(re.findall(r"([\w.$]+)@gotpcrel", text)))
        self.got = {s: -(-len(prog.data) // 8) * 8 + 8 * i for i, s in enumerate(slots)}
        self.f = Fn(f"define i32 @{entry}(ptr noundef %w, i64 %budget)", self.module)
        self.f.W = self.W
        # index of the instruction being lifted
        self.pos = 0

    # registers

    def op(self, text: str) -> Operand:
        return Operand(text, self.areg_base)

    def sptr(self, i: int) -> str:
        return self.f.gep("%w", 4 * i)

    def vptr(self, i: int) -> str:
        return self.f.gep("%w", VREGS + 4 * self.W * i)

    def mask(self, i: int) -> Val:
        """A lane mask register as an integer of warp_size bits."""
        return self.f.load(self.sptr(i), self.W)

    def exec(self) -> Val:
        return self.mask(EXEC)

    def sread(self, o: Operand, bits: int = 32, letter: str = "") -> Val:
        """A scalar operand's value; letter: its type, see `Operand.bits`."""
        if o.kind == "s":
            return self.f.load(self.sptr(o.idx), bits)
        if o.kind in ("imm", "null"):
            return self.f.int(o.bits(bits, letter), bits)
        if o.kind == "scc":
            return self.f.load(self.f.gep("%w", SCC), 32).zext(bits)
        if o.kind == "sym":
            return self.symbol(o.value, bits)
        raise KeyError(f"operand {o.value}")

    def swrite(self, o: Operand, v: Val) -> None:
        if o.kind == "s":
            self.f.store(self.sptr(o.idx), v)
        elif o.kind != "null":
            raise KeyError(f"operand {o.value}")

    def set_scc(self, c: Val) -> None:
        self.f.store(self.f.gep("%w", SCC), c.zext(32))

    def symbol(self, text: str, bits: int) -> Val:
        """`foo@rel32@lo+8` and friends.

        s_getpc gives 0 here, so the value is the symbol's address itself. The addend holds the distance in bytes from
        the end of the s_getpc to this literal; only 4-byte hints and other halves of the sequence lie in between.
        """
        name, kind, part, add = _SYMBOL.match(text).groups()
        bias, i = 4, self.pos - 1
        while kind != "abs32" and isa.canonical(self.p.insts[i].mn) != "s_getpc_b64":
            ins = self.p.insts[i]
            literal = any("@" in o for o in ins.ops)
            if not literal and not re.match(r"s_(wait\w*|delay_alu|sext_i32_i16|nop)$", ins.mn):
                raise KeyError("s_getpc sequence not recognised")
            bias, i = bias + 4 + 4 * literal, i - 1
        off = int(add or 0) - (0 if kind == "abs32" else bias)
        data = self.f.gep("%w", DATA)
        if kind.startswith("got"):
            addr = self.f.load(data, 64) + (self.got[name] + off)
        elif name in self.p.symbols:
            addr = self.f.load(data, 64) + (self.p.symbols[name] + off)
        elif name in self.p.labels:
            addr = self.f.int(CODE_BASE + 4 * self.p.labels[name] + off, 64)
        else:
            raise KeyError(f"undefined symbol {name}")
        return addr if bits == 64 else (addr >> (32 if part == "hi" else 0)).trunc(32)

    # helper functions

    def call(self, key: str, ret: str, args: list[tuple[str, str]], build: Callable[[Fn, list], None]) -> Val | None:
        """Call helper `key`, defining it on first use.

        args: (IR type, text) of each argument. build(fn, parameters) writes the body; a parameter is a pointer's name
        or a `Val`. Everything that changes the body must be part of `key`.
        """
        name = "@" + re.sub(r"[^\w.]", "_", key)
        if name not in self.module.fns:
            # taken now, so that a helper called by build() comes after it
            self.module.fns[name] = ""
            params = [f"%a{i}" for i in range(len(args))]
            head = ", ".join(f"{t} {p}" for (t, _), p in zip(args, params, strict=True))
            fn = Fn(f"define internal {ret} {name}({head})", self.module)
            fn.W = self.W
            build(fn, [p if t == "ptr" else fn.arg(p, int(t[1:])) for (t, _), p in zip(args, params, strict=True)])
            self.module.fns[name] = fn.text()
        text = f"call {ret} {name}({', '.join(f'{t} {v}' for t, v in args)})"
        if ret == "void":
            return self.f.emit(text)
        return self.f.ins(text, int(ret[1:]))

    def pass_(self, o: Operand, bits: int = 32, letter: str = "") -> tuple[str, str]:
        """(IR type, text) to hand an operand to a helper: a pointer to vector registers, the value of all else."""
        if o.kind == "v":
            return "ptr", self.vptr(o.idx)
        return f"i{bits}", self.sread(o, bits, letter).name

    # control flow

    def leaders(self) -> list[int]:
        """Indices of the instructions that start a block.

        Other waves can only notice memory accesses: a wave may be switched before each, and at every branch target.
        """
        insts = self.p.insts
        found = {0, *self.p.labels.values()}
        for i, ins in enumerate(insts):
            if _BRANCH.match(isa.canonical(ins.mn)):
                found.add(i + 1)
            if _MEMORY.match(ins.mn) and not ins.mn.startswith("scratch"):
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
        elif k in ("barrier", "barrier_wait", "sleep"):
            f.store(f.gep("%w", PC), f.int(nxt))
            f.emit(f"br label %{'sleeping' if k == 'sleep' else 'barrier'}")
        elif k in ("setpc_b64", "swappc_b64"):
            target = self.sread(self.op(ins.ops[-1]), 64)
            if k == "swappc_b64":
                self.swrite(self.op(ins.ops[0]), f.int(CODE_BASE + 4 * nxt, 64))
            f.store(f.gep("%w", PC), ((target - CODE_BASE) >> 2).trunc(32))
            f.emit("br label %dispatch")
        elif k == "branch":
            f.emit(f"br label %B{self.p.labels[ins.ops[0]]}")
        else:
            register, zero = re.match(r"cbranch_(scc|vcc|exec)(0|z|1|nz)$", k).groups()
            value = f.load(f.gep("%w", SCC), 32) if register == "scc" else self.mask(VCC if register == "vcc" else EXEC)
            taken = value.cmp("eq" if zero in "0z" else "ne", 0)
            f.emit(f"br i1 {taken.name}, label %B{self.p.labels[ins.ops[0]]}, label %B{nxt}")


def _top(text: str, register: str) -> int:
    """Highest number of a register of this kind that the text names, -1 for none."""
    first = re.findall(rf"\b{register}\[?(\d+)", text)
    last = re.findall(rf"\b{register}\[\d+:(\d+)\]", text)
    return max([-1, *map(int, first), *map(int, last)])
