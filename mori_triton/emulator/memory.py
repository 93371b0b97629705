"""Memory instructions: global, flat, raw-buffer, scratch and LDS accesses, atomics, lane permutes through LDS hardware."""
import re

from mori_triton.emulator import isa
from mori_triton.emulator.state import *


class Memory:
    def fault(self, f, w, kind, pc, addr):
        f.store(f.gep(w, FAULT), f.int(kind)); f.store(f.gep(w, FAULT_PC), pc); f.store(f.gep(w, FAULT_ADDR), addr.zext(64))
        f.emit("ret i1 false")

    def check(self, f, w, a, n, pc, aligned=False):
        """leave the helper with `false` unless [a, a+n) lies in a registered range; the range hit last is tried first"""
        def search(g, p):
            w, a, end = p
            table, count = g.load(g.gep(w, RANGES), 64), g.load(g.gep(w, NRANGES), 64)
            var = g.ptr("alloca i64")
            g.store(var, g.int(0, 64)); g.emit("br label %next"); g.label("next")
            i = g.load(var, 64)
            g.when(i.cmp("uge", count), lambda: g.emit("ret i1 false"))
            g.store(var, i + 1)
            lo, hi = g.load(g.addr(table + i * 16), 64), g.load(g.addr(table + i * 16 + 8), 64)

            def found():
                g.store(g.gep(w, LAST_LO), lo); g.store(g.gep(w, LAST_HI), hi)
                g.emit("ret i1 true")
            g.when(lo.cmp("ule", a) & hi.cmp("uge", end) & a.cmp("ult", end), found)
            g.emit("br label %next")

        def slow():
            ok = self._call_from(f, "in_range", "i1", [("ptr", w), ("i64", a.name), ("i64", end.name)], search)
            f.when(ok ^ 1, lambda: self.fault(f, w, 1, pc, a))
        end = a + n
        f.when(f.load(f.gep(w, LAST_LO), 64).cmp("ugt", a) | f.load(f.gep(w, LAST_HI), 64).cmp("ult", end), slow)
        if aligned:
            f.when((a & (n - 1)).cmp("ne", 0), lambda: self.fault(f, w, 3, pc, a))

    def _call_from(self, f, *args):
        saved, self.f = self.f, f
        try:
            return self.call(*args)
        finally:
            self.f = saved

    def guarded(self, ok):
        n = self.f.n = self.f.n + 1
        self.f.emit(f"br i1 {ok.name}, label %ok{n}, label %faulted")
        self.f.label(f"ok{n}")

    LOADS = {"b32": 4, "b64": 8, "b96": 12, "b128": 16, "u16": 2, "i16": 2, "u8": 1, "i8": 1, "d16_b16": 2, "d16_hi_b16": 2}
    STORES = {"b32": 4, "b64": 8, "b96": 12, "b128": 16, "b16": 2, "b8": 1, "d16_hi_b16": 2, "d16_hi_b8": 1}

    def lane_load(self, f, a, ty, dst):
        """load for one lane: address value -> register slot pointer"""
        n, W = self.LOADS[ty], self.W
        if n in (4, 8):                        # single-copy atomic when aligned, as on the GPU
            def put(v):
                for i in range(n // 4):
                    f.store(f.gep(dst, 4 * W * i), (v >> (32 * i)).trunc(32) if n == 8 else v)
            p = f.addr(a)
            f.when((a & (n - 1)).cmp("eq", 0), lambda: put(f.load(p, 8 * n, align=n, order="acquire")), lambda: put(f.load(p, 8 * n, align=1)))
        elif n > 8:
            vals = [f.load(f.addr(a + 4 * i), 32, align=1) for i in range(n // 4)]
            for i, v in enumerate(vals):
                f.store(f.gep(dst, 4 * W * i), v)
        else:
            v = f.load(f.addr(a), 8 * n, align=1)
            v = v.sext(32) if ty[0] == "i" else v.zext(32)
            if ty.startswith("d16"):
                old = f.load(dst, 32)
                v = (old & 0xFFFF) | (v << 16) if "hi" in ty else (old & 0xFFFF0000) | v
            f.store(dst, v)

    def lane_store(self, f, a, ty, src):
        n, W = self.STORES[ty], self.W
        words = [f.load(f.gep(src, 4 * W * i), 32) for i in range(max(1, n // 4))]
        if n in (4, 8):
            v = words[0] if n == 4 else words[0].zext(64) | (words[1].zext(64) << 32)
            p = f.addr(a)
            f.when((a & (n - 1)).cmp("eq", 0), lambda: f.store(p, v, n, "release"), lambda: f.store(p, v, 1))
        elif n > 8:
            for i, v in enumerate(words):
                f.store(f.addr(a + 4 * i), v, 1)
        else:
            f.store(f.addr(a), (words[0] >> 16 if "hi" in ty else words[0]).trunc(8 * n), 1)

    def lane_atomic(self, f, a, op, ty, src, dst):
        n, W = int(ty[1:]) // 8, self.W
        def word(i):
            lo = f.load(f.gep(src, 4 * W * i * (n // 4)), 32)
            return lo if n == 4 else lo.zext(64) | (f.load(f.gep(src, 4 * W * (2 * i + 1)), 32).zext(64) << 32)
        t, p, x = f"i{8 * n}", f.addr(a), word(0)
        if op == "cmpswap":
            pair = f.ptr(f"cmpxchg ptr {p}, {t} {word(1).name}, {t} {x.name} seq_cst seq_cst, align {n}")
            old = f.ins(f"extractvalue {{ {t}, i1 }} {pair}, 0", 8 * n)
        else:
            rmw = isa.ATOMIC_RMW.get(op)
            if ty[0] == "f":
                x, rmw = x.f(), {"add": "fadd", "max": "fmax", "min": "fmin"}[op]
            elif op in ("max", "min"):
                rmw = op if ty[0] == "i" else "u" + op
            old = f.ins(f"atomicrmw {rmw} ptr {p}, {x.ty} {x.name} seq_cst, align {n}", 8 * n, 0, ty[0] == "f").i()
        if dst:
            for i in range(n // 4):
                f.store(f.gep(dst, 4 * W * i), old if n == 4 else (old >> (32 * i)).trunc(32))

    def returns(self, m): return "RETURN" in str(m.get("th", "")) or ("sc0" in m or "glc" in m) and not self.gfx12

    def memory(self, ins, base):
        """global, flat, raw-buffer and scratch loads, stores and atomics"""
        space, kind, ty = re.match(r"(\w+?)_(load|store|atomic)_(.*)", base).groups()
        ops, m, W = [self.op(o) for o in ins.ops], ins.mods, self.W
        if "lds" in m or ty.startswith(("lds", "tr")):
            raise KeyError("LDS or transpose load")
        op = None
        if kind == "atomic":
            op, _, ty = ty.partition("_")
            if ty not in ("u32", "u64", "i32", "i64", "b32", "b64", "f32") or op not in (*isa.ATOMIC_RMW, "max", "min", "cmpswap"):
                raise KeyError("atomic")
        n = int(ty[1:]) // 8 if kind == "atomic" else (self.LOADS if kind == "load" else self.STORES)[ty]
        dst = ops.pop(0) if kind == "load" or (kind == "atomic" and self.returns(m)) and space != "buffer" else None
        off = int(m.get("offset", "0"), 0)
        if space == "buffer":                               # data, voffset, resource, soffset
            data, vo, res, so = ops if kind != "load" else [dst] + ops
            dst = data if kind == "load" or (kind == "atomic" and self.returns(m)) else None
            if "idxen" in m:
                raise KeyError("idxen")
            mode = "buf" + "v" * ("offen" in m)
            sbase = (self.sread(self.op(f"s[{res.idx}:{res.idx + 1}]"), 64) & 0xFFFFFFFFFFFF) + self.sread(so).zext(64)
            limit = self.f.load(self.sptr(res.idx + 2), 32)
            va = vo if "offen" in m else None
        else:
            va, data, sa = (ops[0], None, ops[1]) if kind == "load" else (ops[0], ops[1], ops[2] if len(ops) > 2 else self.op("off"))
            mode = "v64" if sa.kind == "null" else "sv"
            mode += f"x{n}" if "scale_offset" in m else ""
            sbase, limit = self.sread(sa, 64) if mode != "v64" else self.f.int(0, 64), self.f.int(0)
            if space == "scratch":
                mode = "scratch" + "v" * (va.kind == "v")
                sbase, limit, va = self.sread(sa, 32).zext(64), self.f.int(self.private), va if va.kind == "v" else None
        args = [("ptr", "%w"), ("ptr", self.vptr(va.idx if va else 0)), ("ptr", self.vptr(data.idx if data else 0)), ("ptr", self.vptr(dst.idx if dst else 0)),
                ("i64", sbase.name), ("i32", limit.name), ("i32", str(off)), ("i32", str(self.pos)), (f"i{W}", self.exec().name)]

        def build(f, p):
            w, va, data, dst_, sbase, limit, off, pc, ex = p

            def lane(l):
                slot = l * 4
                word = lambda i: f.load(f.gep(f.gep(va, 4 * W * i), slot), 32).zext(64)
                if mode.startswith("scratch"):
                    o = ((sbase.trunc(32) + off) + (f.load(f.gep(va, slot), 32) if mode[-1] == "v" else 0)).zext(64)
                    f.when((o + n).cmp("ugt", limit.zext(64)), lambda: self.fault(f, w, 5, pc, o))
                    a = f.ins(f"ptrtoint ptr {f.gep(w, self.scratch)} to i64", 64) + l * self.private + o
                elif mode.startswith("buf"):
                    o = off.zext(64) + word(0) if mode == "bufv" else off.zext(64)
                    a = sbase + o
                elif mode.startswith("sv"):
                    v = word(0) * n if "x" in mode else word(0)
                    a = sbase + v + off.sext(64)
                else:
                    a = (word(0) | (word(1) << 32)) + off.sext(64)

                def access():
                    if space != "scratch":
                        self.check(f, w, a, n, pc, kind == "atomic")
                    if kind == "load":
                        self.lane_load(f, a, ty, f.gep(dst_, slot))
                    elif kind == "store":
                        self.lane_store(f, a, ty, f.gep(data, slot))
                    else:
                        self.lane_atomic(f, a, op, ty, f.gep(data, slot), f.gep(dst_, slot) if dst else None)

                def outside():                              # out of a buffer's range: loads give 0, the rest is dropped
                    if dst:
                        for i in range(max(1, n // 4)):
                            f.store(f.gep(f.gep(dst_, 4 * W * i), slot), f.int(0))
                if mode.startswith("buf"):
                    f.when((o + n).cmp("ule", limit.zext(64)), access, outside)
                else:
                    access()
            f.for_lanes(ex, lane)
            f.emit("ret i1 true")
        self.guarded(self.call(f"{kind}_{op or ''}{ty}_{mode}{'_ret' if dst and kind == 'atomic' else ''}", "i1", args, build))

    def ds(self, ins, base):
        k, ops, m, W = base[3:], [self.op(o) for o in ins.ops], ins.mods, self.W
        if k in ("bpermute_b32", "permute_b32"):
            args = [("ptr", self.vptr(o.idx)) for o in ops] + [("i32", m.get("offset", "0")), (f"i{W}", self.exec().name)]

            def build(f, p):
                dst, addr, src, off, ex = p
                copy = f.ptr(f"alloca <{W} x i32>")
                push = k[0] == "p"
                f.store(copy, f.load(src, 32, W) & (0 if push else -1) if push else ex.bits_to_lanes(W).pick(f.load(src, 32, W), 0))
                slot = lambda l: f.gep(copy, ((f.load(f.gep(addr, l * 4), 32) + off) & (4 * W - 4)).zext(64))
                if push:
                    f.for_lanes(ex, lambda l: f.store(slot(l), f.load(f.gep(src, l * 4), 32)))
                    f.store(dst, ex.bits_to_lanes(W).pick(f.load(copy, 32, W), f.load(dst, 32, W)))
                else:
                    f.for_lanes(ex, lambda l: f.store(f.gep(dst, l * 4), f.load(slot(l), 32)))
                f.emit("ret void")
            return self.call(k, "void", args, build)
        if k == "swizzle_b32":
            idx, args = self.swizzle(m["offset"]), [("ptr", self.vptr(o.idx)) for o in ops] + [(f"i{W}", self.exec().name)]

            def build(f, p):
                ex = p[2].bits_to_lanes(W)
                self.write_vector(f, p[0], ex.shuffle(idx).pick(f.load(p[1], 32, W).shuffle(idx), 0), ex)
                f.emit("ret void")
            return self.call(f"swizzle_{m['offset']}", "void", args, build)
        t = re.match(r"(load|store)_(2addr_(?:stride64_)?)?([ubi]\d+)(_d16_hi|_d16)?$", k)
        if not t:
            raise KeyError("no semantics")
        kind, two, ty, d16 = t.groups()
        n = int(ty[1:]) // 8
        ty = {"_d16": "d16_b16", "_d16_hi": "d16_hi_b16"}[d16] if d16 and n == 2 else ty
        unit = n * (64 if two and "stride" in two else 1)
        offs = [int(m.get("offset0", "0")) * unit, int(m.get("offset1", "0")) * unit] if two else [int(m.get("offset", "0"))]
        regs = [ops[0].idx, ops[0].idx + n // 4] if kind == "load" else [o.idx for o in ops[1:]]
        addr = ops[1] if kind == "load" else ops[0]
        for reg, off in zip(regs, offs):
            args = [("ptr", "%w"), ("ptr", self.vptr(addr.idx)), ("ptr", self.vptr(reg)), ("i32", str(off)), ("i32", str(self.pos)), (f"i{W}", self.exec().name)]
            if two and kind == "load" and off == offs[0] and addr.idx == regs[0]:
                args[1] = ("ptr", self.vptr(self.temp))         # first result overwrites the address: keep a copy
                self.move(self.temp, addr.idx)
                addr = self.op(f"v{self.temp}")

            def build(f, p):
                w, addr, reg, off, pc, ex = p
                base, size = f.load(f.gep(w, LDS), 64), f.load(f.gep(w, LDS_SIZE), 64)

                def lane(l):
                    a = f.load(f.gep(addr, l * 4), 32).zext(64) + off.zext(64)
                    f.when((a + n).cmp("ugt", size), lambda: self.fault(f, w, 2, pc, a))
                    (self.lane_load if kind == "load" else self.lane_store)(f, base + a, ty, f.gep(reg, l * 4))
                f.for_lanes(ex, lane)
                f.emit("ret i1 true")
            self.guarded(self.call(f"ds_{kind}_{ty}", "i1", args, build))

    def swizzle(self, spec):
        """lane map of ds_swizzle_b32, from its symbolic or numeric form"""
        m = re.match(r"swizzle\((\w+),(.*)\)", spec)
        mode, a = (m[1], [x.strip(' "') for x in m[2].split(",")]) if m else ("RAW", [spec])
        if mode == "RAW":
            x = int(spec, 0)
            if x & 0x8000:
                return [(l & ~3) | (x >> 2 * (l & 3) & 3) for l in range(self.W)]
            return [(l & ~31) | (((l & x & 31) | (x >> 5 & 31)) ^ (x >> 10 & 31)) for l in range(self.W)]
        fn = {"SWAP": lambda l: l ^ int(a[0]), "REVERSE": lambda l: l ^ (int(a[0]) - 1), "QUAD_PERM": lambda l: (l & ~3) | int(a[l & 3]),
              "BROADCAST": lambda l: (l & ~(int(a[0]) - 1)) | int(a[1])}[mode]
        return [fn(l) for l in range(self.W)]
