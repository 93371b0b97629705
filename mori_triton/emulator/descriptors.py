"""Tensor descriptors as arguments of a kernel: what Triton's launcher makes of them.

A kernel takes a descriptor as a row of arguments. First its parts, from which the kernel computes addresses, or, where
gfx1250's tensor data mover copies the tiles, the scalar registers that describe one to it; then shape and strides.

Source: Triton's backends/driver.py and backends/amd/driver.py and driver.c.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from mori_triton.emulator.launch import TileDescriptor
from mori_triton.errors import ArgumentError

# Triton 3.6 has no such field, and no argument for it
_ROUNDS = ("round_f32_to_tf32",) if hasattr(TensorDescriptor, "round_f32_to_tf32") else ()
_TYPE = re.compile(r"tensordesc<([^[>]*)\[([^\]]*)\]")


@dataclass(frozen=True)
class DescriptorType:
    """A kernel's parameter for a tensor descriptor.

    name: the parameter's. element: Triton's type. meta: how the tensor data mover has to copy it, None: it does not.
    """

    name: str
    element: str
    rank: int
    meta: dict[str, Any] | None
    num_warps: int

    def parts(self) -> list[tuple[str, str]]:
        """(type, name) of the kernel's arguments."""

        def each(type: str, what: str) -> list[tuple[str, str]]:
            return [(type, f"{self.name}.{what}[{i}]") for i in range(self.rank)]

        if self.meta is None:
            first = [("*" + self.element, self.name), *each("i64", "shape"), *each("i64", "strides")]
            first += [("i1", f"{self.name}.{what}") for what in ("padding", *_ROUNDS)]
        else:
            first = [("tensordesc", self.name)]
        return [*first, *each("i32", "shape"), *each("i64", "strides")]

    def values(self, given: Any) -> list[Any]:
        """The arguments for a descriptor."""
        if not isinstance(given, TensorDescriptor):
            raise ArgumentError(f"{self.name}: want a TensorDescriptor, got {type(given).__name__}")
        shape, strides = list(given.shape), list(given.strides)
        if self.meta is None:
            options = [given.padding == "nan", *(getattr(given, name) for name in _ROUNDS)]
            return [given.base, *shape, *strides, *options, *shape, *strides]
        data = tile_descriptor(given.base.data_ptr(), shape, strides, self.meta, self.num_warps)
        return [TileDescriptor(data, given.base), *shape, *strides]


def descriptor_type(kind: str, name: str, meta: dict[str, Any] | None, num_warps: int) -> DescriptorType:
    """The parameter of a type that starts with `tensordesc`. Raises `ArgumentError` for one that no AMD GPU has."""
    found = _TYPE.match(kind)
    if found is None:
        raise ArgumentError(f"{name}: descriptors of type {kind} are not emulated; pass the tensor and its strides")
    return DescriptorType(name, found[1], found[2].count(",") + 1, meta, num_warps)


def tile_descriptor(
    address: int, shape: Sequence[int], strides: Sequence[int], meta: dict[str, Any], num_warps: int
) -> bytes:
    """The groups of scalar registers: 4 and 8 words, for a tile of three to five dimensions also 4 and 4.

    Args:
        address: of the tensor.
        shape, strides: of the tensor, in elements; the last stride is 1.
        meta: of the compiled kernel: `elem_bits`, `block_size`, and `interval_padding_pairs`, `[[elements, gap]]` or
            nothing.
        num_warps: each copies a part of the tile, of which there is one descriptor.
    """
    bits, block, pairs = meta["elem_bits"], list(meta["block_size"]), meta.get("interval_padding_pairs")
    parts, left = [1] * len(block), num_warps
    for i, size in enumerate(block):
        while left > 1 and 2 * parts[i] <= size:
            parts[i], left = 2 * parts[i], left // 2
    tile = [-(-size // part) for size, part in zip(block, parts, strict=True)]
    # (bit, value), the last dimension first
    sizes, tiles, steps = (list(reversed(x)) for x in (shape, tile, strides))
    second = {16: (bits // 8).bit_length() - 1, **dict(zip((48, 80), sizes, strict=False))}
    second |= {**dict(zip((112, 128, 144), tiles, strict=False)), **dict(zip((160, 208), steps[1:], strict=False))}
    third = {**dict(zip((0, 32), sizes[2:], strict=False)), **dict(zip((64,), steps[3:], strict=False))}
    third |= dict(zip((112,), tiles[3:], strict=False))
    fourth = {bit: x[4] for bit, x in ((0, steps), (48, sizes), (80, tiles)) if len(shape) == 5}
    if pairs:
        # in words of 32 bits; the numbers start at 2 and 1
        interval, gap = (elements * bits // 32 for elements in pairs[0])
        second |= {20: 1, 22: interval.bit_length() - 2, 25: gap - 1}
    # something to do; the type of descriptor
    first = {0: 1, 64: address, 126: 2}
    groups = [(first, 16), (second, 32), *(((third, 16), (fourth, 16)) if len(shape) > 2 else ())]
    return b"".join(
        sum(value << bit for bit, value in fields.items()).to_bytes(num_bytes, "little") for fields, num_bytes in groups
    )
