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
from mori_triton.errors import ArgumentError, require

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
        data = tile_descriptor(self.name, given.base.data_ptr(), shape, strides, self.meta, self.num_warps)
        return [TileDescriptor(data, given.base), *shape, *strides]


def descriptor_type(kind: str, name: str, meta: dict[str, Any] | None, num_warps: int) -> DescriptorType:
    """The parameter of a type that starts with `tensordesc`. Raises `ArgumentError` for one that no AMD GPU has."""
    found = _TYPE.match(kind)
    if found is None:
        raise ArgumentError(f"{name}: descriptors of type {kind} are not emulated; pass the tensor and its strides")
    return DescriptorType(name, found[1], found[2].count(",") + 1, meta, num_warps)


# where a dimension stands, the last first: group and bit; of the last the stride is 1
_SIZES = ((1, 48), (1, 80), (2, 0), (2, 32), (3, 48))
_TILES = ((1, 112), (1, 128), (1, 144), (2, 112), (3, 80))
_STRIDES = (None, (1, 160), (1, 208), (2, 64), (3, 0))


def tile_descriptor(
    name: str, address: int, shape: Sequence[int], strides: Sequence[int], meta: dict[str, Any], num_warps: int
) -> bytes:
    """The groups of scalar registers: 4 and 8 words, for a tile of three to five dimensions also 4 and 4.

    Args:
        name: of the parameter.
        address: of the tensor.
        shape, strides: of the tensor, in elements; the last stride is 1.
        meta: of the compiled kernel: `elem_bits`, `block_size`, and `interval_padding_pairs`, `[[elements, gap]]` or
            nothing.
        num_warps: each copies a part of the tile, of which there is one descriptor.

    Raises:
        ArgumentError: a value does not fit its field.
    """
    bits, block, pairs = meta["elem_bits"], list(meta["block_size"]), meta.get("interval_padding_pairs")
    require(1 <= len(shape) <= len(_SIZES), f"{name}: dimensions", f"1 to {len(_SIZES)}", len(shape))
    require(bits in (8, 16, 32, 64), f"{name}: elem_bits", "8, 16, 32 or 64", bits)
    parts, left = [1] * len(block), num_warps
    for i, size in enumerate(block):
        while left > 1 and 2 * parts[i] <= size:
            parts[i], left = 2 * parts[i], left // 2
    # something to do, and the type of descriptor; the size of an element
    groups = [1 | 2 << 126, ((bits // 8).bit_length() - 1) << 16, 0, 0]

    def put(what: str, value: int, place: tuple[int, int], num_bits: int) -> None:
        require(0 <= value < 1 << num_bits, f"{name}: {what}", f"0 to {(1 << num_bits) - 1}", value)
        group, bit = place
        groups[group] |= value << bit

    put("address", address, (0, 64), 57)
    for i, (size, stride, whole, part) in enumerate(zip(shape, strides, block, parts, strict=True)):
        at = len(shape) - 1 - i
        put(f"shape[{i}]", size, _SIZES[at], 32)
        put(f"block_size[{i}] of a warp", -(-whole // part), _TILES[at], 16)
        place = _STRIDES[at]
        if place is not None:
            put(f"strides[{i}]", stride, place, 48)
    if pairs:
        # the numbers start at 2 and 1
        interval, gap = (elements * bits // 32 for elements in pairs[0])
        powers = [2**i for i in range(1, 9)]
        want = f"{', '.join(map(str, powers[:-1]))} or {powers[-1]}"
        require(interval in powers, f"{name}: words of 32 bits before a gap", want, interval)
        require(1 <= gap <= 128, f"{name}: words of 32 bits of a gap", "1 to 128", gap)
        groups[1] |= 1 << 20 | (interval.bit_length() - 2) << 22 | (gap - 1) << 25
    used = groups if len(shape) > 2 else groups[:2]
    return b"".join(x.to_bytes(num_bytes, "little") for x, num_bytes in zip(used, (16, 32, 16, 16), strict=False))
