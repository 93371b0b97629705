"""Lift a parsed kernel to LLVM IR: one function `run(wave, budget)` that works on a wave's state in memory and can stop and resume at
every block.  Scalar instructions are emitted in place; every vector or memory instruction becomes a call of a small helper
function, emitted once per (operation, operand kinds): that keeps both the IR and the compile time small."""
import re

from mori_triton.emulator import isa
from mori_triton.emulator.ir import Fn, Module
from mori_triton.emulator.memory import Memory
from mori_triton.emulator.scalar import Scalar
from mori_triton.emulator.state import *
from mori_triton.emulator.vector import Vector


class Lifter(Vector, Scalar, Memory):
    def __init__(self, prog, entry="run"):
        self.p, self.W, self.gfx12 = prog, prog.warp_size, prog.arch.startswith("gfx12")
        self.module = Module()
        self.module.fnuz = prog.arch == "gfx942"
        text = "\n".join(i.text for i in prog.insts)
        top = lambda c: max([-1] + [int(x) for x in re.findall(rf"\b{c}\[?(\d+)", text)] + [int(x) for x in re.findall(rf"\b{c}\[\d+:(\d+)\]", text)])
        self.areg_base = top("v") + 1
        self.temp = self.areg_base + top("a") + 1               # one extra register for dual-issue pairs
        self.num_vregs = self.temp + 1
        self.private = -(-int(prog.directives.get("private_segment_fixed_size", "0")) // 4) * 4      # stack and spills, bytes a lane
        self.scratch = VREGS + 4 * self.W * self.num_vregs
        self.state_size = self.scratch + self.W * self.private
        # symbols reached through a table: offset in the data image of a slot that will hold their address
        self.got = {s: -(-len(prog.data) // 8) * 8 + 8 * i for i, s in enumerate(sorted(set(re.findall(r"([\w.$]+)@gotpcrel", text))))}
        self.f = Fn(f"define i32 @{entry}(ptr noundef %w, i64 %budget)", self.module)
        self.f.W = self.W

    # ---------------------------------------------------------------- registers
    def op(self, text): return Operand(text, self.areg_base)
    def sptr(self, i): return self.f.gep("%w", 4 * i)
    def vptr(self, i): return self.f.gep("%w", VREGS + 4 * self.W * i)
    def mask(self, i): return self.f.load(self.sptr(i), self.W)
    def exec(self): return self.mask(EXEC)

    def sread(self, o, bits=32):
        f = self.f
        if o.kind == "s":
            v = f.load(self.sptr(o.idx), bits)
        elif o.kind in ("imm", "null"):
            v = f.int(o.bits(bits), bits)
        elif o.kind == "scc":
            v = f.load(f.gep("%w", SCC), 32).zext(bits)
        elif o.kind == "sym":
            v = self.symbol(o.value, bits)
        else:
            raise KeyError(o.value)
        return v

    def swrite(self, o, v):
        if o.kind == "s":
            self.f.store(self.sptr(o.idx), v)
        elif o.kind != "null":
            raise KeyError(o.value)

    def set_scc(self, c): self.f.store(self.f.gep("%w", SCC), c.zext(32))

    def symbol(self, text, bits):
        """foo@rel32@lo+8 and friends: s_getpc gives 0 here, so the value is the symbol's address itself.  The addend holds the distance
        in bytes from the end of the s_getpc to this literal; only 4-byte hints and other halves of the same sequence lie in between"""
        name, kind, part, add = re.match(r"([\w.$]+)@(rel32|gotpcrel32|rel64|gotpcrel|abs32)(?:@(lo|hi))?(?:([+-]\d+))?$", text).groups()
        bias, i = 4, self.pos - 1
        while kind != "abs32" and isa.canonical(self.p.insts[i].mn) != "s_getpc_b64":
            ins = self.p.insts[i]
            literal = any("@" in o for o in ins.ops)
            if not literal and not re.match(r"s_(wait\w*|delay_alu|sext_i32_i16|nop)$", ins.mn):
                raise KeyError("s_getpc sequence not recognised")
            bias, i = bias + 4 + 4 * literal, i - 1
        bias = 0 if kind == "abs32" else bias
        off = int(add or 0) - bias
        if kind.startswith("got"):
            addr = self.f.load(self.f.gep("%w", DATA), 64) + (self.got[name] + off)
        elif name in self.p.symbols:
            addr = self.f.load(self.f.gep("%w", DATA), 64) + (self.p.symbols[name] + off)
        elif name in self.p.labels:
            addr = self.f.int(CODE_BASE + 4 * self.p.labels[name] + off, 64)
        else:
            raise KeyError(f"undefined symbol {name}")
        return addr if bits == 64 else (addr >> (32 if part == "hi" else 0)).trunc(32)

    # ---------------------------------------------------------------- helper functions
    def call(self, key, ret, args, build):
        """call helper `key`, defining it on first use: build(fn, parameter values or pointer names); args: list of (ir type, text)"""
        name = "@" + re.sub(r"[^\w.]", "_", key)
        if name not in self.module.fns:
            self.module.fns[name] = ""
            params = [f"%a{i}" for i in range(len(args))]
            fn = Fn(f"define internal {ret} {name}({', '.join(f'{t} {p}' for (t, _), p in zip(args, params))})", self.module)
            fn.W = self.W
            build(fn, [p if t == "ptr" else fn.arg(p, int(t[1:])) for (t, _), p in zip(args, params)])
            self.module.fns[name] = fn.text()
        text = f"call {ret} {name}({', '.join(f'{t} {v}' for t, v in args)})"
        if ret == "void":
            self.f.emit(text)
        else:
            return self.f.ins(text, int(ret[1:]))

    def pass_(self, o, bits=32):
        """(ir type, text) to hand an operand to a helper: pointer for vector registers, value for everything else"""
        if o.kind == "v":
            return "ptr", self.vptr(o.idx)
        return f"i{bits}", self.sread(o, bits).name

    # ---------------------------------------------------------------- control flow
    BRANCH = re.compile(r"s_(c?branch\w*|setpc_b64|swappc_b64|endpgm\w*|barrier|barrier_wait|sleep)$")

    def lift(self):
        insts, labels = self.p.insts, self.p.labels
        index = {v: k for k, v in labels.items()}
        leaders = {0, *labels.values()}
        for i, ins in enumerate(insts):
            if self.BRANCH.match(isa.canonical(ins.mn)):
                leaders.add(i + 1)
            if re.match(r"(global|flat|buffer)_(load|store|atomic)", ins.mn):
                leaders.add(i)                              # other waves can only notice memory accesses: a wave may be switched before each
        leaders = sorted(l for l in leaders if l < len(insts))
        f = self.f
        f.emit(f"store i64 %budget, ptr {f.gep('%w', BUDGET)}")
        f.emit("br label %dispatch")
        f.label("dispatch")
        pc = f.load(f.gep("%w", PC), 32)
        f.emit(f"switch i32 {pc.name}, label %lost [ {' '.join(f'i32 {l}, label %B{l}' for l in leaders)} ]")
        for l, nxt in zip(leaders, leaders[1:] + [len(insts)]):
            f.label(f"B{l}")
            left = f.load(f.gep("%w", BUDGET), 64)
            f.store(f.gep("%w", PC), f.int(l))
            f.emit(f"br i1 {left.cmp('slt', 1).name}, label %yield, label %C{l}")
            f.label(f"C{l}")
            f.store(f.gep("%w", BUDGET), left - (nxt - l))
            ended = False
            for self.pos in range(l, nxt):
                ended = self.inst(insts[self.pos])
            if not ended:
                f.emit(f"br label %B{nxt}" if nxt < len(insts) else "br label %lost")
        status = lambda name, code: (f.label(name), self.leave(code))
        status("yield", RUNNING); status("finished", DONE); status("barrier", BARRIER); status("faulted", FAULTED)
        f.label("lost")
        f.store(f.gep("%w", FAULT), f.int(4)); f.store(f.gep("%w", FAULT_PC), f.load(f.gep("%w", PC), 32))
        self.leave(FAULTED)
        return self.module.text() + "\n" + f.text()

    def leave(self, code):
        """count the instructions of this quantum and return to the scheduler"""
        f = self.f
        left = f.load(f.gep("%w", BUDGET), 64)
        c = f.gep("%w", COUNT)
        f.store(c, f.load(c, 64) + f.arg("%budget", 64) - left)
        f.emit(f"ret i32 {code}")

    def inst(self, ins):
        """emit one instruction; true if it ended the block"""
        base, f, nxt = isa.canonical(ins.mn), self.f, self.pos + 1
        try:
            if self.BRANCH.match(base):
                return self.branch(ins, base[2:], nxt)
            if isa.NOP.match(base):
                return False
            unknown = [m for i in (ins, ins.dual) if i for m in i.mods if not isa.MODIFIERS.match(m)]
            if unknown:
                raise KeyError(f"modifier {unknown[0]}")
            if ins.mn.startswith("v_"):
                self.v(ins, base)
            elif ins.mn.startswith("s_"):
                self.s(ins, base)
            elif ins.mn.startswith("ds_"):
                self.ds(ins, base)
            elif re.match(r"(global|flat|buffer|scratch)_(load|store|atomic)_", base):
                self.memory(ins, base)
            else:
                raise KeyError("no semantics")
        except (KeyError, ValueError, IndexError, AttributeError, TypeError) as e:
            raise UnsupportedInstruction(ins, str(e)) from e
        return False

    def branch(self, ins, k, nxt):
        f = self.f
        goto = lambda i, label=None: f.emit(f"br label %{label or f'B{i}'}")
        if k.startswith("endpgm"):
            goto(0, "finished")
        elif k in ("barrier", "barrier_wait", "sleep"):
            f.store(f.gep("%w", PC), f.int(nxt))
            goto(0, "yield" if k == "sleep" else "barrier")
        elif k in ("setpc_b64", "swappc_b64"):
            target = self.sread(self.op(ins.ops[-1]), 64)
            if k[1] == "w":
                self.swrite(self.op(ins.ops[0]), f.int(CODE_BASE + 4 * nxt, 64))
            f.store(f.gep("%w", PC), ((target - CODE_BASE) >> 2).trunc(32))
            goto(0, "dispatch")
        else:
            to = self.p.labels[ins.ops[0]]
            if k == "branch":
                goto(to)
                return True
            cond = {"scc": lambda: f.load(f.gep("%w", SCC), 32), "vcc": lambda: self.mask(VCC), "exec": self.exec}[re.match(r"cbranch_(scc|vcc|exec)", k)[1]]()
            f.emit(f"br i1 {cond.cmp('eq' if k.endswith('z') and not k.endswith('nz') or k.endswith('0') else 'ne', 0).name}, label %B{to}, label %B{nxt}")
        return True
