"""Who runs when: launches of one thread alone, or every PE of a world under one seed.

A launch is synchronous for the thread that makes it. `Parallel` (the default) gives each thread a machine of its own
and runs it without the interpreter lock. `Coordinator` lets exactly one of {the PEs' host threads, the device they
share, agents such as a model of the network cards} run at a time and draws each switch from its seed: same seed, same
order of everything.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mori_triton.emulator.launch import Launch
from mori_triton.emulator.machine import Event, Machine
from mori_triton.emulator.weak import WeakMemory
from mori_triton.errors import Deadlock, PeerTimeout, StateError, WeakMemoryError

SLICE = 50_000_000  # instructions between two looks at the interpreter's signals
# instructions of the device's turn while others could act: few, since a wave that waits for them polls all the while
TURNS = (100, 1000, 10000)
# steps in a row that change nothing, with nobody else to run, after which an agent is taken to be stuck
FRUITLESS_STEPS = 10_000


class Aborted(StateError):
    """Another PE of this world failed; its error is the cause to look at."""


class Executor(Protocol):
    """What runs a thread's launches."""

    def execute(self, launch: Launch) -> None:
        """Run a launch to its end. Raises `KernelFault`, `Deadlock`, `PeerTimeout`, `Aborted`."""
        ...


class Agent(Protocol):
    """Something beside hosts and device that changes memory, such as a network card."""

    def pending(self) -> bool:
        """Whether `step` could do something now. Asked at every switch: cheap, and it changes nothing."""
        ...

    def step(self, word: int) -> bool:
        """Do at most one thing, which one `word` decides: 64 random bits. Returns whether that changed anything."""
        ...

    def describe(self) -> list[str]:
        """What it has not finished or waits for, for the report of a deadlock."""
        ...


class Parallel:
    """Runs one thread's launches on a machine of its own, beside other threads and processes.

    `timeout_s`: a launch whose waves have only polled for so long, with no change of memory, is a `PeerTimeout`.
    """

    def __init__(self, timeout_s: float | None = None):
        self.timeout_s = timeout_s
        self.machine = Machine()
        self._aborted = False

    def abort(self) -> None:
        """End the launch in flight, and every later one, with `Aborted`. From any thread."""
        self._aborted = True
        self.machine.state.stop = 1

    def execute(self, launch: Launch) -> None:
        machine = self.machine
        if self._aborted:
            raise Aborted(f"{launch.who} was not started: another PE failed")
        machine.submit(launch)
        waiting_since, epoch = 0.0, -1
        try:
            while not launch.control.ended:
                event = machine.run(SLICE)
                if event == Event.FAULT:
                    raise machine.fault()[1]
                if event == Event.STUCK:
                    raise Deadlock(_listing("every wave waits at a barrier", machine.waiting_waves()))
                if event == Event.STOPPED:
                    raise Aborted(f"{launch.who} was ended: another PE failed")
                if event == Event.WAITING and self.timeout_s is not None:
                    if machine.state.epoch != epoch:
                        waiting_since, epoch = time.monotonic(), machine.state.epoch
                    elif time.monotonic() - waiting_since > self.timeout_s:
                        raise PeerTimeout(
                            _listing(f"nothing changed for {self.timeout_s:g} s", machine.waiting_waves())
                        )
        finally:
            if launch in machine.launches:
                machine.retire(launch)


class SeededHost:
    """One PE's host thread under a `Coordinator`."""

    def __init__(self, coordinator: Coordinator, index: int):
        self.coordinator, self.index = coordinator, index
        self.state = "ready"  # running, waiting, launched, done
        self.predicate: Callable[[], bool] | None = None
        self.what: object = ""
        self.error: BaseException | None = None
        self.go = threading.Semaphore(0)

    def runnable(self) -> bool:
        """Whether the host thread can go on now."""
        if self.state == "waiting":
            assert self.predicate is not None
            return self.predicate()
        return self.state == "ready"

    def begin(self) -> None:
        """First call of the PE's thread; returns when it is this PE's turn."""
        self.go.acquire()
        self.coordinator.check()

    def wait(self, predicate: Callable[[], bool], what: object) -> None:
        """Let others run until `predicate()` holds. Raises `Deadlock` when it never can, `Aborted` when a PE failed."""
        self.predicate, self.what, self.state = predicate, what, "waiting"
        self.coordinator.advance(self)
        self.predicate = None

    def execute(self, launch: Launch) -> None:
        """See `Executor`."""
        self.state = "launched"
        self.coordinator.submit(self, launch)
        self.coordinator.advance(self)
        error, self.error = self.error, None
        if error is not None:
            raise error

    def end(self) -> None:
        """Last call of the PE's thread."""
        self.state = "done"
        self.coordinator.advance(self)


class Coordinator:
    """One seed's order of `n` host threads, the device and agents.

    `reports` tells what waits have written to their PEs' error logs; it is asked when nothing can change any more and
    virtual time has passed every limit. `agents` may be added to and taken from by whoever has the turn; they are not
    waited for once all hosts have ended.
    """

    def __init__(
        self,
        n: int,
        seed: int,
        reports: Callable[[], list[str]] = list,
        *,
        weak_memory: bool = False,
        agents: Sequence[Agent] = (),
    ):
        self.machine = Machine(seed)
        self.weak = WeakMemory(seed, n) if weak_memory else None
        self.hosts = [SeededHost(self, i) for i in range(n)]
        self.failure: BaseException | None = None
        self.reports = reports
        self.agents = list(agents)
        self._random = random.Random(seed)
        self._owners: dict[Launch, SeededHost] = {}
        self._device_idle = False  # the device has nothing to do until a host or an agent has run
        self._host_epoch = -1  # the machine's when a host ran last, which may have changed memory too
        self._fruitless = 0
        self._jumped = False

    @property
    def trace_hash(self) -> int:
        """Hash of every switch between waves, hosts and agents so far."""
        return self.machine.trace_hash

    def start(self) -> None:
        """Give the first PE its turn."""
        self.advance(None)

    def check(self) -> None:
        """Raise `Aborted` when a PE has failed."""
        if self.failure is not None:
            raise Aborted(
                f"another PE of this world failed ({type(self.failure).__name__}: {self.failure})"
            ) from self.failure

    def fail(self, error: BaseException) -> None:
        """A PE failed: every other host thread raises `Aborted` at once. They run freely from here on."""
        if self.failure is None:
            self.failure = error
            for host in self.hosts:
                host.go.release()

    def submit(self, host: SeededHost, launch: Launch) -> None:
        """Put a host's launch in flight."""
        self.check()
        if self.weak is not None and launch.num_groups:
            launch.weak_records = self.weak.attach(launch, host.index)
        self.machine.submit(launch)
        if launch.control.ended:
            host.state = "ready"
        else:
            self._owners[launch] = host
            self._device_idle = False

    def advance(self, me: SeededHost | None) -> None:
        """Decide who runs next, until it is `me`; the caller has the turn. None, or ended: only hand the turn on."""
        while True:
            if me is not None and me.state != "done":
                self.check()
            if self.failure is not None:
                return
            if all(host.state == "done" for host in self.hosts):
                return
            ready = [host for host in self.hosts if host.runnable()]
            agents = self._pending(me)
            if self.failure is not None:
                return
            device = bool(self.machine.launches) and not (self._device_idle and (ready or agents))
            if not ready and not device and not agents:
                self._give_up(Deadlock(_listing("no PE can go on", self._waiting())), me)
                continue
            pick = self._random.randrange(len(ready) + device + len(agents))
            if pick >= len(ready) + device:
                self._run_agent(agents[pick - len(ready) - device], me, alone=not ready and not device)
                continue
            self._fruitless = 0
            if pick == len(ready):
                self._run_device(me, alone=not ready and not agents)
                continue
            host = ready[pick]
            self._device_idle = False
            self._host_epoch = self.machine.state.epoch
            self._mix(host.index)
            host.state = "running"
            if host is me:
                return
            host.go.release()
            if me is not None and me.state != "done":
                me.go.acquire()
                self.check()
            return

    def _pending(self, me: SeededHost | None) -> list[int]:
        """Agents that could act now, by index. An agent that fails ends the world."""
        try:
            return [i for i, agent in enumerate(self.agents) if agent.pending()]
        except Exception as error:
            self._give_up(error, me)
            return []

    def _run_agent(self, index: int, me: SeededHost | None, *, alone: bool) -> None:
        """Let an agent do one thing; alone: nobody else can go on."""
        agent = self.agents[index]
        self._mix(1 << 32 | index)
        try:
            changed = agent.step(self._random.getrandbits(64))
            if self.weak is not None:
                # what a card has moved on is wrong for good: say so before anybody computes with it
                self.weak.raise_races()
        except Exception as error:
            self._give_up(error, me)
            return
        if changed:
            # let the waves poll again
            self.machine.state.epoch += 1
            self._device_idle = False
        self._fruitless = 0 if changed or not alone else self._fruitless + 1
        if self._fruitless > FRUITLESS_STEPS:
            text = f"nothing has changed in {FRUITLESS_STEPS} steps of the only ones that can act"
            self._give_up(Deadlock(_listing(text, self._waiting())), me)

    def _waiting(self) -> list[str]:
        """What everybody waits for: waves, hosts, agents."""
        hosts = [f"{host.what}" for host in self.hosts if host.state == "waiting"]
        return [*self.machine.waiting_waves(), *hosts, *(line for agent in self.agents for line in agent.describe())]

    def _mix(self, index: int) -> None:
        state = self.machine.state
        state.hash = (state.hash ^ (0xFACE << 40 | index)) * 0x9E3779B97F4A7C15 & ((1 << 64) - 1)

    def _give_up(self, error: BaseException, me: SeededHost | None) -> None:
        """Nothing can go on: every PE ends, the caller with the error itself."""
        self.fail(error)
        if me is not None and me.state != "done":
            raise error

    def _run_device(self, me: SeededHost | None, *, alone: bool) -> None:
        """Let the device run for a while; alone: nobody else can go on."""
        machine = self.machine
        # what a kernel does may let an agent act at any moment
        event = machine.run(SLICE if alone and not self.agents else self._random.choice(TURNS))
        if event in (Event.FINISHED, Event.FAULT):
            launch, error = (machine.finished(), None) if event == Event.FINISHED else machine.fault()
            if error is not None:
                machine.retire(launch)
            self._finish(launch, error)
            if self._jumped:
                self._after_jump(me)
        elif event in (Event.QUIET, Event.STUCK):
            starving = self.weak.starving() if self.weak is not None else []
            if not alone or self._pending(me):
                self._device_idle = True
            elif self.weak is not None and self.weak.pending() and not starving:
                self.weak.drain()
                # what arrived is a change: let the waves poll again
                machine.state.epoch += 1
            elif self._host_epoch == machine.state.epoch:
                # what is known of the waves may be older than what a host has written since: let them poll again
                machine.state.epoch += 1
            elif self.weak is not None and starving:
                texts = [*self.weak.races(), *starving]
                self._give_up(WeakMemoryError(_listing("polls wait for stores that need not arrive", texts)), me)
            elif not self._jumped and event == Event.QUIET:
                # waits with a limit write their records and end; the others stay
                machine.jump_clock()
                self._jumped = True
            else:
                lines = [*self.reports(), *self._waiting(), *(self.weak.races() if self.weak else ())]
                self._give_up(Deadlock(_listing("nothing can change any more", lines)), me)

    def _finish(self, launch: Launch, error: BaseException | None) -> None:
        host = self._owners.pop(launch)
        if self.weak is not None and error is None:
            try:
                self.weak.raise_races()
            except WeakMemoryError as race:
                error = race
        host.error, host.state = error, "ready"

    def _after_jump(self, me: SeededHost | None) -> None:
        """Virtual time has passed every limit: once all launches have ended, their records are the report."""
        if self.machine.launches:
            # let every launch end before a host sees anything
            while self.machine.launches and self.failure is None:
                if agents := self._pending(me):
                    self._run_agent(self._random.choice(agents), me, alone=True)
                elif self.failure is None:
                    self._run_device(me, alone=True)
            return
        self._jumped = False
        lines = self.reports()
        if lines:
            self._give_up(Deadlock(_listing("nothing can change any more", lines)), me)


def _listing(head: str, lines: list[str]) -> str:
    return head + "".join(f"\n  {line}" for line in lines)


_thread = threading.local()


def current() -> Executor:
    """The calling thread's executor; a `Parallel` without limit unless one was bound."""
    executor = getattr(_thread, "executor", None)
    if executor is None:
        executor = _thread.executor = Parallel()
    return executor


def bind(executor: Executor | None) -> None:
    """Let `executor` run the calling thread's launches; None: back to the default."""
    _thread.executor = executor


def host_wait(predicate: Callable[[], bool], what: object) -> None:
    """`SeededHost.wait` of the calling thread: others run until `predicate()` holds; `str(what)` is for reports."""
    executor = current()
    assert isinstance(executor, SeededHost), "only the PEs of a seeded world wait like this"
    executor.wait(predicate, what)
