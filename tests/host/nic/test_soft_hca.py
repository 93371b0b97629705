"""The soft HCA carries out requests written by hand, and its completions are the vendors' bytes."""

import ctypes
import gc
import struct
import subprocess
import sys
import threading
import time

import pytest

from mori_triton.errors import ArgumentError, StateError
from mori_triton.host.nic.soft_hca import FAULTS, SoftHca, doorbell_values
from tests.host.nic.soft_cards import OPS, PROVIDERS, STATUS, Memory, Request, World

pytestmark = pytest.mark.cpu

MASK = (1 << 64) - 1


def carried_out(heaps: list[bytearray], pe: int, peer: int, r: Request) -> None:
    """The model: what a request does to copies of the heaps."""
    mine, other = heaps[pe], heaps[peer]
    if r.op == "write":
        other[r.remote : r.remote + r.num_bytes] = mine[r.local : r.local + r.num_bytes]
    elif r.op == "read":
        mine[r.local : r.local + r.num_bytes] = other[r.remote : r.remote + r.num_bytes]
    elif r.op == "inline":
        other[r.remote : r.remote + len(r.data)] = r.data
    else:
        old = int.from_bytes(other[r.remote : r.remote + 8], "little")
        new = (old + r.value) & MASK if r.op == "add" else r.value if old == r.compare else old
        other[r.remote : r.remote + 8] = new.to_bytes(8, "little")
        mine[r.local : r.local + 8] = old.to_bytes(8, "little")


def request_of(op: str, signaled: bool = True) -> Request:
    return Request(
        op, local=264, remote=1024, num_bytes=77, value=0x1122334455667788, compare=5,
        data=b"123456789012"[: 12 if op == "inline" else 0], signaled=signaled,
    )  # fmt: skip


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_operation_does_what_it_says_and_completes(provider: str, op: str, late: bool) -> None:
    world = World(provider, late=late)
    mine, _ = world.connect(1, 0)
    want = [bytearray(heap.bytes.tobytes()) for heap in world.heaps]
    carried_out(want, 1, 0, request_of(op))
    mine.post(request_of(op))
    assert not world.hca.pending()
    mine.ring()
    assert world.hca.pending()
    world.drain()
    assert world.snapshot() == b"".join(want)
    done = mine.last_completion()
    assert (done.count, done.failed) == (1, False)
    assert world.hca.errors == []
    assert world.hca.counts(mine.number)[:4] == (1, 1, 1, 1)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_compare_swap_that_finds_what_it_wants_swaps(provider: str) -> None:
    world = World(provider)
    mine, _ = world.connect(0, 1)
    old = world.heaps[1].word(1024)
    mine.post(Request("cas", local=8, remote=1024, value=0xFEDCBA9876543210, compare=old))
    mine.ring()
    world.drain()
    assert world.heaps[1].word(1024) == 0xFEDCBA9876543210
    assert world.heaps[0].word(8) == old


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("num_bytes", [1, 2, 4, 8, 11, "most"])
def test_an_inline_write_carries_its_bytes(provider: str, num_bytes: int | str) -> None:
    most = {"mlx5": 28, "bnxt_re": 16, "ionic": 32}[provider]
    data = bytes(range(1, 1 + (most if isinstance(num_bytes, str) else num_bytes)))
    world = World(provider)
    mine, _ = world.connect(0, 1)
    before = world.heaps[1].get(0, 200)
    mine.post(Request("inline", remote=101, data=data))
    mine.ring()
    world.drain()
    assert world.heaps[1].get(0, 200) == before[:101] + data + before[101 + len(data) :]
    assert not mine.last_completion().failed


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("local", "remote", "num_bytes"), [(0, 0, 1 << 15), (3, 14, 15011), (1, 8, 4096), (8, 7, 4097)]
)
def test_messages_of_any_size_and_alignment(provider: str, local: int, remote: int, num_bytes: int) -> None:
    for op in ("write", "read"):
        for late in (False, True):
            world = World(provider, late=late)
            mine, _ = world.connect(0, 1)
            want = [bytearray(heap.bytes.tobytes()) for heap in world.heaps]
            r = Request(op, local=local, remote=remote, num_bytes=num_bytes)
            carried_out(want, 0, 1, r)
            mine.post(r)
            mine.ring()
            world.drain()
            assert world.snapshot() == b"".join(want)
            assert world.hca.counts(mine.number).bytes == num_bytes


# ------------------------------------------------------------------------------------------------ completions' bytes


def test_the_bytes_of_mlx5_completions() -> None:
    world = World("mlx5")
    mine, _ = world.connect(0, 1)
    mine.post(request_of("write"))
    mine.ring()
    world.drain()
    c = mine.memory["cq"].get(0, 64)
    assert c[:44] == bytes(44)
    assert struct.unpack(">I", c[44:48])[0] == 77
    assert struct.unpack(">I", c[56:60])[0] == mine.number
    assert c[60:62] == b"\0\0"
    assert c[63] >> 4 == 0
    # those behind the first belong to nobody
    assert mine.memory["cq"].get(64, 64) == b"\xff" * 64
    world.hca.inject(mine.number, "rnr")
    mine.post(request_of("write"))
    mine.ring()
    world.drain()
    c = mine.memory["cq"].get(0, 64)
    assert (c[55], c[60:62], c[63] >> 4) == (0x16, b"\0\1", 13)


def test_the_bytes_of_bnxt_completions() -> None:
    world = World("bnxt_re")
    mine, _ = world.connect(0, 1)
    for count in (1, 2, 3):
        mine.post(request_of("write"))
        mine.ring()
        world.drain()
        c = mine.memory["cq"].get(0, 32)
        assert struct.unpack("<QIIQII", c) == (mine.number, count, 0, 0, count & 1, 0)
    world.hca.inject(mine.number, "retry")
    mine.post(request_of("write"))
    mine.ring()
    world.drain()
    assert struct.unpack("<QIIQII", mine.memory["cq"].get(0, 32)) == (mine.number, 4, 0, 0, 0xA << 8, 0)
    assert mine.memory["cq"].get(32, 32) == bytes(32)


def test_the_bytes_of_ionic_completions() -> None:
    world = World("ionic")
    mine, _ = world.connect(0, 1)
    for _ in range(2):
        mine.post(request_of("write"))
    mine.ring()
    world.drain()
    want = struct.pack("<I", 0) + struct.pack(">I", 2) + bytes(8) + struct.pack("<Q", 1)
    want += struct.pack(">II", 77, mine.number << 8 | 2 << 5 | 1)
    assert mine.memory["cq"].get(32, 32) == want
    assert mine.memory["cq"].get(64, 32) == bytes(32)
    world.hca.inject(mine.number, "remote_access")
    mine.post(request_of("write"))
    mine.ring()
    world.drain()
    assert mine.memory["cq"].get(64 + 24, 8) == struct.pack(">II", 9, mine.number << 8 | 2 << 5 | 2 | 1)


class Recorder:
    """A way to memory that notes every write."""

    def __init__(self) -> None:
        u64, ptr = ctypes.c_uint64, ctypes.c_void_p
        make = ctypes.CFUNCTYPE
        self.writes: list[tuple[int, int]] = []
        self.atomics: list[tuple[int, int, int, int]] = []
        self.kept = (make(None, ptr, u64, u64, ptr)(self.read), make(None, ptr, u64, u64, ptr)(self.write))
        self.kept += (make(u64, ptr, u64, ctypes.c_uint32, u64, u64)(self.atomic),)
        addresses = [ctypes.cast(f, ptr).value or 0 for f in self.kept]
        self.dma = 7, addresses[0], addresses[1], addresses[2]

    def read(self, context: int, address: int, num_bytes: int, out: int) -> None:
        assert context == 7
        ctypes.memmove(out, address, num_bytes)

    def write(self, context: int, address: int, num_bytes: int, data: int) -> None:
        assert context == 7
        self.writes.append((address, num_bytes))
        ctypes.memmove(address, data, num_bytes)

    def atomic(self, context: int, address: int, op: int, value: int, compare: int) -> int:
        self.atomics.append((address, op, value, compare))
        return 41


@pytest.mark.parametrize("provider", PROVIDERS)
def test_everything_goes_through_the_given_way_to_memory_and_what_software_polls_is_written_last(provider: str) -> None:
    recorders = [Recorder(), Recorder()]
    with SoftHca() as hca:
        world = World(provider)
        world.hca.close()
        world.hca = hca
        for pe, recorder in enumerate(recorders):
            hca.use_dma(pe, recorder.dma)
        world.keys = [hca.add_memory(pe, heap.address, 1 << 16) for pe, heap in enumerate(world.heaps)]
        mine, _ = world.connect(0, 1)
        mine.post(request_of("write"))
        mine.ring()
        world.drain()
        assert [at for at, _ in recorders[1].writes] == [world.heaps[1].address + 1024]
        cq, at, size = mine.memory["cq"].address, *{"mlx5": (60, 4), "bnxt_re": (8, 8), "ionic": (28, 4)}[provider]
        assert recorders[0].writes[-1] == (cq + at, size)
        assert len(recorders[0].writes) == 3
        mine.post(request_of("cas"))
        mine.ring()
        world.drain()
        assert recorders[1].atomics == [(world.heaps[1].address + 1024, 1, 0x1122334455667788, 5)]
        assert world.heaps[0].word(264) == 41


# ---------------------------------------------------------------------------------------- order, signals, many queues


@pytest.mark.parametrize("provider", PROVIDERS)
def test_only_signaled_requests_complete_and_stand_for_those_before(provider: str) -> None:
    world = World(provider)
    mine, _ = world.connect(0, 1)
    before = mine.memory["cq"].bytes.copy()
    mine.post(request_of("write", signaled=False))
    mine.post(request_of("inline", signaled=False))
    mine.ring()
    world.drain()
    assert (mine.memory["cq"].bytes == before).all()
    mine.post(request_of("add"))
    mine.ring()
    world.drain()
    done = mine.completion()
    assert done is not None
    assert done.count == 3
    assert mine.provider != "ionic" or mine.completion() is None


@pytest.mark.parametrize("provider", PROVIDERS)
def test_several_pes_and_queue_pairs(provider: str) -> None:
    world = World(provider, 4)
    ends = [end for pe in range(4) for peer in range(pe) for _ in range(2) for end in world.connect(pe, peer)]
    assert len({end.number for end in ends}) == 24
    want = [bytearray(heap.bytes.tobytes()) for heap in world.heaps]
    for at, end in enumerate(ends):
        for turn in range(5):
            r = Request("write", local=at * 64, remote=4096 + at * 320 + turn * 64, num_bytes=61)
            carried_out(want, end.pe, end.peer, r)
            end.post(r)
        end.ring()
    world.drain()
    assert world.snapshot() == b"".join(want)
    assert all(end.last_completion().count == 5 for end in ends)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_queue_pair_may_be_connected_to_itself(provider: str) -> None:
    world = World(provider)
    own, _ = world.connect(0, 0)
    own.post(Request("write", local=0, remote=512, num_bytes=100))
    own.ring()
    world.drain()
    assert world.heaps[0].get(512, 100) == world.heaps[0].get(0, 100)


@pytest.mark.parametrize("first", [0, (1 << 16) - 100, (1 << 24) - 100, (1 << 32) - 100])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_rings_and_counters_wrap(provider: str, first: int) -> None:
    """The ring of 8 (colors, epochs), 16 bits of mlx5, 24-bit counts of ionic, 24-bit packet numbers of bnxt_re."""
    world = World(provider, first=first, psn=(1 << 24) - 50)
    mine, _ = world.connect(0, 1)
    start, total = world.heaps[1].word(0), first
    # batches of every size that fits, so that doorbells fall everywhere
    while total < first + 200:
        batch = total % 7 + 1
        for i in range(batch):
            mine.post(Request("add", value=1, signaled=i == batch - 1))
        mine.ring()
        total += batch
        world.drain()
        newest = mine.last_completion()
        assert (newest.count, newest.failed) == (total, False), world.hca.errors
        mine.acknowledge()
    assert world.heaps[1].word(0) == (start + total - first) & MASK
    assert world.heaps[0].word(0) == (start + total - first - 1) & MASK


def test_bnxt_packet_numbers_count_the_packets_of_messages() -> None:
    world = World("bnxt_re", mtu=256, psn=(1 << 24) - 4)
    mine, _ = world.connect(0, 1)
    for op, num_bytes, want in (
        ("write", 1, -3),
        ("read", 256, -2),
        ("write", 257, 0),
        ("cas", 8, 1),
        ("read", 2000, 9),
    ):
        mine.post(Request(op, num_bytes=num_bytes))
        assert mine.psn == want % (1 << 24)
    mine.ring()
    world.drain()
    assert not world.hca.errors


# ---------------------------------------------------------------------------------------------------- errors, injected


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fault", FAULTS[1:])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_injected_fault_fails_its_request_and_all_behind_it(provider: str, fault: str, late: bool) -> None:
    world = World(provider, late=late)
    mine, theirs = world.connect(0, 1)
    before = world.snapshot()
    world.hca.inject(mine.number, fault, index=1)
    for turn in range(4):
        mine.post(Request("inline", remote=turn * 8, data=b"%d" % turn * 8, signaled=False))
    mine.ring()
    seen = []
    for word in range(100_000):
        if not world.hca.pending():
            break
        world.hca.step(word)
        now = mine.completion()
        if now is not None and now.count and (not seen or seen[-1] != now):
            seen.append(now)
    # each fails for itself, signaled or not; the first says why
    assert [(c.count, c.failed) for c in seen] == [(2, True), (3, True), (4, True)]
    assert [c.status for c in seen] == [STATUS[fault][provider], *[STATUS["flush"][provider]] * 2]
    assert world.snapshot() == before[:65536] + b"00000000" + before[65544:]
    (error,) = world.hca.errors
    assert (error.index, error.fault, error.pe, error.peer) == (1, fault, 0, 1)
    assert str(error) == f"soft {provider}, queue pair {mine.number:#x} of PE 0 to PE 1, request 1: injected ({fault})"
    # what is posted later fails too, and others go on
    mine.post(request_of("write"))
    mine.ring()
    theirs.post(Request("write", local=0, remote=0, num_bytes=8))
    theirs.ring()
    world.drain()
    assert mine.last_completion().status == STATUS["flush"][provider]
    assert world.heaps[0].get(0, 8) == b"00000000"
    assert not theirs.last_completion().failed
    assert len(world.hca.errors) == 1


# ------------------------------------------------------------------------------------------------------ the Python side


def test_arguments_are_checked() -> None:
    memory = Memory(4096)
    at = memory.address
    with SoftHca() as hca:
        with pytest.raises(ArgumentError, match="provider"):
            hca.add_queue_pair("efa", 0, sq=at, cq=at, doorbell=at, num_wqes=8)
        with pytest.raises(ArgumentError, match=r"num_wqes: want a power of two from 2 to 32768, got 12"):
            hca.add_queue_pair("mlx5", 0, sq=at, cq=at, doorbell=at, record=at, num_wqes=12)
        with pytest.raises(ArgumentError, match="record: want an address"):
            hca.add_queue_pair("mlx5", 0, sq=at, cq=at, doorbell=at, num_wqes=8)
        with pytest.raises(ArgumentError, match="num_psns"):
            hca.add_queue_pair("bnxt_re", 0, sq=at, cq=at, doorbell=at, psn_table=at, num_psns=4, num_wqes=8)
        with pytest.raises(ArgumentError, match="num_cqes"):
            hca.add_queue_pair("ionic", 0, sq=at, cq=at, doorbell=at, cq_doorbell=at, num_wqes=8)
        with pytest.raises(ArgumentError, match="number: want the number of a queue pair"):
            hca.connect(5, 6)
        with pytest.raises(ArgumentError, match="address"):
            hca.add_memory(0, 0, 8)
        one = hca.add_queue_pair("mlx5", 0, sq=at, cq=at, doorbell=at, record=at, num_wqes=8)
        two = hca.add_queue_pair("ionic", 0, sq=at, cq=at, doorbell=at, cq_doorbell=at, num_cqes=2, num_wqes=8)
        with pytest.raises(ArgumentError, match="peer: want a queue pair of mlx5, got ionic"):
            hca.connect(one, two)
        with pytest.raises(ArgumentError, match="fault"):
            hca.inject(one, "none")
        hca.connect(one, one)
        with pytest.raises(ArgumentError, match="not connected"):
            hca.connect(one, one)
    with pytest.raises(StateError, match="after close"):
        hca.pending()
    hca.close()


def test_doorbells_of_ionic_leave_room_for_the_index() -> None:
    world = World("ionic")
    mine, _ = world.connect(0, 1)
    assert doorbell_values(mine.number) == (mine.number << 24, mine.number << 24 | 1 << 48)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_is_unfinished_is_described(provider: str) -> None:
    world = World(provider)
    mine, _ = world.connect(0, 1)
    assert world.hca.describe() == []
    mine.post(request_of("write"))
    mine.ring()
    (line,) = world.hca.describe()
    assert line.startswith(f"soft {provider}, queue pair {mine.number:#x} of PE 0 to PE 1: 0 of 0 requests over")
    assert line.endswith("a doorbell not taken")
    world.hca.step(0)
    assert world.hca.describe() == [line.replace("0 of 0", "0 of 1").replace(", a doorbell not taken", "")]
    world.drain()
    assert world.hca.describe() == []


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_queue_pair_that_is_removed_is_left_alone(provider: str) -> None:
    world = World(provider)
    mine, theirs = world.connect(0, 1)
    mine.post(request_of("write"))
    mine.ring()
    world.hca.remove_queue_pair(mine.number)
    before = world.snapshot()
    assert not world.hca.pending()
    assert not world.hca.step(1)
    assert world.snapshot() == before
    # its peer has nobody to talk to
    theirs.post(request_of("write"))
    theirs.ring()
    world.drain()
    assert theirs.last_completion().status == STATUS["retry"][provider]
    world.hca.remove_queue_pair(theirs.number)
    assert "no PE" not in str(world.hca.errors[0])
    again, _ = world.connect(0, 1)
    assert again.number not in {mine.number, theirs.number}


def test_nothing_is_left_of_one_that_is_closed_or_forgotten() -> None:
    hca = SoftHca()
    freed = hca._free
    assert freed.alive
    hca.close()
    assert not freed.alive
    freed = SoftHca()._free
    gc.collect()
    assert not freed.alive


# ----------------------------------------------------------------------------------------------------------- the thread


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_thread_serves_queue_pairs_until_it_is_stopped(provider: str, late: bool) -> None:
    threads = threading.active_count()
    world = World(provider, late=late)
    world.hca.start()
    with pytest.raises(StateError, match="while its thread runs"):
        world.hca.step(0)
    with pytest.raises(StateError, match="while its thread runs"):
        world.hca.start()
    # added while it runs
    ends = [end for _ in range(4) for end in world.connect(0, 1)]
    deadline = time.monotonic() + 20
    for turn in range(50):
        for at, end in enumerate(ends):
            end.post(Request("add", local=at * 8, remote=0, value=1))
            end.ring()
        for end in ends:
            while (done := end.completion()) is None or done.count < turn + 1:
                assert time.monotonic() < deadline, (world.hca.describe(), world.hca.errors)
            assert not done.failed
            end.acknowledge()
    world.hca.stop()
    assert threading.active_count() == threads
    ends[0].post(request_of("write"))
    ends[0].ring()
    time.sleep(0.01)
    assert world.hca.pending()
    world.hca.start()
    while world.hca.pending():
        assert time.monotonic() < deadline
    world.hca.stop()
    world.hca.stop()
    assert threading.active_count() == threads


def test_a_process_that_forgets_to_stop_ends_all_the_same() -> None:
    program = "from mori_triton.host.nic.soft_hca import SoftHca; h = SoftHca(); h.start(); print('ends')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")
