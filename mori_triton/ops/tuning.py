"""Launch shapes: which numbers a call's kernels are launched with. Nothing here may change a result.

`launch_config` is a pure function of what the host knows about a call, so a captured graph and its replay use one
shape. Its numbers come from a tuned table where one was opened (`MORI_EP_LAUNCH_CONFIG_MODE=AUTO`), otherwise from the
built-in defaults; a caller's own `block_num` and `warp_per_block` always win. docs/tuning.md has the whole rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral

import torch

from mori_triton.errors import require
from mori_triton.host.state import PeState
from mori_triton.ops.tuning_tables import EMULATED, SHARED, EpTuningTables, TuningRule, gpu_model, open_tables

PHASES = ("dispatch", "combine")
# more programs than any call has work for
NO_LIMIT = 1 << 20


@dataclass(frozen=True)
class EpLaunchConfig:
    """Launch shape of one half (dispatch or combine) of a round. Every number but `*_programs` is a power of two.

    The *moving* kernel is dispatch's `copy` (all of `IntraNodeLL`'s dispatch) and combine's `reduce`; the *staging*
    kernel is combine's `copy`, which brings an external input to where peers read it. Of `IntraNodeRDNA4`: `dispatch`
    and `sum`; `pull` and `push`.
    """

    num_programs: int  # the most programs of the moving kernel, from 1; NO_LIMIT: one for each piece
    piece_bytes: int  # bytes of a row that one of its programs moves at a time
    num_warps: int  # of its programs
    route_tokens: int  # tokens of one program of `route`, or of a dispatch that is one launch
    route_warps: int  # as num_warps, of `route`
    stage_programs: int  # as num_programs, of the staging kernel
    stage_piece_bytes: int  # as piece_bytes
    stage_warps: int  # as num_warps


# the emulated device runs workgroups on a few host cores: few programs, short vectors
_EMULATED = EpLaunchConfig(
    num_programs=8, piece_bytes=2048, num_warps=2, route_tokens=16, route_warps=2,
    stage_programs=8, stage_piece_bytes=2048, stage_warps=2,
)  # fmt: skip
# a program for every piece of every row, measured best on an H200 at 4096 tokens of 14336 bytes; 16 bytes a thread, on
# waves of 64 too. Rows are staged by few programs with much to do each: how many rows there are only the device knows
_GPU_DISPATCH = EpLaunchConfig(
    num_programs=NO_LIMIT, piece_bytes=4096, num_warps=2, route_tokens=16, route_warps=4,
    stage_programs=528, stage_piece_bytes=16384, stage_warps=8,
)  # fmt: skip
_GPU_COMBINE = replace(_GPU_DISPATCH, piece_bytes=2048)
# few tokens: routing is spread over more programs
_GPU_FEW = {"route_tokens": 4, "route_warps": 1}
_FEW_TOKENS = 512
# a token a program, its whole row in registers, few enough that many programs are resident: latencies overlap
_GPU_LL = replace(_GPU_DISPATCH, num_programs=1024, piece_bytes=16384, num_warps=4, route_tokens=1)
_EMULATED_LL = replace(_EMULATED, route_tokens=2)
# IntraNodeRDNA4, measured on one H200, between two and between four. Few tokens: dispatch has a program for each, and
# combine splits rows into tiles of 512 elements of two bytes, of 1024 where they are long. More: dispatch asks for the
# slots of several tokens at once, which between GPUs takes longest, and combine moves whole tokens, in these steps.
# Few programs push, each with several rows in flight: at the end each has to say that it is done
_EMULATED_RDNA4 = replace(_EMULATED, route_tokens=4)
_GPU_RDNA4_COMBINE = EpLaunchConfig(
    num_programs=4224, piece_bytes=2048, num_warps=2, route_tokens=4, route_warps=4,
    stage_programs=528, stage_piece_bytes=2048, stage_warps=1,
)  # fmt: skip
_GPU_RDNA4_COMBINE_FEW = replace(_GPU_RDNA4_COMBINE, num_programs=1056, stage_programs=264)
# what it stages is pulled, 64 rows of ids a program
_GPU_RDNA4_DISPATCH = replace(_GPU_RDNA4_COMBINE, num_programs=NO_LIMIT, num_warps=4, stage_programs=264, stage_warps=2)
_GPU_RDNA4_DISPATCH_FEW = replace(_GPU_RDNA4_DISPATCH, piece_bytes=4096, route_tokens=1)
RDNA4_FEW_TOKENS = 256
_RDNA4_LONG_ROW = 4096


def launch_config(
    device_type: str,
    phase: str,
    num_tokens: int,
    row_bytes: int,
    *,
    dtype: torch.dtype,
    top_k: int,
    zero_copy: bool = False,
    quant_type: str = "none",
    kernel_type: str = "IntraNode",
    tables: EpTuningTables | None = None,
    block_num: int = -1,
    warp_per_block: int = -1,
) -> EpLaunchConfig:
    """The launch shape of one call. Pure: the same arguments give the same shape, and nothing is read.

    Args:
        device_type: `torch.device.type` of the op.
        phase: "dispatch" or "combine".
        num_tokens: rows of this PE's indices, `n`.
        row_bytes: bytes of a payload row of this call, `h * dtype.itemsize`.
        dtype: payload dtype of this call.
        top_k: `num_experts_per_token`.
        zero_copy: combine: the input is the registered buffer. Not looked at for dispatch.
        quant_type: combine: the codec. Not looked at for dispatch.
        kernel_type: name of the op's kernel type.
        tables: what `open_tables` returned for the op; None: built-in defaults.
        block_num: programs of every kernel that moves rows, or -1.
        warp_per_block: warps of every kernel's programs, 1, 2, 4, 8 or 16, or -1.

    Raises:
        ArgumentError: `block_num` or `warp_per_block` is none of these, or `phase` is no phase.
    """
    require(phase in PHASES, "phase", " or ".join(PHASES), phase)
    is_count = isinstance(block_num, Integral) and (block_num == -1 or block_num >= 1)
    require(is_count, "block_num", "-1 or >= 1", block_num)
    require(warp_per_block in (-1, 1, 2, 4, 8, 16), "warp_per_block", "-1, 1, 2, 4, 8 or 16", warp_per_block)
    shape = _built_in(device_type, phase, num_tokens, row_bytes, kernel_type)
    if tables is not None:
        table = tables.dispatch if phase == "dispatch" else tables.combine
        is_combine = phase == "combine"
        rule = table and table.lookup(
            dtype, num_tokens, row_bytes // dtype.itemsize, top_k,
            zero_copy if is_combine else None, quant_type if is_combine else None,
        )  # fmt: skip
        if rule:
            shape = shape_of_rule(shape, rule)
    if block_num != -1:
        shape = replace(shape, num_programs=block_num, stage_programs=block_num)
    if warp_per_block != -1:
        shape = replace(shape, num_warps=warp_per_block, stage_warps=warp_per_block, route_warps=warp_per_block)
    return shape


def _built_in(device_type: str, phase: str, num_tokens: int, row_bytes: int, kernel_type: str) -> EpLaunchConfig:
    if kernel_type == "IntraNodeRDNA4":
        return _built_in_rdna4(device_type, phase, num_tokens, row_bytes)
    is_ll = kernel_type == "IntraNodeLL" and phase == "dispatch"
    if device_type == "cpu":
        return _EMULATED_LL if is_ll else _EMULATED
    if is_ll:
        return _GPU_LL
    shape = _GPU_DISPATCH if phase == "dispatch" else _GPU_COMBINE
    return replace(shape, **_GPU_FEW) if num_tokens <= _FEW_TOKENS else shape


def _built_in_rdna4(device_type: str, phase: str, num_tokens: int, row_bytes: int) -> EpLaunchConfig:
    few = num_tokens <= RDNA4_FEW_TOKENS
    if device_type == "cpu":
        shape = _EMULATED_RDNA4
    elif phase == "dispatch":
        shape = _GPU_RDNA4_DISPATCH_FEW if few else _GPU_RDNA4_DISPATCH
    else:
        shape = _GPU_RDNA4_COMBINE_FEW if few else _GPU_RDNA4_COMBINE
    if phase == "dispatch" or not few:
        return shape
    tile = 2048 if row_bytes >= _RDNA4_LONG_ROW else 1024
    # 16 bytes a thread, on waves of 64 too; a program that pushes has several rows in flight, so fewer threads do
    return replace(shape, piece_bytes=tile, num_warps=tile // 1024, stage_piece_bytes=tile, stage_warps=1)


def shape_of_rule(shape: EpLaunchConfig, rule: TuningRule) -> EpLaunchConfig:
    """The rule's numbers; what it does not name stays as built in."""
    ours = {name: getattr(rule, name) for name in _OPTIONAL if getattr(rule, name) is not None}
    base = replace(
        shape, num_programs=rule.block_num, num_warps=rule.num_warps,
        stage_programs=rule.block_num, stage_warps=rule.num_warps,
    )  # fmt: skip
    return replace(base, **ours)


_OPTIONAL = ("piece_bytes", "route_tokens", "route_warps", "stage_programs", "stage_piece_bytes", "stage_warps")


def device_names(device: torch.device, emulated_arch: str) -> tuple[str, str]:
    """(architecture, model) of a device as tuning tables spell them: `("sm_90", "h200")`, `("gfx942", "mi300x")`."""
    if device.type == "cpu":
        return emulated_arch, EMULATED
    properties = torch.cuda.get_device_properties(device)
    # "gfx942:sramecc+:xnack-" on AMD
    arch = getattr(properties, "gcnArchName", None) if torch.version.hip else None
    arch = arch.split(":")[0] if arch else f"sm_{properties.major}{properties.minor}"
    return arch, gpu_model(properties.name)


def tables_for(state: PeState, device: torch.device, kernel_type: str) -> EpTuningTables | None:
    """The tuned tables of an op that is being constructed, None in MANUAL mode. Raises as `open_tables` does."""
    settings = state.settings
    if settings.ep_launch_mode == "manual":
        return None
    arch, model = device_names(device, settings.arch)
    # PEs that are threads of this process; processes are taken to have a GPU each
    share = device.type != "cpu" and state.rendezvous is not None and state.n_pes > torch.cuda.device_count()
    return open_tables(
        settings.ep_launch_mode, settings.ep_tuning_config,
        gpu_arch=arch, gpu_model=model + SHARED if share else model, kernel_type=kernel_type, ep_size=state.n_pes,
    )  # fmt: skip
