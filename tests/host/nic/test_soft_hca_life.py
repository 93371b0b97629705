"""The soft HCA from Python: arguments, what is unfinished, what is removed, closed or forgotten, and its thread."""

import gc
import subprocess
import sys
import threading
import time

import pytest

from mori_triton.errors import ArgumentError, StateError
from mori_triton.host.nic.soft_hca import SoftHca, doorbell_values
from tests.host.nic.soft_cards import PROVIDERS, STATUS, Memory, Request, World
from tests.host.nic.soft_requests import request_of

pytestmark = pytest.mark.cpu


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
