"""What the RDNA4 pipelines can do, in one place: what `EpDispatchCombineConfig` refuses, and says when it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mori_triton.errors import require

if TYPE_CHECKING:
    from mori_triton.ops.config import EpDispatchCombineConfig

DTYPES = (torch.bfloat16, torch.float16)
WORLD_SIZES = (2, 4)
MAX_TOP_K = 64
SUPPORTED = (
    f"world_size {' or '.join(map(str, WORLD_SIZES))}, data_type {' or '.join(map(str, DTYPES))}, "
    f"num_experts_per_token from 1 to {MAX_TOP_K}, "
    "no scales (scale_dim * scale_type_size 0), quant_type 'none' and deterministic False"
)


def check_limits(config: EpDispatchCombineConfig) -> None:
    """Raise `ArgumentError` with all that does not fit, and what would."""
    fits = {
        "world_size": config.world_size in WORLD_SIZES,
        "data_type": config.data_type in DTYPES,
        "num_experts_per_token": config.num_experts_per_token <= MAX_TOP_K,
        "scale_dim": config.scale_bytes == 0,
        "quant_type": config.quant_type == "none",
        "deterministic": not config.deterministic,
    }
    wrong = ", ".join(f"{name} {getattr(config, name)!r}" for name, good in fits.items() if not good)
    require(not wrong, "kernel_type IntraNodeRDNA4", SUPPORTED, wrong)
