"""What the soft HCA writes for software to poll: the vendors' bytes, last of all, and faults that are injected."""

import ctypes
import struct

import pytest

from mori_triton.host.nic.soft_hca import FAULTS, SoftHca
from tests.host.nic.soft_cards import PROVIDERS, STATUS, Request, World
from tests.host.nic.soft_requests import request_of

pytestmark = pytest.mark.cpu


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
