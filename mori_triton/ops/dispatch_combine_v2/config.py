"""The problem of an EPv2 op: `EpDispatchCombineConfig`, MORI's fields of `mori.ops.dispatch_combine_v2`.

Notation as in `ops.config`: `M` tokens a PE and call, `k` ids a token, `R` rows of a receive buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mori_triton.errors import require
from mori_triton.ops import config as ops_config
from mori_triton.ops.dispatch_combine_v2.staging import MAX_BLOCKS, MAX_TOP_K, scale_stride_bytes
from mori_triton.ops.tuning import launch_config

MAX_WORLD_SIZE = 64
COMBINE_MODES = ("gather",)
QUANT_TYPES = ("none",)
BACKENDS = ("triton",)
_FP4 = getattr(torch, "float4_e2m1fn_x2", None)
# a block of a size that nobody has asked for routes this many tokens
_TOKENS_OF_A_BLOCK = 16


@dataclass(frozen=True)
class ArenaProblem(ops_config.EpDispatchCombineConfig):
    """The same problem as the kernels that EPv2 shares with `ops.EpDispatchCombineOp` know it.

    Args:
        combine_data_type: of the rows that combine sums; its kernels never learn what a peer takes its own for.
    """

    combine_data_type: torch.dtype = torch.bfloat16

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale row as it lies in the buffers."""
        return scale_stride_bytes(self.scale_dim * self.scale_type_size)


@dataclass(frozen=True)
class EpDispatchCombineConfig:
    """What is dispatched among whom, and how. Equal on every PE, except `rank`.

    Args:
        rank: this PE, in `[0, world_size)`.
        world_size: number of PEs, at most 64.
        hidden_dim: elements of a row; every call brings rows this wide. A row of float4_e2m1fn_x2 has `hidden_dim // 2`
            columns, two elements each.
        max_num_inp_token_per_rank: `M`, the most tokens of a call.
        num_experts_per_rank: expert `i` lives on PE `i // num_experts_per_rank`.
        num_experts_per_token: `k`, at most 16, what a staged row has room for.
        data_type: of dispatch's and combine's rows, one of `ops.config.PAYLOAD_DTYPES`.
        dispatch_data_type, combine_data_type: both or neither; what they are where they differ. Combine then sums
            float32, bfloat16 or float16.
        scale_dim, scale_type_size: entries of a token's scale row, and bytes of one; 0: no scales.
        combine_mode: "gather": the token's PE reads the experts' rows.
        quant_type: "none".
        dispatch_block_num: blocks of tokens that are routed and staged by themselves, at most 512; None: by the number
            of tokens. Each sends one run to each PE.
        combine_block_num: programs of combine's kernels; None: as `ops.tuning` has it.
        warp_num_per_block, combine_warp_num_per_block: 1, 2, 4, 8 or 16; None: as `ops.tuning` has it.
        schedule: launch shapes by size: rows `(most tokens, blocks, warps)` with rising first numbers; the first that
            a PE's tokens fit, else the fields above. Shapes may differ among PEs.
        enable_std_moe: False.
        max_total_recv_tokens: 0, or a wish for smaller buffers: `R = world_size * min(ceil(this / world_size), M)`.
            Tokens beyond `R` are dropped, and the receiver raises `ReceiveOverflow`.
        kernel_backend: None or "triton".

    Raises:
        ArgumentError: a `ValueError`: a field is out of its range or asks for what is not supported; the message lists
            what is.
    """

    rank: int
    world_size: int
    hidden_dim: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    data_type: torch.dtype = torch.bfloat16
    dispatch_data_type: torch.dtype | None = None
    combine_data_type: torch.dtype | None = None
    scale_dim: int = 0
    scale_type_size: int = 0
    combine_mode: str = "gather"
    quant_type: str = "none"
    dispatch_block_num: int | None = None
    combine_block_num: int | None = None
    warp_num_per_block: int | None = None
    combine_warp_num_per_block: int | None = None
    schedule: tuple[tuple[int, int, int], ...] | None = None
    enable_std_moe: bool = False
    max_total_recv_tokens: int = 0
    kernel_backend: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("combine_mode", COMBINE_MODES), ("quant_type", QUANT_TYPES)):
            require(getattr(self, name) in known, name, f"one of: {', '.join(known)}", repr(getattr(self, name)))
        backends = (None, *BACKENDS)
        want = f"None or one of: {', '.join(BACKENDS)}"
        require(self.kernel_backend in backends, "kernel_backend", want, repr(self.kernel_backend))
        require(not self.enable_std_moe, "enable_std_moe", "False: rows are grouped by PE only", self.enable_std_moe)
        override = (self.dispatch_data_type, self.combine_data_type)
        given = sum(dtype is not None for dtype in override)
        require(given != 1, "dispatch_data_type, combine_data_type", "both or neither", override)
        for name in ("data_type", "dispatch_data_type", "combine_data_type"):
            dtype = getattr(self, name)
            known_dtype = dtype in ops_config.PAYLOAD_DTYPES or (dtype is None and name != "data_type")
            require(known_dtype, name, " or ".join(map(str, ops_config.PAYLOAD_DTYPES)), dtype)
        if self.dispatch_dtype != self.combine_dtype:
            summed = (torch.float32, torch.bfloat16, torch.float16)
            want = " or ".join(map(str, summed)) + " where dispatch's differs"
            require(self.combine_dtype in summed, "combine_data_type", want, self.combine_dtype)
        # the fields that every dispatch has are checked where it is
        problem = self.problem
        require(self.world_size <= MAX_WORLD_SIZE, "world_size", f"<= {MAX_WORLD_SIZE}", self.world_size)
        k = problem.num_experts_per_token
        require(k <= MAX_TOP_K, "num_experts_per_token", f"<= {MAX_TOP_K}, what a staged row has room for", k)
        for name in ("dispatch", "combine"):
            is_packed = getattr(self, f"{name}_dtype") == _FP4
            require(not is_packed or self.hidden_dim % 2 == 0, "hidden_dim", "even: two to a byte", self.hidden_dim)
            num_bytes = getattr(self, f"{name}_token_nbytes")
            require(num_bytes % 16 == 0, "hidden_dim", f"a multiple of 16 bytes of {name}'s type", f"{num_bytes} bytes")
        check_blocks("dispatch_block_num", self.dispatch_block_num)
        check_programs("combine_block_num", self.combine_block_num)
        check_warps("warp_num_per_block", self.warp_num_per_block)
        check_warps("combine_warp_num_per_block", self.combine_warp_num_per_block)
        most = 0
        for row in self.schedule or ():
            require(len(row) == 3 and row[0] > most, "schedule", "(tokens, blocks, warps), tokens rising", row)
            check_blocks("schedule: blocks", row[1])
            check_warps("schedule: warps", row[2])
            most = row[0]

    @classmethod
    def tuned(cls, **fields: Any) -> EpDispatchCombineConfig:
        """A config whose launch shape is settled: what is chosen for the largest call, where `fields` name none."""
        config = cls(**fields)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        most = config.max_num_inp_token_per_rank

        def shape(phase: str, num_bytes: int, dtype: torch.dtype) -> Any:
            return launch_config(device, phase, most, num_bytes, dtype=dtype, top_k=config.num_experts_per_token)

        sent = shape("dispatch", config.dispatch_token_nbytes, config.dispatch_dtype)
        back = shape("combine", config.combine_token_nbytes, config.combine_dtype)
        settled = {
            "dispatch_block_num": num_blocks(None, most),
            "combine_block_num": back.num_programs,
            "warp_num_per_block": sent.num_warps,
            "combine_warp_num_per_block": back.num_warps,
        }
        return cls(**(settled | {name: value for name, value in fields.items() if value is not None}))

    @property
    def dispatch_dtype(self) -> torch.dtype:
        return self.dispatch_data_type or self.data_type

    @property
    def combine_dtype(self) -> torch.dtype:
        return self.combine_data_type or self.data_type

    @property
    def dispatch_columns(self) -> int:
        """Columns of dispatch's rows as tensors have them."""
        return num_columns(self.hidden_dim, self.dispatch_dtype)

    @property
    def combine_columns(self) -> int:
        return num_columns(self.hidden_dim, self.combine_dtype)

    @property
    def dispatch_token_nbytes(self) -> int:
        """Bytes of a row that dispatch sends."""
        return self.dispatch_columns * self.dispatch_dtype.itemsize

    @property
    def combine_token_nbytes(self) -> int:
        return self.combine_columns * self.combine_dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of a token's scale row as the caller has it."""
        return self.scale_dim * self.scale_type_size

    @property
    def effective_max_recv(self) -> int:
        """`R`: rows of every receive buffer."""
        return self.problem.max_recv

    @property
    def problem(self) -> ArenaProblem:
        # the buffers hold rows of hidden_dim elements of this many bytes; of packed float4 one row is half as long
        widest = max(self.dispatch_dtype.itemsize, self.combine_dtype.itemsize)
        return ArenaProblem(
            data_type=self.dispatch_dtype, rank=self.rank, world_size=self.world_size, hidden_dim=self.hidden_dim,
            scale_dim=self.scale_dim, scale_type_size=self.scale_type_size, max_token_type_size=widest,
            max_num_inp_token_per_rank=self.max_num_inp_token_per_rank,
            num_experts_per_rank=self.num_experts_per_rank, num_experts_per_token=self.num_experts_per_token,
            max_total_recv_tokens=self.max_total_recv_tokens, combine_data_type=self.combine_dtype,
        )  # fmt: skip


def num_columns(hidden_dim: int, dtype: torch.dtype) -> int:
    """Columns of a row of `hidden_dim` elements: two packed float4 share one."""
    return hidden_dim // 2 if dtype == _FP4 else hidden_dim


def check_blocks(name: str, block_num: int | None) -> None:
    """Raise `ArgumentError` for a number of blocks that the staging buffer has no room for. None: not chosen."""
    fits = block_num is None or (isinstance(block_num, int) and 1 <= block_num <= MAX_BLOCKS)
    require(fits, name, f"in [1, {MAX_BLOCKS}], what the staging buffer has room for, or None", block_num)


def check_programs(name: str, block_num: int | None) -> None:
    """Raise `ArgumentError` for a number of combine's programs that there cannot be. None: not chosen."""
    fits = block_num is None or (isinstance(block_num, int) and block_num >= 1)
    require(fits, name, ">= 1 or None", block_num)


def check_warps(name: str, warps: int | None) -> None:
    """Raise `ArgumentError` for a number of a program's warps that there cannot be. None: not chosen."""
    require(warps in (None, 1, 2, 4, 8, 16), name, "1, 2, 4, 8, 16 or None", warps)


def num_blocks(block_num: int | None, num_tokens: int) -> int:
    """Blocks that route and stage `num_tokens` tokens: as chosen, but each has a token; 0 without tokens."""
    if block_num is None:
        return min(MAX_BLOCKS, -(-num_tokens // _TOKENS_OF_A_BLOCK))
    return min(block_num, num_tokens)
