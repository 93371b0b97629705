"""What an op's kernel type decides: which launches a call is made of, and what they do with the caller's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mori_triton.ops import combine, dispatch, rdna4
from mori_triton.ops.calls import CombineCall, DispatchCall
from mori_triton.ops.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_triton.ops.plans import Step


@dataclass(frozen=True)
class Pipeline:
    """Makers of launches. Between the halves of a combine, `ops.combine.recv_step` waits."""

    dispatch: Callable[[DispatchCall], list[Step]]
    dispatch_rest: Callable[[DispatchCall], list[Step]]  # the second half of a call that only sends (`wait` off)
    combine: Callable[[CombineCall], tuple[list[Step], list[Step]]]  # that send, that sum
    peers_read_input: bool  # combine's registered buffer is read by peers, until a dispatch has come


_INTRANODE = Pipeline(dispatch.plan_dispatch, dispatch.recv_steps, combine.plan_combine, peers_read_input=True)
_RDNA4 = Pipeline(rdna4.dispatch_steps, rdna4.dispatch_rest_steps, rdna4.combine_steps, peers_read_input=False)
_PIPELINES = {
    EpDispatchCombineKernelType.IntraNode: _INTRANODE,
    EpDispatchCombineKernelType.IntraNodeLL: _INTRANODE,
    EpDispatchCombineKernelType.IntraNodeRDNA4: _RDNA4,
}


def pipeline_of(config: EpDispatchCombineConfig) -> Pipeline:
    """The pipeline of the config's kernel type."""
    return _PIPELINES[config.kernel_type]
