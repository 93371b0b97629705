"""What every part of the lifter builds on: the kernel's registers as IR values, and helper functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mori_triton.emulator import isa
from mori_triton.emulator.asm import Inst, Program
from mori_triton.emulator.ir import Fn, Module, Pair, Val
from mori_triton.emulator.state import (
    CODE_BASE,
    DATA,
    EXEC,
    PRIVATE_BASE,
    SCC,
    SHARED_BASE,
    VREGS,
    Operand,
    unsupported,
)

_SYMBOL = re.compile(r"([\w.$]+)@(rel32|gotpcrel32|rel64|gotpcrel|abs32)(?:@(lo|hi))?(?:([+-]\d+))?$")
_TO_LDS = re.compile(r"\blds\b|_lds_|tensor_")
# of a long branch: to a label, from the label behind its s_getpc
_DISTANCE = re.compile(r"\(([\w.$]+)-([\w.$]+)\)(&4294967295|>>32)$")
APERTURES = {"src_shared_base": SHARED_BASE, "src_private_base": PRIVATE_BASE}
Build = Callable[[Fn, list], None]


class LiftBase:
    """One kernel on its way to IR: state shared by the lifter's parts.

    p: the program. W: lanes of a wave. f: the function being written. pos: index of the instruction being lifted.
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
        # one extra register for dual-issue pairs, five for copies to LDS
        self.temp = self.areg_base + _top(text, "a") + 1
        self.spare = self.temp + 1
        self.num_vregs = self.spare + 5 * bool(_TO_LDS.search(text))
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
        for key, usual in (("float_round_mode_", "0"), ("float_denorm_mode_", "3")):
            for width in ("32", "16_64"):
                if prog.directives.get(key + width, usual) != usual:
                    text = f".amdhsa_{key}{width} {prog.directives[key + width]}"
                    raise unsupported(Inst(0, f".amdhsa_{key}{width}", [], {}, text), "rounding or denormal mode")

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
            return self.symbol(o.text, bits)
        if o.text in APERTURES and bits == 64:
            return self.f.int(APERTURES[o.text], 64)
        far = _DISTANCE.match(o.text)
        if far:
            return self.f.int(self.distance(*far.groups()), bits)
        raise KeyError(f"operand {o.text}")

    def swrite(self, o: Operand, v: Val) -> None:
        if o.kind == "s":
            self.f.store(self.sptr(o.idx), v)
        elif o.kind != "null":
            raise KeyError(f"operand {o.text}")

    def access(
        self,
        what: str,
        address: int,
        data: int,
        how: int,
        *,
        base: Val | None = None,
        offset: int | Val = 0,
        limit: int | Val = 0,
        out: int | None = None,
        lanes: Val | None = None,
    ) -> None:
        """One vector access; see memory.Memory. lanes: those that take part, None: the active ones."""
        raise NotImplementedError

    def scalar_load(self, register: int, address: Val, num_bytes: int) -> None:
        """Load into consecutive scalar registers; see memory.Memory."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Send the host a message; see memory.Memory."""
        raise NotImplementedError

    def set_scc(self, c: Val) -> None:
        self.f.store(self.f.gep("%w", SCC), c.zext(32))

    def distance(self, to: str, start: str, part: str) -> int:
        """Half of a distance that is added to what s_getpc gave: that is 0 here, so half of the label's address."""
        labels = self.p.labels
        if isa.canonical(self.p.insts[labels[start] - 1].mn) != "s_getpc_b64":
            raise KeyError("s_getpc sequence not recognised")
        address = CODE_BASE + 4 * labels[to]
        return address >> 32 if part == ">>32" else address & 0xFFFFFFFF

    def symbol(self, text: str, bits: int) -> Val:
        """`foo@rel32@lo+8` and friends.

        s_getpc gives 0 here, so the value is the symbol's address itself. The addend holds the distance in bytes from
        the end of the s_getpc to this literal; only 4-byte hints and other halves of the sequence lie in between.
        """
        match = _SYMBOL.match(text)
        if not match:
            raise KeyError(f"symbol {text}")
        name, kind, part, add = match.groups()
        bias, i = 4, self.pos - 1
        while kind != "abs32" and isa.canonical(self.p.insts[i].mn) != "s_getpc_b64":
            ins = self.p.insts[i]
            literal = any("@" in o for o in ins.ops)
            if not literal and not re.match(r"s_(wait\w*|delay_alu|sext_i32_i16|nop|set_vgpr_msb)$", ins.mn):
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

    def typed(self, o: Operand, t: str) -> Val:
        """A scalar operand as a value of a type letter."""
        v = self.sread(o, {"q": 64, "d": 64, "e": 16}.get(t, 32), t)
        if t in "fde":
            v = v.f()
            v = v.intr("fabs") if o.abs else v
            return -v if o.neg else v
        if o.abs or o.neg:
            raise KeyError("modifier on an integer operand")
        return v

    def write_vector(self, f: Fn, p: str, v: Val | Pair, write: Val, *, part: str = "") -> None:
        """Store v into the register(s) at p, in the lanes that `write` flags (lane flags, or the exec register's bits).

        part: see `destination_part`.
        """
        W = self.W
        if isinstance(v, Pair):
            parts = [v.lo, v.hi]
        else:
            v = v.i()
            parts = [v.trunc(32), (v >> 32).trunc(32)] if v.bits == 64 else [v]
        places = [f.gep(p, 4 * W * k) for k in range(len(parts))]
        if part:
            old = f.load(p, 32, W)
            parts = [self.insert_part(parts[0].zext(32), old, part)]

        def store_all() -> None:
            for q, x in zip(places, parts, strict=True):
                f.store(q, x)

        def store_some() -> None:
            mask = (write if write.lanes else write.bits_to_lanes(W)).sext(32)
            for q, x in zip(places, parts, strict=True):
                old = f.load(q, 32, W)
                # not a select: from level 1 on, that and the store become a masked store, slow on some CPUs
                f.store(q, old ^ ((old ^ x) & mask))

        if write.lanes:
            store_some()
        else:
            # most often every lane is active
            f.when(write.cmp("eq", -1), store_all, store_some)

    @staticmethod
    def insert_part(x: Val, old: Val, part: str) -> Val:
        if part == "l":
            return (old & 0xFFFF0000) | (x & 0xFFFF)
        if part == "h":
            return (old & 0xFFFF) | (x << 16)
        if part == "z":
            return x & 0xFFFF
        kind, n = part[:-1].split("_")
        bits = 16 if kind == "WORD" else 8
        shift, ones = int(n) * bits, (1 << bits) - 1
        new = (x & ones) << shift
        return new | (old & ~(ones << shift)) if part[-1] == "p" else new

    def call(self, key: str, ret: str, args: list[tuple[str, str]], build: Build) -> Any:
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
            self.f.emit(text)
            return None
        return self.f.ins(text, int(ret[1:]))

    def pass_(self, o: Operand, bits: int = 32, letter: str = "") -> tuple[str, str]:
        """(IR type, text) to hand an operand to a helper: a pointer to vector registers, the value of all else."""
        if o.kind == "v":
            return "ptr", self.vptr(o.idx)
        return f"i{bits}", self.sread(o, bits, letter).name


def _top(text: str, register: str) -> int:
    """Highest number of a register of this kind that the text names, -1 for none."""
    first = re.findall(rf"\b{register}\[?(\d+)", text)
    last = re.findall(rf"\b{register}\[\d+:(\d+)\]", text)
    return max([-1, *map(int, first), *map(int, last)])
