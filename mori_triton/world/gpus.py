"""The GPUs of this machine as a world uses them: torch's current device and stream, events, and CUDA graphs.

Streams are the driver's own, not torch's: torch hands out 32 in a circle, so a PE's stream could be one that the
program uses elsewhere, and a kernel that waits would keep it busy. CUDA spreads streams over a few hardware queues, so
those that were made first are used first: 8 PEs of a GPU have 8 neighbours.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mori_triton.emulator import driver as emulated_driver
from mori_triton.errors import ArgumentError
from mori_triton.host import drivers
from mori_triton.host.drivers.base import Driver

# of each (kind of device, index), in the order in which they were made. Never destroyed: torch keeps memory by stream
_streams: dict[tuple[str, int], list[torch.cuda.Stream]] = {}
_in_use: set[torch.cuda.Stream] = set()
_streams_lock = threading.Lock()
# graphs whose capture could not be ended
_spoilt: list[torch.cuda.CUDAGraph] = []


def check_available(device: str) -> None:
    """Raise `ArgumentError` unless torch can use GPUs of this kind: "cuda" or "hip"."""
    built = torch.version.cuda if device == "cuda" else torch.version.hip
    if built is None:
        raise ArgumentError(f'device: got "{device}", for which torch {torch.__version__} was not built')
    if not torch.cuda.is_available():
        raise ArgumentError(f'device: got "{device}", but torch finds no GPU (torch.cuda.is_available() is False)')


class Gpus:
    """The GPUs of one run. `device`: "cuda" or "hip"; to torch both are cuda."""

    def __init__(self, device: str) -> None:
        self.device = device
        # by the caller's thread: two PEs at once would both start torch.cuda
        torch.cuda.init()
        self.num_gpus = torch.cuda.device_count()
        # Triton has one active driver in a process, so GPUs and the emulated device take turns
        emulated_driver.driver().keep_out()

    def close(self) -> None:
        """After the last use."""
        emulated_driver.driver().let_in()

    def open_driver(self, index: int, heap_mode: str) -> Driver:
        """A driver of GPU `index`."""
        return drivers.open_driver(self.device, index, heap_mode=heap_mode)

    def take_stream(self, index: int, driver: Driver) -> torch.cuda.Stream:
        """A stream of GPU `index` that nobody else uses; give it back, idle, to `give_stream`."""
        with _streams_lock:
            streams = _streams.setdefault((self.device, index), [])
            stream = next((idle for idle in streams if idle not in _in_use), None)
            if stream is None:
                stream = torch.cuda.ExternalStream(driver.create_stream(), device=torch.device("cuda", index))
                streams.append(stream)
            _in_use.add(stream)
        return stream

    def give_stream(self, stream: torch.cuda.Stream) -> None:
        """Let later worlds use it."""
        with _streams_lock:
            _in_use.remove(stream)

    def enter(self, stream: torch.cuda.Stream) -> None:
        """Make a stream and its device the calling thread's current ones."""
        torch.cuda.set_device(stream.device)
        torch.cuda.set_stream(stream)

    def attach(self, here: Any) -> Callable[[], None]:
        """Make a PE's memory known to its kernels: on GPUs they reach whatever is mapped. Returns the undo."""
        return lambda: None

    def current_stream(self) -> torch.cuda.Stream:
        """The calling thread's current stream."""
        return torch.cuda.current_stream()

    def new_event(self) -> torch.cuda.Event:
        """An event with `record(stream)`; streams have `wait_event(event)`."""
        return torch.cuda.Event()

    @contextlib.contextmanager
    def stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Inside the block a stream and its device are the calling thread's current ones."""
        with torch.cuda.stream(stream):
            yield

    @contextlib.contextmanager
    def capture(self, main: torch.cuda.Stream, streams: Sequence[torch.cuda.Stream]) -> Iterator[Captured]:
        """Capture what the block does on `main`, and on `streams` once they wait for an event of `main`."""
        captured, pool = Captured(torch.cuda.CUDAGraph()), torch.cuda.graph_pool_handle()
        # `main` is made current here: where a capture cannot be ended torch leaves it current
        with _no_garbage(), torch.cuda.stream(main), contextlib.ExitStack() as stack:
            stack.enter_context(_allocator_told(captured.graph, main.device, pool))
            # other threads wait meanwhile, and what they do in the background must not spoil the capture
            stack.enter_context(torch.cuda.graph(captured.graph, pool, main, capture_error_mode="thread_local"))
            # torch keeps what is allocated meanwhile for the graph, but on the device of `main` only
            for device in sorted({stream.device for stream in streams} - {main.device}, key=str):
                # what is kept is of the device that is current when the pool is made, and goes with the pool
                with torch.cuda.device(device):
                    captured.pools.append(torch.cuda.MemPool())
                stack.enter_context(torch.cuda.use_mem_pool(captured.pools[-1], device))
            yield captured


@contextlib.contextmanager
def _allocator_told(graph: torch.cuda.CUDAGraph, device: torch.device, pool: tuple[int, int]) -> Iterator[None]:
    """Where the block, a capture into `graph`, cannot be ended, end it for torch's allocator all the same.

    Torch tells its allocator after CUDA has ended the capture, so not at all where CUDA says that it was spoilt. Then
    a capture would be underway on that device for ever: nothing is given back to it, and a memory pool of any later
    graph that is freed finds it so and ends the process.
    """
    older_name = "_cuda_endAllocateCurrentStreamToPool"  # before torch 2.8
    end = getattr(torch._C, "_cuda_endAllocateToPool", None) or getattr(torch._C, older_name)
    try:
        yield
    except BaseException:
        # raises where torch has done so itself, or has not begun; then the graph gives the pool back, if it has it
        with contextlib.suppress(RuntimeError):
            end(device.index, pool)
            # the allocator of pinned memory is not told, and asks the graph which allocations are its own
            _spoilt.append(graph)
            torch._C._cuda_releasePool(device.index, pool)
        raise


class Captured:
    """A CUDA graph, and the memory of other devices that belongs to it."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph, self.pools = graph, list[Any]()

    def replay(self) -> None:
        """Launch it on the current stream."""
        self.graph.replay()


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Collect now, and not in the block: an older CUDA graph that is freed there would spoil a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
