"""First-fit allocation of offsets in a heap, with coalescing: pure arithmetic, equal on every PE for equal calls."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

# every block starts and ends on this many bytes, the widest access of a lane
GRANULE = 16


@dataclass(frozen=True)
class Block:
    """An allocation: `num_bytes` as asked for, `extent` as taken from the heap."""

    offset: int
    num_bytes: int
    extent: int
    name: str


class Allocator:
    """Offsets in [0, num_bytes). The free list is canonical: it depends only on what is allocated, not on the past."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes // GRANULE * GRANULE
        self.blocks: dict[int, Block] = {}
        # sorted, not touching one another: (offset, extent)
        self._free: list[tuple[int, int]] = [(0, self.num_bytes)] if self.num_bytes else []

    @property
    def used_bytes(self) -> int:
        return sum(block.extent for block in self.blocks.values())

    @property
    def free_bytes(self) -> int:
        return sum(extent for _, extent in self._free)

    @property
    def largest_free_bytes(self) -> int:
        return max((extent for _, extent in self._free), default=0)

    def allocate(self, num_bytes: int, alignment: int, name: str) -> Block | None:
        """The lowest aligned place that fits, None (and no change) if there is none. `alignment`: a power of two."""
        extent = -(-num_bytes // GRANULE) * GRANULE
        for i, (start, room) in enumerate(self._free):
            offset = -(-start // alignment) * alignment
            if offset + extent <= start + room:
                # what alignment skips stays free
                rest = [(start, offset - start), (offset + extent, start + room - offset - extent)]
                self._free[i : i + 1] = [piece for piece in rest if piece[1]]
                block = Block(offset, num_bytes, extent, name)
                self.blocks[offset] = block
                return block
        return None

    def release(self, offset: int) -> Block:
        """Free the block that starts at `offset` (KeyError if none does), merging it with free neighbours."""
        block = self.blocks.pop(offset)
        start, end = offset, offset + block.extent
        i = bisect.bisect_left(self._free, (offset, 0))
        if i < len(self._free) and self._free[i][0] == end:
            end += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end - start))
        return block

    def find(self, offset: int) -> Block | None:
        """The block that `offset` lies in."""
        below = max((start for start in self.blocks if start <= offset), default=None)
        if below is None or offset >= below + self.blocks[below].extent:
            return None
        return self.blocks[below]
