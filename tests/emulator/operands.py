"""Operand values for instruction tests: for every operand type, edge cases mixed with random bits."""

from __future__ import annotations

import numpy as np

# bits that matter for integers: limits, powers of two, shift counts beyond the width, byte and half-word patterns
_INT32 = [0, 1, 2, 3, 7, 15, 16, 31, 32, 33, 63, 64, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000]
_INT32 += [0xFFFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x00FF00FF, 0x80808080, 0x0C0D0106]
_INT64 = [x | y << 32 for x in (0, 1, 0xFFFFFFFF, 0x80000000) for y in (0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000)]
# signs are added: zero, denormals, normals, ties, integer limits, infinity, quiet and signalling NaNs with payloads
_F32 = [
    0,
    1,
    0x007FFFFF,
    0x00800000,
    0x00800001,
    0x3F000000,
    0x3F7FFFFF,
    0x3F800000,
    0x3FC00000,
    0x40200000,
    0x40490FDB,
]
_F32 += [0x4EFFFFFF, 0x4F000000, 0x4F7FFFFF, 0x4F800000, 0x4B000001, 0x4B800001, 0x477FE000, 0x477FF000, 0x43E00000]
_F32 += [0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7FC12345, 0x7F800001, 0x7FA00000, 0x7E800000, 0x7F000000, 0x0C000000]
_F64 = [0, 1, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x3FE0000000000000, 0x3FF0000000000000, 0x3FF8000000000000]
_F64 += [0x41DFFFFFFFC00000, 0x41E0000000000000, 0x41EFFFFFFFE00000, 0x41F0000000000000, 0x47EFFFFFE0000000]
_F64 += [0x47EFFFFFF0000000, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000, 0x7FF8123456789ABC]
_F64 += [0x7FF0000000000001, 0x36A0000000000000, 0x3690000000000000, 0x380FFFFFE0000000, 0x4004000000000000]
_F16 = [0, 1, 0x3FF, 0x400, 0x3800, 0x3BFF, 0x3C00, 0x3E00, 0x4100, 0x7BFF, 0x7C00, 0x7E00, 0x7E12, 0x7C01, 0x0C00]


def _mix(rng: np.random.Generator, edges: list[int], bits: int, n: int, ordinary: np.ndarray) -> np.ndarray:
    """n values: half edges (zero more often than others), a quarter random bits, a quarter ordinary numbers."""
    kind = rng.integers(0, 4, n)
    edges = edges + [x for x in edges if x << 1 & ((1 << bits) - 1) == 0] * 3
    anything = rng.integers(0, 1 << bits, n, dtype=np.uint64)
    return np.where(kind < 2, rng.choice(np.array(edges, np.uint64), n), np.where(kind == 2, anything, ordinary))


def values(rng: np.random.Generator, kind: str, n: int) -> np.ndarray:
    """n operand values of a type letter (see mori_triton.emulator.isa) as uint64 bit patterns."""
    if kind in "fde":
        flt, integer, edges, bits = {
            "f": (np.float32, np.uint32, _F32, 32),
            "d": (np.float64, np.uint64, _F64, 64),
            "e": (np.float16, np.uint16, _F16, 16),
        }[kind]
        signed = edges + [x | 1 << (bits - 1) for x in edges]
        ordinary = (rng.standard_normal(n) * 2.0 ** rng.integers(-6, 10, n)).astype(flt).view(integer).astype(np.uint64)
        return _mix(rng, signed, bits, n, ordinary)
    small = rng.integers(-40, 40, n).astype(np.uint64)
    if kind == "q":
        return _mix(rng, _INT64, 64, n, small)
    if kind == "h":
        return _mix(rng, [x & 0xFFFF for x in _INT32], 16, n, small & np.uint64(0xFFFF))
    if kind == "p":  # two halves, each an fp16 edge now and then
        low, high = values(rng, "e", n), values(rng, "e", n)
        return np.where(rng.integers(0, 2, n) == 1, low | high << np.uint64(16), values(rng, "i", n))
    return _mix(rng, _INT32, 32, n, small & np.uint64(0xFFFFFFFF))
