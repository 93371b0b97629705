"""The problem a dispatch/combine op solves: `EpDispatchCombineConfig`, MORI's fields in MORI's order with MORI's
defaults.

Notation used all over `ops`: `n` tokens of this PE in this call, `M = max_num_inp_token_per_rank`, `k =
num_experts_per_token`, `E = num_experts_per_rank`, `h` the hidden size of a call (at most `hidden_dim`), `R =
max_num_tokens_to_recv`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from mori_triton.errors import require
from mori_triton.ops import rdna4_limits
from mori_triton.ops.formats import QUANT_TYPES

# what dispatch carries and combine sums: MORI's types and float16. Two float4_e2m1fn_x2, which torch has from 2.8 on,
# make a byte
PAYLOAD_DTYPES = tuple(
    getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float4_e2m1fn_x2")
    if hasattr(torch, name)
)
MAX_TOP_K = 128
_INT32_MAX = 2**31 - 1


class EpDispatchCombineKernelType(enum.IntEnum):
    """How tokens travel; MORI's values, and one more for what MORI chooses by an environment variable.

    `SUPPORTED_KERNEL_TYPES` lists those that work.
    """

    IntraNode = 0
    InterNode = 1
    InterNodeV1 = 2
    InterNodeV1LL = 3
    AsyncLL = 4
    IntraNodeLL = 5
    IntraNodeRDNA4 = 6


SUPPORTED_KERNEL_TYPES = (
    EpDispatchCombineKernelType.IntraNode,
    EpDispatchCombineKernelType.IntraNodeLL,
    EpDispatchCombineKernelType.IntraNodeRDNA4,
)


@dataclass(frozen=True)
class EpDispatchCombineConfig:
    """What is dispatched among whom. Equal on every PE, except `rank`.

    Args:
        data_type: payload dtype, one of `PAYLOAD_DTYPES`; a label as in MORI, the dtype of a call is its input's.
        rank: this PE, in `[0, world_size)`.
        world_size: number of PEs, any number from 1.
        hidden_dim: elements of the widest row that a call may bring; narrower rows are fine. Of float4_e2m1fn_x2, two
            of which make a byte, the columns are counted in bytes.
        scale_dim: entries of a token's scale row; 0: no scales.
        scale_type_size: bytes of a scale entry; 0: no scales.
        max_token_type_size: bytes of the widest payload element that a call may bring; sizes the buffers.
        max_num_inp_token_per_rank: `M`, the most tokens that a PE may dispatch in one call.
        num_experts_per_rank: `E`; expert `i` lives on PE `i // E`.
        num_experts_per_token: `k`, at most 128.
        warp_num_per_block, block_num: MORI's launch shape; accepted and not used, see
            `EpDispatchCombineOp.get_launch_config`.
        max_total_recv_tokens: 0, or a wish for smaller receive buffers: `R = world_size * min(ceil(this / world_size),
            M)`. Tokens beyond `R` are dropped, and the receiver raises `ReceiveOverflow`.
        use_external_inp_buf: False: combine's input is always the registered buffer.
        kernel_type: `IntraNode`; `IntraNodeLL`, whose dispatch is one launch, for few tokens; or `IntraNodeRDNA4`, for
            2 or 4 PEs behind PCIe, which takes no scales, codecs or other dtypes (docs/rdna4_ep.md). Results are the
            same.
        gpu_per_node, rdma_block_num, num_qp_per_pe: of the kernel types that cross nodes; these three do not use them.
        quant_type: how combine sends rows: "none", or one of `QUANT_TYPES` for bfloat16 rows outside the registered
            buffer.
        deterministic: dispatch's rows come sorted by source PE, then token, and every run gives the same bits. MORI has
            no such field.

    Raises:
        ArgumentError: a field is out of its range, or asks for what is not supported; the message lists what is.
    """

    data_type: torch.dtype
    rank: int
    world_size: int
    hidden_dim: int
    scale_dim: int
    scale_type_size: int
    max_token_type_size: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    warp_num_per_block: int = 8
    block_num: int = 80
    max_total_recv_tokens: int = 0
    use_external_inp_buf: bool = True
    kernel_type: EpDispatchCombineKernelType = EpDispatchCombineKernelType.IntraNode
    gpu_per_node: int = 8
    rdma_block_num: int = 0
    num_qp_per_pe: int = 1
    quant_type: str = "none"
    deterministic: bool = False

    def __post_init__(self) -> None:
        supported = ", ".join(t.name for t in SUPPORTED_KERNEL_TYPES)
        require(self.kernel_type in SUPPORTED_KERNEL_TYPES, "kernel_type", f"one of: {supported}", self.kernel_type)
        require(
            self.quant_type in QUANT_TYPES, "quant_type", f"one of: {', '.join(QUANT_TYPES)}", repr(self.quant_type)
        )
        dtypes = " or ".join(map(str, PAYLOAD_DTYPES))
        require(self.data_type in PAYLOAD_DTYPES, "data_type", dtypes, self.data_type)
        for name in _POSITIVE:
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, "an int >= 1", repr(value))
        for name in ("scale_dim", "scale_type_size", "max_total_recv_tokens", "rdma_block_num"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 0, name, "an int >= 0", repr(value))
        valid_rank = isinstance(self.rank, int) and 0 <= self.rank < self.world_size
        require(valid_rank, "rank", f"an int in [0, {self.world_size})", repr(self.rank))
        require(
            self.num_experts_per_token <= MAX_TOP_K,
            "num_experts_per_token",
            f"<= {MAX_TOP_K}",
            self.num_experts_per_token,
        )
        require(
            self.max_token_type_size >= self.data_type.itemsize,
            "max_token_type_size",
            f">= {self.data_type.itemsize}, the bytes of {self.data_type}",
            self.max_token_type_size,
        )
        if self.quant_type != "none":
            want = "True: a codec encodes rows on their way out of the caller's memory"
            require(self.use_external_inp_buf, "use_external_inp_buf", want, self.use_external_inp_buf)
            want = ">= 2, the bytes of torch.bfloat16, which codecs take"
            require(self.max_token_type_size >= 2, "max_token_type_size", want, self.max_token_type_size)
        # both maps hold pe * rows + row in an int32, and expert ids are int32
        rows = self.world_size * max(self.max_recv, self.max_num_inp_token_per_rank)
        require(rows <= _INT32_MAX, "world_size * receive rows", f"<= {_INT32_MAX}", rows)
        require(
            self.num_experts <= _INT32_MAX, "world_size * num_experts_per_rank", f"<= {_INT32_MAX}", self.num_experts
        )
        if self.kernel_type is EpDispatchCombineKernelType.IntraNodeRDNA4:
            rdna4_limits.check_limits(self)

    @property
    def payload_dtypes(self) -> tuple[torch.dtype, ...]:
        """What a call's payload may be."""
        is_rdna4 = self.kernel_type is EpDispatchCombineKernelType.IntraNodeRDNA4
        return rdna4_limits.DTYPES if is_rdna4 else PAYLOAD_DTYPES

    @property
    def num_experts(self) -> int:
        """Experts of all PEs; ids outside `[0, num_experts)` are dropped."""
        return self.world_size * self.num_experts_per_rank

    @property
    def max_recv_per_rank(self) -> int:
        """The most rows counted on from one source PE."""
        quota = -(-self.max_total_recv_tokens // self.world_size) or self.max_num_inp_token_per_rank
        return min(quota, self.max_num_inp_token_per_rank)

    @property
    def max_recv(self) -> int:
        """`R`: rows of every receive buffer."""
        return self.world_size * self.max_recv_per_rank

    @property
    def scale_bytes(self) -> int:
        """Bytes of a token's scale row."""
        return self.scale_dim * self.scale_type_size


_POSITIVE = (
    "world_size",
    "hidden_dim",
    "max_token_type_size",
    "max_num_inp_token_per_rank",
    "num_experts_per_rank",
    "num_experts_per_token",
    "warp_num_per_block",
    "block_num",
    "gpu_per_node",
    "num_qp_per_pe",
)


def expert_owner(expert: int, config: EpDispatchCombineConfig) -> int:
    """The PE that expert id `expert` lives on, -1 for an id outside `[0, num_experts)`."""
    return expert // config.num_experts_per_rank if 0 <= expert < config.num_experts else -1
