"""local_expert_count: how many received (token, id) pairs each local expert has."""

from __future__ import annotations

import torch

from mori_triton.device.launch import launch
from mori_triton.errors import check_tensor
from mori_triton.ops.config import EpDispatchCombineConfig
from mori_triton.ops.kernels.local_expert_count import local_expert_count_kernel


def local_expert_count(
    config: EpDispatchCombineConfig, indices: torch.Tensor, total_recv: torch.Tensor, out_counts: torch.Tensor
) -> None:
    """Count the ids of this PE's experts among the rows received. Asynchronous, local: no peer takes part.

    Args:
        config: the problem; `rank` and `num_experts_per_rank` say which ids are local.
        indices: `[rows, k]` int32, dispatch's `out_indices`.
        total_recv: `[1]` int32, rows that count.
        out_counts: `[num_experts_per_rank]` int32, overwritten.

    Raises:
        ArgumentError: a dtype or shape above is not met; nothing is launched.

    Reference: `local_expert_count_torch`.
    """
    check_tensor("indices", indices, torch.int32, (None, config.num_experts_per_token))
    check_tensor("total_recv", total_recv, torch.int32, (1,), indices.device)
    check_tensor("out_counts", out_counts, torch.int32, (config.num_experts_per_rank,), indices.device)
    launch(
        local_expert_count_kernel, (config.num_experts_per_rank,),
        indices, total_recv, out_counts, config.num_experts_per_token, config.rank * config.num_experts_per_rank,
        BLOCK=256, num_warps=1,
    )  # fmt: skip


def local_expert_count_torch(config: EpDispatchCombineConfig, indices: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Reference: `[num_experts_per_rank]` counts of the local ids in the first `num_rows` rows."""
    local = indices[:num_rows].flatten().long() - config.rank * config.num_experts_per_rank
    local = local[(local >= 0) & (local < config.num_experts_per_rank)]
    return torch.bincount(local, minlength=config.num_experts_per_rank).int()
