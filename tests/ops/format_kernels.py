"""Kernels that convert arrays, to try `ops.kernels.formats` on any device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mori_triton.device.launch import FP_FUSION
from mori_triton.ops.formats import FORMATS
from mori_triton.ops.kernels.formats import decode, encode, in_order, lift, pack_nibbles, unpack

BLOCK = 1024


@triton.jit
def decode_kernel(words_ptr, out_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, PER_WORD: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.reshape(decode(tl.load(words_ptr + offs), FORMAT), [BLOCK * PER_WORD])
    tl.store(out_ptr + tl.program_id(0) * BLOCK * PER_WORD + tl.arange(0, BLOCK * PER_WORD), values)


@triton.jit
def decode_tile_kernel(words_ptr, out_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, PER_WORD: tl.constexpr):
    """As `decode_kernel`, with the words in two dimensions."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.reshape(decode(tl.load(words_ptr + offs), FORMAT), [BLOCK * PER_WORD])
    tl.store(out_ptr + tl.program_id(0) * BLOCK * PER_WORD + tl.arange(0, BLOCK * PER_WORD), values)


@triton.jit
def encode_kernel(values_ptr, out_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    codes = encode(tl.load(values_ptr + offs).to(tl.float32), FORMAT)
    if FORMAT == "e2m1":
        codes = pack_nibbles(tl.reshape(codes, [BLOCK // 2, 2]))
        offs = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    tl.store(out_ptr + offs, codes)


@triton.jit
def sum_kernel(words_ptr, out_ptr, ROWS: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """Sum rows of `BLOCK` words: what a combine does, and little else."""
    offs = tl.arange(0, BLOCK)
    total = unpack(tl.zeros([BLOCK], tl.uint32), FORMAT)
    for row in tl.static_range(ROWS):
        total += unpack(tl.load(words_ptr + row * BLOCK + offs), FORMAT)
    SIZE: tl.constexpr = BLOCK * (8 if FORMAT == "e2m1" else 4)
    total = tl.reshape(in_order(total, FORMAT, 4), [SIZE])
    tl.store(out_ptr + tl.arange(0, SIZE), total * lift(FORMAT))


def run_decode(codes: torch.Tensor, name: str, word: torch.dtype, tile: bool = False) -> torch.Tensor:
    """Values of `[n]` uint8 `codes`, loaded as words of a type; `n` bytes are a multiple of `BLOCK` words."""
    words = codes.view(word)
    per_word = word.itemsize * 8 // FORMATS[name].bits
    assert len(words) % BLOCK == 0
    out = torch.full((len(words) * per_word,), torch.nan, device=codes.device)
    kernel = decode_tile_kernel if tile else decode_kernel
    kernel[(len(words) // BLOCK,)](
        words, out, FORMAT=name, BLOCK=BLOCK, PER_WORD=per_word, num_warps=4, enable_fp_fusion=FP_FUSION
    )
    return out


def run_encode(values: torch.Tensor, name: str) -> torch.Tensor:
    """uint8 codes of `[n]` values, `n` a multiple of `BLOCK`."""
    assert len(values) % BLOCK == 0
    out = torch.full((len(values) * FORMATS[name].bits // 8,), 0xA5, dtype=torch.uint8, device=values.device)
    encode_kernel[(len(values) // BLOCK,)](
        values, out, FORMAT=name, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=FP_FUSION
    )
    return out


def all_bytes(repeat: int = 16) -> torch.Tensor:
    """Every byte, `repeat` times, each time beside others."""
    byte = torch.arange(256, dtype=torch.int32)
    return torch.cat([(byte * (2 * i + 1) + i) % 256 for i in range(repeat)]).to(torch.uint8)


def all_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a 16-bit float type."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def float32_samples(name: str) -> torch.Tensor:
    """float32 numbers around everything that a format decides: its numbers, the middles between, and neighbours."""
    positive = FORMATS[name].table[: 1 << (FORMATS[name].bits - 1)]
    positive = positive[~positive.isnan()]
    edges = torch.cat([positive, (positive[1:] + positive[:-1]) / 2, 2 * positive[-1:] - positive[-2:-1]])
    up, down = torch.tensor(torch.inf), torch.tensor(0.0)
    near = torch.cat([edges, torch.nextafter(edges, up), torch.nextafter(edges, down)])
    bits = torch.randint(-(2**31), 2**31, (1 << 14,), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    special = torch.tensor([torch.inf, torch.nan, torch.finfo(torch.float32).max, 2.0**-149, 2.0**-126, 463.99997])
    odd_nans = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    found = torch.cat([near, special, odd_nans])
    found = torch.cat([found, -found, bits.view(torch.float32)])
    return torch.nn.functional.pad(found, (0, -len(found) % BLOCK))
