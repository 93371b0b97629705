"""Triton-first communication kernels for expert-parallel mixture-of-experts models.

Importing this touches no GPU, no environment variable and no Triton hook; submodules load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_SUBMODULES = ("emulator", "ir", "layers", "ops", "shmem")
_ATTRIBUTES = {
    "alias_mori": "mori_triton.alias",
    **dict.fromkeys(("LocalWorld", "WorldGraph", "current_world", "local_world"), "mori_triton.world"),
}

if TYPE_CHECKING:
    from mori_triton import emulator, ir, layers, ops, shmem
    from mori_triton.alias import alias_mori
    from mori_triton.world import LocalWorld, WorldGraph, current_world, local_world

__all__ = [
    "LocalWorld",
    "WorldGraph",
    "alias_mori",
    "current_world",
    "emulator",
    "ir",
    "layers",
    "local_world",
    "ops",
    "shmem",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"mori_triton.{name}")
    if name in _ATTRIBUTES:
        return getattr(import_module(_ATTRIBUTES[name]), name)
    raise AttributeError(f"module 'mori_triton' has no attribute {name!r}")
