"""Watching where tokens go: per layer call, tokens sent to and received from each PE."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mori_triton.errors import require
from mori_triton.layers.shards import ExpertShard, ExpertsModule, experts_modules

_WATCHERS = "_mori_ep_watchers"


@dataclass(frozen=True)
class LayerTraffic:
    """One layer call on one PE. A token counts once per PE that holds at least one of its experts, itself included."""

    layer: str  # name of the experts module in the model
    pe: int
    num_tokens: int  # of this PE in this call
    sent: tuple[int, ...]  # [n_pes] tokens sent to each PE
    received: tuple[int, ...]  # [n_pes] tokens received from each PE


@contextmanager
def watch_traffic(model: torch.nn.Module, callback: Callable[[LayerTraffic], None]) -> Iterator[None]:
    """Call `callback` with a `LayerTraffic` after each dispatch of `model`'s layers, on the PE's thread.

    Counting reads the routing back to the host, so layers that nobody watches do not count.

    Raises:
        ArgumentError: `model` has no experts module.
    """
    watched = list(experts_modules(model))
    require(bool(watched), "model", "a model with experts modules", type(model).__name__)
    entries = []
    for name, module in watched:
        module.__dict__.setdefault(_WATCHERS, [])
        entries.append((getattr(module, _WATCHERS), (name, callback)))
    for watchers, entry in entries:
        watchers.append(entry)
    try:
        yield
    finally:
        for watchers, entry in entries:
            watchers.remove(entry)


def is_watched(module: ExpertsModule) -> bool:
    """Whether `report` has anyone to tell."""
    return bool(getattr(module, _WATCHERS, None))


def report(module: ExpertsModule, shard: ExpertShard, top_k_index: torch.Tensor, source_pes: torch.Tensor) -> None:
    """Tell `module`'s watchers about a dispatch.

    Args:
        top_k_index: `[tokens, k]` expert ids of this PE's tokens.
        source_pes: the source PE of each received token.
    """
    sent = tokens_per_pe(top_k_index, shard)
    received = torch.bincount(source_pes.long(), minlength=shard.n_pes).tolist()
    for name, callback in list(getattr(module, _WATCHERS, ())):
        callback(LayerTraffic(name, shard.pe, len(top_k_index), tuple(sent), tuple(received)))


def tokens_per_pe(top_k_index: torch.Tensor, shard: ExpertShard) -> list[int]:
    """How many rows of `top_k_index` name at least one expert of each PE; ids outside the model count nowhere."""
    valid = (top_k_index >= 0) & (top_k_index < shard.num_experts)
    pes = torch.where(valid, top_k_index // shard.num_local, -1)
    return [int((pes == pe).any(dim=1).sum()) for pe in range(shard.n_pes)]
