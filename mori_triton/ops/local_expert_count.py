"""local_expert_count: how many received (token, id) pairs each local expert has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from mori_triton.device.prepared import PreparedKernel, prepare
from mori_triton.errors import LaunchShapeError, check_tensor
from mori_triton.ops.config import EpDispatchCombineConfig
from mori_triton.ops.kernels.local_expert_count import clear_counts_kernel, local_expert_count_kernel

# ids of a program at a time; so many at most are left to a single program, which saves the launch that clears
_BLOCK, _BLOCK_ALONE = 2048, 8192
_MAX_PROGRAMS, _NUM_WARPS = 256, 8
_MAX_WARPS = 16


class _Kernels(NamedTuple):
    """What one launch shape needs on one device."""

    clear: PreparedKernel | None
    add: PreparedKernel


_prepared: dict[tuple[int, int, bool, int], _Kernels] = {}


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
    num_ids = indices.numel()
    programs = 1 if num_ids <= _BLOCK_ALONE else min(triton.cdiv(num_ids, _BLOCK), _MAX_PROGRAMS)
    _launch(config, indices, total_recv, out_counts, programs, _NUM_WARPS, None)


def launch_local_expert_count(
    config: EpDispatchCombineConfig,
    indices_ptr: Any,
    total_recv_ptr: Any,
    out_ptr: Any,
    block_num: int = -1,
    warp_per_block: int = -1,
    stream: int = 0,
) -> None:
    """`local_expert_count` under MORI's name: addresses, of which nothing is checked, and a launch shape.

    Args:
        config: as above.
        indices_ptr, total_recv_ptr, out_ptr: addresses of what `local_expert_count` takes. On the emulated device pass
            the tensors: an address alone opens no memory that is not on the symmetric heap.
        block_num: programs; -1: `config.block_num`.
        warp_per_block: warps of a program, rounded down to a power of two, 16 at most; -1:
            `config.warp_num_per_block`.
        stream: the device's handle of a stream; 0: its default stream, as in MORI.

    Raises:
        LaunchShapeError: (a RuntimeError) `block_num` or `warp_per_block`, or the config's, is neither -1 nor positive.
    """
    programs = config.block_num if block_num == -1 else block_num
    warps = config.warp_num_per_block if warp_per_block == -1 else warp_per_block
    for name, value in (("block_num", programs), ("warp_per_block", warps)):
        if value <= 0:
            raise LaunchShapeError(f"{name}: want -1 or a positive number, got {value}")
    num_warps = 1 << (min(warps, _MAX_WARPS).bit_length() - 1)
    _launch(config, indices_ptr, total_recv_ptr, out_ptr, programs, num_warps, stream)


def _launch(
    config: EpDispatchCombineConfig,
    indices: Any,
    total_recv: Any,
    out_counts: Any,
    programs: int,
    num_warps: int,
    stream: int | None,
) -> None:
    num_experts = config.num_experts_per_rank
    device = triton.runtime.driver.active.get_current_device()
    key = device, num_experts, programs == 1, num_warps
    kernels = _prepared.get(key)
    if kernels is None:
        kernels = _prepared[key] = prepare_kernels(num_experts, programs == 1, num_warps)
    if kernels.clear is not None:
        kernels.clear((1,), out_counts, num_experts, stream=stream)
    first = config.rank * num_experts
    k = config.num_experts_per_token
    kernels.add((programs,), indices, total_recv, out_counts, k, first, num_experts, stream=stream)


def prepare_kernels(num_experts: int, alone: bool, num_warps: int = _NUM_WARPS) -> _Kernels:
    """The kernels for `num_experts` local experts and one program (`alone`) or several."""
    word = torch.empty(1, dtype=torch.int32)
    # one bin more than experts; fewer bins than threads of a wave are not faster
    bins = max(64, triton.next_power_of_2(num_experts + 1))
    constants = {"BLOCK": _BLOCK, "BINS": bins, "num_warps": num_warps}
    return _Kernels(
        None if alone else prepare(clear_counts_kernel, word, num_experts, BINS=bins, num_warps=4),
        prepare(local_expert_count_kernel, word, word, word, 1, 0, num_experts, ALONE=alone, **constants),
    )


def local_expert_count_torch(config: EpDispatchCombineConfig, indices: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Reference: `[num_experts_per_rank]` counts of the local ids in the first `num_rows` rows."""
    local = indices[:num_rows].flatten().long() - config.rank * config.num_experts_per_rank
    local = local[(local >= 0) & (local < config.num_experts_per_rank)]
    return torch.bincount(local, minlength=config.num_experts_per_rank).int()
