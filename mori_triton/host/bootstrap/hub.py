"""The server of a unique-id world: one thread, in the process that made the id, that every PE connects to.

Its listening socket is open from the moment the id exists until all PEs have joined, so there is no window in which
another program takes the port. It answers a collective call when all PEs have made it, and tells those who wait at once
when a PE has died, left, or is too late; it alone decides, so all PEs hear the same.

Frames: u64 length of what follows, u8 type, body.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque

from mori_triton.errors import StateError
from mori_triton.host.bootstrap.base import check_same_call, pe_list

HELLO, CALL, BYE, WELCOME, RESULT, ERROR = range(1, 7)
FRAME = struct.Struct("<QB")
# magic, rank, number of PEs, time limit in seconds
HELLO_BODY = struct.Struct("<16siid")
# number of the call, length of its name
CALL_HEAD = struct.Struct("<QH")
# of an ERROR: a PE is missing, or the PEs do not agree
MISSING, DISAGREE = 1, 2
# a connection that does not introduce itself is no PE
_INTRODUCTION_S = 10.0


def frame(kind: int, *parts: bytes) -> bytes:
    """One frame, ready to send."""
    return b"".join((FRAME.pack(1 + sum(map(len, parts)), kind), *parts))


class _Client:
    """A connection; a PE once it has said hello."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = bytearray()
        self.to_send: deque[memoryview] = deque()
        self.pe: int | None = None
        self.timeout_s = 0.0
        self.since = time.monotonic()


class Hub:
    """Serves one world. `start` returns at once; the thread ends when every PE has left."""

    def __init__(self, listener: socket.socket, magic: bytes) -> None:
        self._listener, self._magic = listener, magic
        self._selector = selectors.DefaultSelector()
        self._clients: set[_Client] = set()
        self._pes: dict[int, _Client] = {}
        self._gone: dict[int, str] = {}
        self._n_pes = 0
        self._joined = False
        # of those who came: how many, how many they expect at most, when the last of them stops to wait
        self._num_hellos = self._most_pes = 0
        self._last_limit = 0.0
        # a reason that no call can be answered any more: (MISSING or DISAGREE, text)
        self._broken: tuple[int, str] | None = None
        # the call in progress: by PE (number, name, data, when it is too late)
        self._calls: dict[int, tuple[int, str, bytes, float]] = {}
        self._thread = threading.Thread(target=self._serve, name="mori bootstrap hub", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until every answer given so far is on its way, so that this process may exit."""
        limit = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < limit:
            if not any(client.to_send for client in list(self._clients)):
                return
            time.sleep(0.002)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # everything below runs in the hub's thread

    def _serve(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        with self._selector, contextlib.closing(self._listener):
            while not (self._n_pes and len(self._gone) == self._n_pes) and not self._deserted():
                for key, _ in self._selector.select(self._next_event()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._clients:
                        self._receive(key.data)
                self._check_limits()
                self._send_all()
            for client in list(self._clients):
                self._drop(client)

    def _deserted(self) -> bool:
        """Whether nobody is left, or still to come, who has to hear what is wrong."""
        return self._broken is not None and not self._clients and not self._late_may_come()

    def _late_may_come(self) -> bool:
        return not self._joined and self._num_hellos < self._most_pes and time.monotonic() < self._last_limit

    def _next_event(self) -> float | None:
        limits = [limit for *_, limit in self._calls.values()]
        if self._broken is None:
            limits += [c.since + c.timeout_s for c in self._pes.values() if not self._joined]
        elif self._late_may_come():
            limits.append(self._last_limit)
        limits += [c.since + _INTRODUCTION_S for c in self._clients if c.pe is None]
        return max(0.0, min(limits) - time.monotonic()) if limits else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _receive(self, client: _Client) -> None:
        try:
            data = client.connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(client)
            return
        client.received += data
        while len(client.received) >= FRAME.size:
            length, kind = FRAME.unpack_from(client.received)
            if client.pe is None and (kind != HELLO or length != 1 + HELLO_BODY.size):
                self._drop(client)
                return
            end = FRAME.size - 1 + length
            if len(client.received) < end:
                return
            body = bytes(client.received[FRAME.size : end])
            del client.received[:end]
            if kind == HELLO:
                self._hello(client, body)
            elif kind == CALL:
                self._call(client, body)
            elif kind == BYE:
                self._leave(client, "has left (finalized or exited)")
            if client not in self._clients:
                return

    def _hello(self, client: _Client, body: bytes) -> None:
        magic, pe, n_pes, timeout_s = HELLO_BODY.unpack(body)
        if magic != self._magic or client.pe is not None:
            self._drop(client)
            return
        self._num_hellos, self._most_pes = self._num_hellos + 1, max(self._most_pes, n_pes)
        self._last_limit = max(self._last_limit, time.monotonic() + timeout_s)
        problem = None
        if self._n_pes and n_pes != self._n_pes:
            problem = f"PE {pe} asks for a world of {n_pes} PEs, others for {self._n_pes}"
        elif pe in self._pes or pe in self._gone:
            problem = f"two PEs call themselves PE {pe}"
        if problem is not None:
            client.to_send.append(memoryview(frame(ERROR, bytes([DISAGREE]), problem.encode())))
            if not self._joined:
                self._break(DISAGREE, problem)
            return
        client.pe, client.timeout_s, client.since = pe, timeout_s, time.monotonic()
        self._pes[pe], self._n_pes = client, n_pes
        if self._broken is not None:
            self._answer_error(client)
        elif len(self._pes) == n_pes:
            self._joined = True
            for other in self._pes.values():
                other.to_send.append(memoryview(frame(WELCOME)))
            # nobody else is expected
            self._selector.unregister(self._listener)
            self._listener.close()

    def _call(self, client: _Client, body: bytes) -> None:
        assert client.pe is not None
        sequence, length = CALL_HEAD.unpack_from(body)
        start = CALL_HEAD.size + length
        what = body[CALL_HEAD.size : start].decode()
        if self._broken is None and self._gone:
            each = "; ".join(f"PE {pe} {why}" for pe, why in sorted(self._gone.items()))
            client.to_send.append(memoryview(frame(ERROR, bytes([MISSING]), each.encode())))
            return
        if self._broken is not None:
            self._answer_error(client)
            return
        self._calls[client.pe] = (sequence, what, body[start:], time.monotonic() + client.timeout_s)
        if len(self._calls) == self._n_pes:
            self._complete()

    def _complete(self) -> None:
        calls, self._calls = self._calls, {}
        try:
            check_same_call({pe: f"{what} (number {sequence})" for pe, (sequence, what, *_) in calls.items()})
        except StateError as error:
            answer = memoryview(frame(ERROR, bytes([DISAGREE]), str(error).encode()))
        else:
            parts = []
            for pe in range(self._n_pes):
                data = calls[pe][2]
                parts += [struct.pack("<Q", len(data)), data]
            answer = memoryview(frame(RESULT, *parts))
        # all are queued before any is sent: whoever has an answer knows that the others' are on their way
        for client in self._pes.values():
            client.to_send.append(answer)

    def _check_limits(self) -> None:
        now = time.monotonic()
        for client in list(self._clients):
            if client.pe is None and now >= client.since + _INTRODUCTION_S:
                self._drop(client)
        if self._broken is not None:
            return
        late_joins = [c for c in self._pes.values() if not self._joined and now >= c.since + c.timeout_s]
        if late_joins:
            missing = pe_list(set(range(self._n_pes)) - set(self._pes))
            self._break(MISSING, f"{missing} of {self._n_pes} did not join within {late_joins[0].timeout_s:g} s")
        late_calls = {pe: call for pe, call in self._calls.items() if now >= call[3]}
        if late_calls:
            pe, (sequence, what, *_) = min(late_calls.items())
            missing = pe_list(set(range(self._n_pes)) - set(self._calls))
            limit = self._pes[pe].timeout_s
            self._break(MISSING, f"{missing} did not take part in {what} (number {sequence}) within {limit:g} s")

    def _lost(self, client: _Client) -> None:
        if client.pe is None:
            self._drop(client)
        else:
            self._leave(client, "has died (its connection was lost)")

    def _leave(self, client: _Client, why: str) -> None:
        assert client.pe is not None
        pe = client.pe
        self._gone[pe] = why
        del self._pes[pe]
        self._calls.pop(pe, None)
        self._drop(client)
        if not self._joined:
            self._break(MISSING, f"PE {pe} {why} before all PEs had joined")
        waiting, self._calls = self._calls, {}
        for other in waiting:
            self._pes[other].to_send.append(memoryview(frame(ERROR, bytes([MISSING]), f"PE {pe} {why}".encode())))

    def _break(self, kind: int, text: str) -> None:
        if self._broken is not None:
            return
        self._broken = (kind, text)
        waiting = set(self._calls) if self._joined else set(self._pes)
        self._calls = {}
        for pe in waiting:
            self._answer_error(self._pes[pe])

    def _answer_error(self, client: _Client) -> None:
        assert self._broken is not None
        kind, text = self._broken
        client.to_send.append(memoryview(frame(ERROR, bytes([kind]), text.encode())))

    def _send_all(self) -> None:
        for client in list(self._clients):
            try:
                while client.to_send:
                    sent = client.connection.send(client.to_send[0])
                    if sent < len(client.to_send[0]):
                        client.to_send[0] = client.to_send[0][sent:]
                    else:
                        client.to_send.popleft()
            except BlockingIOError:
                pass
            except OSError:
                # reading will tell that it is gone
                client.to_send.clear()
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.to_send else 0)
            if self._selector.get_key(client.connection).events != events:
                self._selector.modify(client.connection, events, client)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        client.connection.close()
