"""Vector instructions (VALU): operands, source modifiers, SDWA, write masks, the way from mnemonic to helper."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from mori_triton.emulator import asm, isa
from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Pair, Val
from mori_triton.emulator.isa.integer import Formula, perm_of
from mori_triton.emulator.state import Operand
from mori_triton.emulator.vector_lanes import Lanes
from mori_triton.emulator.vector_matrix import ANY_FORMAT, MATRIX, Matrix, half_of
from mori_triton.emulator.vector_packed import MIXED, PACKED, Packed
from mori_triton.emulator.vector_small import SmallFloats, is_small_conversion

_WIDTH = {"q": 64, "w": 64, "d": 64}


# modifiers of a result, in the order they apply
_RESULT_MODIFIERS = ("mul", "div", "clamp", "bitop3")
# modifiers that only a mnemonic's encoding suffix makes valid
_DPP_MODIFIERS = re.compile(r"quad_perm|row_|wave_|bank_mask|bound_ctrl")
_SDWA_MODIFIERS = re.compile(r"(src[01]_sel|dst_sel|dst_unused)$")


class Source(NamedTuple):
    """How a helper reads one source: type letter, operand, register half, SDWA selector."""

    type: str
    op: Operand
    half: str | None
    sel: str

    def key(self) -> str:
        """What of it changes the helper's code."""
        o = self.op
        flags = f"{'n' * o.neg}{'a' * o.abs}{'x' * o.sext}{self.half or ''}"
        return f"{self.type}{o.kind[0]}{flags}{'' if self.sel == 'DWORD' else self.sel}"


def bracket_list(text: str) -> list[int]:
    """`[0,1,1]` of op_sel, neg_lo and others."""
    return [int(x) for x in text.strip("[]").split(",")]


class Vector(Lanes, Packed, Matrix, SmallFloats):
    """Part of the lifter: turns a vector instruction into the call of a helper."""

    def v(self, ins: Inst, base: str) -> None:
        k, ops = base[2:], ins.ops
        if ins.dual:
            self.dual(ins, ins.dual)
        elif k.startswith("cmp"):
            types, fn = isa.compare(k)
            to_exec = k.startswith("cmpx")
            self.vector(ins, k, "m<-" + types, fn, ["exec", *ops[-2:]] if to_exec else ops)
            if to_exec and len(ops) > 2:
                # gfx9 writes the mask it names as well
                self.swrite(self.op(ops[0]), self.exec())
        elif k.startswith("bitop"):
            t = "h" if k.endswith("b16") else "i"
            self.vector(ins, k, f"{t}<-" + t * (len(ops) - 1), isa.bitop(int(ins.mods["bitop3"], 0)), ops)
        elif k.startswith("s_") and k[2:] in isa.VALU:
            # transcendental functions of a scalar register
            types, fn = isa.VALU[k[2:]]
            value = fn(self.typed(self.op(ops[1]), types[-1])).i()
            self.swrite(self.op(ops[0]), value.zext(32))
        elif k in self.LANE_MOVES:
            self.lane_move(ins, k)
        elif k in PACKED:
            self.packed(ins, ops, k)
        elif k in MIXED:
            self.mixed(ins, ops, k)
        elif k in MATRIX or ANY_FORMAT.match(half_of(k)):
            self.matrix(ins, k)
        elif is_small_conversion(k):
            self.small_conversion(ins, k)
        elif k == "perm_b32":
            self.perm(ins, ops)
        elif k in isa.VALU:
            types, fn = isa.VALU[k]
            self.vector(ins, k, types, fn, ops)
        else:
            raise KeyError("no semantics")

    def vector(
        self, ins: Inst, name: str, types: str, fn: Formula, ops: list[str], *, dst_override: int | None = None
    ) -> None:
        """Apply `fn` to every lane, under exec. dst_override: vector register that takes the result instead."""
        mods, W = ins.mods, self.W
        dtypes, stypes = types.split("<-")
        dst = [(t, self.op(o)) for t, o in zip(dtypes, ops, strict=False)]
        srcs = self.sources(stypes, dst[0][1], ops[len(dtypes) :])
        stypes = stypes.replace("D", dtypes[0])
        key, args, loaders = [name], [], []
        opsel = bracket_list(mods["op_sel"]) if "op_sel" in mods else []
        if any(opsel) and not set(types) & set("he"):
            raise KeyError("op_sel")
        sdwa, is_dpp = ins.mn.endswith("sdwa"), ins.mn.endswith("dpp")
        for m in mods:
            if (not is_dpp and _DPP_MODIFIERS.match(m)) or (not sdwa and _SDWA_MODIFIERS.match(m)):
                raise KeyError(f"modifier {m}")
            if dtypes[0] == "m" and m in _RESULT_MODIFIERS:
                raise KeyError(f"{m} on a compare")
        for i, (t, o) in enumerate(zip(stypes, srcs, strict=True)):
            half = o.half or ("h" if t in "he" and i < len(opsel) and opsel[i] else None)
            source = Source(t, o, half, mods.get(f"src{i}_sel", "DWORD") if sdwa else "DWORD")
            key.append(source.key())
            loaders.append(source)
            if t in "qw" and "i64" in name:
                o.value = o.signed_literal if o.kind == "imm" else o.value
            # a 16-bit immediate has its own pattern
            bits = 16 if t in "he" and o.kind == "imm" else W if t == "m" else _WIDTH.get(t, 32)
            args.append(self.pass_(o, bits, t))
        d0 = dst[0][1]
        value = dtypes[0] != "m"
        if value and d0.kind == "v":
            args.append(("ptr", self.vptr(d0.idx if dst_override is None else dst_override)))
        elif value:
            raise KeyError("destination")
        args.append((f"i{W}", self.exec().name))
        part = self.destination_part(name, dtypes[0], d0, opsel[len(stypes) : len(stypes) + 1], mods if sdwa else {})
        dpp = self.dpp_lanes(ins) if is_dpp else None
        key.append(f"d{dtypes}{part}{'_'.join(f'{m}{mods[m]}' for m in _RESULT_MODIFIERS if m in mods)}")
        if dpp:
            key.append("dpp_" + "_".join(f"{k}{v}" for k, v in mods.items()))

        def body(f: Fn, params: list, exec_full: bool = False) -> None:
            write = ex = params[-1]
            # the destination pointer and exec follow the sources
            vals = [self.load_source(f, p, l) for p, l in zip(params, loaders, strict=False)]
            if dpp:
                vals[0], write = self.dpp_value(f, dpp, vals[0], ex, exec_full)
            r = fn(*vals)
            r = list(r) if isinstance(r, tuple) else [r]
            if value:
                x = self.modify_result(name, mods, vals, r[0])
                self.write_vector(f, params[-2], x.splat(W), write, part=part)
            if "m" in dtypes:
                # inactive lanes read as 0
                m = r[-1].splat(W).lanes_to_bits() & (ex if write is ex else write.lanes_to_bits())
                f.emit(f"ret i{W} {m.name}")
            else:
                f.emit("ret void")

        def build(f: Fn, params: list) -> None:
            if dpp:
                # most often every lane is active, and constants do
                f.when(params[-1].cmp("eq", -1), lambda: body(f, params, True))
            body(f, params)

        m = self.call("_".join(key), f"i{W}" if "m" in dtypes else "void", args, build)
        if m:
            self.swrite(dst[dtypes.index("m")][1], m)

    def destination_part(self, name: str, t: str, dst: Operand, opsel: list[int], sdwa: dict) -> str:
        """Which part of its register a result replaces.

        "" all of it; "l" or "h" one half, the other kept; "z" the low half, the other cleared; "BYTE_1p" and the like
        for SDWA, with the rest preserved (p) or zero (z).
        """
        if sdwa.get("dst_sel", "DWORD") != "DWORD":
            if sdwa.get("dst_unused", "UNUSED_PAD") == "UNUSED_SEXT":
                raise KeyError("UNUSED_SEXT")
            return sdwa["dst_sel"] + ("p" if sdwa.get("dst_unused") == "UNUSED_PRESERVE" else "z")
        if t not in "he":
            return ""
        if dst.half == "h" or any(opsel):
            return "h"
        return "z" if not self.gfx12 and name in isa.CLEARS_HIGH_HALF else "l"

    def perm(self, ins: Inst, ops: list[str]) -> None:
        """v_perm_b32. The selector is often known here, or a scalar that packs half-words."""
        types, fn = isa.VALU["perm_b32"]
        selector = self.op(ops[3])
        if selector.kind == "imm":
            known = selector.bits(32)
            special = perm_of(known)
            if special:
                return self.vector(ins, f"perm_{known:x}", "i<-ii", special, ops[:3])
        return self.vector(ins, "perm_b32", types, fn, ops)

    def sources(self, types: str, dst: Operand, texts: list[str]) -> list[Operand]:
        """One operand per source type; the last may be the implied vcc of the short encodings."""
        srcs, texts = [], list(texts)
        for t in types:
            if t == "D":
                srcs.append(dst)
            elif t == "m" and not texts:
                srcs.append(self.op("vcc"))
            elif texts:
                srcs.append(self.op(texts.pop(0)))
            else:
                raise KeyError("operand count")
        if texts:
            raise KeyError("operand count")
        return srcs

    def load_source(self, f: Fn, p: Any, source: Source) -> Any:
        """A source inside a helper: `p` points to vector registers or is a scalar's value."""
        (t, o, half, sel), W = source, self.W
        if t == "w" and (o.abs or o.neg or o.sext or sel != "DWORD"):
            raise KeyError("modifier on a 64-bit integer operand")
        if o.kind != "v":
            if t == "m":
                return p.bits_to_lanes(W)
            v = p
            if t == "w":
                return Pair(p.trunc(32), (p >> 32).trunc(32)).splat(W)
        elif t == "w":
            return Pair(f.load(p, 32, W), f.load(f.gep(p, 4 * W), 32, W))
        elif t in "qd":
            v = f.load(p, 32, W).zext(64) | (f.load(f.gep(p, 4 * W), 32, W).zext(64) << 32)
        else:
            v = f.load(p, 32, W)
        if sel != "DWORD":
            v = self.select_bytes(v, sel, o.sext)
        elif o.sext:
            raise KeyError("sext")
        if t in "he":
            v = v if v.bits == 16 else (v >> 16 if half == "h" else v).trunc(16)
        if t in "fde":
            v = v.f()
            if o.abs:
                v = v.intr("fabs")
            if o.neg:
                v = -v
        elif o.abs or o.neg:
            # v_cndmask, for one, moves floats
            sign = 1 << (v.bits - 1)
            v = v & (sign - 1) if o.abs else v
            v = v ^ sign if o.neg else v
        return v.splat(W)

    @staticmethod
    def select_bytes(v: Val, sel: str, signed: bool) -> Val:
        """SDWA: BYTE_n or WORD_n of each lane, extended."""
        kind, n = sel.split("_")
        bits = 16 if kind == "WORD" else 8
        v = v << (32 - bits - int(n) * bits)
        return v.sar(32 - bits) if signed else v >> (32 - bits)

    def modify_result(self, name: str, mods: dict, vals: list, r: Any) -> Any:
        """Output modifiers: times 2, 4 or 1/2, then clamp."""
        if isinstance(r, Pair):
            if any(m in mods for m in _RESULT_MODIFIERS):
                raise KeyError("modifier on a 64-bit integer result")
            return r
        for key, factors in (("mul", {"2": 2.0, "4": 4.0}), ("div", {"2": 0.5})):
            if key in mods:
                if not r.flt:
                    raise KeyError(f"{key} on an integer result")
                r = r * factors[mods[key]]
        if "clamp" not in mods:
            return r
        if name == "sub_nc_u32":
            return vals[0].cmp("ugt", vals[1]).pick(r, 0)
        if name == "subrev_nc_u32":
            return vals[1].cmp("ugt", vals[0]).pick(r, 0)
        if name == "add_nc_u32":
            return r.cmp("ult", vals[0]).pick(-1, r)
        if r.flt:
            # NaN becomes 0
            return r.intr("maximumnum", r.const(0.0)).intr("minimumnum", r.const(1.0))
        raise KeyError("clamp")

    def dual(self, ins: Inst, other: Inst) -> None:
        """Both halves read their sources before either writes."""
        first, second = self.op(ins.ops[0]), [self.op(o) for o in other.ops]
        accumulates = "fmac" in other.mn or "acc" in other.mn
        read_later = any(o.kind == "v" and o.idx == first.idx for o in second[0 if accumulates else 1 :])
        # send the first result through a spare register if the second half reads what it overwrites
        for h, dst in ((ins, self.temp if read_later else None), (other, None)):
            k = isa.canonical(h.mn)[2:]
            if k.startswith("bitop2"):
                types, fn = "i<-ii", isa.bitop(int(h.mods["bitop3"], 0))
            else:
                types, fn = isa.VALU[k]
            self.vector(h, k, types, fn, h.ops, dst_override=dst)
        if read_later:
            self.move(first.idx, self.temp)

    def move(self, dst: int, src: int) -> None:
        """Copy a vector register in the active lanes."""
        ins = asm.Inst(0, "v_mov_b32", [], {}, "")
        self.vector(ins, "mov_b32", *isa.VALU["mov_b32"], [f"v{dst}", f"v{src}"])
