"""Bootstrap over TCP from a 128-byte unique id, without torch. The process that made the id serves it (hub.py)."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
import zlib
from typing import NamedTuple

from mori_triton.errors import ArgumentError, DriverError, PeerTimeout, StateError
from mori_triton.host.bootstrap import hub
from mori_triton.host.bootstrap.base import Collectives, check_rank
from mori_triton.host.bootstrap.interfaces import listen_address

UNIQUE_ID_BYTES = 128
_HEADER = b"mori id\x01"
# header, family (4 or 6), port, address, scope id, magic
_ID = struct.Struct("<8sBxH16sI16s")
# how much longer a PE waits than the hub does, which decides for all
_GRACE_S = 3.0


class UniqueId(NamedTuple):
    """What the 128 bytes say."""

    family: int
    address: str
    port: int
    scope: int
    magic: bytes

    def pack(self) -> bytes:
        family = 4 if self.family == socket.AF_INET else 6
        packed = socket.inet_pton(self.family, self.address)
        body = _ID.pack(_HEADER, family, self.port, packed, self.scope, self.magic)
        return (body + struct.pack("<I", zlib.crc32(body))).ljust(UNIQUE_ID_BYTES, b"\0")

    @classmethod
    def unpack(cls, unique_id: bytes) -> UniqueId:
        """Raises `ArgumentError` for anything that `pack` did not make."""
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ArgumentError(f"unique_id: want {UNIQUE_ID_BYTES} bytes, got {len(unique_id)}")
        body = unique_id[: _ID.size]
        header, family, port, packed, scope, magic = _ID.unpack(body)
        (check,) = struct.unpack_from("<I", unique_id, _ID.size)
        if header != _HEADER or check != zlib.crc32(body) or family not in (4, 6):
            raise ArgumentError("unique_id: want the bytes of shmem_get_unique_id, unchanged; these are not")
        kind = socket.AF_INET if family == 4 else socket.AF_INET6
        return cls(kind, socket.inet_ntop(kind, packed[: 4 if family == 4 else 16]), port, scope, magic)

    @property
    def where(self) -> tuple:
        """The address in the form that `socket.connect` takes."""
        return (self.address, self.port) if self.family == socket.AF_INET else (self.address, self.port, 0, self.scope)


# worlds that this process serves, by magic
_hubs: dict[bytes, hub.Hub] = {}
_hubs_lock = threading.Lock()


def new_unique_id(interfaces: tuple[str, ...] | None = None) -> bytes:
    """Start to serve a world and return its id. `interfaces`: as in `listen_address`."""
    family, address, scope = listen_address(interfaces)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0) if family == socket.AF_INET else (address, 0, 0, scope))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise DriverError(f"listening on {address}: {error}") from error
    unique_id = UniqueId(family, address, listener.getsockname()[1], scope, secrets.token_bytes(16))
    server = hub.Hub(listener, unique_id.magic)
    with _hubs_lock:
        for magic in [magic for magic, other in _hubs.items() if not other.alive]:
            del _hubs[magic]
        server.start()
        _hubs[unique_id.magic] = server
    return unique_id.pack()


class TcpBootstrap(Collectives):
    """`Bootstrap` of one process. The constructor is collective: it returns when all PEs have joined.

    Raises:
        ArgumentError: the id is not one, or the rank does not fit.
        StateError: PEs disagree on the number of PEs, or two have the same rank.
        PeerTimeout: names the PEs that have not joined within `timeout_s`.
    """

    def __init__(self, unique_id: bytes, pe: int, n_pes: int, *, timeout_s: float = 300.0) -> None:
        check_rank(pe, n_pes)
        super().__init__(pe, n_pes, timeout_s)
        self._id = UniqueId.unpack(unique_id)
        self._failure: tuple[int, str] | None = None
        self._socket: socket.socket | None = socket.socket(self._id.family, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            try:
                self._socket.connect(self._id.where)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                raise PeerTimeout(f"PE {pe} of {n_pes} cannot reach {self._server}: {error}") from error
            hello = hub.HELLO_BODY.pack(self._id.magic, pe, n_pes, timeout_s)
            self._ask("joining the world", hub.frame(hub.HELLO, hello), hub.WELCOME)
        except BaseException:
            self._socket.close()
            self._socket = None
            raise

    def _exchange(self, sequence: int, what: str, data: bytes) -> list[bytes]:
        name = what.encode()
        call = hub.frame(hub.CALL, hub.CALL_HEAD.pack(sequence, len(name)), name, data)
        body = self._ask(f"{what} (number {sequence})", call, hub.RESULT)
        results, at = [], 0
        for _ in range(self.n_pes):
            (size,) = struct.unpack_from("<Q", body, at)
            results.append(bytes(body[at + 8 : at + 8 + size]))
            at += 8 + size
        return results

    def close(self) -> None:
        connection, self._socket = self._socket, None
        if connection is None:
            return
        try:
            connection.settimeout(1.0)
            connection.sendall(hub.frame(hub.BYE))
        except OSError:
            # the hub is gone, so nobody is left to be told
            pass
        finally:
            connection.close()
        server = _hubs.get(self._id.magic)
        if server is not None:
            server.flush()

    @property
    def _server(self) -> str:
        return f"the process that made the unique id, at {self._id.address} port {self._id.port}"

    def _ask(self, what: str, request: bytes, want: int) -> memoryview:
        """Send a frame and return the body of the answer; raise what the hub, or its silence, says."""
        if self._socket is None:
            raise StateError(f"{what}: this PE's bootstrap is closed")
        if self._failure is not None:
            self._raise(what, *self._failure)
        limit = time.monotonic() + self.timeout_s + _GRACE_S
        # stands until the answer is here: after an interrupt the next bytes would be the answer to this call
        self._failure = (hub.MISSING, f"an earlier call ({what}) was interrupted")
        try:
            self._socket.settimeout(self.timeout_s + _GRACE_S)
            self._socket.sendall(request)
            length, kind = hub.FRAME.unpack(self._receive(hub.FRAME.size, limit))
            body = self._receive(length - 1, limit)
        except TimeoutError as error:
            self._failure = (hub.MISSING, f"{self._server} does not answer within {self.timeout_s:g} s")
            raise PeerTimeout(f"PE {self.pe}, {what}: {self._failure[1]}") from error
        except OSError as error:
            self._failure = (hub.MISSING, f"lost the connection to {self._server}, which has died")
            raise PeerTimeout(f"PE {self.pe}, {what}: {self._failure[1]} ({error})") from error
        self._failure = None
        if kind == hub.ERROR:
            self._raise(what, body[0], bytes(body[1:]).decode())
        if kind != want:
            raise StateError(f"PE {self.pe}, {what}: {self._server} answered with frame {kind}, want {want}")
        return body

    def _raise(self, what: str, kind: int, text: str) -> None:
        error = PeerTimeout if kind == hub.MISSING else StateError
        raise error(f"PE {self.pe} of {self.n_pes}, {what}: {text}")

    def _receive(self, num_bytes: int, limit: float) -> memoryview:
        assert self._socket is not None
        data = bytearray(num_bytes)
        view = memoryview(data)
        got = 0
        while got < num_bytes:
            self._socket.settimeout(max(0.01, limit - time.monotonic()))
            count = self._socket.recv_into(view[got:])
            if count == 0:
                raise ConnectionError("closed by the other side")
            got += count
        return view
