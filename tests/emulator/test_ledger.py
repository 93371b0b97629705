"""The byte ledger: exact numbers, for every kind of access, against a count that is made byte by byte."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from mori_triton import current_world, emulator, local_world, shmem
from mori_triton.device import shmem as dev
from mori_triton.device.launch import launch
from mori_triton.emulator import state as lay
from mori_triton.emulator.ledger import ByteLedger, LaunchCounts
from mori_triton.errors import ArgumentError, StateError
from mori_triton.host import state
from mori_triton.world import ledger as world_ledger
from tests.emulator.accesses import (
    LOADS,
    OFFSET,
    PRIVATE,
    STORES,
    active,
    lane_offsets,
    loads_and_stores,
    masks,
    prepare,
)
from tests.emulator.bare import BareWave, Program

pytestmark = pytest.mark.cpu

OTHERS = {
    "gfx1201": {
        "add": f"global_atomic_add_u32 v10, v20, s[4:5] offset:{OFFSET}",
        "swap": f"global_atomic_swap_b64 v[30:31], v10, v[20:21], s[4:5] offset:{OFFSET} th:TH_ATOMIC_RETURN",
        "scalar": "s_load_b32 s20, s[4:5], 8\ns_load_b256 s[24:31], s[4:5], 8",
        "local": "ds_store_b32 v14, v20\nds_load_b32 v20, v14\nds_add_u32 v14, v20",
        "transfer": f"global_load_tr_b128 v[20:23], v10, s[4:5] offset:{OFFSET}",
    },
    "gfx942": {
        "add": f"global_atomic_add v10, v20, s[4:5] offset:{OFFSET}",
        "swap": f"global_atomic_swap_x2 v[30:31], v10, v[20:21], s[4:5] offset:{OFFSET} sc0",
        "scalar": "s_load_dword s20, s[4:5], 8\ns_load_dwordx8 s[24:31], s[4:5], 8",
        "local": "ds_write_b32 v14, v20\nds_read_b32 v20, v14\nds_add_u32 v14, v20",
        "transfer": f"s_mov_b32 m0, 0\nglobal_load_lds_dword v10, s[4:5] offset:{OFFSET}",
    },
}
NUM_PES = 3


def expected(addresses: list[int], size: int, owner, *, atomic: bool = False) -> dict[int, tuple[int, int, int]]:
    """(operations, bytes, messages) by owner, from the bytes of all lanes, one after the other."""
    found: dict[int, list[int]] = {}
    bytes_in_order, seen = [], set()
    for address in addresses:
        found.setdefault(owner(address), [0, 0, 0])[0] += 1
        if atomic:
            found[owner(address)][1] += size
            found[owner(address)][2] += 1
        elif address not in seen:
            seen.add(address)
            bytes_in_order += [(address + i, owner(address)) for i in range(size)]
    before = (-2, -1)
    for byte in bytes_in_order:
        found[byte[1]][1] += 1
        found[byte[1]][2] += byte != (before[0] + 1, before[1]) or byte[0] % 256 == 0
        before = byte
    return {pe: tuple(numbers) for pe, numbers in found.items()}


class Counted:
    """A wave whose accesses are counted; `memory[:1024]` is PE 2's, `[1024:2048]` PE 0's, the rest nobody's."""

    def __init__(self, program: Program) -> None:
        self.wave, self.W = BareWave(program), program.W
        # at a multiple of 256, so that every run of the test has the same numbers
        raw = np.zeros(8192, np.uint8)
        self.memory = raw[-raw.ctypes.data % 4096 :][:4096]
        start = self.memory.ctypes.data
        self.counts = LaunchCounts("k", 1, [(start + 1024, start + 2048, 0), (start, start + 1024, 2)], NUM_PES)
        self.wave.put(lay.LEDGER, self.counts.address)

    def owner(self, address: int) -> int:
        at = address - self.memory.ctypes.data
        return 2 if at < 1024 else 0 if at < 2048 else NUM_PES

    def run(self, piece: str, mask: int) -> dict[tuple[int, int], tuple[int, int, int]]:
        """What was counted, by (owner, kind)."""
        self.counts.counts[:] = 0
        assert self.wave(piece, mask) == lay.DONE
        rows = self.counts.counts
        return {(o, k): tuple(map(int, rows[o, k])) for o in range(NUM_PES + 1) for k in range(3) if rows[o, k].any()}


@pytest.fixture(scope="module", params=list(OTHERS))
def programs(request):
    arch = request.param
    return Program(arch, loads_and_stores(arch), PRIVATE), Program(arch, OTHERS[arch])


def test_every_load_and_store(programs):
    """All widths, lane orders and masks, in all modes; buffers end in the middle."""
    rng, counted = np.random.default_rng(1), Counted(programs[0])
    W, base = counted.W, counted.memory.ctypes.data
    sizes = [("load", 0, ty, size[0]) for ty, size in LOADS.items()]
    sizes += [("store", 1, ty, size) for ty, (size, _) in STORES.items()]
    # each of them once for every order and mask
    modes = itertools.cycle(("base", "address", "buffer", "flat", "buffer"))
    for kind, number, ty, size in sizes:
        for offsets in lane_offsets(W, size, 1500, rng).values():
            for mask, mode in zip(masks(W, rng), modes, strict=False):
                prepare(counted.wave, counted.memory, 1000, offsets, 1200)
                at = [1000 + int(o) for o in offsets[active(mask, W)] if mode != "buffer" or o + size <= 1200]
                want = expected([base + a for a in at], size, counted.owner)
                got = counted.run(f"{kind}_{ty}_{mode}", mask)
                assert got == {(pe, number): counts for pe, counts in want.items()}, (ty, mode, hex(mask))


def test_no_lane_no_count_and_no_scratch(programs):
    counted = Counted(programs[0])
    prepare(counted.wave, counted.memory, 0, np.arange(counted.W) * 0, 1000)
    assert counted.run("load_b32_base", 0) == {}
    assert counted.run("store_b64_scratch", 1) == {}
    assert counted.run("load_b64_scratch", 1) == {}


def test_uniform_and_overwritten_addresses(programs):
    counted = Counted(programs[0])
    prepare(counted.wave, counted.memory, 0, np.arange(counted.W) * 16, 4096)
    assert counted.run("load_uniform", (1 << counted.W) - 1) == {(2, 0): (counted.W, 8, 1)}
    # this one has no offset, and what it loads goes to v[10:13], over the addresses
    prepare(counted.wave, counted.memory, OFFSET, np.arange(counted.W) * 16, 4096)
    addresses = [int(low) | int(high) << 32 for low, high in counted.wave.v[12:14].T]
    want = expected(addresses, 16, counted.owner)
    assert counted.run("load_over_address", (1 << counted.W) - 1) == {(pe, 0): n for pe, n in want.items()}


@pytest.mark.parametrize(("piece", "size"), [("add", 4), ("swap", 8)])
def test_atomics_are_messages_of_their_own(programs, piece, size):
    rng, counted = np.random.default_rng(2), Counted(programs[1])
    for offsets in (np.arange(counted.W) * size, np.zeros(counted.W, np.int64), 960 + np.arange(counted.W) * size):
        for mask in masks(counted.W, rng):
            prepare(counted.wave, counted.memory, 0, offsets, 4096)
            addresses = [counted.memory.ctypes.data + int(o) for o in offsets[active(mask, counted.W)]]
            want = expected(addresses, size, counted.owner, atomic=True)
            assert counted.run(piece, mask) == {(pe, 2): numbers for pe, numbers in want.items()}


def test_scalar_loads_count_once_and_lds_never(programs):
    counted = Counted(programs[1])
    prepare(counted.wave, counted.memory, 244, np.arange(counted.W), 4096)
    # 4 and 32 bytes; the second lies across a multiple of 256
    assert counted.run("scalar", (1 << counted.W) - 1) == {(2, 0): (2, 36, 3)}
    lds = np.zeros(256, np.uint8)
    counted.wave.set_lds(lds)
    counted.wave.v[14] = np.arange(counted.W) * 0
    assert counted.run("local", (1 << counted.W) - 1) == {}


def test_transposing_loads_and_copies_to_lds_are_loads(programs):
    """Every lane takes part in a transposing load; a copy to LDS loads a word for each active lane."""
    counted = Counted(programs[1])
    transposes = counted.W == 32
    size, mask = (16, 1) if transposes else (4, 0xF0F)
    prepare(counted.wave, counted.memory, 1000, np.arange(counted.W) * size, 4096)
    counted.wave.set_lds(np.zeros(512, np.uint8))
    lanes = range(counted.W) if transposes else np.flatnonzero(active(mask, counted.W))
    want = expected([counted.memory.ctypes.data + 1000 + size * int(l) for l in lanes], size, counted.owner)
    assert counted.run("transfer", mask) == {(pe, 0): numbers for pe, numbers in want.items()}


# ------------------------------------------------------------------------------------------------------------- worlds


@triton.jit
def visit_kernel(ctx, rows_ptr, flag_ptr, payload_address, out_ptr, N: tl.constexpr):
    """Store to the next PE's heap and to its other allocation, load from the one after that, count on PE 0."""
    me, n = dev.my_pe(ctx), dev.n_pes(ctx)
    offs = tl.arange(0, N)
    tl.store(dev.remote_ptr(ctx, rows_ptr, (me + 1) % n) + offs, offs, mask=offs < N - 3)
    row = tl.load(dev.remote_ptr(ctx, rows_ptr + N, (me + 2) % n) + offs)
    tl.store(payload_address.to(tl.pointer_type(tl.int16)) + offs, row.to(tl.int16))
    tl.atomic_add(dev.remote_ptr(ctx, flag_ptr, 0), 1, sem="relaxed", scope="sys")
    tl.store(out_ptr + offs, row)


N, LAUNCHES = 512, 3


def visit(pe: int) -> bool:
    n, here = shmem.shmem_npes(), state.current()
    rows = shmem.mori_shmem_create_tensor((2 * N,), torch.int32)
    flag = shmem.mori_shmem_create_tensor((1,), torch.int32)
    rows[N:] = torch.arange(N) + pe
    flag.zero_()
    # as an op does that wants other memory than the heap's
    own = here.driver.alloc(2 * N, exportable=True)
    addresses = [int(a) for a in here.bootstrap.allgather(str(own).encode())]
    peer = addresses[(pe + 1) % n]
    device = emulator.current_device()
    emulator.allow(device, peer, 2 * N, "payload")
    out = torch.full((N,), -1, dtype=torch.int32)
    for _ in range(LAUNCHES):
        launch(visit_kernel, (1,), shmem.context(), rows, flag, peer, out, N=N)
    shmem.shmem_barrier_all()
    emulator.disallow(device, peer)
    here.driver.free(own)
    return torch.equal(out, torch.arange(N, dtype=torch.int32) + (pe + 2) % n)


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"seed": 4, "weak_memory": True}], ids=str)
def test_a_world_counts_by_pe_and_owner(options):
    world, n = local_world(3, **options), 3
    with world.byte_ledger() as ledger:
        assert world.run(visit) == [True] * n
        assert world.run(visit) == [True] * n
    remote = {}
    for entry in ledger.entries():
        if entry.kernel == "visit_kernel" and entry.dst not in (None, entry.src):
            remote[entry.src, entry.dst, entry.kind] = entry[4:]
    times = 2 * LAUNCHES
    # an element a lane, so 128 and 64 bytes an instruction of 32 lanes
    stored = (times * (N - 3 + N), times * (4 * (N - 3) + 2 * N), times * 2 * N // 32)
    want = {(pe, (pe + 1) % n, "store"): stored for pe in range(n)}
    want |= {(pe, (pe + 2) % n, "load"): (times * N // 4, times * 4 * N, times * 4 * N // 256) for pe in range(n)}
    want |= {(pe, 0, "atomic"): (times, times * 4, times) for pe in (1, 2)}
    assert remote == want
    # the output is a tensor of torch's, which belongs to nobody's heap
    private = [entry for entry in ledger.entries() if entry.kernel == "visit_kernel" and entry.dst is None]
    assert {entry.src: entry.bytes for entry in private if entry.kind == "store"} == dict.fromkeys(
        range(n), times * 4 * N
    )
    assert ledger.bytes(0, 1, "store", kernel="visit_kernel") == stored[1]
    assert ledger.total(dst=0, kind="atomic", kernel="visit_kernel") == (n * times, n * times * 4, n * times)
    line = next(line for line in ledger.table().splitlines() if "visit_kernel" in line and "store" in line)
    assert line.split("|")[1:3] == [" visit_kernel ", "  0 "]
    ledger.clear()
    assert ledger.entries() == []


def test_nothing_is_counted_outside_of_the_block():
    world, other = local_world(3), local_world(3)
    with world.byte_ledger() as ledger:
        assert other.run(visit) == [True] * 3
        with world.byte_ledger() as inner:
            assert world.run(visit) == [True] * 3
    assert world.run(visit) == [True] * 3
    assert ledger.entries() == []
    assert inner.total(1, 2, "store", kernel="visit_kernel").operations == LAUNCHES * (2 * N - 3)


def test_refusals():
    with pytest.raises(ArgumentError, match="device"):
        world_ledger.byte_ledger(SimpleNamespace(device="cuda", n=2)).__enter__()

    def program(pe):
        with current_world().byte_ledger():
            pass

    with pytest.raises(StateError, match="around run"):
        local_world(1).run(program)
    ledger = ByteLedger(2)
    with pytest.raises(ArgumentError, match="dst"):
        ledger.bytes(0, 2)
    with pytest.raises(ArgumentError, match="kind"):
        ledger.bytes(0, 1, "put")
