"""One PE's proxy: the ring, the thread that serves it through UCX, and what it says when something fails."""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from mori_triton.errors import ArgumentError, MoriError, NetworkError, PeerTimeout, StateError, require
from mori_triton.host.agreement import together
from mori_triton.host.bootstrap.base import Bootstrap
from mori_triton.host.proxy import layout
from mori_triton.host.proxy.endpoints import Endpoints, ends_requests
from mori_triton.host.proxy.engine import engine
from mori_triton.host.proxy.layout import ErrorKind, Op
from mori_triton.host.proxy.ring import ErrorRecord, Ring, descriptor
from mori_triton.host.proxy.status import GONE, LOCAL, LOCAL_TEXT

# how long a failed world's loop may go on with what has been posted
_ABANDON_S = 0.1
# how long the loop may take to notice that an operation's time is up
_GRACE_S = 1.0


class Proxy:
    """Collective to create: every PE, one version of UCX. The thread runs until `close`.

    All operations are asynchronous: they return an index for `wait`. Offsets are in the heap of the other PE.

    Args:
        address, num_bytes: this PE's symmetric heap, in host memory; sizes may differ.
        entries: slots of the ring, a power of two, the same on all PEs.
        timeout_s: limit of one operation and of waiting for room in the ring, above 0.
        options: UCX settings such as `{"TLS": "tcp"}`; what is not given is UCX's choice, or the environment's `UCX_*`.
        memory: where the ring lies, as of `Ring`.

    Raises:
        HeapError: on every PE, when one of them has no UCX, cannot register its heap or cannot reach a peer.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        address: int,
        num_bytes: int,
        *,
        entries: int = 1024,
        timeout_s: float = 30.0,
        options: Mapping[str, str] | None = None,
        memory: Any = None,
    ) -> None:
        require(timeout_s > 0, "timeout_s", "a time above 0", timeout_s)
        self.bootstrap, self.pe, self.n_pes, self.timeout_s = bootstrap, bootstrap.pe, bootstrap.n_pes, timeout_s
        self.ring = Ring(entries, self.n_pes, memory)
        self._engine = together(bootstrap, "the proxy's loop", engine)
        self._peers = (layout.Peer * self.n_pes)()
        self._pending = (layout.Pending * entries)()
        self._state = layout.State(
            ring=self.ring.address,
            peers=ctypes.addressof(self._peers),
            pending=ctypes.addressof(self._pending),
            pe=self.pe,
            n_pes=self.n_pes,
            timeout_ns=int(timeout_s * 1e9),
        )
        for peer in self._peers:
            peer.state = ctypes.addressof(self._state)
        failed = self._engine.address("mori_proxy_peer_failed")
        self._endpoints = Endpoints(bootstrap, address, num_bytes, self._peers, entries, failed, options or {})
        ucp = self._endpoints.ucp
        assert ucp is not None
        self._describe = ucp.describe
        for name in layout.FUNCTIONS:
            key = {"flush": "ep_flush", "close": "ep_close", "progress": "worker_progress"}.get(name, name)
            setattr(self._state.ucp, name, ucp.address(key))
        self._state.worker, self._state.force = self._endpoints.worker.value, int(ends_requests(ucp))
        self._state.host_only = int(self._endpoints.host_only)
        handlers = {1: self._engine.address("mori_proxy_request"), 2: self._engine.address("mori_proxy_reply")}
        answer = partial(self._endpoints.answer, handlers, ctypes.addressof(self._state))
        try:
            # no PE may send before all of them answer
            together(bootstrap, "the proxy's answers", answer)
        except BaseException:
            self._endpoints.close()
            raise
        self._thread: threading.Thread | None = threading.Thread(
            target=self._engine.run, args=(ctypes.addressof(self._state),), name=f"mori proxy {self.pe}", daemon=True
        )
        self._thread.start()
        # the thread runs code that the interpreter takes away when it ends
        atexit.register(self._stop, _ABANDON_S)

    def put(self, pe: int, remote: int, local: int, num_bytes: int) -> int:
        """Write `num_bytes` from address `local` to `remote`. Done: the source may be reused."""
        return self._post(Op.PUT, pe, local=local, remote=remote, num_bytes=num_bytes)

    def get(self, pe: int, remote: int, local: int, num_bytes: int) -> int:
        """Read `num_bytes` from `remote` to address `local`. Done: they are there."""
        return self._post(Op.GET, pe, local=local, remote=remote, num_bytes=num_bytes)

    def put_signal(
        self, pe: int, remote: int, local: int, num_bytes: int, signal: int, value: int, *, add: bool = False
    ) -> int:
        """`put`, and when the data is at its place set the 64-bit word at `signal` to `value`, or add `value` to it."""
        op = Op.PUT_SIGNAL_ADD if add else Op.PUT_SIGNAL_SET
        return self._post(op, pe, local=local, remote=remote, num_bytes=num_bytes, value=value, extra=signal)

    def atomic(
        self, op: Op, pe: int, remote: int, value: int, *, num_bytes: int = 8, result: int = 0, compare: int = 0
    ) -> int:
        """An atomic on the word of 4 or 8 bytes at `remote`; `result`: address for the old value, if `op` fetches."""
        require(op >= Op.ADD, "op", "an atomic", op.name)
        return self._post(op, pe, local=result, remote=remote, num_bytes=num_bytes, value=value, extra=compare)

    def quiet(self, pe: int | None = None) -> None:
        """Wait until everything posted before has had its effect, on `pe` or on all. Raises as `check` does."""
        op, to = (Op.QUIET, layout.ALL_PES) if pe is None else (Op.FLUSH, pe)
        self.wait(self._post(op, to))

    def _post(
        self, op: Op, pe: int, *, local: int = 0, remote: int = 0, num_bytes: int = 0, value: int = 0, extra: int = 0
    ) -> int:
        self._check_open()
        one = descriptor(op, pe, local=local, remote=remote, num_bytes=num_bytes, value=value, extra=extra)
        return self.ring.post(one, self.timeout_s)[0]

    def wait(self, index: int) -> None:
        """Wait for one operation.

        Raises:
            PeerTimeout, NetworkError, ArgumentError: it failed, as `check` says.
        """
        self._check_open()
        # the loop gives up on every operation; a flush takes its time after those before it have had theirs
        if not self.ring.wait(index, 2 * self.timeout_s + _GRACE_S):
            self.check(index)

    def check(self, index: int | None = None) -> None:
        """Raise for the failure of operation `index`, or else the first one there was: an error stays.

        Raises:
            PeerTimeout: a peer is gone, or an operation took too long.
            ArgumentError: a descriptor asked for what there is not.
            NetworkError: any other error of UCX.
        """
        records = self.ring.errors()
        for record in sorted(records, key=lambda record: record.operation != index):
            raise self._error_of(record)

    def failed_peers(self) -> dict[int, str]:
        """PEs that count as gone, with UCX's reason. Operations to them fail at once."""
        return {pe: self._describe(peer.status) for pe, peer in enumerate(self._peers) if peer.status}

    def _error_of(self, record: ErrorRecord) -> MoriError:
        name = record.op.name if isinstance(record.op, Op) else f"operation code {record.op}"
        what = f"proxy of PE {self.pe}: {name} of {record.num_bytes} bytes at heap offset {record.remote}"
        what += f" of PE {record.pe} (operation {record.operation})"
        if record.kind is ErrorKind.REFUSED:
            if record.status == LOCAL:
                return ArgumentError(f"{what}: {LOCAL_TEXT}")
            known = " and ".join(f"PE {pe}: {peer.bytes} bytes" for pe, peer in enumerate(self._peers))
            return ArgumentError(f"{what}: want an operation, PE, alignment and place inside a heap ({known})")
        if record.kind is ErrorKind.TIMEOUT:
            return PeerTimeout(f"{what}: not finished within {self.timeout_s:g} s (after {record.elapsed_s:.3g} s)")
        text = f"{what}: failed after {record.elapsed_s:.3g} s: {self._describe(record.status)}"
        # what an operation is told may be less than what UCX knows of the peer
        gone = GONE & {record.status, self._peers[record.pe].status}
        return PeerTimeout(text) if gone else NetworkError(text)

    def _check_open(self) -> None:
        if self._thread is None:
            raise StateError("the proxy is closed")

    def _stop(self, limit_s: float) -> None:
        """End the thread, which serves what has been posted for at most `limit_s` more. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._state.stop = max(int(limit_s * 1e9), 1)
            thread.join()
            atexit.unregister(self._stop)

    def close(self, *, failed: bool = False) -> None:
        """Collective, unless `failed`: serve what has been posted, meet the peers, end the thread. Idempotent.

        Raises:
            PeerTimeout, NetworkError, ArgumentError: an operation failed; everything is given back all the same.
        """
        if self._thread is None:
            return
        try:
            if not failed:
                self.quiet()
                # peers may still need this PE's thread until their own operations are done
                self.bootstrap.barrier("proxy: everything is served")
        finally:
            self._stop(_ABANDON_S)
            self._endpoints.close(cut=self.ring.in_flight > 0)
