"""The experts implementation `mori_ep`: dispatch, the local experts, combine.

Every PE runs the same model on its own part of the batch (data-parallel attention) and holds an equal slice of the
experts of every layer (expert-parallel MoE). Rules:

* All PEs call the layers in the same order and equally often. Token counts may differ and may be zero: transformers'
  attention cannot run on an empty batch, so a PE without tokens calls `forward_idle(model)` in place of the model.
* The first forward narrows the layer's weights to this PE's experts, see `keep_local_experts`. PEs that are threads of
  one process each need their own copy of the model. Make the model before the PEs start, and copy it inside them:
  while transformers builds one it changes what all threads share (default dtype, torch's initialisers and generator).
* `torch.no_grad()` is a matter of each thread: a block around the world does not reach the PEs inside.
* Forward only. A backward pass through the layer raises; gradients are never silently missing.
"""

from __future__ import annotations

from typing import Any

import torch

from mori_triton.errors import StateError, check_tensor, require
from mori_triton.host.state import current
from mori_triton.layers.op_pool import OpShape, ops_of
from mori_triton.layers.shards import ExpertShard, ExpertsModule, experts_modules, local_shard
from mori_triton.layers.traffic import is_watched, report


def mori_ep_experts_forward(
    module: ExpertsModule,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What transformers calls in place of an experts module's forward. Collective: every PE, same order of layers.

    Args:
        module: the experts module; its first call keeps this PE's experts only.
        hidden_states: `[tokens, hidden]` fp32, bf16 or fp16, this PE's tokens; 0 tokens are fine.
        top_k_index: `[tokens, k]` integer, experts of the whole model; ids outside `[0, num_experts)` are skipped.
        top_k_weights: `[tokens, k]` floating, multiplied into the experts' outputs on the PE that computes them.

    Returns:
        `[tokens, hidden]`, dtype of `hidden_states`, a tensor of its own.

    Raises:
        StateError: no PE is initialised on this thread, or the module belongs to another PE.
        ArgumentError: experts not divisible by the PEs, shapes or dtypes that do not fit, PEs running different layers.
    """
    state = current()
    shard = local_shard(module, state)
    num_tokens, k = top_k_index.shape
    hidden_dim = hidden_states.shape[-1]
    with torch.no_grad():
        x = hidden_states.reshape(-1, hidden_dim).contiguous()
        indices = top_k_index.to(torch.int32).contiguous()
        weights = top_k_weights.to(torch.float32).contiguous()
        check_tensor("hidden_states", x, x.dtype, (num_tokens, hidden_dim))
        check_tensor("top_k_weights", weights, torch.float32, (num_tokens, k))
        op = ops_of(state).get(state, OpShape(hidden_dim, shard.num_local, k, x.dtype), num_tokens)
        received, received_weights, _, received_index, total = op.dispatch(x, weights, None, indices)
        num_received = int(total.item())
        # the precision in which the model multiplies: bf16 routers round their weights, which fp32 carries exactly
        scores = received_weights[:num_received].to(top_k_weights.dtype)
        partial = op.get_registered_combine_input_buffer(x.dtype, hidden_dim)[:num_received]
        partial.copy_(local_experts(module, shard, received[:num_received], received_index[:num_received], scores))
        # taken before combine: after it a faster peer may be writing those of the next layer
        source_pes = op.decode_send_flat_idx(op.get_dispatch_src_token_pos())[0] if is_watched(module) else None
        combined, _ = op.combine(partial, None, indices)
        # the op reuses its buffer in the next layer
        output = combined[:num_tokens].clone().view(hidden_states.shape)
        # last, so that a watcher that raises leaves the op between rounds
        if source_pes is not None:
            report(module, shard, indices, source_pes)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        output = _ForwardOnly.apply(output, hidden_states, top_k_weights)
    return output


def forward_idle(model: torch.nn.Module, num_experts_per_token: int | None = None) -> None:
    """A forward of `model` on a PE that has no tokens: only its experts work. Collective, like a forward.

    Args:
        model: this PE's copy, its experts implementation set to `mori_ep`.
        num_experts_per_token: None: `num_experts_per_tok` of the model's config.

    Raises:
        ArgumentError: no experts module in `model`, or the config does not say how many experts a token has.
    """
    modules = list(experts_modules(model))
    require(bool(modules), "model", "a model with experts modules", type(model).__name__)
    for _, module in modules:
        k: Any = num_experts_per_token or getattr(module.config, "num_experts_per_tok", None)
        require(isinstance(k, int), "num_experts_per_token", "given, as the config has no num_experts_per_tok", k)
        weights = module.down_proj
        hidden_dim = weights.shape[2 if getattr(module, "is_transposed", False) else 1]
        module(
            torch.empty(0, hidden_dim, dtype=weights.dtype, device=weights.device),
            torch.empty(0, k, dtype=torch.int64, device=weights.device),
            torch.empty(0, k, dtype=weights.dtype, device=weights.device),
        )


def local_experts(
    module: ExpertsModule,
    shard: ExpertShard,
    rows: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of this PE's experts over each row's choices, in fp32.

    Args:
        rows: `[num_rows, hidden]`.
        index: `[num_rows, k]` experts of the whole model; other PEs' experts are left to them.
        weights: `[num_rows, k]`.

    Returns:
        `[num_rows, hidden]` float32.
    """
    local = index.long() - shard.first
    row, choice = ((local >= 0) & (local < shard.num_local)).nonzero(as_tuple=True)
    expert = local[row, choice]
    # stable: each row's experts are added in ascending order, as transformers' eager loop does
    order = torch.argsort(expert, stable=True)
    row, choice = row[order], choice[order]
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    start = 0
    for number, count in enumerate(torch.bincount(expert, minlength=shard.num_local).tolist()):
        if count:
            group = slice(start, start + count)
            outputs = _one_expert(module, number, rows[row[group]]) * weights[row[group], choice[group], None]
            total.index_add_(0, row[group], outputs.float())
        start += count
    return total


def _one_expert(module: ExpertsModule, number: int, rows: torch.Tensor) -> torch.Tensor:
    """Expert `number` (local) of an experts module in any of transformers' weight layouts, on `[num_rows, hidden]`."""
    if getattr(module, "has_gate", True):
        hidden = module._apply_gate(_linear(module, "gate_up_proj", number, rows))
    else:
        hidden = module.act_fn(_linear(module, "up_proj", number, rows))
    output = _linear(module, "down_proj", number, hidden)
    return module.post_expert_norm(output) if getattr(module, "has_post_expert_norm", False) else output


def _linear(module: ExpertsModule, name: str, number: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[number]
    bias = getattr(module, f"{name}_bias")[number] if getattr(module, "has_bias", False) else None
    return torch.nn.functional.linear(rows, weight.T if getattr(module, "is_transposed", False) else weight, bias)


class _ForwardOnly(torch.autograd.Function):
    """Ties the output to the inputs, so that a backward pass meets an error and not missing gradients."""

    @staticmethod
    def forward(ctx, output, *inputs):
        return output.view_as(output)

    @staticmethod
    def backward(ctx, *gradients):
        raise StateError("mori_ep has no backward pass; use another experts implementation for training")
