"""What operations do over a network beside posting: local sides, who hears of the result, what is complete."""

from __future__ import annotations

import re
import threading
import time
import zlib
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import mori_triton
from mori_triton import abi, bitcode, emulator
from mori_triton import shmem as mori_shmem
from mori_triton.device import externs, shmem
from mori_triton.device.launch import launch
from mori_triton.errors import KernelFault, NetworkError
from tests.device.pes import Pes
from tests.device.queue_pairs import PROVIDERS, Card, QueuePairs
from tests.host.proxy.ucx import needs_ucx

pytestmark = pytest.mark.cpu

ARCHS = ("gfx1201", "gfx942")
HEAP = 1 << 18  # of QueuePairs
SRC, DST, SIG = 8192, 4096, 16384
LANES = 256
PUT_NAME = "mori_shmem_ctx_put_block"
PUT, GET, GET_NBI, PUT_SIGNAL, QUIET, FETCH_ADD, SET_ALL, BARRIER, SET_ALL_LAST = range(9)


@triton.jit(do_not_specialize=["dst", "src", "num_bytes", "sig", "pe", "which"])
def one_kernel(ctx, out, dst, src, num_bytes, sig, pe, which, LANES: tl.constexpr):
    """One operation; its result as every thread has it. out: int64 [LANES]."""
    zero = tl.zeros([LANES], tl.int64)
    o = out + tl.arange(0, LANES)
    if which == 0:
        tl.store(o, zero + shmem.put(ctx, dst, src, num_bytes, pe))
    elif which == 1:
        tl.store(o, zero + shmem.get(ctx, dst, src, num_bytes, pe))
    elif which == 2:
        tl.store(o, zero + shmem.get_nbi(ctx, dst, src, num_bytes, pe))
    elif which == 3:
        tl.store(o, zero + shmem.put_signal(ctx, dst, src, num_bytes, sig, 1, shmem.SIGNAL_ADD, pe))
    elif which == 4:
        tl.store(o, zero + shmem.quiet(ctx))
    elif which == 5:
        tl.store(o, zero + externs.ctx_atomic_fetch_uint64(ctx, dst, 5, 0, 14, pe, 0).to(tl.int64))
    elif which == 6:
        tl.store(o, zero + shmem.signal_set_all(ctx, sig, 77))
    elif which == 7:
        tl.store(o, zero + shmem.barrier_all(ctx))
    else:
        # of one program: nobody to count
        tl.store(o, zero + shmem.signal_set_all_last(ctx, sig, 77, 0, 1))


def call(pairs: QueuePairs, ctx: torch.Tensor, which: int, *, pe: int = 1, size: int = 64, **at: int) -> int:
    """One operation of 4 warps; the result, which all threads have. `dst`, `src`: addresses, else of my heap."""
    base = pairs.pes.base(0)
    out = torch.full((LANES,), -7, dtype=torch.int64)
    dst, src = at.get("dst", base + DST), at.get("src", base + SRC)
    pairs.launch(one_kernel, (1,), ctx, out, dst, src, size, base + SIG, pe, which, LANES=LANES, num_warps=4)
    assert len(set(out.tolist())) == 1
    return int(out[0])


@pytest.mark.parametrize(("which", "side"), [(PUT, "src"), (GET, "dst"), (GET_NBI, "dst"), (PUT_SIGNAL, "src")])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_card_is_not_asked_for_local_memory_outside_the_heap(provider: str, which: int, side: str) -> None:
    pairs = QueuePairs("gfx1201", provider)
    elsewhere, base = torch.zeros(64, dtype=torch.uint8), pairs.pes.base(0)
    with pairs.current() as ctx:
        # another one's memory; my heap's last bytes and those behind it
        for address in (elsewhere.data_ptr(), base + HEAP - 63):
            pairs.pes.clear_log(0)
            other = {"src": {"dst": base + DST}, "dst": {"src": base + SRC}}[side]
            assert call(pairs, ctx, which, **{side: address}, **other) == -1
            (record,) = pairs.pes.records(0)
            found = {name: record[name] for name in ("kind", "peer", "address", "expected", "seen")}
            assert found == {"kind": abi.ERROR_REFUSED, "peer": 1, "address": address, "expected": 64, "seen": 1}
        assert pairs.queue()["reserved"] == 0


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_get_that_does_not_wait_is_complete_after_quiet(provider: str) -> None:
    pairs = QueuePairs("gfx942", provider, timeout_s=60)
    mine, theirs = pairs.pes.view(0, DST, 64, torch.uint8), pairs.pes.view(1, SRC, 64, torch.uint8)
    theirs[:] = torch.arange(64, dtype=torch.uint8)
    before = mine.clone()
    with pairs.current() as ctx, Card(pairs) as card:
        card.hold.set()
        assert call(pairs, ctx, GET_NBI) == 0
        assert torch.equal(mine, before)
        card.hold.clear()
        assert call(pairs, ctx, QUIET) == 0
        assert torch.equal(mine, theirs)
        queue = pairs.queue()
        assert queue["done"] == queue["reserved"] == 1
        # the other kind needs no quiet
        theirs += 100
        assert call(pairs, ctx, GET) == 0
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_fetch_and_a_failure_reach_every_thread(arch: str) -> None:
    pairs = QueuePairs(arch, "mlx5", timeout_s=60)
    pairs.pes.view(1, DST, 1, torch.int64)[0] = 2**40
    with pairs.current() as ctx, Card(pairs) as card:
        assert call(pairs, ctx, FETCH_ADD) == 2**40
        assert int(pairs.pes.view(1, DST, 1, torch.int64)[0]) == 2**40 + 5
        card.fail[0, 1] = 0x13
        assert call(pairs, ctx, PUT) == -1
        # broken: at once, and with no record of its own
        assert call(pairs, ctx, PUT_SIGNAL) == -1
        assert call(pairs, ctx, QUIET) == -1
        assert call(pairs, ctx, FETCH_ADD) == 0
    (record,) = pairs.pes.records(0)
    assert (record["kind"], record["peer"]) == (abi.ERROR_NETWORK_FAILED, 1)


@pytest.mark.parametrize(("which", "result"), [(SET_ALL, 0), (SET_ALL_LAST, 1)], ids=["at once", "of the last"])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_signal_to_all_goes_to_mapped_and_other_pes(arch: str, provider: str, which: int, result: int) -> None:
    pairs = QueuePairs(arch, provider, timeout_s=60)
    words = [pairs.pes.view(pe, SIG, 1, torch.int64) for pe in range(2)]
    with pairs.current() as ctx, Card(pairs) as card:
        assert call(pairs, ctx, which) == result
        deadline = time.monotonic() + 20
        while int(words[1][0]) != 77 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [int(word[0]) for word in words] == [77, 77]
        assert card.served == [1]
        assert pairs.pes.records(0) == []


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_barrier_over_a_network(provider: str) -> None:
    pairs = QueuePairs("gfx1201", provider, timeout_s=60)
    heard, told = pairs.pes.view(0, 0, 1, torch.int64), pairs.pes.view(1, 0, 1, torch.int64)
    with pairs.current() as ctx, Card(pairs) as card:
        for epoch in (1, 2, 3):
            # PE 1 has come when it sees that PE 0 has
            other = threading.Thread(target=answer, args=(told, heard, epoch))
            other.start()
            assert call(pairs, ctx, PUT) == 0
            assert call(pairs, ctx, BARRIER) == 0
            other.join()
            assert int(told[0]) == int(heard[0]) == epoch
        assert card.served == [6]
        assert pairs.pes.records(0) == []


def answer(told: torch.Tensor, heard: torch.Tensor, epoch: int) -> None:
    deadline = time.monotonic() + 30
    while int(told[0]) != epoch and time.monotonic() < deadline:
        time.sleep(0.001)
    heard[0] = epoch


def test_a_barrier_does_not_signal_before_all_is_complete() -> None:
    pairs = QueuePairs("gfx1201", "mlx5", timeout_s=0.2)
    pairs.pes.view(0, 0, 1, torch.int64)[0] = 1
    with pairs.current() as ctx, Card(pairs) as card:
        card.hold.set()
        assert call(pairs, ctx, GET_NBI) == 0
        assert call(pairs, ctx, BARRIER) == -1
        # the get alone
        assert pairs.queue()["reserved"] == 1
        (record,) = pairs.pes.records(0)
        assert (record["kind"], record["tag"], record["peer"]) == (abi.ERROR_WAIT_TIMEOUT, abi.TAG_NETWORK, 1)


# --------------------------------------------------------------------------------------------------------------- debug


@pytest.mark.parametrize("arch", ARCHS)
def test_a_debug_build_names_the_function_and_looks_at_the_local_side(arch: str) -> None:
    pes, symbol = Pes(2, arch), zlib.crc32(PUT_NAME.encode())
    library = bitcode.specialize(arch, provider="p2p", debug=True)
    base, out = pes.base(0), torch.full((64,), -7, dtype=torch.int32)
    # destination, source, PE, result; what is outside the heap altogether may be any memory
    elsewhere = torch.zeros(64, dtype=torch.uint8)
    cases: list[tuple[int, int, int, int, Any]] = [
        (base + DST, base + SRC, 1, 0, None),
        (base + DST, elsewhere.data_ptr(), 1, 0, None),
        (base + DST, base + SRC, 2, -1, (2, base + DST, 0)),
        (base + DST, base + pes.heap_bytes - 60, 1, -1, (1, base + pes.heap_bytes - 60, 1)),
        (base + pes.heap_bytes - 60, base + SRC, 1, -1, (1, base + pes.heap_bytes - 60, 0)),
    ]
    with pes.current(0) as ctx:
        emulator.allow(emulator.current_device(), elsewhere.data_ptr(), 64, "elsewhere")
        for dst, src, pe, result, refused in cases:
            pes.clear_log(0)
            out.fill_(-7)
            args = ctx, out, dst, src, 64, pe
            launch(one_put_kernel, (1,), *args, num_warps=2, extern_libs={abi.LIBRARY: str(library)})
            assert set(out.tolist()) == {result}
            records = [(r["peer"], r["address"], r["seen"]) for r in pes.records(0)]
            assert records == ([] if refused is None else [refused])
            assert {r["symbol"] for r in pes.records(0)} <= {symbol}


@pytest.mark.parametrize("transport", ["mlx5", pytest.param("proxy", marks=needs_ucx)])
def test_a_debug_build_over_a_network_says_which_function_of_which_pe(transport: str) -> None:
    """The world's error: function, address as the heap knows it, both PEs; of what is refused, and of what fails."""
    library = bitcode.specialize("gfx1201", provider=transport, debug=True)

    def program(pe: int, num_bytes: int) -> None:
        rows = mori_shmem.mori_shmem_create_tensor((128,), torch.uint8)
        out = torch.full((64,), -7, dtype=torch.int32)
        mori_shmem.shmem_barrier_all()
        if pe == 1:
            args = mori_shmem.context(), out, rows.data_ptr() + 64, rows.data_ptr(), num_bytes, 0
            launch(one_put_kernel, (1,), *args, num_warps=2, extern_libs={abi.LIBRARY: str(library)})
            assert set(out.tolist()) == {-1}
        mori_shmem.shmem_barrier_all()

    world = mori_triton.local_world(2, transport=transport, heap_size="1M", timeout_s=20)
    with pytest.raises(KernelFault) as refused:
        world.run(program, 1 << 21)
    text = str(refused.value)
    assert re.search(rf"PE 1, to PE 0: allocation 0\+64 of PE 1: {1 << 21} bytes refused .*, in {PUT_NAME}", text)
    if transport == "mlx5":
        world = mori_triton.local_world(
            2, transport=transport, heap_size="1M", timeout_s=20, network={"faults": [{"pe": 1, "peer": 0}]}
        )
        with pytest.raises(NetworkError) as failed:
            world.run(program, 64)
        text = str(failed.value)
        assert re.search(rf"mlx5, PE 1 to PE 0: queue pair 0x\w+, request 0: status 0x15.*, in {PUT_NAME}", text)


def test_a_record_has_no_name_of_an_earlier_one() -> None:
    pes = Pes(2, "gfx1201")
    with pes.current(0) as ctx:
        # what records of another build have left
        pes.logs[0][abi.ERROR_LOG_FIELDS["records"].offset :] = 0xA5
        out = torch.full((64,), -7, dtype=torch.int32)
        launch(one_put_kernel, (1,), ctx, out, pes.base(0) + DST, pes.base(0) + SRC, 64, 2, num_warps=2)
        assert [(r["kind"], r["symbol"]) for r in pes.records(0)] == [(abi.ERROR_REFUSED, 0)]


@triton.jit(do_not_specialize=["dst", "src", "num_bytes", "pe"])
def one_put_kernel(ctx, out, dst, src, num_bytes, pe):
    """A put. out: int32 [64]."""
    status = shmem.put(ctx, dst, src, num_bytes, pe)
    tl.store(out + tl.arange(0, 64), tl.zeros([64], tl.int32) + status)


# ----------------------------------------------------------------------------------------------- what is read after


@triton.jit
def read_again_kernel(ctx, mine_ptr, theirs_ptr, out_ptr, WAIT: tl.constexpr):
    """Read a row, bring another one over it, read it again. out: int32 [2, 64]."""
    offs = tl.arange(0, 64)
    if shmem.my_pe(ctx) == 0:
        tl.store(out_ptr + offs, tl.load(mine_ptr + offs))
        if WAIT:
            shmem.get(ctx, mine_ptr, theirs_ptr, 256, 1)
        else:
            shmem.get_nbi(ctx, mine_ptr, theirs_ptr, 256, 1)
            shmem.quiet(ctx)
        tl.store(out_ptr + 64 + offs, tl.load(mine_ptr + offs))


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_card_has_brought_is_read_after_a_get_or_a_quiet(waits: bool) -> None:
    """Weak memory: a thread's cache may have the old row until the thread acquires."""

    def program(pe: int) -> list[list[int]]:
        rows = mori_shmem.mori_shmem_create_tensor((2, 64), torch.int32)
        rows[0], rows[1] = 1000 + torch.arange(64), 2000 + 100 * pe
        out = torch.full((2, 64), -1, dtype=torch.int32)
        mori_shmem.shmem_barrier_all()
        launch(read_again_kernel, (1,), mori_shmem.context(), rows[0], rows[1], out, WAIT=waits, num_warps=2)
        mori_shmem.shmem_barrier_all()
        return [out[0].tolist(), out[1].tolist()]

    for seed in range(4):
        world = mori_triton.local_world(2, transport="mlx5", seed=seed, weak_memory=True, network={"late": True})
        before, after = world.run(program)[0]
        assert before == list(range(1000, 1064))
        assert after == [2100] * 64, seed
