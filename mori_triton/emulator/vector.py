"""Vector instructions (VALU): operand modifiers, DPP, SDWA, compares, lane moves, packed and dual-issue forms, matrix products."""
from mori_triton.emulator import asm
from mori_triton.emulator import isa


def _square(n, per_lane):
    """mfma: n x n result; each lane holds `per_lane` consecutive k of one row (A) or column (B)"""
    half = 64 // n
    return dict(n=n, k=per_lane * half, per_lane=per_lane, row=lambda r, lane: (r % 4) + 4 * (lane // n) + 4 * half * (r // 4), regs=n * n // 64)


# name -> result size n, depth k, elements a lane, row of result register r in a lane (its column is lane % n), result registers
MATRIX = {"mfma_f32_32x32x8_bf16": _square(32, 4), "mfma_f32_32x32x16_bf16": _square(32, 8), "mfma_f32_16x16x16_bf16": _square(16, 4), "mfma_f32_16x16x32_bf16": _square(16, 8),
          "wmma_f32_16x16x16_bf16": dict(n=16, k=16, per_lane=8, row=lambda r, lane: r + 8 * (lane // 16), regs=8)}


class Vector:
    def vector(self, ins, name, types, fn, ops, dst_override=None):
        mods, W = ins.mods, self.W
        dtypes, stypes = types.split("<-")
        dst = [(t, self.op(o)) for t, o in zip(dtypes, ops)]
        texts, srcs = list(ops[len(dtypes):]), []
        for t in stypes:
            if t == "D":                                       # the destination's old value
                srcs.append(dst[0][1])
            else:
                srcs.append(self.op(texts.pop(0)) if texts else self.op("vcc"))
        if texts:
            raise KeyError("operand count")
        stypes = stypes.replace("D", dtypes[0])
        key, args, loaders = [name], [], []
        opsel = [int(x) for x in mods["op_sel"].strip("[]").split(",")] if "op_sel" in mods else []
        if any(opsel) and "h" not in types:
            raise KeyError("op_sel")
        dpp = self.dpp_lanes(ins) if ins.mn.endswith("dpp") else None
        for i, (t, o) in enumerate(zip(stypes, srcs)):
            sel = mods.get(f"src{i}_sel", "DWORD") if ins.mn.endswith("sdwa") else "DWORD"
            half = o.half or ("h" if t == "h" and i < len(opsel) and opsel[i] else None)
            if o.sext:
                raise KeyError("sext")
            key.append(f"{t}{o.kind[0]}{'n' * o.neg}{'a' * o.abs}{half or ''}{'' if sel == 'DWORD' else sel}")
            args.append(("i32", str(o.bits(16) & 0xFFFF)) if t == "h" and o.kind == "imm" else self.pass_(o, {"q": 64, "d": 64, "m": W}.get(t, 32)))
            loaders.append((t, o, half, sel))
        d0 = dst[0][1]
        dst_half = d0.half or ("h" if dtypes[0] == "h" and len(opsel) > len(stypes) and opsel[len(stypes)] else None)
        value = dtypes[0] != "m"
        if value and d0.kind == "v":
            args.append(("ptr", self.vptr(d0.idx if dst_override is None else dst_override)))
        args.append((f"i{W}", self.exec().name))
        clamp = "clamp" in mods
        key += [f"d{dtypes}{dst_half or ''}{'s' if d0.kind == 's' else ''}{'_clamp' * clamp}{'_bitop' + mods['bitop3'] if 'bitop3' in mods else ''}"]
        if dpp:
            key.append("dpp_" + "_".join(f"{k}{v if v is not True else ''}" for k, v in mods.items()))

        def build(f, params):
            ex = params[-1].bits_to_lanes(W)
            vals = [self.load_source(f, p, *l) for p, l in zip(params, loaders)]
            write = ex
            if dpp:
                idx, ok, rows, zero = dpp
                live = f.flags(ok) & ex.shuffle(idx)
                v = vals[0].shuffle(idx)
                vals[0] = live.pick(v, v.const(0))
                write = ex & f.flags(rows) if zero else ex & f.flags(rows) & live
            r = fn(*vals)
            r = list(r) if isinstance(r, tuple) else [r]
            if clamp:
                r[0] = self.clamp(f, name, vals, r[0])
            if value:
                self.write_vector(f, params[-2], dtypes[0], r[0].splat(W), write, dst_half)
            if "m" in dtypes:
                m = (r[-1].splat(W) & ex).lanes_to_bits()
                f.emit(f"ret i{W} {m.name}")
            else:
                f.emit("ret void")
        ret = f"i{W}" if "m" in dtypes else "void"
        m = self.call("_".join(key), ret, args, build)
        if m:
            self.swrite(dst[dtypes.index("m")][1], m)

    def load_source(self, f, p, t, o, half, sel):
        W = self.W
        if o.kind != "v":
            v = p
            if t == "m":
                return p.bits_to_lanes(W)
            if t == "h":
                v = v & 0xFFFF
            elif sel != "DWORD":
                v = self.select_bytes(v, sel)
        elif t in "qd":
            v = f.load(p, 32, W).zext(64) | (f.load(f.gep(p, 4 * W), 32, W).zext(64) << 32)
        else:
            v = f.load(p, 32, W)
            if t == "h":
                v = (v >> 16) if half == "h" else v & 0xFFFF
            elif sel != "DWORD":
                v = self.select_bytes(v, sel)
        if t in "fd":
            v = v.f()
            if o.abs:
                v = v.intr("fabs")
            if o.neg:
                v = -v
        elif o.abs or o.neg:
            raise KeyError("modifier on an integer operand")
        return v.splat(W)

    @staticmethod
    def select_bytes(v, sel):
        kind, n = sel.split("_")
        return (v >> (int(n) * (16 if kind == "WORD" else 8))) & (0xFFFF if kind == "WORD" else 0xFF)

    def clamp(self, f, name, vals, r):
        if name == "sub_nc_u32":
            return vals[0].cmp("ugt", vals[1]).pick(r, 0)
        if name == "add_nc_u32":
            return r.cmp("ult", vals[0]).pick(-1, r)
        if r.flt and r.bits == 32:
            return r.intr("maxnum", r.const(0.0)).intr("minnum", r.const(1.0))
        raise KeyError("clamp")

    def write_vector(self, f, p, t, v, write, half=None):
        v = v.i()
        if v.bits == 64:
            parts = [v.trunc(32), (v >> 32).trunc(32)]
        else:
            parts = [v]
        for k, x in enumerate(parts):
            q = f.gep(p, 4 * self.W * k)
            old = f.load(q, 32, self.W)
            if t == "h":
                x = (old & 0xFFFF) | (x << 16) if half == "h" else (old & 0xFFFF0000) | (x & 0xFFFF)
            # not a select: from optimisation level 1 on, that and the store become a masked store, several times slower on some CPUs
            f.store(q, old ^ ((old ^ x) & write.sext(32)))

    def dpp_lanes(self, ins):
        """(source lane of each lane, source exists, lane may be written, missing sources read as 0)"""
        m, idx, ok = ins.mods, [], []
        ctl = next((k for k in m if k.startswith(("quad_perm", "row_sh", "row_ro", "row_x", "row_bcast", "row_mirror", "row_half_mirror", "row_newbcast", "wave_"))), None)
        if ctl is None:
            raise KeyError("dpp control")
        n = int(m[ctl]) if isinstance(m[ctl], str) and m[ctl].isdigit() else 0
        quad = [int(x) for x in m[ctl].strip("[]").split(",")] if ctl == "quad_perm" else None
        for l in range(self.W):
            r = l & ~15
            s, good = {"quad_perm": lambda: ((l & ~3) | quad[l & 3], True), "row_shr": lambda: (l - n, (l & 15) >= n), "row_shl": lambda: (l + n, (l & 15) + n < 16),
                       "row_ror": lambda: (r | ((l - n) & 15), True), "row_xmask": lambda: (l ^ n, True), "row_share": lambda: (r | n, True), "row_newbcast": lambda: (r | n, True),
                       "row_bcast": lambda: (r - 1, l >= 16) if n == 15 else (31, l >= 32), "row_half_mirror": lambda: (l ^ 7, True), "row_mirror": lambda: (l ^ 15, True),
                       "wave_shl": lambda: (l + 1, l + 1 < self.W), "wave_shr": lambda: (l - 1, l > 0)}[ctl]()
            idx.append(s if good else l); ok.append(good)
        rm, bm = int(m.get("row_mask", "0xf"), 0), int(m.get("bank_mask", "0xf"), 0)
        return idx, ok, [rm >> (l >> 4) & 1 and bm >> (l >> 2 & 3) & 1 for l in range(self.W)], "bound_ctrl" in m

    def v(self, ins, base):
        k, ops, f = base[2:], ins.ops, self.f
        if ins.dual:
            return self.dual(ins)
        if k.startswith("cmp"):
            types, fn = isa.compare(k)
            ops = ops if len(ops) > 2 and not k.startswith("cmpx") else ["exec"] + ops[-2:]
            self.vector(ins, k, "m<-" + types, fn, ops)
        elif k.startswith("bitop"):
            t = "h" if k.endswith("b16") else "i"
            self.vector(ins, k, f"{t}<-" + t * (len(ops) - 1), isa.bitop(int(ins.mods["bitop3"], 0)), ops)
        elif k == "readfirstlane_b32":
            e, o = self.exec(), self.op(ops[1])
            lane = e.cmp("eq", 0).pick(0, e.intr("cttz", 0)).zext(64)
            self.swrite(self.op(ops[0]), f.load(f.gep(self.vptr(o.idx), lane * 4), 32) if o.kind == "v" else self.sread(o))
        elif k in ("readlane_b32", "writelane_b32"):
            lane = ((self.sread(self.op(ops[2])) & (self.W - 1)) * 4).zext(64)
            if k[0] == "r":
                self.swrite(self.op(ops[0]), f.load(f.gep(self.vptr(self.op(ops[1]).idx), lane), 32))
            else:
                f.store(f.gep(self.vptr(self.op(ops[0]).idx), lane), self.sread(self.op(ops[1])))
        elif k in ("permlane16_b32", "permlanex16_b32"):
            self.permlane(ins, ops, k)
        elif k in ("permlane16_swap_b32", "permlane32_swap_b32"):
            n, W = int(k[8:10]), self.W
            args = [("ptr", self.vptr(self.op(o).idx)) for o in ops]

            def build(g, p):                                     # odd rows of the first register <-> even rows of the second
                a, b, odd = g.load(p[0], 32, W), g.load(p[1], 32, W), g.flags([l // n & 1 for l in range(W)])
                g.store(p[0], odd.pick(b.shuffle([max(l - n, 0) for l in range(W)]), a))
                g.store(p[1], odd.pick(b, a.shuffle([min(l + n, W - 1) for l in range(W)])))
                g.emit("ret void")
            self.call(k, "void", args, build)
        elif k in ("pk_fma_f32", "pk_add_f32", "pk_mul_f32", "pk_mov_b32"):
            self.packed(ins, ops, k)
        elif k in MATRIX:
            self.matrix(ops, k)
        elif k in isa.VALU:
            if ins.mods.get("dst_sel", "DWORD") != "DWORD":
                raise KeyError("dst_sel")
            types, fn = isa.VALU[k]
            self.vector(ins, k, types, fn, ops)
        else:
            raise KeyError("no semantics")

    def dual(self, ins):
        """both halves read their sources before either writes: send the first result through a spare register"""
        for h, dst in ((ins, self.temp), (ins.dual, None)):
            k = isa.canonical(h.mn)[2:]
            types, fn = ("i<-ii", isa.bitop(int(h.mods["bitop3"], 0))) if k.startswith("bitop2") else isa.VALU[k]
            self.vector(h, k, types, fn, h.ops, dst_override=dst)
        self.move(self.op(ins.ops[0]).idx, self.temp)

    def move(self, dst, src):
        self.vector(asm.Inst(0, "v_mov_b32", [], {}, ""), "mov_b32", *isa.VALU["mov_b32"], [f"v{dst}", f"v{src}"])

    def permlane(self, ins, ops, k):
        flip, W = 16 if "x16" in k else 0, self.W
        fetch_inactive, bound = ([int(x) for x in ins.mods.get("op_sel", "[0,0]").strip("[]").split(",")] + [0])[:2]
        args = [("ptr", self.vptr(self.op(o).idx)) for o in ops[:2]] + [("i32", self.sread(self.op(o)).name) for o in ops[2:4]] + [(f"i{W}", self.exec().name)]

        def build(f, p):
            dst, src, lo, hi, ex = p
            copy = f.ptr(f"alloca <{W} x i32>")
            f.store(copy, f.load(src, 32, W))
            sel = (hi.zext(64) << 32) | lo.zext(64)

            def lane(l):
                s = ((l & ~15) ^ flip) | ((sel >> ((l & 15) * 4)) & 15)
                live = (ex >> s.trunc(W) if W == 32 else ex >> s).trunc(1) | fetch_inactive
                put = lambda v: f.store(f.gep(dst, l * 4), v)
                f.when(live, lambda: put(f.load(f.gep(copy, s * 4), 32)), (lambda: put(f.int(0))) if bound else None)
            f.for_lanes(ex, lane)
            f.emit("ret void")
        self.call(f"{k}_{fetch_inactive}{bound}", "void", args, build)

    def packed(self, ins, ops, k):
        n, W = len(ops) - 1, self.W
        get = lambda key, d: [int(x) for x in ins.mods[key].strip("[]").split(",")] if key in ins.mods else [d] * n
        lo, hi, nlo, nhi = get("op_sel", 0), get("op_sel_hi", 1), get("neg_lo", 0), get("neg_hi", 0)
        srcs = [self.op(o) for o in ops[1:]]
        args = [("ptr", self.vptr(o.idx)) if o.kind == "v" else ("i64", (self.sread(o, 64) if o.kind == "s" else self.both(o)).name) for o in srcs]
        args += [("ptr", self.vptr(self.op(ops[0]).idx)), (f"i{W}", self.exec().name)]
        fn = {"pk_fma_f32": isa._fma, "pk_add_f32": lambda a, b: a + b, "pk_mul_f32": lambda a, b: a * b, "pk_mov_b32": None}[k]

        def build(f, p):
            def src(i, h, neg):
                v = f.load(f.gep(p[i], 4 * W * h), 32, W) if srcs[i].kind == "v" else (p[i] >> (32 * h)).trunc(32).splat(W)
                v = v.f()
                return -v if neg else v
            a, b = [src(i, lo[i], nlo[i]) for i in range(n)], [src(i, hi[i], nhi[i]) for i in range(n)]
            ex = p[-1].bits_to_lanes(W)
            r = (a[0], b[1]) if fn is None else (fn(*a), fn(*b))
            for h, v in enumerate(r):
                self.write_vector(f, f.gep(p[-2], 4 * W * h), "f", v, ex)
            f.emit("ret void")
        self.call(f"{k}_{''.join(o.kind[0] for o in srcs)}_{lo}{hi}{nlo}{nhi}", "void", args, build)

    def both(self, o):
        b = o.bits(32) & 0xFFFFFFFF
        return self.f.int(b | b << 32, 64)

    def matrix(self, ops, k):
        """bf16 products, accumulated in fp32 one k after the other (the hardware's order and rounding are not documented)"""
        m, W = MATRIX[k], self.W
        d, a, b, c = (self.op(o) for o in ops)
        args = [("ptr", self.vptr(o.idx)) for o in (d, a, b)] + [self.pass_(c)]

        def build(f, p):
            lanes, n = range(W), m["n"]

            def element(src, k, index):                          # element k of the row or column index(lane)
                e = k % m["per_lane"]
                reg = f.load(f.gep(src, 4 * W * (e // 2)), 32, W)
                x = (reg & 0xFFFF0000 if e % 2 else reg << 16).f()
                return x.shuffle([index(l) + n * (k // m["per_lane"]) for l in lanes])
            cols = [element(p[2], k, lambda l: l % n) for k in range(m["k"])]
            sums = []
            for r in range(m["regs"]):
                acc = f.load(f.gep(p[3], 4 * W * r), 32, W).f() if c.kind == "v" else p[3].f().splat(W)
                for k in range(m["k"]):
                    acc = element(p[1], k, lambda l: m["row"](r, l)).intr("fma", cols[k], acc)
                sums.append(acc)
            for r, x in enumerate(sums):
                f.store(f.gep(p[0], 4 * W * r), x.i())
            f.emit("ret void")
        self.call(f"{k}_{c.kind}", "void", args, build)
