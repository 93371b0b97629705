"""Tiny models with random weights, and running them with their experts spread over PEs."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import mori_triton as mori
from mori_triton import layers

VOCABULARY = 128
SHAPE = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    # experts of this size change the logits by more than 0.01, see test_the_experts_matter
    "initializer_range": 0.1,
}


def qwen(num_experts: int = 8, top_k: int = 3) -> PreTrainedModel:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "head_dim": 16, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **sizes, num_experts=num_experts, num_experts_per_tok=top_k)
    ).eval()


def mixtral(num_experts: int = 4, top_k: int = 2) -> PreTrainedModel:
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "intermediate_size": 24}
    return MixtralForCausalLM(
        MixtralConfig(**SHAPE, **sizes, num_local_experts=num_experts, num_experts_per_tok=top_k)
    ).eval()


MODELS = {"qwen": qwen, "mixtral": mixtral}


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(sum(shape)))


def world(num_pes: int, device: str = "cpu", **options: Any) -> mori.LocalWorld:
    return mori.local_world(num_pes, device=device, heap_size="16M", timeout_s=60.0, **options)


def forward(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """This PE's logits; with no tokens it only serves the others."""
    if ids.numel() == 0:
        layers.forward_idle(model)
        return torch.empty(*ids.shape, VOCABULARY, device=model.device)
    return model(ids).logits


def spread(
    model: PreTrainedModel, parts: list[torch.Tensor], after: Callable = lambda pe, mine: None, **options: Any
) -> list[tuple]:
    """Run `model` on one part per PE: (logits, what `after(pe, model)` returns) of each PE. `options` of the world."""

    where = world(len(parts), **options)

    def program(pe: int) -> tuple[torch.Tensor, Any]:
        mine = copy.deepcopy(model).to("cpu" if where.device == "cpu" else "cuda")
        mine.set_experts_implementation("mori_ep")
        with torch.no_grad(), layers.shared_ops():
            logits = forward(mine, parts[pe].to(mine.device))
            return logits, after(pe, mine)

    return where.run(program)
