"""A run of a world on the emulated device: every PE has a device of its own and launches end before they return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mori_triton import abi
from mori_triton.emulator import device as devices
from mori_triton.emulator import driver as emulated_driver
from mori_triton.emulator import scheduler
from mori_triton.emulator.scheduler import Aborted
from mori_triton.errors import PeerTimeout
from mori_triton.host import state
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers.base import Driver
from mori_triton.host.drivers.cpu import CpuDriver
from mori_triton.host.tables import Region
from mori_triton.world.graph import CalledGraph, WorldGraph
from mori_triton.world.ledger import ledger_of
from mori_triton.world.network import WorldNetwork
from mori_triton.world.run import Run

if TYPE_CHECKING:
    from mori_triton.world.local import LocalWorld

# a wait in a kernel writes its own record first; then a kernel that spins on its own ends
_GRACE_S = 2.0
# how long the other PEs' waits may go on after the first has reached its limit
_LAST_CALL_S = 0.5


class EmulatedRun(Run):
    """See the module."""

    def __init__(self, world: LocalWorld, program: Callable[..., Any], args: tuple) -> None:
        self.coordinator: scheduler.Coordinator | None = None
        self.executors: list[Any] = []
        self.devices: list[devices.Device] = []
        self._driver = emulated_driver.driver()
        self._holding = False
        self._last_call: threading.Timer | None = None
        super().__init__(world, program, args)

    def new_group(self) -> ThreadGroup:
        """With a seed the scheduler decides who runs, also while PEs meet."""
        if self.world.seed is None:
            return super().new_group()
        return ThreadGroup(self.world.n, timeout_s=self.settings.wait_timeout_s, wait=scheduler.host_wait)

    def set_up(self) -> None:
        """See `Run`."""
        world = self.world
        self._driver.hold()
        self._holding = True
        assert world.arch is not None
        self.devices = devices.acquire(world.arch, world.n)
        for pe, device in enumerate(self.devices):
            device.label = f"PE {pe}"
        ledger = ledger_of(world)
        if ledger is not None:
            for pe, device in enumerate(self.devices):
                device.ledger = partial(ledger.open, pe=pe, owned=self._owned)
        wait = None if world.seed is None else scheduler.host_wait
        self.network = WorldNetwork(self.settings.transport, world.network, wait)
        hca = self.network.hca
        if world.seed is None:
            if hca is not None:
                hca.start()
            self.executors = [scheduler.Parallel(self.settings.wait_timeout_s + _GRACE_S) for _ in self.devices]
        else:
            self.coordinator = scheduler.Coordinator(world.n, world.seed, self.report, weak_memory=world.weak_memory)
            self.executors = list(self.coordinator.hosts)
            weak = self.coordinator.weak
            if hca is not None:
                self.coordinator.agents.append(hca)
                if weak is not None:
                    for pe in range(world.n):
                        hca.use_dma(pe, weak.dma(pe))

    def _owned(self) -> list[tuple[int, int, int]]:
        """(low, high, PE) of all memory that PEs have allocated for kernels: heaps, tables, payload of ops."""
        return [
            (address, address + num_bytes, pe)
            for pe, driver in enumerate(self.drivers)
            if isinstance(driver, CpuDriver)
            for address, num_bytes in driver.allocations()
        ]

    def take_down(self) -> None:
        """See `Run`."""
        if self._last_call is not None:
            self._last_call.cancel()
            self._last_call.join()
        devices.release(self.devices)
        if self._holding:
            self._driver.release()

    def started(self) -> None:
        """See `Run`."""
        if self.coordinator is not None:
            self.coordinator.start()

    def enter(self, pe: int) -> Driver:
        """See `Run`."""
        emulated_driver.set_device(self.devices[pe].number)
        scheduler.bind(self.executors[pe])
        if self.coordinator is not None:
            self.executors[pe].begin()
        return CpuDriver()

    def leave(self, pe: int) -> None:
        """See `Run`."""
        scheduler.bind(None)
        emulated_driver.set_device(None)
        if self.coordinator is not None:
            self.executors[pe].end()

    def attach(self, here: state.PeState) -> Callable[[], None]:
        """Let this PE's kernels touch its own heap and every reachable peer's, and later what it shares besides."""
        device = self.devices[here.pe]
        here.expose = partial(self._expose, here)
        hide = here.expose(here.regions())
        device.set_global(abi.CONTEXT_SYMBOL, here.heap.ctx_address.to_bytes(8, "little"))

        def detach() -> None:
            device.set_global(abi.CONTEXT_SYMBOL, bytes(8))
            hide()

        return detach

    def _expose(self, here: state.PeState, regions: Sequence[Region]) -> Callable[[], None]:
        device = self.devices[here.pe]
        for region in regions:
            device.allow(region.address, region.num_bytes, region.name)
        # in weak-memory mode a store to a PE's memory is in real memory once it has reached that PE
        weak = self.coordinator.weak if self.coordinator is not None else None
        homes: list[Region] = []
        if weak is not None:
            # what is not of the heap is the card's, which has it in memory of the host
            shared = here.network.regions() if here.network is not None else []
            for region in regions:
                if region.pe == here.pe:
                    homes.append(region)
                    home = weak.card(here.pe) if region in shared else here.pe
                    weak.set_home(region.address, region.num_bytes, home)

        def hide() -> None:
            for region in regions:
                device.disallow(region.address)
            for region in homes:
                assert weak is not None
                weak.forget(region.address, region.num_bytes)

        return hide

    def preload(self, load: Callable[[], Any]) -> Any:
        """Nothing waits for a running kernel here."""
        return load()

    def graph(self, step: Callable[[], Any]) -> WorldGraph:
        """A replay is a call."""
        return CalledGraph(step)

    def cause(self, error: BaseException) -> BaseException:
        """See `Run`."""
        if isinstance(error, Aborted) and self.coordinator is not None and self.coordinator.failure is not None:
            # this PE was ended because of that one, and is merely the first to say so
            return self.coordinator.failure
        return error

    def stop(self, error: BaseException) -> None:
        """See `Run`."""
        if self.coordinator is not None:
            self.coordinator.fail(error)
        elif isinstance(error, PeerTimeout):
            # who waits in a circle reaches the limit at about the same time: let all of them write their records
            self._last_call = threading.Timer(_LAST_CALL_S, self._end_kernels)
            self._last_call.start()
        else:
            self._end_kernels()

    def _end_kernels(self) -> None:
        for executor in self.executors:
            executor.abort()
