"""What dispatch and combine have to do, for all PEs at once, in plain numpy. Knows nothing of the package.

Payloads are numpy arrays in a storage type: float32 as float32, float16 as float16, bfloat16 as its uint16 bit pattern.
"""

from __future__ import annotations

import numpy as np


def to_float32(stored: np.ndarray) -> np.ndarray:
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def from_float32(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round to nearest even, once."""
    if dtype == np.uint16:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(dtype)


def owners(row: np.ndarray, num_pes: int, experts_per_pe: int) -> list[int]:
    """Distinct PEs of a row of expert ids, in the order in which they first occur; ids of no expert name no PE."""
    seen: list[int] = []
    for expert in row.tolist():
        if 0 <= expert < num_pes * experts_per_pe and expert // experts_per_pe not in seen:
            seen.append(expert // experts_per_pe)
    return seen


def received(indices: list[np.ndarray], experts_per_pe: int) -> list[set[tuple[int, int]]]:
    """For each PE the (source PE, token) pairs that it is sent; `indices` holds each PE's `[n, k]`."""
    got: list[set[tuple[int, int]]] = [set() for _ in indices]
    for pe, mine in enumerate(indices):
        for token, row in enumerate(mine):
            for owner in owners(row, len(indices), experts_per_pe):
                got[owner].add((pe, token))
    return got


def expert_output(pe: int, stored: np.ndarray) -> np.ndarray:
    """What the experts of `pe` make of rows: different on every PE, rounded to the payload type."""
    return from_float32(to_float32(stored) * np.float32(1.0 + 0.3125 * pe) + np.float32(0.01 * pe), stored.dtype)


def combined(pe: int, tokens: np.ndarray, indices: np.ndarray, num_pes: int, experts_per_pe: int) -> np.ndarray:
    """What combine gives back to `pe` for its tokens `[n, h]`: float32 sums over distinct PEs in order, rounded
    once.
    """
    out = np.zeros(tokens.shape, np.float32)
    for token, row in enumerate(indices):
        for owner in owners(row, num_pes, experts_per_pe):
            out[token] += to_float32(expert_output(owner, tokens[token]))
    return from_float32(out, tokens.dtype)


def combined_weights(weights: np.ndarray, indices: np.ndarray, num_pes: int, experts_per_pe: int) -> np.ndarray:
    """Weights that come back when every PE hands on those that it received."""
    out = np.zeros_like(weights)
    for token, row in enumerate(indices):
        for _ in owners(row, num_pes, experts_per_pe):
            out[token] += weights[token]
    return out
