"""Load lifted kernels, launch them, and interleave the waves of all launches in flight under one seeded scheduler."""
import ctypes
import hashlib
import os
import struct
import time
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np

from mori_triton.emulator import asm
from mori_triton.emulator import ir as irb
from mori_triton.emulator import isa
from mori_triton.emulator import lift
from mori_triton.emulator import memory
from mori_triton.emulator import scalar
from mori_triton.emulator import state as lay
from mori_triton.emulator import vector
from mori_triton.emulator.state import BARRIER, DONE, FAULTED

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

# scheduler state, 64-bit words
(S_READY, S_RNG, S_QMIN, S_QSPAN, S_CLOCK, S_SWITCHES, S_HASH, S_FAULTED) = (8 * i for i in range(8))
# workgroup state, 64-bit words
(G_WAVES, G_DONE, G_WAITING, G_FIRST, G_STRIDE) = (8 * i for i in range(5))
# launch control, 64-bit words: waves not ended, first wave, bytes a wave, waves a group, groups started, groups, groups started at once, next launch of the stream
(L_LEFT, L_FIRST, L_STRIDE, L_WAVES, L_STARTED, L_GROUPS, L_RESIDENT, L_NEXT) = (8 * i for i in range(8))
IDLE, FINISHED, LIMIT, FAULT = range(4)                        # what schedule() returns


def scheduler_ir():
    """start(state, ready, launch, n): put the waves of the next n workgroups on the ready list.
    i32 schedule(state, ready, switch limit, address of a counter to wait for): pick a random ready wave and quantum, run it, again"""
    mod = irb.Module()

    def words(f):
        get = lambda base, off: f.load(f.gep(base, off), 64, align=8)
        put = lambda base, off, v: f.store(f.gep(base, off), v, 8)
        return get, put, lambda base, off, x: put(base, off, get(base, off) + x)

    f = irb.Fn("define void @start(ptr %s, ptr %ready, ptr %launch, i64 %n)", mod)
    get, put, add = words(f)
    left = f.ptr("alloca i64")
    groups, started = get("%launch", L_GROUPS), get("%launch", L_STARTED)
    n = f.arg("%n", 64)
    n = n.cmp("ult", groups - started).pick(n, groups - started)
    put("%launch", L_STARTED, started + n)
    put(left, 0, n * get("%launch", L_WAVES))
    w = f.ptr("alloca i64")
    put(w, 0, get("%launch", L_FIRST) + started * get("%launch", L_WAVES) * get("%launch", L_STRIDE))
    f.emit("br label %loop"); f.label("loop")
    f.when(get(left, 0).cmp("eq", 0), lambda: f.emit("ret void"))
    put(f.gep("%ready", get("%s", S_READY) * 8), 0, get(w, 0))
    add("%s", S_READY, 1); add(w, 0, get("%launch", L_STRIDE)); add(left, 0, -1)
    f.emit("br label %loop")
    text = f.text()

    f = irb.Fn("define i32 @schedule(ptr %s, ptr %ready, i64 %limit, ptr %until)", mod)
    get, put, add = words(f)
    ret, again = lambda code: f.emit(f"ret i32 {code}"), lambda: f.emit("br label %loop")
    count, it = f.ptr("alloca i64"), f.ptr("alloca i64")
    put(count, 0, f.int(0, 64))
    again(); f.label("loop")
    n = get("%s", S_READY)
    f.when(get("%until", 0).cmp("eq", 0), lambda: ret(FINISHED))
    f.when(n.cmp("eq", 0), lambda: ret(IDLE))
    f.when(get(count, 0).cmp("uge", f.arg("%limit", 64)), lambda: ret(LIMIT))
    add(count, 0, 1); add("%s", S_SWITCHES, 1)
    x = get("%s", S_RNG)
    x = x ^ (x << 13); x = x ^ (x >> 7); x = x ^ (x << 17)          # xorshift64
    put("%s", S_RNG, x)
    slot = f.gep("%ready", ((x >> 33) % n) * 8)
    quantum = (x & 0x7FFFFFFF) % get("%s", S_QSPAN) + get("%s", S_QMIN)
    w = f.addr(get(slot, 0))
    before = get(w, lay.COUNT)
    r = f.ins(f"call i32 {f.addr(get(w, lay.FN))}(ptr {w}, i64 {quantum.name})", 32).zext(64)
    used = get(w, lay.COUNT) - before
    add("%s", S_CLOCK, used)
    event = (get(w, lay.WAVE_ID) << 32) ^ (used << 2) ^ r
    put("%s", S_HASH, (get("%s", S_HASH) ^ event) * 0x9E3779B97F4A7C15)
    f.when(r.cmp("eq", FAULTED), lambda: (put("%s", S_FAULTED, get(slot, 0)), ret(FAULT)))
    f.when(r.cmp("eq", 0), again)
    group, launch = f.addr(get(w, lay.GROUP)), f.addr(get(w, lay.LAUNCH))
    put(w, lay.STATUS, r)                                         # the wave ended or waits at a barrier: take it off the ready list
    put(slot, 0, get(f.gep("%ready", (n - 1) * 8), 0))
    put("%s", S_READY, n - 1)
    start = lambda who, n: f.emit(f"call void @start(ptr %s, ptr %ready, ptr {who}, i64 {n})")

    def ended():
        add(group, G_DONE, 1); add(launch, L_LEFT, -1)
        f.when(get(group, G_DONE).cmp("eq", get(group, G_WAVES)), lambda: start(launch, 1))
        follower = get(launch, L_NEXT)
        f.when(get(launch, L_LEFT).cmp("eq", 0) & follower.cmp("ne", 0), lambda: start(f.addr(follower), get(f.addr(follower), L_RESIDENT).name))
    f.when(r.cmp("eq", DONE), ended, lambda: add(group, G_WAITING, 1))
    f.when((get(group, G_DONE) + get(group, G_WAITING)).cmp("ne", get(group, G_WAVES)), again)
    put(group, G_WAITING, f.int(0, 64))                            # all arrived: release the group
    put(it, 0, f.int(0, 64)); f.emit("br label %release"); f.label("release")
    i = get(it, 0)
    f.when(i.cmp("uge", get(group, G_WAVES)), again)
    put(it, 0, i + 1)
    a = get(group, G_FIRST) + i * get(group, G_STRIDE)

    def release():
        k = get("%s", S_READY)
        put(f.addr(a), lay.STATUS, f.int(0, 64)); put(f.gep("%ready", k * 8), 0, a); put("%s", S_READY, k + 1)
    f.when(get(f.addr(a), lay.STATUS).cmp("eq", BARRIER), release)
    f.emit("br label %release")
    return mod.text() + text + f.text()


class Jit:
    """One process-wide MCJIT engine that is given object code; object code is cached on disk when a directory is given.
    opt: level of LLVM's code generator; 2 compiles about half as fast as 0 and the code runs up to twice as fast."""
    engine = target = None
    opt = int(os.environ.get("AMDLIFT_OPT", "0"))
    version = hashlib.sha256(b"".join(Path(m.__file__).read_bytes() for m in (asm, irb, isa, lay, lift, memory, scalar, vector))).hexdigest()

    @classmethod
    def load(cls, name, make_ir, cache=None):
        if cls.engine is None:
            cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
            machine = lambda: llvm.Target.from_default_triple().create_target_machine(opt=cls.opt, cpu=cpu, features=features, jit=True)
            cls.target, cls.engine = machine(), llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine())      # the engine owns its own
            cls.host = f"{cpu}{features}{cls.opt}"
        path = Path(cache) / f"{name}-{hashlib.sha256((cls.version + cls.host).encode()).hexdigest()[:12]}.o" if cache else None
        if path and path.exists():
            obj = path.read_bytes()
        else:
            mod = llvm.parse_assembly(make_ir())
            mod.verify()
            obj = cls.target.emit_object(mod)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                tmp = path.with_suffix(f".{os.getpid()}.tmp")
                tmp.write_bytes(obj)
                tmp.rename(path)
        cls.engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(obj))
        cls.engine.finalize_object()
        return cls.engine.get_function_address(name)


def _buffer(n, align=64):
    """zeroed bytes at an aligned address"""
    raw = np.zeros(n + align, np.uint8)
    return raw[-raw.ctypes.data % align:][:n]


class Kernel:
    """A kernel from assembly text; module-level variables live in `data` and are reached with `symbol()`."""

    def __init__(self, text, cache=None):
        t0 = time.perf_counter()
        self.prog = p = asm.parse(text)
        name = "k" + hashlib.sha256(text.encode()).hexdigest()[:24]
        self.lifter = lift.Lifter(p, name)
        self.data = _buffer(len(p.data) + 8 * len(self.lifter.got) + 8)
        self.data[:len(p.data)] = np.frombuffer(bytes(p.data), np.uint8)
        for off, sym, add in [*p.relocs, *((o, s, 0) for s, o in self.lifter.got.items())]:
            self.data[off:off + 8] = np.frombuffer(struct.pack("<Q", self.address(sym) + add), np.uint8)
        self.fn = Jit.load(name, self.lifter.lift, cache)
        self.load_seconds = time.perf_counter() - t0

    def address(self, sym):
        if sym in self.prog.symbols:
            return self.data.ctypes.data + self.prog.symbols[sym]
        return lay.CODE_BASE + 4 * self.prog.labels[sym]

    def symbol(self, sym, dtype=np.uint8):
        """the host's view of a module-level variable, to its end of storage"""
        start = self.prog.symbols[sym]
        end = min([s for s in self.prog.symbols.values() if s > start] + [len(self.prog.data)])
        return self.data[start:end].view(dtype)


class Launch:
    pass


class KernelFault(RuntimeError):
    pass


class Machine:
    """`seed` fixes the interleaving; with virtual_time the kernels' clock counts executed instructions, so a run repeats exactly.
    Launches of one stream run in order, those of different streams (one or more a PE) together; at most `resident` workgroups of a
    launch are in flight, as on a GPU that is full: a kernel whose workgroups wait for later ones then does not end."""

    def __init__(self, seed=1, quantum=(200, 2000), virtual_time=False, resident=64, capacity=1 << 16):
        if not hasattr(Machine, "_schedule"):
            ptr, u64 = ctypes.c_void_p, ctypes.c_uint64
            Machine._schedule = ctypes.CFUNCTYPE(ctypes.c_int32, ptr, ptr, u64, ptr)(Jit.load("schedule", scheduler_ir))
            Machine._start = ctypes.CFUNCTYPE(None, ptr, ptr, ptr, u64)(Jit.engine.get_function_address("start"))
        self.state, self.ready = _buffer(64).view(np.uint64), _buffer(8 * capacity).view(np.uint64)
        self.state[S_RNG // 8] = (seed * 0x9E3779B97F4A7C15 + 0x1234567) % (1 << 64) or 1
        self.state[S_QMIN // 8], self.state[S_QSPAN // 8] = quantum[0], quantum[1] - quantum[0] + 1
        self.virtual_time, self.resident, self.ranges, self.launches, self.serial, self.last = virtual_time, resident, [], [], 0, {}

    instructions = property(lambda self: int(self.state[S_CLOCK // 8]))
    trace_hash = property(lambda self: int(self.state[S_HASH // 8]))
    switches = property(lambda self: int(self.state[S_SWITCHES // 8]))

    def allow(self, lo, hi):
        """register memory that every later launch may access"""
        self.ranges.append((lo, hi))

    def pack_args(self, k, grid, args, threads, ranges):
        """fill the kernel argument block after the layout in the code object's metadata"""
        size = max([o + n for o, n, _ in k.prog.args] + [int(k.prog.directives.get("kernarg_size", "0"))])
        ka, args = _buffer(size + 64), list(args)
        hidden = {**{f"hidden_block_count_{d}": g for d, g in zip("xyz", grid)}, "hidden_group_size_x": threads, "hidden_group_size_y": 1, "hidden_group_size_z": 1, "hidden_grid_dims": 3}
        for off, n, kind in k.prog.args:
            v = hidden.get(kind, 0) if kind.startswith("hidden") or not args else args.pop(0)
            if hasattr(v, "untyped_storage"):                       # torch tensor
                st = v.untyped_storage()
                ranges.append((st.data_ptr(), st.data_ptr() + st.nbytes()))
                v = v.data_ptr()
            elif isinstance(v, np.ndarray):
                ranges.append((v.ctypes.data, v.ctypes.data + v.nbytes))
                v = v.ctypes.data
            b = struct.pack({2: "<e", 4: "<f", 8: "<d"}[n], v) if isinstance(v, float) else int(v or 0).to_bytes(n, "little", signed=int(v or 0) < 0)
            ka[off:off + n] = np.frombuffer(b, np.uint8)
        ranges.append((ka.ctypes.data, ka.ctypes.data + len(ka)))
        return ka

    def launch(self, k, grid, args, num_warps=4, shared=0, extra_ranges=(), stream=None):
        """queue a kernel; nothing runs before run().  stream=None: no order with other launches"""
        p, L, W, d = k.prog, Launch(), k.prog.warp_size, k.prog.directives
        gx, gy, gz = (*grid, 1, 1)[:3]
        ranges = [*self.ranges, *extra_ranges, (k.data.ctypes.data, k.data.ctypes.data + len(k.data))]
        L.kernel, L.kernarg = k, self.pack_args(k, (gx, gy, gz), args, num_warps * W, ranges)
        L.ranges = np.array(sorted(ranges), np.uint64)
        groups, stride = gx * gy * gz, -(-k.lifter.state_size // 64) * 64
        lds = max(shared, int(d.get("group_segment_fixed_size", "0")))
        L.lds, L.groups, L.control = _buffer(groups * (lds + 64)), np.zeros((groups, 8), np.uint64), np.zeros(8, np.uint64)
        L.waves = _buffer(groups * num_warps * stride).reshape(groups * num_warps, stride)
        head = L.waves[:, 512:lay.VREGS].view(np.uint64)
        sgpr, vgpr0 = L.waves[:, :512].view(np.uint32), L.waves[:, lay.VREGS:lay.VREGS + 4 * W].view(np.uint32)
        put = lambda field, v: head.__setitem__((slice(None), (field - 512) // 8), v)
        g, wave = np.divmod(np.arange(groups * num_warps, dtype=np.uint64), np.uint64(num_warps))
        put(lay.PC, p.labels[p.name]); put(lay.FN, k.fn); put(lay.LDS, L.lds.ctypes.data + g * np.uint64(lds + 64)); put(lay.LDS_SIZE, lds)
        put(lay.RANGES, L.ranges.ctypes.data); put(lay.NRANGES, len(L.ranges)); put(lay.DATA, k.data.ctypes.data)
        put(lay.CLOCK, self.state.ctypes.data + S_CLOCK if self.virtual_time else 0); put(lay.WAVE_ID, np.arange(len(g), dtype=np.uint64) + np.uint64(self.serial))
        put(lay.GROUP, L.groups.ctypes.data + g * np.uint64(64)); put(lay.LAUNCH, L.control.ctypes.data)
        L.groups[:, G_WAVES // 8], L.groups[:, G_STRIDE // 8] = num_warps, stride
        L.groups[:, G_FIRST // 8] = L.waves.ctypes.data + np.arange(groups, dtype=np.uint64) * np.uint64(num_warps * stride)
        sgpr[:, lay.EXEC:lay.EXEC + W // 32] = 0xFFFFFFFF
        ka = L.kernarg.ctypes.data
        flag = lambda n: int(d.get("user_sgpr_" + n, "0"))
        at = 4 * flag("private_segment_buffer") + 2 * flag("dispatch_ptr") + 2 * flag("queue_ptr")
        sgpr[:, at], sgpr[:, at + 1] = ka & 0xFFFFFFFF, ka >> 32
        at += 2 + 2 * flag("dispatch_id") + 2 * flag("flat_scratch_init") + flag("private_segment_size")
        sgpr[:, at:at + flag("kernarg_preload_length")] = L.kernarg[:4 * flag("kernarg_preload_length")].view(np.uint32)
        ids = [g % np.uint64(gx), g // np.uint64(gx) % np.uint64(gy), g // np.uint64(gx * gy)]
        user = int(d.get("user_sgpr_count", "2"))
        if p.arch.startswith("gfx12"):
            sgpr[:, lay.TTMP + 9], sgpr[:, lay.TTMP + 7], sgpr[:, lay.TTMP + 8] = ids[0], ids[1] | ids[2] << np.uint64(16), wave << np.uint64(25)
        else:
            for x, n in zip(ids, "xyz"):
                if d.get(f"system_sgpr_workgroup_id_{n}") == "1":
                    sgpr[:, user] = x
                    user += 1
        vgpr0[:] = wave[:, None] * np.uint64(W) + np.arange(W, dtype=np.uint64)
        L.control[:] = [groups * num_warps, L.waves.ctypes.data, stride, num_warps, 0, groups, self.resident, 0]
        self.serial += len(g)
        self.launches.append(L)
        previous = self.last.get(stream)
        if stream is not None:
            self.last[stream] = L
        if previous and previous.control[0]:
            previous.control[L_NEXT // 8] = L.control.ctypes.data
        else:
            Machine._start(self.state.ctypes.data, self.ready.ctypes.data, L.control.ctypes.data, self.resident)
        return L

    def run(self, until=None, seconds=60.0, instructions=1 << 62):
        """run until one launch (or all) has finished; KernelFault on a bad access, a deadlock, or past a limit (the one in instructions
        repeats exactly)"""
        t0, stop, all_left = time.monotonic(), self.instructions + instructions, np.ones(1, np.uint64)
        target = (until.control if until else all_left).ctypes.data
        while True:
            r = Machine._schedule(self.state.ctypes.data, self.ready.ctypes.data, 500, target)
            if r == FAULT:
                self.report()
            if r == FINISHED or r == IDLE and not any(int(L.control[0]) for L in self.launches):
                break
            if r == IDLE:
                raise KernelFault("deadlock: every wave waits at a barrier")
            if time.monotonic() - t0 > seconds or self.instructions > stop:
                raise KernelFault(f"not finished after {time.monotonic() - t0:.1f} s, {self.instructions} instructions: " + "; ".join(self.where(L, i) for L in self.launches for i in range(len(L.waves)) if 0 < self.head(L, i, lay.COUNT) and self.head(L, i, lay.STATUS) != DONE)[:500])
            os.sched_yield()
        self.launches = [L for L in self.launches if int(L.control[0])]

    def head(self, L, i, field): return int(L.waves[i, field:field + 8].view(np.uint64)[0])

    def where(self, L, i, index=None):
        ins = L.kernel.prog.insts[self.head(L, i, lay.PC) & 0xFFFFFFFF if index is None else index]
        group, wave = divmod(i, int(L.groups[0, G_WAVES // 8]))
        return f"{L.kernel.prog.name} workgroup {group} wave {wave} line {ins.line} `{ins.text}`"

    def report(self):
        bad = int(self.state[S_FAULTED // 8])
        for L in self.launches:
            i, rest = divmod(bad - L.waves.ctypes.data, L.waves.shape[1])
            if 0 <= i < len(L.waves) and not rest:
                index, kind = self.head(L, i, lay.FAULT_PC) & 0xFFFFFFFF, self.head(L, i, lay.FAULT) & 0xFFFFFFFF
                raise KernelFault(f"{lay.FAULTS[kind]}: address {self.head(L, i, lay.FAULT_ADDR):#x}, {self.where(L, i, index)}")
