"""A run of a world on GPUs: PE `p` is on GPU `p % num_gpus`, with a stream of its own that is current in its thread.

Loading a kernel, and much of what torch does for the first time, waits for the kernels that run on that GPU. If one of
them waits for the PE that loads, nothing moves until its limit. So PEs meet on the host (`PeState.meet`) between
loading and launching; `preload` gives them turns at loading; and no PE's memory is given back before all are idle.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mori_triton.errors import StateError
from mori_triton.host import state
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers.base import Driver
from mori_triton.world.gpus import Gpus
from mori_triton.world.graph import WorldGraph
from mori_triton.world.network import WorldNetwork
from mori_triton.world.run import Run

if TYPE_CHECKING:
    import torch

    from mori_triton.world.local import LocalWorld

# how a PE in another call is told apart from one that is late
_GRAPH, _PRELOAD, _REPLAY = "world.graph", "world.preload", "WorldGraph.replay"
# what a PE may take to compile while the others wait to meet it. A PE that fails or ends is noticed at once
_COMPILE_S = 120.0


class GpuRun(Run):
    """See the module."""

    def __init__(self, world: LocalWorld, program: Callable[..., Any], args: tuple) -> None:
        self.gpus: Gpus | None = None
        self.streams: list[Any] = [None] * world.n
        # what graphs are captured and launched on, once there is one
        self.main: Any = None
        self._steps: list[Callable[[], Any] | None] = [None] * world.n
        # a captured one, until each PE has taken it: the program decides how long a graph lives
        self._graphs: list[CapturedGraph | None] = [None] * world.n
        # the thread that captures stands for every PE
        self._capturing = threading.Event()
        super().__init__(world, program, args)

    def new_group(self) -> ThreadGroup:
        """See `Run`."""
        return ThreadGroup(self.world.n, timeout_s=self.settings.wait_timeout_s + _COMPILE_S)

    def set_up(self) -> None:
        """See `Run`."""
        self.gpus = Gpus(self.world.device)
        self.network = WorldNetwork(self.settings.transport, self.world.network)
        if self.network.hca is not None:
            self.network.hca.start()

    def take_down(self) -> None:
        """See `Run`. Every device is idle."""
        if self.gpus is None:
            return
        # a graph that the program has kept must not keep the world
        self._graphs, self._steps = [], []
        for stream in (*self.streams, self.main):
            # where a device has failed its streams are of no use
            if stream is not None and not self.remains:
                self.gpus.give_stream(stream)
        self.gpus.close()

    def enter(self, pe: int) -> Driver:
        """See `Run`."""
        assert self.gpus is not None
        driver = self.gpus.open_driver(self._index(pe), self.settings.heap_mode)
        driver.set_current()
        self.streams[pe] = self.gpus.take_stream(self._index(pe), driver)
        self.gpus.enter(self.streams[pe])
        return driver

    def leave(self, pe: int) -> None:
        """See `Run`. A thread's current device and stream end with it."""

    def started(self) -> None:
        """See `Run`."""

    def stop(self, error: BaseException) -> None:
        """See `Run`. A kernel cannot be ended from outside: the others' waits end at their limit."""

    def attach(self, here: state.PeState) -> Callable[[], None]:
        """See `Run`."""
        assert self.gpus is not None
        if here.n_pes > 1:
            here.rendezvous = lambda what: self._meet(here, what)
        return self.gpus.attach(here)

    def _index(self, pe: int) -> int:
        assert self.gpus is not None
        return pe % self.gpus.num_gpus

    def _meet(self, here: state.PeState, what: str) -> None:
        if not self._capturing.is_set():
            here.bootstrap.barrier(what)

    # ------------------------------------------------------------------------------------------- turns and graphs
    def preload(self, load: Callable[[], Any]) -> Any:
        """See `LocalWorld.preload`: nothing runs on any GPU while a PE has its turn."""
        here, result = state.current(), None
        here.driver.synchronize()
        for pe in range(here.n_pes):
            here.bootstrap.barrier(f"{_PRELOAD}, turn of PE {pe}")
            if pe == here.pe:
                result = load()
                here.driver.synchronize()
        here.bootstrap.barrier(f"{_PRELOAD}, all PEs had their turn")
        return result

    def graph(self, step: Callable[[], Any]) -> WorldGraph:
        """See `LocalWorld.graph`. All but PE 0 wait meanwhile."""
        here = state.current()
        here.driver.synchronize()
        self._steps[here.pe] = step
        here.bootstrap.barrier(_GRAPH)
        if here.pe == 0:
            self._graphs = [self._capture()] * here.n_pes
        here.bootstrap.barrier(f"{_GRAPH}, captured")
        graph, self._graphs[here.pe], self._steps[here.pe] = self._graphs[here.pe], None, None
        assert graph is not None
        return graph

    def _capture(self) -> CapturedGraph:
        assert self.gpus is not None
        if self.main is None:
            self.main = self.gpus.take_stream(self._index(0), state.current().driver)
        captured = None
        results: list[Any] = []
        failed: tuple[int, BaseException] | None = None
        with self._refusing_collectives():
            try:
                with self.gpus.capture(self.main, self.streams) as captured:
                    begin = self.gpus.new_event()
                    begin.record(self.main)
                    for pe, stream in enumerate(self.streams):
                        stream.wait_event(begin)
                        try:
                            results.append(self._step_as(pe))
                        except BaseException as error:
                            failed = pe, error
                        # also after a failure: a capture cannot end before all its streams have come back
                        end = self.gpus.new_event()
                        end.record(stream)
                        self.main.wait_event(end)
                        if failed:
                            break
            except RuntimeError:
                # a step that fails may leave a capture that cannot be ended; then the step's error is the one to know
                if failed is None:
                    raise
        if failed is not None:
            self.fail(*failed)
            raise failed[1]
        return CapturedGraph(self.gpus, self.main, captured, results, self.states)

    def _step_as(self, pe: int) -> Any:
        """The step of `pe`, as that PE, by the calling thread."""
        assert self.gpus is not None
        mine, theirs, step = state.bound(), self.states[pe], self._steps[pe]
        if mine is None or theirs is None or step is None:
            raise StateError(f"{_GRAPH}: shmem was finalized on PE {pe}")
        state.bind(theirs)
        try:
            with self.gpus.stream(self.streams[pe]):
                return step()
        finally:
            state.bind(mine)

    @contextlib.contextmanager
    def _refusing_collectives(self) -> Iterator[None]:
        """The PEs that would have to answer are waiting."""
        self._capturing.set()
        why = f"{_GRAPH}: a step must not make collective calls on the host while it is captured"
        self.group.refusal = threading.get_ident(), why
        try:
            yield
        finally:
            self.group.refusal = None
            self._capturing.clear()


class CapturedGraph(WorldGraph):
    """The steps of all PEs as one CUDA graph, launched by PE 0's thread."""

    def __init__(
        self, gpus: Gpus, main: Any, captured: Any, results: list[Any], states: Iterable[state.PeState | None]
    ) -> None:
        self._gpus, self._main, self._captured, self._results = gpus, main, captured, results
        # whose memory the kernels have the addresses of
        self._states = {weakref.ref(there) for there in states if there is not None}
        self.cuda_graph: torch.cuda.CUDAGraph | None = captured.graph
        self._ready = [gpus.new_event() for _ in results]
        self._done = gpus.new_event()

    def replay(self) -> Any:
        """See `WorldGraph`."""
        here = state.current()
        if weakref.ref(here) not in self._states:
            raise StateError(f"{_REPLAY}: the memory that the graph uses was given back: shmem was finalized since")
        stream = self._gpus.current_stream()
        self._ready[here.pe].record(stream)
        here.meet(_REPLAY)
        if here.pe == 0:
            for event in self._ready:
                self._main.wait_event(event)
            with self._gpus.stream(self._main):
                self._captured.replay()
            self._done.record(self._main)
        here.meet(f"{_REPLAY}, launched")
        stream.wait_event(self._done)
        return self._results[here.pe]
