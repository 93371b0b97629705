"""Worlds of PEs that are threads of this process: on the emulated device, or on this machine's GPUs."""

from mori_triton.world.graph import WorldGraph
from mori_triton.world.local import LocalWorld, current_world, local_world

__all__ = ["LocalWorld", "WorldGraph", "current_world", "local_world"]
