"""MORI's `mori.ops`: dispatch and combine of expert-parallel mixture-of-experts models."""

from mori_triton.ops.buffers import EpBufferLayout, EpRegion, ep_buffer_layout
from mori_triton.ops.config import (
    SUPPORTED_KERNEL_TYPES,
    EpDispatchCombineConfig,
    EpDispatchCombineKernelType,
    expert_owner,
)
from mori_triton.ops.dispatch_combine import EpDispatchCombineOp
from mori_triton.ops.local_expert_count import (
    launch_local_expert_count,
    local_expert_count,
    local_expert_count_torch,
)
from mori_triton.ops.routing import EpDispatchRoutingHandle

__all__ = [
    "SUPPORTED_KERNEL_TYPES",
    "EpBufferLayout",
    "EpDispatchCombineConfig",
    "EpDispatchCombineKernelType",
    "EpDispatchCombineOp",
    "EpDispatchRoutingHandle",
    "EpRegion",
    "ep_buffer_layout",
    "expert_owner",
    "launch_local_expert_count",
    "local_expert_count",
    "local_expert_count_torch",
]
