"""`LocalWorld.graph`: one step of every PE, captured once and replayed together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class WorldGraph(ABC):
    """What `LocalWorld.graph` returns. On GPUs it ends with its world's run, or when shmem is finalized in it."""

    cuda_graph: torch.cuda.CUDAGraph | None = None
    """The steps of all PEs as one graph, None on the CPU. A benchmark may replay it from one thread while no PE does
    anything else."""

    @abstractmethod
    def replay(self) -> Any:
        """Run every PE's step; what this PE's step returned. Collective, asynchronous on GPUs.

        It starts when what the PEs have enqueued on their current streams is done, and what they enqueue afterwards
        starts when all steps are done. On GPUs the result is what the step returned when it was captured: its tensors
        have new contents.

        Raises: `PeerTimeout` naming the PEs that do not come, `StateError` when a PE has failed, and on GPUs when shmem
            was finalized since the capture.
        """


class CalledGraph(WorldGraph):
    """A graph of the CPU: a replay calls this PE's step."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step

    def replay(self) -> Any:
        """See `WorldGraph`."""
        return self._step()
