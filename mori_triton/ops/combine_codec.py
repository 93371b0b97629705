"""combine with rows of small floats: bfloat16 rows that a codec encodes for the way, or payloads of such a format.

The steps stand in for those of `ops.combine`; references are `ops.formats.encode_rows` and `decode_rows`, and
`sum_rows_torch` here.
"""

from __future__ import annotations

import torch
import triton

from mori_triton.errors import ArgumentError
from mori_triton.ops.calls import CombineCall, num_programs, piece_grid, row_alignment
from mori_triton.ops.formats import BLOCK, CODECS, FORMAT_OF_DTYPE, Codec, decode_rows, encode_rows
from mori_triton.ops.kernels.combine_codec import combine_decode_kernel, combine_encode_kernel
from mori_triton.ops.plans import Step
from mori_triton.wait_sites import register_wait_site

WAIT_TAG = register_wait_site("EpDispatchCombineOp.combine (combine_encode_kernel)")


def check_codec(call: CombineCall) -> None:
    """Raise `ArgumentError` for rows that the config's codec does not take, as MORI does for the blockwise ones."""
    name = call.config.quant_type
    if call.rows.dtype != torch.bfloat16:
        raise ArgumentError(
            f"input.dtype: want torch.bfloat16, which quant_type={name!r} encodes, got {call.rows.dtype}; "
            'an op with quant_type="none" takes every payload dtype'
        )
    if call.in_place and call.rows.numel() > 0:
        raise ArgumentError(
            f"input: want memory of the caller's own, from which quant_type={name!r} encodes rows, got the registered "
            'buffer; an op with quant_type="none" takes it'
        )


def encode_step(call: CombineCall) -> Step:
    """Encode rows to where peers read them, bring the weights, and signal."""
    config, shape = call.config, call.shape
    codec = CODECS[config.quant_type]
    row_bytes = call.hidden * 2
    align = row_alignment(row_bytes, call.rows.data_ptr())
    # as many elements at a time as a plain copy of these rows
    blocks = max(1, shape.stage_piece_bytes // 2 // BLOCK)
    num_pieces = triton.cdiv(call.hidden, blocks * BLOCK)
    num_rows = 0 if call.in_place else call.num_rows
    return call.step(
        combine_encode_kernel, (num_programs(num_rows, num_pieces, shape.stage_programs),),
        call.ctx, call.given("rows"), call.view("combine_in"), call.view("combine_in_weights"),
        call.given("total"), call.view("combine_signals"), call.view("control"),
        config.num_experts_per_token, num_rows, row_bytes // align, num_pieces,
        call.given("weights"), call.view("combine_in_scales") if codec.scaled else None,
        FORMAT=codec.format.name, ALIGN=align, WIRE_ALIGN=row_alignment(_wire_bytes(call, codec)), BLOCKS=blocks,
        BLOCK_K=call.block_k, WAIT=call.wait, TAG=WAIT_TAG, num_warps=shape.stage_warps, waits=call.wait,
    )  # fmt: skip


def decode_step(call: CombineCall) -> Step:
    """Pull and sum rows that a codec encoded, or that are of a small format themselves."""
    shape, codec = call.shape, CODECS.get(call.config.quant_type)
    if codec is None:
        small, out = FORMAT_OF_DTYPE[call.rows.dtype], call.out.view(torch.uint8)
        hidden, row_bytes = call.hidden * 8 // small.bits, call.hidden
    else:
        small, out = codec.format, call.out
        hidden, row_bytes = call.hidden, _wire_bytes(call, codec)
    # a byte has one element or two: one for a byte that a plain sum reads keeps as many loads in flight
    blocks = max(1, shape.piece_bytes // BLOCK)
    return call.step(
        combine_decode_kernel, piece_grid(call.num_tokens, hidden, blocks * BLOCK, shape.num_programs),
        call.ctx, call.view("combine_in"), call.given("forward"), call.view("control"), out,
        call.view("combine_out_weights"),
        call.num_tokens, call.config.num_experts_per_token, *call.capacity,
        None if call.weights is None else call.view("combine_in_weights"),
        call.view("combine_in_scales") if codec is not None and codec.scaled else None,
        FORMAT=small.name, HIDDEN=hidden, ROW_BYTES=row_bytes, ALIGN=row_alignment(row_bytes),
        BLOCKS=blocks, BLOCK_K=call.block_k, CHUNK=call.chunk, num_warps=shape.num_warps,
    )  # fmt: skip


def sum_rows_torch(rows: torch.Tensor, quant_type: str = "none") -> torch.Tensor:
    """Reference of a combine for one token, or for several that have equally many rows.

    Args:
        rows: `[U, ..., h]`, the rows of its `U` distinct PEs in the order of the ids; bfloat16 with a codec, of a small
            format's dtype without.

    Returns:
        `[..., h]` of the dtype of `rows`: their float32 sum in that order, rounded once.
    """
    small = FORMAT_OF_DTYPE.get(rows.dtype)
    if small is not None:
        values = small.decode(rows.view(torch.uint8))
    elif quant_type == "none":
        values = rows.float()
    else:
        values = decode_rows(*encode_rows(rows, quant_type), quant_type, rows.shape[-1])
    total = torch.zeros_like(values[0])
    for row in values:
        total = total + row
    return total.to(rows.dtype) if small is None else small.encode(total).view(rows.dtype)


def _wire_bytes(call: CombineCall, codec: Codec) -> int:
    """Bytes of an encoded row."""
    return -(-call.hidden * codec.format.bits // 8)
