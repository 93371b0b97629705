"""GPUs that are none: asynchronous streams, events and graphs of launches, whose kernels run on the emulated device.

Only launches are asynchronous. Torch operations on the (CPU) tensors happen at once, so tests synchronise before them.
Loading a kernel waits for the kernels that run on that GPU, as on a real one. Every PE loads for itself, which PEs of
one real GPU need not.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mori_triton import abi
from mori_triton.emulator import device as devices
from mori_triton.emulator import driver as emulated_driver
from mori_triton.emulator import scheduler
from mori_triton.emulator.launch import Launch
from mori_triton.host.drivers.cpu import CpuDriver

ARCH, SPIN_LIMIT_S = "gfx1201", 20.0
_thread = threading.local()


class FakeEvent:
    """Stands for what is on a stream when it is recorded."""

    def __init__(self) -> None:
        self.come = threading.Event()
        self.come.set()

    def record(self, stream: FakeStream) -> None:
        self.come = threading.Event()
        stream.put(self.come.set)


class FakeStream:
    """Does one thing after another on a thread of its own; while it is captured, keeps them for the graph."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = devices.acquire(ARCH, 1)[0]
        self.graph: FakeGraph | None = None
        self.executor = scheduler.Parallel(SPIN_LIMIT_S)
        self.errors: list[BaseException] = []
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._worker.start()

    def _work(self) -> None:
        while (call := self._todo.get()) is not None:
            call()

    def put(self, call: Callable[[], None]) -> None:
        if self.graph is not None:
            self.graph.calls.append((self, call))
        else:
            self._todo.put(call)

    def launch(self, launch: Launch) -> None:
        # a graph runs the same launch many times, each from its beginning
        fresh = bytes(launch.control)

        def run() -> None:
            ctypes.memmove(launch.address, fresh, len(fresh))
            try:
                self.executor.execute(launch)
            except BaseException as error:
                self.errors.append(error)

        self.put(run)

    def wait_event(self, event: FakeEvent) -> None:
        # an event of the stream that is captured draws this one into the capture
        begun = FakeGraph.capturing
        if begun is not None and event in begun.events:
            self.graph = begun
            begun.streams.append(self)
        elif self.graph is None:
            self._todo.put(event.come.wait)

    def synchronize(self) -> None:
        done = threading.Event()
        self._todo.put(done.set)
        while not done.wait(0.1) and self._worker.is_alive():
            pass

    def close(self) -> None:
        self._todo.put(None)
        self._worker.join()
        devices.release([self.device])


class FakeGraph:
    """Launches of several streams; a replay keeps the order of each stream only."""

    capturing: FakeGraph | None = None

    def __init__(self) -> None:
        self.graph = self
        self.calls: list[tuple[FakeStream, Callable[[], None]]] = []
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []

    def replay(self) -> None:
        """Put it on the current stream."""

        def run() -> None:
            def of(stream: FakeStream) -> None:
                for owner, call in self.calls:
                    if owner is stream:
                        call()

            threads = [threading.Thread(target=of, args=(stream,)) for stream in self.streams]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        _thread.stream.put(run)


class _Asynchronous:
    """The executor of a thread on fake GPUs: launches go to its current stream."""

    def execute(self, launch: Launch) -> None:
        _thread.stream.launch(launch)


class FakeDriver(CpuDriver):
    """The driver of a fake GPU: its synchronize waits for that GPU's streams."""

    name = "fake"

    def __init__(self, gpus: FakeGpus, index: int) -> None:
        super().__init__()
        self.gpus, self.device_index = gpus, index

    def synchronize(self) -> None:
        self.gpus.synchronize(self.device_index)


class FakeGpus:
    """In place of `mori_triton.world.gpus.Gpus`."""

    count = 1
    made: list[FakeGpus]

    def __init__(self, device: str) -> None:
        self.device, self.num_gpus = device, self.count
        self.streams: list[FakeStream] = []
        self.log: list[Any] = []
        self.given = 0
        self.driver = emulated_driver.driver()
        self.driver.hold()
        self.made.append(self)
        self.num_loads = 0
        load = self.driver.utils.load_binary

        def load_when_idle(name: str, binary: bytes, shared: int, number: int) -> Any:
            self.num_loads += 1
            self.synchronize(next(stream.index for stream in self.streams if stream.device.number == number))
            return load(name, binary, shared, number)

        self.driver.utils.load_binary = load_when_idle  # type: ignore[method-assign]

    def synchronize(self, index: int) -> None:
        for stream in list(self.streams):
            if stream.index == index:
                stream.synchronize()

    def open_driver(self, index: int, heap_mode: str) -> FakeDriver:
        return FakeDriver(self, index)

    def take_stream(self, index: int, driver: FakeDriver) -> FakeStream:
        stream = FakeStream(index)
        self.streams.append(stream)
        return stream

    def give_stream(self, stream: FakeStream) -> None:
        self.given += 1
        stream.close()

    def close(self) -> None:
        del self.driver.utils.load_binary
        self.driver.release()

    def enter(self, stream: FakeStream) -> None:
        _thread.stream = stream
        emulated_driver.set_device(stream.device.number)
        scheduler.bind(_Asynchronous())

    def attach(self, here: Any) -> Callable[[], None]:
        device = _thread.stream.device
        device.label = f"PE {here.pe}"

        def expose(regions: Sequence[Any]) -> Callable[[], None]:
            for region in regions:
                device.allow(region.address, region.num_bytes, region.name)

            def hide() -> None:
                for region in regions:
                    device.disallow(region.address)

            return hide

        # the heaps now, and later what the PE shares besides
        here.expose = expose
        device.set_global(abi.CONTEXT_SYMBOL, here.heap.ctx_address.to_bytes(8, "little"))
        return expose(here.regions())

    def current_stream(self) -> FakeStream:
        return _thread.stream

    def new_event(self) -> FakeEvent:
        event = FakeEvent()
        if FakeGraph.capturing is not None:
            FakeGraph.capturing.events.append(event)
        return event

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = _thread.stream
        self.enter(stream)
        try:
            yield
        finally:
            self.enter(before)

    @contextlib.contextmanager
    def capture(self, main: FakeStream, streams: Sequence[FakeStream]) -> Iterator[FakeGraph]:
        graph = FakeGraph()
        main.graph = FakeGraph.capturing = graph
        failed = False
        try:
            yield graph
        finally:
            main.graph = FakeGraph.capturing = None
            for stream in graph.streams:
                stream.graph = None
            failed = len(graph.streams) < len(streams)
        if failed:
            raise RuntimeError("the capture has unjoined work")
