"""Moves between lanes: DPP source lanes, readlane and writelane, permlane."""

from __future__ import annotations

from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.lift_base import LiftBase

_DPP_CONTROL = (
    "quad_perm",
    "row_sh",
    "row_ro",
    "row_x",
    "row_bcast",
    "row_mirror",
    "row_half_mirror",
    "row_newbcast",
    "wave_",
)


def _dpp_source(control: str, n: int, quad: list[int], lane: int, warp_size: int) -> tuple[int, bool]:
    """(source lane, whether it exists) of one lane; a row is 16 lanes."""
    row = lane & ~15
    table = {
        "quad_perm": lambda: ((lane & ~3) | quad[lane & 3], True),
        "row_shr": lambda: (lane - n, (lane & 15) >= n),
        "row_shl": lambda: (lane + n, (lane & 15) + n < 16),
        "row_ror": lambda: (row | ((lane - n) & 15), True),
        "row_xmask": lambda: (lane ^ n, True),
        "row_share": lambda: (row | n, True),
        "row_newbcast": lambda: (row | n, True),
        "row_bcast": lambda: (row - 1, lane >= 16) if n == 15 else (31, lane >= 32),
        "row_half_mirror": lambda: (lane ^ 7, True),
        "row_mirror": lambda: (lane ^ 15, True),
        "wave_shl": lambda: (lane + 1, lane + 1 < warp_size),
        "wave_shr": lambda: (lane - 1, lane > 0),
    }
    return table[control]()


class Lanes(LiftBase):
    """Part of the lifter."""

    LANE_MOVES = frozenset(
        {
            "readfirstlane_b32",
            "readlane_b32",
            "writelane_b32",
            "swap_b32",
            "permlane16_b32",
            "permlanex16_b32",
            "permlane16_swap_b32",
            "permlane32_swap_b32",
        }
    )

    def dpp_lanes(self, ins: Inst) -> tuple[list[int], list[bool], list[int], bool]:
        """(source lane of each lane, source exists, lane may be written, missing sources read as 0)"""
        m, idx, ok = ins.mods, [], []
        control = next((k for k in m if k.startswith(_DPP_CONTROL)), None)
        if control is None:
            raise KeyError("dpp control")
        value = m[control]
        n = int(value) if isinstance(value, str) and value.isdigit() else 0
        if control == "row_bcast" and n not in (15, 31):
            raise KeyError("dpp control")
        quad = [int(x) for x in value.strip("[]").split(",")] if control == "quad_perm" else []
        for lane in range(self.W):
            source, good = _dpp_source(control, n, quad, lane, self.W)
            idx.append(source if good else lane)
            ok.append(good)
        rows, banks = int(m.get("row_mask", "0xf"), 0), int(m.get("bank_mask", "0xf"), 0)
        write = [rows >> (l >> 4) & 1 and banks >> (l >> 2 & 3) & 1 for l in range(self.W)]
        return idx, ok, write, "bound_ctrl" in m

    @staticmethod
    def dpp_value(f: Fn, dpp: tuple, v: Val, ex: Val, exec_full: bool) -> tuple[Val, Val]:
        """(first source after its move between lanes, lanes to write). exec_full: every lane is active."""
        idx, ok, rows, zero = dpp
        moved = v.shuffle(idx)
        if exec_full:
            live = f.flags(ok)
            write = (
                ex
                if all(rows) and (zero or all(ok))
                else f.flags([r and (zero or o) for r, o in zip(rows, ok, strict=True)])
            )
            return moved if all(ok) else live.pick(moved, v.const(0)), write
        active = ex.bits_to_lanes(v.lanes)
        live = f.flags(ok) & active.shuffle(idx)
        write = active & f.flags(rows)
        return live.pick(moved, v.const(0)), write if zero else write & live

    def lane_move(self, ins: Inst, k: str) -> None:
        f, ops = self.f, ins.ops
        if k == "readfirstlane_b32":
            # with no active lane, lane 0
            e, o = self.exec(), self.op(ops[1])
            lane = e.cmp("eq", 0).pick(0, e.intr("cttz", 0)).zext(64)
            value = f.load(f.gep(self.vptr(o.idx), lane * 4), 32) if o.kind == "v" else self.sread(o)
            self.swrite(self.op(ops[0]), value)
        elif k in ("readlane_b32", "writelane_b32"):
            lane = ((self.sread(self.op(ops[2])) & (self.W - 1)) * 4).zext(64)
            if k == "readlane_b32":
                self.swrite(self.op(ops[0]), f.load(f.gep(self.vptr(self.op(ops[1]).idx), lane), 32))
            else:
                f.store(f.gep(self.vptr(self.op(ops[0]).idx), lane), self.sread(self.op(ops[1])))
        elif k == "swap_b32":
            self.swap(ops)
        elif k.endswith("swap_b32"):
            self.permlane_swap(ops, k)
        else:
            self.permlane(ins, ops, k)

    def swap(self, ops: list[str]) -> None:
        """Exchange two registers in the active lanes."""
        W = self.W

        def build(f: Fn, p: list) -> None:
            a, b, ex = f.load(p[0], 32, W), f.load(p[1], 32, W), p[2]
            self.write_vector(f, p[0], b, ex)
            self.write_vector(f, p[1], a, ex)
            f.emit("ret void")

        args = [("ptr", self.vptr(self.op(o).idx)) for o in ops]
        self.call("swap_b32", "void", [*args, (f"i{W}", self.exec().name)], build)

    def permlane_swap(self, ops: list[str], k: str) -> None:
        """Odd rows (of 16 or 32 lanes) of the first register <-> even rows of the second; exec is not looked at."""
        n, W = int(k[8:10]), self.W

        def build(f: Fn, p: list) -> None:
            a, b, odd = f.load(p[0], 32, W), f.load(p[1], 32, W), f.flags([l // n & 1 for l in range(W)])
            f.store(p[0], odd.pick(b.shuffle([max(l - n, 0) for l in range(W)]), a))
            f.store(p[1], odd.pick(b, a.shuffle([min(l + n, W - 1) for l in range(W)])))
            f.emit("ret void")

        self.call(k, "void", [("ptr", self.vptr(self.op(o).idx)) for o in ops], build)

    def permlane(self, ins: Inst, ops: list[str], k: str) -> None:
        """Any lane of the same row (permlane16) or of the pair's other row (permlanex16), 4 selector bits a lane."""
        flip, W = 16 if "x16" in k else 0, self.W
        op_sel = [int(x) for x in ins.mods.get("op_sel", "[0,0]").strip("[]").split(",")]
        fetch_inactive, bound = [*op_sel, 0][:2]
        args = [("ptr", self.vptr(self.op(o).idx)) for o in ops[:2]]
        args += [("i32", self.sread(self.op(o)).name) for o in ops[2:4]] + [(f"i{W}", self.exec().name)]

        def build(f: Fn, p: list) -> None:
            dst, src, lo, hi, ex = p
            copy = f.ptr(f"alloca <{W} x i32>")
            f.store(copy, f.load(src, 32, W))
            sel = (hi.zext(64) << 32) | lo.zext(64)

            def lane(l: Val) -> None:
                s = ((l & ~15) ^ flip) | ((sel >> ((l & 15) * 4)) & 15)
                live = (ex >> s.trunc(W) if W == 32 else ex >> s).trunc(1) | fetch_inactive

                def put(v: Val) -> None:
                    f.store(f.gep(dst, l * 4), v)

                zero = (lambda: put(f.int(0))) if bound else None
                f.when(live, lambda: put(f.load(f.gep(copy, s * 4), 32)), zero)

            f.for_lanes(ex, lane)
            f.emit("ret void")

        self.call(f"{k}_{fetch_inactive}{bound}", "void", args, build)
