"""MORI's `mori.ops.dispatch_combine_v2`: dispatch and combine as plans, metadata through a caller's staging buffer."""

from mori_triton.ops.dispatch_combine_v2.arena import EpArena
from mori_triton.ops.dispatch_combine_v2.config import EpDispatchCombineConfig
from mori_triton.ops.dispatch_combine_v2.op import EpDispatchCombineOp
from mori_triton.ops.dispatch_combine_v2.plans import EpCombinePlan, EpDispatchPlan
from mori_triton.ops.dispatch_combine_v2.staging import ep_staging_bytes, scale_stride_bytes
from mori_triton.ops.routing import EpDispatchRoutingHandle

__all__ = [
    "EpArena",
    "EpCombinePlan",
    "EpDispatchCombineConfig",
    "EpDispatchCombineOp",
    "EpDispatchPlan",
    "EpDispatchRoutingHandle",
    "ep_staging_bytes",
    "scale_stride_bytes",
]
