"""Bootstrap for PEs that are threads of one process.

Blocking goes through an injected `wait(predicate, what)`, so that a world with its own scheduler decides who runs. The
default waits on a condition variable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mori_triton.errors import PeerTimeout, StateError
from mori_triton.host.bootstrap.base import Collectives, check_rank, check_same_call, pe_list

Wait = Callable[[Callable[[], bool], object], None]


class _Round:
    """One collective call: who is in it, and with what."""

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.data: dict[int, bytes] = {}


class _Pending:
    """Text of a wait, made when it is asked for: who is missing changes with time."""

    def __init__(self, group: ThreadGroup, call: _Round, pe: int, sequence: int) -> None:
        self._group, self._call, self._pe, self._sequence = group, call, pe, sequence

    def __str__(self) -> str:
        missing = (
            pe_list(set(range(self._group.n_pes)) - set(self._call.calls))
            if not self._group.complete(self._call)
            else "nobody"
        )
        return f"{self._call.calls[self._pe]} (collective {self._sequence}) of PE {self._pe}: waiting for {missing}"


class ThreadGroup:
    """The meeting place of `n_pes` threads. `wait` returns when its predicate is true, or raises; None: the default."""

    def __init__(self, n_pes: int, *, timeout_s: float = 30.0, wait: Wait | None = None) -> None:
        check_rank(0, n_pes)
        self.n_pes, self.timeout_s = n_pes, timeout_s
        self._wait = wait or self._wait_on_condition
        self._changed = threading.Condition()
        self._rounds: dict[int, _Round] = {}
        self._gone: set[int] = set()
        self._failure: BaseException | None = None
        self.refusal: tuple[int, str] | None = None
        """A thread (its ident) that may begin no collective now, and why."""

    def bootstrap(self, pe: int) -> ThreadBootstrap:
        """The bootstrap of one PE; call once per PE."""
        return ThreadBootstrap(self, pe)

    def abort(self, error: BaseException) -> None:
        """A PE has failed: every collective that is waiting or yet to come raises, with `error` as its cause."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def complete(self, call: _Round) -> bool:
        return len(call.calls) == self.n_pes

    def leave(self, pe: int) -> None:
        with self._changed:
            self._gone.add(pe)
            self._changed.notify_all()

    def exchange(self, pe: int, sequence: int, what: str, data: bytes) -> list[bytes]:
        self._check_alive()
        if self.refusal is not None and self.refusal[0] == threading.get_ident():
            raise StateError(f"{what} (collective {sequence}) of PE {pe}: {self.refusal[1]}")
        with self._changed:
            call = self._rounds.setdefault(sequence, _Round())
            call.calls[pe], call.data[pe] = what, data
            if self.complete(call):
                # those who take part hold it
                del self._rounds[sequence]
            # who is woken for nothing delays those who have something to do
            if self._settled(call):
                self._changed.notify_all()
        self._wait(lambda: self._failure is not None or self._settled(call), _Pending(self, call, pe, sequence))
        if not self.complete(call):
            self._check_alive()
            gone = pe_list(self._gone - set(call.calls))
            raise PeerTimeout(f"{what} (collective {sequence}) of PE {pe}: {gone} left the world without taking part")
        check_same_call(call.calls)
        return [call.data[peer] for peer in range(self.n_pes)]

    def _settled(self, call: _Round) -> bool:
        # one step for the interpreter: a wait may ask without the lock
        return self.complete(call) or not self._gone.issubset(call.calls)

    def _check_alive(self) -> None:
        if self._failure is not None:
            text = f"{type(self._failure).__name__}: {self._failure}"
            raise StateError(f"another PE of this world failed ({text})") from self._failure

    def _wait_on_condition(self, predicate: Callable[[], bool], what: object) -> None:
        with self._changed:
            if not self._changed.wait_for(predicate, self.timeout_s):
                raise PeerTimeout(f"{what} for {self.timeout_s:g} s")


class ThreadBootstrap(Collectives):
    """`Bootstrap` of one thread."""

    def __init__(self, group: ThreadGroup, pe: int) -> None:
        super().__init__(pe, group.n_pes, group.timeout_s)
        self._group = group
        self._closed = False

    def _exchange(self, sequence: int, what: str, data: bytes) -> list[bytes]:
        if self._closed:
            raise StateError(f"{what}: this PE's bootstrap is closed")
        return self._group.exchange(self.pe, sequence, what, data)

    def close(self) -> None:
        self._closed = True
        self._group.leave(self.pe)
