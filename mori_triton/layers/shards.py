"""Which experts a PE holds, and letting go of the others' weights.

PE `p` of `n` holds the experts `[p * E / n, (p + 1) * E / n)` of every experts module, as dispatch routes them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mori_triton.errors import ArgumentError, StateError, require
from mori_triton.host.state import PeState, current

# transformers' experts modules have attributes in common and no type
ExpertsModule = Any

# dimension 0 of each is the expert; a module has those that its architecture uses
_EXPERT_TENSORS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
_SHARD = "_mori_ep_shard"

# two PEs of one process may be handed one model by mistake: whoever is second must see what the first has done
_narrowing = threading.Lock()


@dataclass(frozen=True)
class ExpertShard:
    """The slice of an experts module that one PE holds."""

    pe: int
    n_pes: int
    num_experts: int  # of the whole model

    @property
    def num_local(self) -> int:
        return self.num_experts // self.n_pes

    @property
    def first(self) -> int:
        return self.pe * self.num_local


def keep_local_experts(model: torch.nn.Module) -> int:
    """Keep this PE's experts of every experts module and free the others' weights. Local; returns the bytes freed.

    The first forward of each layer does this by itself. Call it to have the memory back before that. Afterwards
    `state_dict()` has this PE's experts only, and other experts implementations cannot run on this model.

    Args:
        model: any module tree; each submodule that has 3-D `down_proj` weights and `num_experts` is narrowed in place.
            Parameter objects stay, so optimisers that hold them stay valid; their gradients are dropped.

    Raises:
        ArgumentError: no experts module in `model`, or its experts cannot be divided evenly among the PEs.
        StateError: no PE is initialised on this thread, or another PE has taken its share of this very model.
    """
    state = current()
    modules = dict(experts_modules(model))
    require(bool(modules), "model", "a model with experts modules (3-D down_proj, num_experts)", type(model).__name__)
    before = sum(_expert_bytes(module) for module in modules.values())
    for name, module in modules.items():
        local_shard(module, state, name)
    return before - sum(_expert_bytes(module) for module in modules.values())


def experts_modules(model: torch.nn.Module) -> Iterator[tuple[str, ExpertsModule]]:
    """The experts modules of `model` with their names, in the model's order."""
    for name, module in model.named_modules():
        weights = getattr(module, "down_proj", None)
        if isinstance(weights, torch.Tensor) and weights.dim() == 3 and hasattr(module, "num_experts"):
            yield name, module


def local_shard(module: ExpertsModule, state: PeState, name: str = "") -> ExpertShard:
    """The shard of an experts module for this PE; the first call narrows the module's weights to it.

    Raises:
        ArgumentError: the experts cannot be divided evenly among the PEs, or someone else has divided them already.
        StateError: another PE has taken its share of this module.
    """
    with _narrowing:
        shard = getattr(module, _SHARD, None)
        if shard is None:
            shard = narrow(module, ExpertShard(state.pe, state.n_pes, int(module.num_experts)), name)
            setattr(module, _SHARD, shard)
    if (shard.pe, shard.n_pes) != (state.pe, state.n_pes):
        raise StateError(
            f"this model holds the experts of PE {shard.pe} of {shard.n_pes}, but PE {state.pe} of {state.n_pes} runs "
            "it; give each PE its own copy of the whole model, for example copy.deepcopy(model)"
        )
    return shard


def narrow(module: ExpertsModule, shard: ExpertShard, name: str = "") -> ExpertShard:
    """Keep `shard` of an experts module that has the weights of all experts; returns `shard`."""
    label = f"{name or type(module).__name__}.num_experts"
    require(shard.num_experts % shard.n_pes == 0, label, f"a multiple of the {shard.n_pes} PEs", shard.num_experts)
    tensors = _expert_tensors(module)
    for key, tensor in tensors.items():
        if len(tensor) != shard.num_experts:
            raise ArgumentError(
                f"{name or type(module).__name__}.{key}: want the weights of all {shard.num_experts} experts, got "
                f"{len(tensor)}; mori_ep divides them itself, so load the model without another expert parallelism"
            )
    for tensor in tensors.values():
        # a clone, because a view would keep the whole storage alive
        tensor.data = tensor.data[shard.first : shard.first + shard.num_local].clone()
        tensor.grad = None
    return shard


def _expert_tensors(module: ExpertsModule) -> dict[str, torch.Tensor]:
    found = {key: getattr(module, key, None) for key in _EXPERT_TENSORS}
    return {key: tensor for key, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def _expert_bytes(module: ExpertsModule) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in _expert_tensors(module).values())
