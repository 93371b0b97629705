"""A double of libucp, with which the loop runs without UCX."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from mori_triton.host.proxy import Ring, layout
from mori_triton.host.proxy.engine import engine


class Ucp:
    """A double of libucp: records the calls and answers what it is told to: 0, a status, or a request for later."""

    def __init__(self, entries: int = 8, n_pes: int = 2, timeout_s: float = 0.0) -> None:
        self.calls: list[tuple] = []
        self.answers: dict[str, list[int]] = {}
        self.waiting: list[tuple[int, int, int]] = []  # callback, request, user
        self.freed: list[int] = []
        self.headers: list[tuple[int, bytes]] = []  # where they lay, and what they were
        self.ring = Ring(entries, n_pes)
        self.peers = (layout.Peer * n_pes)()
        self.pending = (layout.Pending * entries)()
        self.heap = np.zeros(4096, np.uint8)
        u64, u32, ptr = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p
        types = {
            "put": (u64, u64, u64, u64, u64, u64, ptr),
            "get": (u64, u64, u64, u64, u64, u64, ptr),
            "am_send": (u64, u64, u32, ptr, u64, ptr, u64, ptr),
            "flush": (u64, u64, ptr),
            "close": (u64, u64, ptr),
            "progress": (u32, u64),
            "request_free": (None, u64),
        }
        self.functions = {name: ctypes.CFUNCTYPE(*kinds)(getattr(self, name)) for name, kinds in types.items()}
        self.state = layout.State(
            ring=self.ring.address, peers=ctypes.addressof(self.peers), pending=ctypes.addressof(self.pending),
            pe=0, n_pes=n_pes, timeout_ns=int(timeout_s * 1e9), force=1, worker=99,
        )  # fmt: skip
        for pe, peer in enumerate(self.peers):
            peer.ep, peer.rkey, peer.base, peer.bytes = 100 + pe, 200 + pe, self.heap.ctypes.data, 4096
            peer.state = ctypes.addressof(self.state)
        for name, function in self.functions.items():
            setattr(self.state.ucp, name, ctypes.cast(function, ptr).value)
        self.handler = ctypes.CFUNCTYPE(ctypes.c_int8, ptr, ptr, u64, ptr, u64, ptr)
        self.gone = ctypes.CFUNCTYPE(None, ptr, u64, ctypes.c_int8)(engine().address("mori_proxy_peer_failed"))
        self.progressed = 0
        self.ending: tuple[int, int] | None = None
        self.thread = threading.Thread(target=engine().run, args=(ctypes.addressof(self.state),), daemon=True)

    def answer(self, name: str, param: int) -> int:
        given = self.answers.get(name, [])
        value = given.pop(0) if given else 0
        if 0 < value < 1 << 63:
            mask, _, callback, _, user = (ctypes.c_uint64 * 5).from_address(param)
            assert mask & 6 == 6
            self.waiting.append((callback, value, user))
        return value & ((1 << 64) - 1)

    def put(self, ep, local, count, remote, rkey, param) -> int:
        self.calls.append(("put", ep, local, count, remote - self.heap.ctypes.data, rkey))
        return self.answer("put", param)

    def get(self, ep, local, count, remote, rkey, param) -> int:
        self.calls.append(("get", ep, local, count, remote - self.heap.ctypes.data, rkey))
        return self.answer("get", param)

    def am_send(self, ep, number, header, size, data, count, param) -> int:
        message = ctypes.string_at(header, size)
        self.calls.append(("send", ep, number, message))
        self.headers.append((header, message))
        value = self.answer("am_send", param)
        if value == 0 and number == 1 and "hold" not in self.answers:
            # the peer's loop, at once: this loop, since the memory is one
            name = "mori_proxy_request"
            buffer = ctypes.create_string_buffer(message, size)
            self.handler(engine().address(name))(ctypes.addressof(self.state), buffer, size, None, 0, None)
        if number == 2:
            buffer = ctypes.create_string_buffer(message, size)
            self.handler(engine().address("mori_proxy_reply"))(
                ctypes.addressof(self.state), buffer, size, None, 0, None
            )
        return value

    def flush(self, ep, param) -> int:
        self.calls.append(("flush", ep))
        return self.answer("flush", param)

    def close(self, ep, param) -> int:
        self.calls.append(("close", ep))
        return 0

    def progress(self, worker) -> int:
        assert worker == 99
        self.progressed += 1
        if self.ending is not None:
            (place, status), self.ending = self.ending, None
            self.finish(place, status)
            return 1
        return 0

    def request_free(self, request) -> None:
        self.freed.append(request)

    def finish(self, place: int = 0, status: int = 0) -> None:
        """UCX ends the request at `place`. Before `run`, since it is the loop's thread that is called back."""
        callback, request, user = self.waiting.pop(place)
        ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_int8, ctypes.c_uint64)(callback)(request, status, user)

    def finish_in_loop(self, place: int, status: int) -> None:
        """The same while the loop runs for the first time: a request that it has yet to make."""
        self.ending = (place, status)

    def answer_message(self, index: int, old: int) -> None:
        """The peer's loop has carried out operation `index`."""
        reply = ctypes.create_string_buffer(np.array([index, old], np.uint64).tobytes(), 16)
        self.handler(engine().address("mori_proxy_reply"))(ctypes.addressof(self.state), reply, 16, None, 0, None)

    def ring_peer(self, pe: int) -> layout.RingPeer:
        end = self.ring.address + ctypes.sizeof(layout.Ring) + self.ring.entries * 64
        return layout.RingPeer.from_address(end + 8 * pe)

    def post(self, *descriptors) -> list[int]:
        return [self.ring.post(d, 1.0)[0] for d in descriptors]

    def run(self, limit_s: float = 0.02) -> int:
        """The loop in this thread, until all is done or for so long; how many operations are left."""
        self.state.stop = int(limit_s * 1e9)
        return engine().run(ctypes.addressof(self.state))

    def ended(self, index: int) -> str:
        done = layout.Descriptor.from_address(
            self.ring.address + ctypes.sizeof(layout.Ring) + index % self.ring.entries * 64
        ).done
        return {0: "no", index + 1: "done", (index + 1) | layout.FAILED: "failed"}.get(done, "other")
