"""`local_world`: all PEs of a world as threads of this process.

On the CPU each PE has an emulated GPU of its own. By default the PEs run in parallel; with a seed exactly one of {the
PEs' host threads, the device} runs at a time and the seed alone decides every switch, so a run repeats exactly.
"""

from __future__ import annotations

import contextvars
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from mori_triton import abi, env
from mori_triton.emulator import device as devices
from mori_triton.emulator import scheduler
from mori_triton.emulator.scheduler import Aborted
from mori_triton.errors import ArgumentError, Deadlock, MoriError, PeerTimeout, StateError, require
from mori_triton.host import context, state
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers.cpu import CpuDriver

# a wait in a kernel writes its own record first; then a kernel that spins on its own ends; then host collectives
_GRACE_S, _COLLECTIVE_GRACE_S = 2.0, 10.0
# how long the other PEs' waits may go on after the first has reached its limit
_LAST_CALL_S = 0.5


def local_world(
    n: int,
    device: str = "cpu",
    *,
    heap_size: str | int = "64M",
    gpus_per_node: int | None = None,
    arch: str = "gfx1201",
    seed: int | None = None,
    weak_memory: bool = False,
    timeout_s: float = 30.0,
    transport: str = "auto",
) -> LocalWorld:
    """A world of `n` PEs in this process; `.run(program, *args)` runs `program(pe, *args)` once per PE.

    Args:
        n: number of PEs, from 1.
        device: "cpu", the emulated GPU.
        heap_size: symmetric heap of each PE: bytes, or a text such as "64M".
        gpus_per_node: PEs `k*g` to `k*g+g-1` reach each other by load/store, others do not; None: all do.
        arch: GPU to emulate: "gfx942", "gfx950", "gfx1201" or "gfx1250".
        seed: None: PEs run in parallel. A number: one thing runs at a time, in an order that depends on the seed alone.
        weak_memory: stores and loads may be seen as late as the memory model allows; needs a seed.
        timeout_s: limit of every wait in a kernel and of every host collective, in seconds; virtual time with a seed.
        transport: "auto" or "p2p": how kernels reach a peer. There is no other yet.

    Raises: `ArgumentError` for a value that cannot be.
    """
    return LocalWorld(n, device, heap_size, gpus_per_node, arch, seed, weak_memory, timeout_s, transport)


@dataclasses.dataclass(frozen=True)
class LocalWorld:
    """See `local_world`. Holds no resources: each `run` builds the world anew and takes it down."""

    n: int
    device: str
    heap_size: str | int
    gpus_per_node: int | None
    arch: str
    seed: int | None
    weak_memory: bool
    timeout_s: float
    transport: str

    def __post_init__(self) -> None:
        def is_count(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= 1

        require(is_count(self.n), "n", "a number of PEs from 1", repr(self.n))
        if self.device in ("cuda", "hip"):
            raise ArgumentError(f'device: want "cpu", got "{self.device}"; GPUs of this machine are not served yet')
        require(self.device == "cpu", "device", '"cpu"', repr(self.device))
        env.parse_size(self.heap_size)
        ok = self.gpus_per_node is None or is_count(self.gpus_per_node)
        require(ok, "gpus_per_node", "None or a number from 1", repr(self.gpus_per_node))
        devices.check_arch(self.arch)
        ok = self.seed is None or (isinstance(self.seed, int) and not isinstance(self.seed, bool))
        require(ok, "seed", "None or an integer", repr(self.seed))
        require(isinstance(self.weak_memory, bool), "weak_memory", "True or False", repr(self.weak_memory))
        if self.weak_memory and self.seed is None:
            raise ArgumentError("weak_memory: want a seed too (it draws the stale value that a load sees), got None")
        env.parse_seconds(self.timeout_s, "timeout_s")
        require(self.transport in ("auto", "p2p"), "transport", '"auto" or "p2p"', repr(self.transport))

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """`program(pe, *args)` on every PE, with `mori_triton.shmem` initialised for it; the results, indexed by PE.

        Raises: the first error of a PE, with the PE named; the other PEs are ended. `PeerTimeout` for a wait in a
        kernel that reached its limit, `Deadlock` when nothing can change any more; both list who waits for what.
        """
        require(callable(program), "program", "a function of the PE's number", type(program).__name__)
        return _Run(self, program, args).results()


class _Run:
    """One `LocalWorld.run`."""

    def __init__(self, world: LocalWorld, program: Callable[..., Any], args: tuple):
        from mori_triton.emulator import driver

        self.world, self.program, self.args = world, program, args
        self.values: list[Any] = [None] * world.n
        self.records: list[list[context.ErrorRecord]] = [[] for _ in range(world.n)]
        self.num_errors = [0] * world.n
        self.states: list[state.PeState | None] = [None] * world.n
        self.failure: tuple[int, BaseException] | None = None
        # what other PEs' waits have said after that
        self.later: list[tuple[int, PeerTimeout]] = []
        self._lock = threading.Lock()
        self._last_call: threading.Timer | None = None
        self._set_device, self._driver = driver.set_device, driver.driver()
        self.settings = dataclasses.replace(
            env.snapshot(),
            heap_bytes=env.parse_size(world.heap_size),
            wait_timeout_s=env.parse_seconds(world.timeout_s, "timeout_s"),
            gpus_per_node=world.gpus_per_node,
            arch=world.arch,
            device="cpu",
        )

    def results(self) -> list[Any]:
        """Run every PE to its end and return or raise what `LocalWorld.run` does."""
        world = self.world
        self._driver.hold()
        self.devices = devices.acquire(world.arch, world.n)
        try:
            self._prepare()
            threads = [
                threading.Thread(
                    target=contextvars.copy_context().run, args=(self._pe, pe), name=f"PE {pe}", daemon=True
                )
                for pe in range(world.n)
            ]
            for thread in threads:
                thread.start()
            if self.coordinator is not None:
                self.coordinator.start()
            self._join(threads)
        finally:
            if self._last_call is not None:
                self._last_call.cancel()
                self._last_call.join()
            devices.release(self.devices)
            self._driver.release()
        if self.failure is not None:
            raise self._named(*self.failure)
        return self.values

    def _prepare(self) -> None:
        world = self.world
        self.coordinator: scheduler.Coordinator | None = None
        for pe, device in enumerate(self.devices):
            device.label = f"PE {pe}"
        if world.seed is None:
            self.executors: list[Any] = [
                scheduler.Parallel(self.settings.wait_timeout_s + _GRACE_S) for _ in self.devices
            ]
            self.group = ThreadGroup(world.n, timeout_s=self.settings.wait_timeout_s + _COLLECTIVE_GRACE_S)
        else:
            self.coordinator = scheduler.Coordinator(world.n, world.seed, self._report, weak_memory=world.weak_memory)
            self.executors = list(self.coordinator.hosts)
            self.group = ThreadGroup(world.n, timeout_s=self.settings.wait_timeout_s, wait=scheduler.host_wait)

    def _join(self, threads: list[threading.Thread]) -> None:
        try:
            for thread in threads:
                # a timeout lets the main thread take its signals
                while thread.is_alive():
                    thread.join(0.5)
        except BaseException as error:
            # Ctrl-C: the PEs' kernels and collectives end, a PE that runs Python code goes on to its next call
            self._fail(-1, error)
            for thread in threads:
                thread.join(1.0)
            raise

    def _pe(self, pe: int) -> None:
        """Body of a PE's thread."""
        executor, driver = self.executors[pe], CpuDriver()
        self._set_device(self.devices[pe].number)
        scheduler.bind(executor)
        bootstrap = self.group.bootstrap(pe)
        try:
            if self.coordinator is not None:
                executor.begin()
            state.bind(state.open_state(bootstrap, driver, self.settings, attach=self._attach, owns_bootstrap=False))
            self.values[pe] = self.program(pe, *self.args)
            here = state.bound()
            if here is not None and not here.closed:
                self._collect(here)
                self._raise_records(pe)
                here.close()
            self._raise_records(pe)
        except BaseException as error:
            self._fail(pe, error)
            here = state.bound()
            if here is not None:
                here.close(failed=True)
        finally:
            bootstrap.close()
            driver.close()
            state.unbind()
            scheduler.bind(None)
            self._set_device(None)
            if self.coordinator is not None:
                executor.end()

    def _attach(self, here: state.PeState) -> Callable[[], None]:
        """Let this PE's kernels touch its own heap and every reachable peer's; returns the undo."""
        device, regions = self.devices[here.pe], here.heap.regions()
        for region in regions:
            device.allow(region.address, region.num_bytes, region.name)
        device.set_global(abi.CONTEXT_SYMBOL, here.heap.ctx_address.to_bytes(8, "little"))
        # in weak-memory mode a store to a PE's memory is in real memory once it has reached that PE
        weak = self.coordinator.weak if self.coordinator is not None else None
        if weak is not None:
            for region in regions:
                if region.pe == here.pe:
                    weak.set_home(region.address, region.num_bytes, here.pe)
        self.states[here.pe] = here

        def detach() -> None:
            self._collect(here)
            self.states[here.pe] = None
            device.set_global(abi.CONTEXT_SYMBOL, bytes(8))
            for region in regions:
                device.disallow(region.address)
                if weak is not None and region.pe == here.pe:
                    weak.forget(region.address, region.num_bytes)

        return detach

    # ------------------------------------------------------------------------------------------------- errors
    def _collect(self, here: state.PeState) -> None:
        """Take what this PE's kernels have written to its error log."""
        records, count = here.heap.take_errors()
        self.records[here.pe] += records
        self.num_errors[here.pe] += count

    def _raise_records(self, pe: int) -> None:
        if self.num_errors[pe]:
            raise context.error_of(self.records[pe], self.num_errors[pe])

    def _report(self) -> list[str]:
        """One line for every wait that has reached its limit, of all PEs."""
        for here in self.states:
            if here is not None:
                self._collect(here)
        return [str(record) for records in self.records for record in records]

    def _fail(self, pe: int, error: BaseException) -> None:
        """The first failure ends the other PEs: their waits and collectives raise."""
        with self._lock:
            if self.failure is not None:
                if isinstance(error, PeerTimeout):
                    self.later.append((pe, error))
                return
            if isinstance(error, Aborted) and self.coordinator is not None and self.coordinator.failure is not None:
                # this PE was ended because of that one, and is merely the first to say so
                error = self.coordinator.failure
            self.failure = pe, error
        self.group.abort(error)
        if self.coordinator is not None:
            self.coordinator.fail(error)
        elif isinstance(error, PeerTimeout):
            # who waits in a circle reaches the limit at about the same time: let all of them write their records
            self._last_call = threading.Timer(_LAST_CALL_S, self._stop)
            self._last_call.start()
        else:
            self._stop()

    def _stop(self) -> None:
        """End the kernels of every PE."""
        for executor in self.executors:
            executor.abort()

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
        if hasattr(error, "add_note"):
            for note in notes:
                error.add_note(note)
        elif error.__cause__ is None and notes:
            error.__cause__ = StateError("; ".join(notes))
        return error
