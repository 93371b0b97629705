"""The loop without UCX: what it asks of libucp, in which order, and what it makes of errors and of limits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from mori_triton.host.proxy import Op, descriptor, layout, status
from tests.host.proxy.ucp_double import Ucp

pytestmark = pytest.mark.cpu


def test_what_is_asked_reaches_ucx_in_order() -> None:
    ucp = Ucp()
    ucp.post(
        descriptor(Op.PUT, 1, local=4096, remote=16, num_bytes=8),
        descriptor(Op.GET, 0, local=8192, remote=24, num_bytes=4088 - 24),
        descriptor(Op.PUT, 1, local=4096, remote=0, num_bytes=0),
    )
    assert ucp.run() == 0
    assert ucp.calls == [("put", 101, 4096, 8, 16, 201), ("get", 100, 8192, 4064, 24, 200)]
    assert [ucp.ended(i) for i in range(3)] == ["done"] * 3
    assert (ucp.ring.header.head, ucp.ring.num_errors) == (3, 0)


def kinds(ucp: Ucp) -> list[str]:
    """Calls of UCX but for answers, which every message brings at once."""
    return [call[0] for call in ucp.calls if call[:1] != ("send",) or call[2] == 1]


@pytest.mark.parametrize("first", ["data", "flush"])
def test_a_signal_starts_only_when_its_data_is_flushed(first: str) -> None:
    ucp = Ucp()
    ucp.answers = {"put": [11], "flush": [12]}
    (index,) = ucp.post(descriptor(Op.PUT_SIGNAL_SET, 1, local=1, remote=0, num_bytes=8, value=7, extra=64))
    assert ucp.run() == 1
    assert kinds(ucp) == ["put", "flush"]
    ucp.finish(("data", "flush").index(first))
    assert ucp.run() == 1
    assert ucp.ended(index) == "no"
    assert ucp.heap[64] == 0
    ucp.finish()
    assert ucp.run() == 0
    assert kinds(ucp) == ["put", "flush", "send"]
    assert ucp.ended(index) == "done"
    assert ucp.heap[64] == 7
    assert sorted(ucp.freed) == [11, 12]


PUT = descriptor(Op.PUT, 1, local=1, remote=8, num_bytes=8)
ADD = descriptor(Op.ADD, 1, remote=64, num_bytes=8, value=1)
SIGNAL = descriptor(Op.PUT_SIGNAL_ADD, 1, value=16, extra=64)


@pytest.mark.parametrize("message", [ADD, SIGNAL], ids=["atomic", "signal without data"])
def test_a_message_waits_for_earlier_puts_to_its_pe_and_only_for_those(message: layout.Descriptor) -> None:
    ucp = Ucp(n_pes=3)
    ucp.answers = {"put": [11, 12], "flush": [13]}
    ucp.post(PUT, descriptor(Op.PUT, 2, local=1, remote=8, num_bytes=8), message)
    assert ucp.run() == 3
    assert [call[:2] for call in ucp.calls] == [("put", 101), ("put", 102), ("flush", 101)]
    ucp.finish(2)
    # its own completion is not what the message waits for, and the other PE's put even less
    assert ucp.run() == 3
    assert [ucp.ended(i) for i in range(3)] == ["no", "no", "done"]
    assert kinds(ucp) == ["put", "put", "flush", "send"]
    assert ucp.heap[64] == message.value
    # with nothing put since, the next leaves at once
    ucp.post(message)
    ucp.run()
    assert kinds(ucp)[4:] == ["send"]


def test_messages_share_a_flush_and_keep_their_order_and_puts_pass_them() -> None:
    ucp = Ucp(entries=16)
    ucp.answers = {"flush": [11, 12]}
    put = descriptor(Op.PUT, 1, local=1, remote=128, num_bytes=8)
    ucp.post(put, ADD, SIGNAL, put, ADD)
    assert ucp.run() == 4
    assert kinds(ucp) == ["put", "flush", "put"]
    ucp.finish()
    # the flush was there before the second put, which the last message waits for
    assert ucp.run() == 1
    assert kinds(ucp) == ["put", "flush", "put", "send", "send", "flush"]
    assert ucp.heap[64] == 17
    operations = [np.frombuffer(call[3], np.uint32)[8] for call in ucp.calls if call[0] == "send" and call[2] == 1]
    assert operations == [Op.ADD, Op.PUT_SIGNAL_ADD]
    ucp.finish()
    assert ucp.run() == 0
    assert ucp.heap[64] == 18


def test_a_copy_of_what_a_message_changes_waits_for_its_answer() -> None:
    ucp = Ucp(entries=16)
    ucp.answers = {"hold": []}
    touching = descriptor(Op.PUT, 1, local=1, remote=71, num_bytes=8)
    beside = descriptor(Op.PUT, 1, local=2, remote=72, num_bytes=8)
    got = descriptor(Op.GET, 1, local=3, remote=60, num_bytes=5)
    ucp.post(ADD, beside, touching, beside)
    ucp.post(ADD, got)
    ucp.run()
    # what comes behind a put that waits waits too
    assert [call[:3] for call in ucp.calls] == [("send", 101, 1), ("put", 101, 2)]
    ucp.answer_message(0, 0)
    ucp.run()
    assert kinds(ucp) == ["send", "put", "put", "put", "flush", "send"]
    assert [call[2] for call in ucp.calls if call[0] == "put"] == [2, 1, 2]
    ucp.answer_message(4, 0)
    assert ucp.run() == 0
    assert kinds(ucp)[6:] == ["get"]


def test_a_get_waits_until_earlier_puts_are_at_their_places() -> None:
    ucp = Ucp()
    ucp.answers = {"flush": [11]}
    ucp.post(PUT, descriptor(Op.GET, 1, local=3, remote=512, num_bytes=5), PUT)
    assert ucp.run() == 2
    assert kinds(ucp) == ["put", "flush"]
    ucp.finish()
    assert ucp.run() == 0
    assert kinds(ucp) == ["put", "flush", "get", "put"]


@pytest.mark.parametrize("behind", [SIGNAL, descriptor(Op.GET, 1, local=3, remote=512, num_bytes=5)])
def test_what_is_behind_a_put_that_had_to_wait_comes_after_it(behind: layout.Descriptor) -> None:
    """The put is not among those given to UCX when the last one is taken from the ring."""
    ucp = Ucp()
    ucp.answers = {"hold": [], "flush": [11]}
    ucp.post(ADD, descriptor(Op.PUT, 1, local=1, remote=60, num_bytes=8), behind)
    assert ucp.run() == 3
    assert kinds(ucp) == ["send"]
    ucp.answer_message(0, 0)
    assert ucp.run() == 1
    assert kinds(ucp) == ["send", "put", "flush"]
    ucp.finish()
    ucp.run()
    assert kinds(ucp)[3:] == ["send" if behind is SIGNAL else "get"]


def test_no_signal_follows_data_that_was_lost() -> None:
    ucp = Ucp()
    ucp.answers = {"put": [11], "flush": [12]}
    indices = ucp.post(PUT, SIGNAL, descriptor(Op.QUIET, layout.ALL_PES), descriptor(Op.FLUSH, 0))
    ucp.finish_in_loop(0, -3)
    assert ucp.run() == 0
    assert "send" not in kinds(ucp)
    assert [ucp.ended(i) for i in indices] == ["failed", "failed", "failed", "done"]
    (gone,) = [pe for pe in range(2) if ucp.ring_peer(pe).gone]
    assert (gone, ucp.ring.header.num_gone) == (1, 1)
    assert ucp.ring_peer(1).gone == 2 << 8 | (-3 & 0xFF)


def test_a_ticket_tells_how_its_operation_ended_when_its_slot_serves_another() -> None:
    ucp = Ucp(entries=2)
    ucp.heap[64:72] = 9
    fetch, wrong = (descriptor(Op.FETCH_ADD, pe, remote=64, num_bytes=8, value=1) for pe in (1, 9))
    fetch.ticket, wrong.ticket = 3, 64
    for one in (fetch, wrong, ADD, ADD):
        ucp.post(one)
        assert ucp.run() == 0
    told, failed = ucp.ring.header.tickets[2], ucp.ring.header.tickets[63]
    assert (told.done, told.value) == (1, 0x0909_0909_0909_0909)
    assert (failed.done, failed.reason, failed.pe) == (2 | layout.FAILED, 1 << 8, 9)
    # a number that there is not
    wrong = descriptor(Op.PUT, 1, local=1, remote=64, num_bytes=8)
    wrong.ticket = 65
    (index,) = ucp.post(wrong)
    assert ucp.run() == 0
    assert ucp.ended(index) == "failed"


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_value_is_set_in_every_width(width: int) -> None:
    ucp = Ucp()
    ucp.heap[:] = 0xEE
    ucp.post(descriptor(Op.SET, 1, remote=16, num_bytes=width, value=0x8877_6655_4433_2211))
    assert ucp.run() == 0
    want = np.full(4096, 0xEE, np.uint8)
    want[16 : 16 + width] = [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88][:width]
    np.testing.assert_array_equal(ucp.heap, want)


def test_a_quiet_waits_for_what_came_before_and_flushes_who_got_something() -> None:
    ucp = Ucp(n_pes=3)
    ucp.answers = {"put": [11, 0], "flush": [12, 0]}
    put = descriptor(Op.PUT, 1, local=1, num_bytes=8)
    indices = ucp.post(put, descriptor(Op.PUT, 2, local=1, num_bytes=8), descriptor(Op.QUIET, layout.ALL_PES), put)
    assert ucp.run() == 4
    assert [ucp.ended(i) for i in indices] == ["no", "done", "no", "done"]
    assert "flush" not in [call[0] for call in ucp.calls]
    ucp.finish()
    assert ucp.run() == 2
    assert [call for call in ucp.calls if call[0] == "flush"] == [("flush", 101), ("flush", 102)]
    assert ucp.ended(indices[2]) == "no"
    ucp.finish()
    assert ucp.run() == 0
    assert ucp.ended(indices[2]) == "done"


def test_an_error_of_ucx_names_peer_and_operation() -> None:
    ucp = Ucp()
    ucp.answers = {"put": [11], "get": [12]}
    put, get = (descriptor(op, 1, local=1, remote=40, num_bytes=8) for op in (Op.PUT, Op.GET))
    ucp.post(get, put, descriptor(Op.PUT, 0, local=1, num_bytes=8))
    assert ucp.run() == 3
    ucp.gone(ctypes.addressof(ucp.peers[1]), 101, -25)
    ucp.finish(0, -16)
    ucp.finish(0, -80)
    assert ucp.run() == 0
    assert ("close", 101) in ucp.calls
    records = ucp.ring.errors()
    assert {r.kind.name for r in records} == {"PEER_FAILED"}
    assert sorted((r.op, r.operation, r.status, r.pe) for r in records) == [(Op.PUT, 1, -80, 1), (Op.GET, 0, -16, 1)]
    assert ucp.ring_peer(1).gone == 2 << 8 | (-25 & 0xFF)
    # what comes later for it is not even tried, and every quiet says that puts may be lost
    calls = len(ucp.calls)
    later = ucp.post(put, *[descriptor(Op.QUIET, layout.ALL_PES)] * 2, descriptor(Op.FLUSH, 0))
    assert ucp.run() == 0
    assert [ucp.ended(i) for i in later] == ["failed", "failed", "failed", "done"]
    assert [call for call in ucp.calls[calls:] if call[1] == 101] == []


def test_what_ucx_refuses_ends_what_its_peer_is_sent() -> None:
    ucp = Ucp()
    ucp.answers = {"put": [-3]}
    ucp.post(PUT, PUT, descriptor(Op.PUT, 0, local=1, num_bytes=8))
    assert ucp.run() == 0
    assert [ucp.ended(i) for i in range(3)] == ["failed", "failed", "done"]
    assert [(r.operation, r.status) for r in ucp.ring.errors()] == [(0, -3), (1, -3)]


def test_who_waits_for_an_answer_of_a_peer_that_is_gone_is_told() -> None:
    ucp = Ucp()
    ucp.answers = {"hold": []}
    (index,) = ucp.post(descriptor(Op.ADD, 1, remote=8, num_bytes=8, value=1))
    assert ucp.run() == 1
    ucp.gone(ctypes.addressof(ucp.peers[1]), 101, -25)
    assert ucp.run() == 0
    assert ucp.ended(index) == "failed"
    assert ucp.ring.errors()[0][:4] == (layout.ErrorKind.PEER_FAILED, Op.ADD, 1, index)


def test_what_never_ends_is_reported_at_the_limit_and_its_slot_stays() -> None:
    ucp = Ucp(entries=4, timeout_s=0.05)
    ucp.answers = {"get": [11]}
    get, other = descriptor(Op.GET, 1, local=1, num_bytes=8), descriptor(Op.PUT, 0, local=1, num_bytes=8)
    ucp.post(get, other, descriptor(Op.QUIET, layout.ALL_PES))
    assert ucp.run(0.3) == 3
    # what a get should have brought is not there
    assert [ucp.ended(i) for i in range(3)] == ["failed", "done", "failed"]
    record = ucp.ring.errors()[0]
    assert (record.kind.name, record.op, record.pe, record.operation) == ("TIMEOUT", Op.GET, 1, 0)
    assert 0.05 <= record.elapsed_s < 0.25
    assert ucp.ring.header.head == 0
    # UCX comes back to it after all: the slot is free again
    ucp.finish()
    assert ucp.run() == 0
    assert ucp.ring.header.head == 3
    assert ucp.ended(0) == "failed"


def test_messages_that_are_never_answered_give_their_slots_back_at_the_limit() -> None:
    ucp = Ucp(entries=4, n_pes=3, timeout_s=0.05)
    ucp.answers = {"hold": []}
    ucp.post(ADD, ADD, SIGNAL)
    assert ucp.run(1.0) == 0
    assert [ucp.ended(i) for i in range(3)] == ["failed"] * 3
    # who fails with it has not waited for its own limit
    assert sorted(r.kind.name for r in ucp.ring.errors()) in (["PEER_FAILED"] * 2 + ["TIMEOUT"], ["TIMEOUT"] * 3)
    # the ring goes on for others
    indices = ucp.post(*[descriptor(Op.PUT, 2, local=1, remote=8, num_bytes=8)] * 4)
    assert ucp.run() == 0
    assert [ucp.ended(i) for i in indices] == ["done"] * 4


def test_a_header_stays_as_it_is_until_ucx_is_done_with_it() -> None:
    """UCX may look at a message's header long after the operation's time was up, and its slot serves another one."""
    ucp = Ucp(entries=2, n_pes=3, timeout_s=0.05)
    ucp.answers = {"am_send": [21], "hold": []}
    ucp.post(ADD)
    assert ucp.run(0.2) == 0
    assert ucp.ended(0) == "failed"
    place, message = ucp.headers[0]
    del ucp.answers["hold"]
    for _ in range(4):
        (index,) = ucp.post(descriptor(Op.ADD, 2, remote=72, num_bytes=8, value=9))
        assert ucp.run() == 0
        assert ucp.ended(index) == "done"
    # two slots: the first one has served others since
    assert ctypes.string_at(place, len(message)) == message
    assert ucp.freed == []
    ucp.finish(0, -25)
    assert ucp.freed == [21]
    assert ucp.run() == 0


@pytest.fixture
def untouchable() -> Iterator[int]:
    """Address of a page that is there and cannot be read, as memory of a GPU is."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
    place = libc.mmap(None, 4096, 0, 0x22, -1, 0)
    assert place not in (None, 2**64 - 1)
    yield place
    libc.munmap(ctypes.c_void_p(place), ctypes.c_size_t(4096))


@pytest.mark.parametrize("host_only", [0, 1])
@pytest.mark.parametrize("op", [Op.PUT, Op.GET, Op.PUT_SIGNAL_SET, Op.FETCH_ADD])
def test_local_memory_that_the_loop_cannot_touch_is_refused(op: Op, host_only: int, untouchable: int) -> None:
    """Where UCX knows a device's memory, it is given all; what an atomic has fetched the loop itself writes."""
    touched = bool(host_only) or op is Op.FETCH_ADD
    ucp = Ucp()
    ucp.state.host_only = host_only
    extra = 64 if op is Op.PUT_SIGNAL_SET else 0
    good = np.zeros(8, np.uint8)
    # the last byte of it is of the page
    for local in (untouchable, untouchable - 7, good.ctypes.data, ucp.heap.ctypes.data + 8):
        (index,) = ucp.post(descriptor(op, 1, local=local, remote=8, num_bytes=8, value=1, extra=extra))
        assert ucp.run() == 0
        refused = touched and local in (untouchable, untouchable - 7)
        assert ucp.ended(index) == ("failed" if refused else "done"), hex(local)
    errors = ucp.ring.errors()
    assert [(r.kind, r.status) for r in errors] == [(layout.ErrorKind.REFUSED, -7)] * (2 if touched else 0)
    reason = layout.ErrorKind.REFUSED << 8 | (-7 & 0xFF)
    assert "cannot touch, such as a GPU's" in status.describe(reason, op)
    # it ends nothing else
    assert ucp.ring_peer(1).gone == 0


def test_only_the_first_failures_have_records() -> None:
    ucp = Ucp(entries=64)
    ucp.post(*(descriptor(Op.PUT, 9, local=1, remote=i, num_bytes=1) for i in range(40)))
    assert ucp.run() == 0
    assert ucp.ring.num_errors == 40
    assert [r.remote for r in ucp.ring.errors()] == list(range(layout.ERROR_RECORDS))


@pytest.mark.parametrize("code", [0, 7, 15, 21, 31, 38, 1 << 15])
def test_an_unknown_operation_is_refused(code: int) -> None:
    ucp = Ucp()
    ucp.post(layout.Descriptor(op=code, pe=0, local=1, bytes=8))
    assert ucp.run() == 0
    assert ucp.ring.errors()[0][:2] == (layout.ErrorKind.REFUSED, code)
    assert ucp.calls == []
