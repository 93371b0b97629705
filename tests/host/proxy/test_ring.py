"""The ring without UCX: layout, back-pressure, wrapping, many producers."""

from __future__ import annotations

import ctypes
import json
import threading
import time

import numpy as np
import pytest

from mori_triton.errors import ArgumentError, BitcodeError, PeerTimeout
from mori_triton.host.proxy import Op, Ring, descriptor, layout
from mori_triton.host.proxy import engine as engine_module
from mori_triton.host.proxy.engine import engine
from tests.host.proxy.ucp_double import Ucp

pytestmark = pytest.mark.cpu


def test_layout_matches_the_bitcode(monkeypatch: pytest.MonkeyPatch) -> None:
    engine()
    assert ctypes.sizeof(layout.Descriptor) == ctypes.sizeof(layout.Error) == 64
    assert ctypes.sizeof(layout.Pending) == 72
    words = layout.words()
    monkeypatch.setattr(layout, "words", lambda: [*words[:-1], words[-1] + 8])
    with pytest.raises(BitcodeError, match="mori_proxy_layout: want"):
        engine_module.Engine()


@pytest.mark.parametrize("entries", [0, 3, -4, 1 << 21, 2.0, "8"])
def test_a_ring_is_a_power_of_two(entries) -> None:
    with pytest.raises(ArgumentError, match="entries"):
        Ring(entries)


def test_every_byte_of_a_slot_is_written() -> None:
    memory = np.full(Ring.num_bytes(2) + 64, 0xEE, np.uint8)
    start = -memory.ctypes.data % 64
    place = (ctypes.c_uint8 * Ring.num_bytes(2)).from_buffer(memory[start:])
    ring = Ring(2, memory=place)
    assert ring.address == memory.ctypes.data + start
    inside = memory[start : start + Ring.num_bytes(2)]
    assert (memory[:start] == 0xEE).all()
    assert (memory[start + len(inside) :] == 0xEE).all()
    slots = inside[ctypes.sizeof(layout.Ring) :][: 2 * 64]
    assert not slots.any()
    slots[:] = 0xEE
    one = descriptor(Op.PUT, 1, local=2, remote=3, num_bytes=4, value=5, extra=6)
    one.ticket = 7
    ring.post(one, 1.0)
    words = slots.view(np.uint64)
    # `done`, the second word, is the loop's
    assert words[:8].tolist() == [1, 0xEEEE_EEEE_EEEE_EEEE, 1 | 7 << 16 | 1 << 32, 2, 3, 4, 5, 6]
    assert (slots[64:] == 0xEE).all()


def test_a_full_ring_refuses_and_leaves_no_hole() -> None:
    ring = Ring(4)
    batch = (layout.Descriptor * 6)(*(descriptor(Op.PUT, i) for i in range(6)))
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"4 descriptors stayed full for 0\.2 s; 4 of 6 were posted"):
        ring.post(batch, 0.2)
    assert 0.2 <= time.monotonic() - start < 2
    assert (ring.header.tail, ring.header.head, ring.in_flight) == (4, 0, 4)
    # room for one: one more, with the next index
    ring.header.head = 1
    assert ring.post(batch[5], 0.2) == [4]


def test_posting_goes_on_when_there_is_room() -> None:
    ring = Ring(1)
    ring.post(descriptor(Op.PUT, 0), 1.0)
    threading.Timer(0.2, setattr, [ring.header, "head", 1]).start()
    assert ring.post(descriptor(Op.PUT, 0), 10.0) == [1]


def test_many_producers_and_many_wraps() -> None:
    ucp = Ucp(entries=16)
    ucp.thread.start()
    each, threads = 200, 8
    indices: list[int] = []

    def produce(thread: int) -> None:
        batch = (layout.Descriptor * each)(
            *(descriptor(Op.PUT, 1, local=1 + thread * each + i, remote=8, num_bytes=8) for i in range(each))
        )
        indices.extend(ucp.ring.post(batch, 60.0))

    producers = [threading.Thread(target=produce, args=(t,)) for t in range(threads)]
    for producer in producers:
        producer.start()
    for producer in producers:
        producer.join()
    ucp.state.stop = int(10e9)
    ucp.thread.join(20)
    assert not ucp.thread.is_alive()
    assert sorted(indices) == list(range(each * threads))
    assert ucp.ring.header.head == ucp.ring.header.tail == each * threads >= 4 * ucp.ring.entries
    sources = [call[2] for call in ucp.calls]
    assert sorted(sources) == list(range(1, each * threads + 1))
    # a producer's own order is kept
    for thread in range(threads):
        own = [s for s in sources if thread * each < s <= (thread + 1) * each]
        assert own == sorted(own)


def test_waiting_for_one_operation_has_a_limit() -> None:
    ring = Ring(2)
    (index,) = ring.post(descriptor(Op.PUT, 0), 1.0)
    with pytest.raises(PeerTimeout, match=r"operation 0 was not finished within 0\.05 s"):
        ring.wait(index, 0.05)
    assert json.dumps(ring.in_flight) == "1"
