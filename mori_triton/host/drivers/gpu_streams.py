"""Streams, events and graphs of a GPU: what `GpuDriver` offers of `Driver` besides memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mori_triton.host.drivers.gpu import Gpu


class GpuStreams:
    """Part of `GpuDriver`."""

    @property
    def _gpu(self) -> Gpu:
        raise NotImplementedError

    def synchronize(self) -> None:
        self._gpu.call("synchronize")

    def stream_synchronize(self, stream: int) -> None:
        self._gpu.call("stream_synchronize", stream)

    def create_stream(self) -> int:
        return self._gpu.output("stream_create", self._gpu.api.Handle, self._gpu.api.STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        self._gpu.call("stream_destroy", stream)

    def create_event(self) -> int:
        return self._gpu.output("event_create", self._gpu.api.Handle, self._gpu.api.EVENT_DISABLE_TIMING)

    def destroy_event(self, event: int) -> None:
        self._gpu.call("event_destroy", event)

    def record_event(self, event: int, stream: int) -> None:
        self._gpu.call("event_record", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._gpu.call("stream_wait_event", stream, event, 0)

    def begin_capture(self, stream: int) -> None:
        # other threads go on allocating and freeing meanwhile
        self._gpu.call("capture_begin", stream, self._gpu.api.STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        graph = ctypes.c_void_p()
        self._gpu.call("capture_end", stream, ctypes.byref(graph))
        try:
            return self._gpu.output("graph_instantiate", self._gpu.api.Handle, graph, 0)
        finally:
            self._gpu.call("graph_destroy", graph)

    def capture_id(self, stream: int) -> int:
        status, found = ctypes.c_int(), ctypes.c_ulonglong()
        self._gpu.call("capture_info", stream, ctypes.byref(status), ctypes.byref(found))
        # otherwise nothing is said about the other number
        return found.value if status.value == self._gpu.api.STREAM_CAPTURE_STATUS_ACTIVE else 0

    def launch_graph(self, graph: int, stream: int) -> None:
        self._gpu.call("graph_launch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._gpu.call("graph_exec_destroy", graph)
