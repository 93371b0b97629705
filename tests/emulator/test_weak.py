"""Litmus tests of the weak-memory mode: what is synchronised is clean under every seed, what is not is reported."""

import ctypes

import numpy as np
import pytest
import triton
import triton.language as tl

from mori_triton.emulator import jit, weak
from mori_triton.emulator.machine import Event
from mori_triton.errors import ArgumentError, KernelFault, WeakMemoryError
from tests.emulator.litmus import Litmus

pytestmark = pytest.mark.cpu

ARCHS = ["gfx1201", "gfx942", "gfx950", "gfx1250"]
CLEAN_SEEDS, BROKEN_SEEDS = range(50), range(5)
N = 64
WANTED = np.arange(1, N + 1)
POINTERS2, POINTERS3 = ("*i32",) * 2, ("*i32",) * 3


@triton.jit
def _send(data, flag, SEM: tl.constexpr, SCOPE: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(data + offs, offs + 1)
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem=SEM, scope=SCOPE)


@triton.jit
def _receive(data, flag, out, SEM: tl.constexpr, SCOPE: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    while tl.atomic_add(flag, 0, sem=SEM, scope=SCOPE) == 0:
        pass
    tl.debug_barrier()
    tl.store(out + offs, tl.load(data + offs))


def message(
    seed, release="release sys", acquire="acquire sys", *, home=1, arch="gfx1201", num_warps=1, edits=(None, None)
):
    """PE 0 sends words and a flag to PE 1, or leaves them in its own memory (home 0). -> (races, words as wanted)"""
    run, num = Litmus(seed, arch=arch), N * num_warps
    data, flag, out = run.buffer(home, num, name="data"), run.buffer(1, 1, name="flag"), run.buffer(1, num, name="out")
    out[:] = -1
    (s, sc), (r, rc) = release.split(), acquire.split()
    run.submit(0, _send, (data, flag), POINTERS2, num_warps=num_warps, edit=edits[0], SEM=s, SCOPE=sc, N=num)
    run.submit(1, _receive, (data, flag, out), POINTERS3, num_warps=num_warps, edit=edits[1], SEM=r, SCOPE=rc, N=num)
    run.run()
    return [*run.weak.races(), *run.starved], (out == np.arange(1, num + 1)).all()


def _every_wave_waits(text):
    """What a fence by every thread before the barrier does for its stores on gfx9."""
    return text.replace("s_barrier", "s_waitcnt vmcnt(0)\n\ts_barrier")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("num_warps", [1, 4])
def test_message_is_clean_when_synchronised(arch, num_warps):
    seeds = CLEAN_SEEDS if arch == "gfx1201" else range(12)
    edit = _every_wave_waits if num_warps > 1 and arch.startswith("gfx9") else None
    for seed in seeds:
        for home in (0, 1):
            races, right = message(seed, arch=arch, home=home, num_warps=num_warps, edits=(edit, None))
            assert not races, (seed, home, races[0])
            assert right, (seed, home)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_gfx9_barriers_wait_for_no_stores(arch):
    """One thread's release after a barrier covers other waves only if they have waited; Triton's barrier does not."""
    for seed in BROKEN_SEEDS:
        races, _ = message(seed, arch=arch, num_warps=4)
        assert races, seed
        assert not any("_send of PE 0, workgroup 0, wave 0" in race for race in races), seed


BROKEN = [
    ("relaxed sys", "acquire sys", "release of system scope on PE 0"),
    ("release gpu", "acquire sys", "release of system scope on PE 0"),
    ("release sys", "relaxed sys", "acquire of system scope on PE 1"),
    ("release sys", "acquire gpu", "system scope of the load itself"),
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("release", "acquire", "missing"), BROKEN)
def test_message_with_weak_synchronisation_is_reported(arch, release, acquire, missing):
    for seed in BROKEN_SEEDS:
        for home in (0, 1):
            races, _ = message(seed, release, acquire, arch=arch, home=home)
            assert races, f"seed {seed}, data at PE {home}: nothing reported"
            assert any(missing in race for race in races), races


@pytest.mark.parametrize(("release", "acquire"), [case[:2] for case in BROKEN])
def test_racing_loads_return_old_and_new_values(release, acquire):
    outcomes = {message(seed, release, acquire)[1] for seed in range(40)}
    assert False in outcomes, "every load saw the new value"


def test_report_names_load_store_and_what_is_missing():
    (text, *_), _ = message(1, "relaxed sys")
    first, second, third, missing = text.splitlines()
    assert first.startswith("_receive of PE 1, workgroup 0, wave 0, line ")
    assert "buffer_load" in first or "global_load" in first
    assert second.startswith("  loads data + 0 bytes (0x")
    assert third.startswith("  _send of PE 0, workgroup 0, wave 0, line ")
    assert "store" in third
    assert missing.startswith("  missing: ")


def _without(word, after=""):
    """Drop the instructions that contain `word`, from the first line that contains `after` on."""

    def edit(text):
        lines, armed, dropped = [], not after, 0
        for line in text.splitlines():
            armed |= bool(after) and after in line
            if armed and word in line.split(";")[0]:
                dropped += 1
            else:
                lines.append(line)
        assert dropped, f"no {word}"
        return "\n".join(lines)

    return edit


@pytest.mark.parametrize("word", ["global_wb", "s_wait_storecnt"])
def test_dropped_release_instruction_is_reported(word):
    for seed in BROKEN_SEEDS:
        races, _ = message(seed, edits=(_without(word), None))
        assert races, seed


def test_barrier_does_not_wait_for_other_waves_stores():
    """One wave releases for its workgroup, the other has not waited for its stores."""
    for seed in BROKEN_SEEDS:
        races, _ = message(seed, num_warps=2, edits=(_only_in_first_wave_waits, None))
        assert any("_send of PE 0, workgroup 0, wave 1" in race for race in races), seed
        assert not any("_send of PE 0, workgroup 0, wave 0" in race for race in races), seed


def _only_in_first_wave_waits(text):
    """Keep the wait that belongs to the write-back, which one lane of wave 0 executes."""
    lines = text.splitlines()
    after = next(i for i, line in enumerate(lines) if "global_wb" in line)
    return "\n".join(line for i, line in enumerate(lines) if "s_wait_storecnt" not in line or i > after)


def test_waves_acquire_for_themselves_where_they_have_own_caches():
    """Wave 0 acquires; wave 1 meets it at a barrier but drops its own invalidate."""
    for seed in BROKEN_SEEDS:
        races, _ = message(seed, num_warps=2, edits=(None, _without("SCOPE_SE")))
        assert any("wave 1, line" in race for race in races), seed
    # here the waves of a workgroup share a cache
    for seed in BROKEN_SEEDS:
        assert message(seed, num_warps=2, arch="gfx942", edits=(_every_wave_waits, None)) == ([], True)


@triton.jit
def _send_from_second_group(data, flag, inner, INNER: tl.constexpr, N: tl.constexpr):
    """Workgroup 1 stores; workgroup 0 waits for it and signals with a release of system scope."""
    offs = tl.arange(0, N)
    if tl.program_id(0) == 1:
        tl.store(data + offs, offs + 1)
        tl.debug_barrier()
        tl.atomic_xchg(inner, 1, sem=INNER, scope="gpu")
    else:
        while tl.atomic_add(inner, 0, sem="acquire", scope="gpu") == 0:
            pass
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@pytest.mark.parametrize("arch", ["gfx942", "gfx1250"])
@pytest.mark.parametrize("inner", ["release", "relaxed"])
def test_release_covers_what_its_workgroup_has_acquired(arch, inner):
    for seed in range(12) if inner == "release" else BROKEN_SEEDS:
        run = Litmus(seed, arch=arch)
        data, flag, out, local = run.buffer(1, N), run.buffer(1, 1), run.buffer(1, N), run.buffer(0, 1)
        run.submit(0, _send_from_second_group, (data, flag, local), POINTERS3, grid=2, INNER=inner, N=N)
        run.submit(1, _receive, (data, flag, out), POINTERS3, SEM="acquire", SCOPE="sys", N=N)
        run.run()
        races = run.weak.races()
        if inner == "release":
            assert not races, (seed, races[0])
            assert (out == WANTED).all()
        else:
            # reported as missing is the release of either scope, by whether the sender's kernel has ended by then
            assert any("of PE 0, workgroup 1" in race for race in races), seed


@triton.jit
def _receive_in_second_group(data, flag, inner, out, SEM: tl.constexpr, N: tl.constexpr):
    """Workgroup 0 waits for the peer and tells workgroup 1, which reads."""
    offs = tl.arange(0, N)
    if tl.program_id(0) == 0:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
            pass
        tl.debug_barrier()
        tl.atomic_xchg(inner, 1, sem="release", scope="gpu")
    else:
        while tl.atomic_add(inner, 0, sem=SEM, scope="gpu") == 0:
            pass
        tl.debug_barrier()
        tl.store(out + offs, tl.load(data + offs))


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
@pytest.mark.parametrize("sem", ["acquire", "relaxed"])
def test_every_reading_workgroup_must_acquire(arch, sem):
    for seed in range(12) if sem == "acquire" else BROKEN_SEEDS:
        run = Litmus(seed, arch=arch)
        data, flag, out, local = run.buffer(1, N), run.buffer(1, 1), run.buffer(1, N), run.buffer(1, 1)
        run.submit(0, _send, (data, flag), POINTERS2, SEM="release", SCOPE="sys", N=N)
        run.submit(1, _receive_in_second_group, (data, flag, local, out), ("*i32",) * 4, grid=2, SEM=sem, N=N)
        run.run()
        races = run.weak.races()
        if sem == "acquire":
            assert not races, (seed, races[0])
            assert (out == WANTED).all()
        else:
            assert any("acquire of agent scope by wave 0 of workgroup 1" in race for race in races), seed


@triton.jit
def _fill(data, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(data + offs, offs + 1)


@triton.jit
def _signal(flag, SEM: tl.constexpr):
    tl.atomic_xchg(flag, 1, sem=SEM, scope="sys")


@triton.jit
def _wait(flag, SEM: tl.constexpr):
    while tl.atomic_add(flag, 0, sem=SEM, scope="sys") == 0:
        pass


@triton.jit
def _read(data, out, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out + offs, tl.load(data + offs))


@pytest.mark.parametrize(
    ("release", "acquire", "missing"),
    [
        ("release", "acquire", None),
        ("relaxed", "acquire", "release of system scope"),
        ("release", "relaxed", "acquire of system scope"),
    ],
)
def test_kernel_boundaries_are_of_agent_scope(release, acquire, missing):
    for seed in range(20) if missing is None else BROKEN_SEEDS:
        run = Litmus(seed)
        data, flag, out = run.buffer(1, N), run.buffer(1, 1), run.buffer(1, N)
        run.submit(0, _fill, (data,), ("*i32",), N=N)
        run.run()
        run.submit(0, _signal, (flag,), ("*i32",), SEM=release)
        run.submit(1, _wait, (flag,), ("*i32",), SEM=acquire)
        run.run()
        run.submit(1, _read, (data, out), POINTERS2, N=N)
        run.run()
        races = run.weak.races()
        if missing:
            assert races, seed
            assert missing in races[0]
        else:
            assert not races, (seed, races[0])
            assert (out == WANTED).all()


def test_kernels_of_one_device_need_no_fence():
    for seed in range(10):
        run = Litmus(seed, num_devices=1)
        data, out = run.buffer(0, N), run.buffer(0, N)
        run.submit(0, _fill, (data,), ("*i32",), N=N)
        run.run()
        # the host sees what a kernel left in its own device's memory
        assert (data == WANTED).all()
        run.submit(0, _read, (data, out), POINTERS2, N=N)
        run.run()
        run.weak.raise_races()
        assert (out == WANTED).all()


def test_peers_host_sees_stores_late_without_a_release():
    late = 0
    for seed in range(20):
        run = Litmus(seed)
        data = run.buffer(1, N)
        run.submit(0, _fill, (data,), ("*i32",), N=N)
        run.run()
        late += not (data == WANTED).all()
        assert run.weak.pending() or (data == WANTED).all()
        run.weak.drain()
        assert run.weak.pending() == 0
        assert (data == WANTED).all()
    assert late > 10


def test_host_writes_replace_what_kernels_stored():
    for seed in range(10):
        run = Litmus(seed)
        data, out = run.buffer(1, N), run.buffer(1, N)
        run.submit(1, _fill, (data,), ("*i32",), N=N)
        run.run()
        data[:] = 7
        run.submit(1, _read, (data, out), POINTERS2, N=N)
        run.run()
        run.weak.raise_races()
        assert (out == 7).all()


def test_stores_on_their_way_do_not_undo_a_host_write():
    run = Litmus(1)
    data = run.buffer(1, N)
    run.submit(0, _fill, (data,), ("*i32",), N=N)
    run.run()
    assert (data == 0).all(), "nothing arrives by itself with odd seeds"
    data[:] = 7
    run.weak.drain()
    assert (data == 7).all()


@triton.jit
def _store_and_reload(data, out, N: tl.constexpr):
    """Each workgroup overwrites its words again and again and must always find its latest value."""
    offs = tl.program_id(0) * N + tl.arange(0, N)
    wrong = tl.zeros([N], tl.int32)
    for i in range(20):
        tl.store(data + offs, offs + i)
        wrong += (tl.load(data + offs) != offs + i).to(tl.int32)
    tl.store(out + offs, wrong)


def test_a_workgroup_never_reads_older_than_its_own_store():
    for seed in range(10):
        run = Litmus(seed)
        data, out = run.buffer(0, 4 * N), run.buffer(0, 4 * N)
        out[:] = -1
        run.submit(0, _store_and_reload, (data, out), POINTERS2, grid=4, N=N)
        run.run()
        run.weak.raise_races()
        assert (out == 0).all()
        assert (data == np.arange(4 * N) + 19).all()


@triton.jit
def _reverse_through_memory(data, out, N: tl.constexpr):
    """Waves of one workgroup hand values over through global memory and a barrier."""
    offs = tl.arange(0, N)
    for i in range(4):
        tl.store(data + offs, offs + i)
        tl.debug_barrier()
        tl.store(out + i * N + offs, tl.load(data + (N - 1 - offs)))
        tl.debug_barrier()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_barrier_orders_the_waves_of_a_workgroup(arch):
    num = 512
    for seed in range(6):
        run = Litmus(seed, arch=arch)
        data, out = run.buffer(0, num), run.buffer(0, 4 * num)
        run.submit(0, _reverse_through_memory, (data, out), POINTERS2, num_warps=4, N=num)
        run.run()
        run.weak.raise_races()
        assert (out.reshape(4, num) == np.arange(num)[::-1] + np.arange(4)[:, None]).all()


@triton.jit
def _store_bytes(data, flag, first, N: tl.constexpr):
    offs = 2 * tl.arange(0, N) + first
    tl.store(data + offs, (offs + 1).to(tl.int8))
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope="sys")


@triton.jit
def _read_bytes(data, flag, out, N: tl.constexpr):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 2:
        pass
    tl.debug_barrier()
    offs = tl.arange(0, N)
    tl.store(out + offs, tl.load(data + offs))


def test_neighbouring_bytes_of_two_devices_both_arrive():
    for seed in range(20):
        run = Litmus(seed)
        data, flag, out = run.buffer(1, N, np.int8), run.buffer(1, 1), run.buffer(1, N, np.int8)
        for pe in (0, 1):
            run.submit(pe, _store_bytes, (data, flag, pe), ("*i8", "*i32", "i32"), N=N // 2)
        run.submit(1, _read_bytes, (data, flag, out), ("*i8", "*i32", "*i8"), N=N)
        run.run()
        run.weak.raise_races()
        assert (out == WANTED).all(), seed
        # and no arrival in host memory has touched its neighbours
        assert (data == WANTED).all(), seed


@triton.jit
def _count(counters, old, SCOPE: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    seen = tl.atomic_add(counters + offs % 4, 1, sem="relaxed", scope=SCOPE)
    tl.store(old + tl.program_id(0) * N + offs, seen)


@pytest.mark.parametrize(("scope", "devices"), [("sys", 2), ("gpu", 1)])
def test_atomics_lose_nothing_at_their_scope(scope, devices):
    for seed in range(5):
        run = Litmus(seed)
        counters = run.buffer(1, 4)
        olds = [run.buffer(2 - devices + pe, 4 * N) for pe in range(devices)]
        for pe in range(devices):
            run.submit(2 - devices + pe, _count, (counters, olds[pe]), POINTERS2, grid=4, SCOPE=scope, N=N)
        run.run()
        run.weak.raise_races()
        assert (counters == devices * N).all()
        # every value was handed out once a counter
        assert sorted(np.concatenate(olds)) == sorted(list(range(devices * N)) * 4)


def test_same_seed_same_run():
    def outcome(seed):
        run = Litmus(seed)
        data, flag, out = run.buffer(1, N), run.buffer(1, 1), run.buffer(1, N)
        run.submit(0, _send, (data, flag), POINTERS2, SEM="relaxed", SCOPE="sys", N=N)
        run.submit(1, _receive, (data, flag, out), POINTERS3, SEM="acquire", SCOPE="sys", N=N)
        run.run()
        return out.tolist(), run.machine.trace_hash

    assert outcome(3) == outcome(3)
    assert len({str(outcome(seed)) for seed in range(8)}) > 4


def test_errors():
    with pytest.raises(ArgumentError, match="num_devices"):
        weak.WeakMemory(1, 0)
    run = Litmus(0)
    run.weak = weak.WeakMemory(0, 2, arena_bytes=1 << 20)
    big = run.buffer(0, 1 << 16)
    for d in run.devices:
        d.allow(big.ctypes.data, big.nbytes, "big")
    run.submit(0, _fill, (big,), ("*i32",), N=1 << 13)
    with pytest.raises(KernelFault, match="no memory left"):
        run.run()
    assert issubclass(WeakMemoryError, KernelFault)
    run = Litmus(0)
    data, flag, out = run.buffer(1, N), run.buffer(1, 1), run.buffer(1, N)
    run.submit(0, _send, (data, flag), POINTERS2, SEM="relaxed", SCOPE="sys", N=N)
    run.submit(1, _receive, (data, flag, out), POINTERS3, SEM="acquire", SCOPE="sys", N=N)
    run.run()
    with pytest.raises(WeakMemoryError, match="missing: a release of system scope on PE 0"):
        run.weak.raise_races()
    run.weak.raise_races()


def test_layout_matches_the_bitcode():
    weak.WeakMemory(0, 1, arena_bytes=1 << 20)
    names = (ctypes.c_uint64 * 7).from_address(jit.address("mori_emu_weak_layout"))
    assert list(names) == [
        ctypes.sizeof(weak._System),
        weak._System.starved.offset,
        ctypes.sizeof(weak.Race),
        ctypes.sizeof(weak._Launch),
        weak._VERSION_BYTES,
        weak._PAGE_BYTES,
        512 + 8 * 40,
    ]


@triton.jit
def _peek(flag, out, SCOPE: tl.constexpr):
    """Poll with loads (a read-modify-write of nothing), without ordering."""
    seen = tl.atomic_or(flag, 0, sem="relaxed", scope=SCOPE)
    while seen == 0:
        seen = tl.atomic_or(flag, 0, sem="relaxed", scope=SCOPE)
    tl.store(out, seen)


@triton.jit
def _set(flag, SCOPE: tl.constexpr):
    tl.atomic_xchg(flag, 1, sem="relaxed", scope=SCOPE)


@pytest.mark.parametrize(
    ("setting", "polling", "missing"),
    [
        ("sys", "sys", None),
        ("gpu", "sys", "a release of system scope on PE 0 after the store reached it"),
        ("sys", "gpu", "system scope of the load itself"),
    ],
)
def test_flags_need_system_scope_on_both_sides(setting, polling, missing):
    """A flag of too narrow a scope may never arrive; a poll of too narrow a scope may never look."""
    ended = 0
    for seed in range(20):
        run = Litmus(seed)
        flag, out = run.buffer(1, 1, name="flag"), run.buffer(1, 1)
        run.submit(0, _set, (flag,), ("*i32",), SCOPE=setting)
        run.submit(1, _peek, (flag, out), POINTERS2, SCOPE=polling)
        run.run()
        ended += int(out[0])
        if out[0] == 0:
            assert any(missing in text for text in run.starved), run.starved
    assert ended == 20 if missing is None else 2 < ended < 18


@triton.jit
def _ticket(counter, out):
    tl.store(out + tl.program_id(0), tl.atomic_add(counter, 1, sem="relaxed", scope="gpu"))


def test_atomics_of_workgroup_scope_do_not_count_for_others():
    def narrow(text):
        assert "SCOPE_DEV" in text
        return text.replace("scope:SCOPE_DEV", "scope:SCOPE_SE")

    for seed in BROKEN_SEEDS:
        for edit in (None, narrow):
            run = Litmus(seed)
            counter, out = run.buffer(0, 1), run.buffer(0, 8)
            run.submit(0, _ticket, (counter, out), POINTERS2, grid=8, edit=edit)
            run.run()
            tickets = sorted(out) == list(range(8))
            assert tickets == (edit is None), seed
            assert bool(run.weak.races()) == (edit is not None), seed


@triton.jit
def _ring_step(mine, theirs, my_flags, next_flags, previous_flags, out, rounds, N: tl.constexpr):
    """Pass rows around a ring: put into the next PE's memory, signal it, wait for my own row, read it, say so.

    flags of a PE: [0] counts rows that have arrived, [1] rows that its successor has read.
    """
    offs = tl.arange(0, N)
    for i in range(rounds):
        while tl.atomic_add(my_flags + 1, 0, sem="acquire", scope="sys") < i:
            pass
        tl.debug_barrier()
        tl.store(theirs + offs, tl.load(out + offs) + 1)
        tl.debug_barrier()
        tl.atomic_add(next_flags, 1, sem="release", scope="sys")
        while tl.atomic_add(my_flags, 0, sem="acquire", scope="sys") <= i:
            pass
        tl.debug_barrier()
        tl.store(out + offs, tl.load(mine + offs))
        tl.debug_barrier()
        tl.atomic_add(previous_flags + 1, 1, sem="release", scope="sys")


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_memory_used_again_and_again(arch):
    """Many rounds over the same words: old stores must be forgotten, and no reuse may look like a race."""
    num, rounds = 3, 25
    for seed in range(6):
        run = Litmus(seed, num_devices=num, arch=arch)
        rows = [run.buffer(pe, N, name=f"row {pe}") for pe in range(num)]
        flags = [run.buffer(pe, 4) for pe in range(num)]
        outs = [run.buffer(pe, N) for pe in range(num)]
        for pe in range(num):
            outs[pe][:] = 1000 * pe
        for pe in range(num):
            after, before = (pe + 1) % num, (pe - 1) % num
            args = (rows[pe], rows[after], flags[pe], flags[after], flags[before], outs[pe], rounds)
            run.submit(pe, _ring_step, args, ("*i32",) * 6 + ("i32",), N=N)
        run.run(limit=200_000_000)
        run.weak.raise_races()
        for pe in range(num):
            assert (outs[pe] == 1000 * ((pe - rounds) % num) + rounds).all(), seed
        # stores that everybody has are forgotten: not every one of the 600 words keeps its last 8
        assert run.weak._system.pool_used < 2500


@triton.jit
def _locked(lock, cells, rounds, RELEASE: tl.constexpr, SCOPE: tl.constexpr, N: tl.constexpr):
    """Add one to plain words inside a spin lock."""
    offs = tl.arange(0, N)
    for _ in range(rounds):
        while tl.atomic_cas(lock, 0, 1, sem="acquire", scope=SCOPE) != 0:
            pass
        tl.debug_barrier()
        tl.store(cells + offs, tl.load(cells + offs) + 1)
        tl.debug_barrier()
        tl.atomic_xchg(lock, 0, sem=RELEASE, scope=SCOPE)


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
@pytest.mark.parametrize(("scope", "devices"), [("sys", 2), ("gpu", 1)])
@pytest.mark.parametrize("release", ["release", "relaxed"])
def test_a_lock_makes_plain_counters_exact(arch, scope, devices, release):
    groups, rounds = 3, 4
    for seed in range(12) if release == "release" else BROKEN_SEEDS:
        run = Litmus(seed, arch=arch)
        lock, cells = run.buffer(0, 1), run.buffer(0, N)
        for pe in range(devices):
            constants = {"RELEASE": release, "SCOPE": scope, "N": N}
            run.submit(pe, _locked, (lock, cells, rounds), ("*i32", "*i32", "i32"), grid=groups, **constants)
        run.run()
        if release == "release" or (arch == "gfx1201" and scope == "gpu"):
            # on gfx1201 a barrier waits for the stores, which is all that a release of agent scope is
            assert run.weak.races() == [], seed
            assert (cells == groups * rounds * devices).all(), seed
        else:
            assert run.weak.races(), seed


@triton.jit
def _send_twice(data, flag, N: tl.constexpr):
    """The first half is released; what is stored after that is not, though every store is waited for."""
    offs = tl.arange(0, N)
    tl.store(data + offs, offs + 1)
    tl.debug_barrier()
    tl.atomic_xchg(flag + 1, 1, sem="release", scope="sys")
    tl.store(data + N + offs, offs + 1)
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="relaxed", scope="sys")


@pytest.mark.parametrize("arch", ARCHS)
def test_a_release_covers_nothing_that_comes_after_it(arch):
    for seed in BROKEN_SEEDS:
        run = Litmus(seed, arch=arch)
        data, flag, out = run.buffer(1, 2 * N, name="data"), run.buffer(1, 2), run.buffer(1, 2 * N)
        run.submit(0, _send_twice, (data, flag), POINTERS2, N=N)
        run.submit(1, _receive, (data, flag, out), POINTERS3, SEM="acquire", SCOPE="sys", N=2 * N)
        run.run()
        races = run.weak.races()
        assert races, seed
        offsets = [int(race.split("data + ")[1].split()[0]) for race in races]
        assert min(offsets) >= 4 * N, races
        assert (out[:N] == WANTED).all()


@triton.jit
def _store_plain_then_coherent(data):
    tl.store(data, 5)
    tl.debug_barrier()
    tl.store(data, 9)


@pytest.mark.parametrize("scope", ["SCOPE_DEV", "SCOPE_SYS"])
def test_stores_of_different_scopes_stay_in_order(scope):
    def edit(text):
        lines = text.splitlines()
        last = max(i for i, line in enumerate(lines) if "_store_b32" in line)
        lines[last] += f" scope:{scope}"
        # nothing but the coherent store itself may push the plain one
        return "\n".join(line for line in lines if "s_wait_storecnt" not in line)

    for seed in range(6):
        for home in (0, 1):
            run = Litmus(seed)
            data = run.buffer(home, 1)
            run.submit(0, _store_plain_then_coherent, (data,), ("*i32",), edit=edit)
            run.run()
            if home == 0 or scope == "SCOPE_SYS":
                assert data[0] == 9
            run.weak.drain()
            assert data[0] == 9


@triton.jit
def _publish(data, flag, rounds, N: tl.constexpr):
    offs = tl.arange(0, N)
    for i in range(rounds):
        tl.store(data + offs, offs + i)
        tl.debug_barrier()
        tl.atomic_xchg(flag, i + 1, sem="release", scope="gpu")


@triton.jit
def _read_late(data, flag, out, rounds, SEM: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    while tl.atomic_add(flag, 0, sem=SEM, scope="gpu") < rounds:
        pass
    tl.debug_barrier()
    tl.store(out + offs, tl.load(data + offs))


@pytest.mark.parametrize("sem", ["acquire", "relaxed"])
def test_old_stores_are_kept_for_those_who_have_not_acquired(sem):
    rounds = 60
    for seed in BROKEN_SEEDS:
        run = Litmus(seed, num_devices=1)
        data, flag, out = run.buffer(0, N), run.buffer(0, 1), run.buffer(0, N)
        run.submit(0, _read_late, (data, flag, out, rounds), (*POINTERS3, "i32"), SEM=sem, N=N)
        run.submit(0, _publish, (data, flag, rounds), (*POINTERS2, "i32"), N=N)
        run.run()
        if sem == "acquire":
            assert run.weak.races() == [], seed
            assert (out == np.arange(N) + rounds - 1).all()
        else:
            assert any("acquire of agent scope" in race for race in run.weak.races()), seed


def test_an_array_that_two_devices_were_given():
    """Ordinary memory belongs to the device that stores to it, also when another one is about to use it."""
    for seed in range(6):
        run = Litmus(seed)
        shared, out = np.zeros(N, np.int32), run.buffer(1, N)
        for d in run.devices:
            d.allow(shared.ctypes.data, shared.nbytes, "shared")
        run.submit(0, _fill, (shared,), ("*i32",), N=N)
        if run.machine.run(seed * 5) == Event.FINISHED:
            run.machine.finished()
        run.submit(1, _read, (shared, out), POINTERS2, N=N)
        run.run()
        assert (shared == WANTED).all(), seed
        assert all(x in (0, w) for x, w in zip(out, WANTED, strict=True))
