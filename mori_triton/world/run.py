"""One `LocalWorld.run`: a thread for each PE, the first failure, and what kernels have recorded.

Where PEs run is the business of subclasses: `emulated.EmulatedRun` and `gpu.GpuRun`.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mori_triton import env
from mori_triton.errors import Deadlock, MoriError, PeerTimeout, StateError
from mori_triton.host import context, state
from mori_triton.host.bootstrap.base import Bootstrap
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers.base import Driver
from mori_triton.world.network import WorldNetwork

if TYPE_CHECKING:
    from mori_triton.world.graph import WorldGraph
    from mori_triton.world.local import LocalWorld

# a wait in a kernel writes its record first; then host collectives reach their limit
_COLLECTIVE_GRACE_S = 10.0

_thread = threading.local()


def running() -> Run | None:
    """The run whose program the calling thread is in, as a PE; None elsewhere."""
    return getattr(_thread, "run", None)


class Run(ABC):
    """See the module. Subclasses say what a PE's thread begins and ends with, and how kernels are ended early."""

    def __init__(self, world: LocalWorld, program: Callable[..., Any], args: tuple) -> None:
        self.world, self.program, self.args = world, program, args
        self.values: list[Any] = [None] * world.n
        self.records: list[list[context.ErrorRecord]] = [[] for _ in range(world.n)]
        self.num_errors = [0] * world.n
        # those that are up, by PE
        self.states: list[state.PeState | None] = [None] * world.n
        self.drivers: list[Driver | None] = [None] * world.n
        self.failure: tuple[int, BaseException] | None = None
        # what other PEs' waits have said after that
        self.later: list[tuple[int, PeerTimeout]] = []
        # what went wrong while the world was taken down
        self.remains: list[MoriError] = []
        # what the network cards have said
        self.card_errors: list[str] = []
        self._lock = threading.Lock()
        # whoever is last of the caller and the PEs takes the world down
        self._num_holders = 1
        settings = dataclasses.replace(
            env.snapshot(),
            heap_bytes=env.parse_size(world.heap_size),
            wait_timeout_s=env.parse_seconds(world.timeout_s, "timeout_s"),
            gpus_per_node=world.gpus_per_node,
            device=world.device,
            transport=world.way,
        )
        self.settings = settings if world.arch is None else dataclasses.replace(settings, arch=world.arch)
        self.group = self.new_group()
        self.network: WorldNetwork | None = None

    # ---------------------------------------------------------------------------------------------- for subclasses
    def new_group(self) -> ThreadGroup:
        """How the PEs meet on the host."""
        return ThreadGroup(self.world.n, timeout_s=self.settings.wait_timeout_s + _COLLECTIVE_GRACE_S)

    @abstractmethod
    def set_up(self) -> None:
        """Before the PEs' threads start. Sets `network`."""

    @abstractmethod
    def take_down(self) -> None:
        """After the last of them has ended and every state is closed. Called once, also after a failed `set_up`."""

    @abstractmethod
    def enter(self, pe: int) -> Driver:
        """First call of a PE's thread; the driver of its memory."""

    @abstractmethod
    def leave(self, pe: int) -> None:
        """Last call of a PE's thread, also of one that failed in `enter`."""

    @abstractmethod
    def attach(self, here: state.PeState) -> Callable[[], None]:
        """Make a PE's memory known to what runs its kernels; returns the undo."""

    @abstractmethod
    def started(self) -> None:
        """All threads are there."""

    @abstractmethod
    def stop(self, error: BaseException) -> None:
        """A PE has failed: end the other PEs' kernels, where that can be done. They have a limit anyway."""

    def cause(self, error: BaseException) -> BaseException:
        """The error of which `error`, the first to be reported, may be a mere consequence."""
        return error

    @abstractmethod
    def preload(self, load: Callable[[], Any]) -> Any:
        """`LocalWorld.preload` of the calling PE."""

    @abstractmethod
    def graph(self, step: Callable[[], Any]) -> WorldGraph:
        """`LocalWorld.graph` of the calling PE."""

    # ------------------------------------------------------------------------------------------------------ threads
    def results(self) -> list[Any]:
        """Run every PE to its end and return or raise what `LocalWorld.run` does."""
        threads: list[threading.Thread] = []
        try:
            self.set_up()
            for pe in range(self.world.n):
                threads.append(self._start(pe))
            self.started()
            for thread in threads:
                # a timeout lets the main thread take its signals
                while thread.is_alive():
                    thread.join(0.5)
        except BaseException as error:
            # Ctrl-C: the PEs' kernels and collectives end, a PE that runs Python code goes on to its next call
            self.fail(-1, error)
            for thread in threads:
                thread.join(1.0)
            raise
        finally:
            self._let_go()
        if self.failure is not None:
            raise self._named(*self.failure)
        if self.remains:
            raise self.remains[0]
        return self.values

    def _start(self, pe: int) -> threading.Thread:
        body = contextvars.copy_context().run
        thread = threading.Thread(target=body, args=(self._pe, pe), name=f"PE {pe}", daemon=True)
        with self._lock:
            self._num_holders += 1
        try:
            thread.start()
        except RuntimeError:
            # there is no such thread that could let go
            self._let_go()
            raise
        return thread

    def _pe(self, pe: int) -> None:
        """Body of a PE's thread."""
        bootstrap = self.group.bootstrap(pe)
        _thread.run = self
        try:
            self.drivers[pe] = driver = self.enter(pe)
            self._open(bootstrap, driver)
            self.values[pe] = self.program(pe, *self.args)
            here = state.bound()
            if here is not None and not here.closed:
                driver.synchronize()
                self._collect(here)
                self._raise_records(pe)
                here.close()
            self._raise_records(pe)
        except BaseException as error:
            self.fail(pe, error)
        finally:
            bootstrap.close()
            state.unbind()
            _thread.run = None
            try:
                self.leave(pe)
            finally:
                self._let_go()

    def _open(self, bootstrap: Bootstrap, driver: Driver) -> None:
        fabric = self.network.fabric if self.network is not None else None
        state.bind(
            state.open_state(bootstrap, driver, self.settings, attach=self._attach, fabric=fabric, owns_bootstrap=False)
        )

    def _attach(self, here: state.PeState) -> Callable[[], None]:
        undo = self.attach(here)
        self.states[here.pe] = here

        def detach() -> None:
            self._collect(here)
            self.states[here.pe] = None
            undo()

        return detach

    def _let_go(self) -> None:
        """One holder less. What a failed PE has left stays until all have ended: peers' kernels may still use it."""
        with self._lock:
            self._num_holders -= 1
            if self._num_holders:
                return
        for driver in self.drivers:
            if driver is not None:
                self._try(driver.synchronize)
        for here in list(self.states):
            if here is not None:
                self._try(functools.partial(here.close, failed=True))
        for driver in self.drivers:
            if driver is not None:
                self._try(driver.close)
        try:
            if self.network is not None:
                # PEs have given back what they had of it
                self.card_errors = self.network.errors()
                self.network.close()
        finally:
            self.take_down()

    def _try(self, call: Callable[[], None]) -> None:
        """A device that is broken after a failure must not keep the rest from being taken down."""
        try:
            call()
        except MoriError as error:
            self.remains.append(error)

    # ------------------------------------------------------------------------------------------------------- errors
    def _collect(self, here: state.PeState) -> None:
        """Take what this PE's kernels have written to its error log."""
        records, count = here.heap.take_errors()
        self.records[here.pe] += records
        self.num_errors[here.pe] += count

    def _raise_records(self, pe: int) -> None:
        if self.num_errors[pe]:
            raise context.error_of(self.records[pe], self.num_errors[pe])

    def report(self) -> list[str]:
        """One line for every wait that has reached its limit, of all PEs."""
        for here in self.states:
            if here is not None:
                self._collect(here)
        return [str(record) for records in self.records for record in records]

    def fail(self, pe: int, error: BaseException) -> None:
        """The first failure ends the other PEs: their collectives raise, and their waits where that can be done."""
        with self._lock:
            if self.failure is not None:
                if isinstance(error, PeerTimeout) and error is not self.failure[1]:
                    self.later.append((pe, error))
                return
            error = self.cause(error)
            self.failure = pe, error
        self.group.abort(error)
        self.stop(error)

    def _named(self, pe: int, error: BaseException) -> BaseException:
        """The error with the PE that raised it, and what other PEs' waits have recorded."""
        # a deadlock is nobody's in particular
        notes = [] if isinstance(error, Deadlock) else [f"raised by PE {pe} of {self.world.n}"]
        lines = [str(record) for other, records in enumerate(self.records) if other != pe for record in records]
        if isinstance(error, MoriError):
            later = [f"PE {other}: {text}" for other, text in self.later if other != pe]
            said = "\n".join([str(error), *later])
            notes += [line for line in lines if line not in said]
            notes += later
            notes += [line for line in self.card_errors if line not in said]
        if self.remains:
            more = f" (and {len(self.remains) - 1} more errors)" if len(self.remains) > 1 else ""
            notes.append(f"while the world was taken down: {self.remains[0]}{more}")
        if hasattr(error, "add_note"):
            for note in notes:
                error.add_note(note)
        elif error.__cause__ is None and notes:
            error.__cause__ = StateError("; ".join(notes))
        return error
