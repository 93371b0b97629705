"""The allocator against a bitmap of granules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_triton.host.allocator import GRANULE, Allocator

pytestmark = pytest.mark.cpu

NUM_GRANULES = 64


class Model:
    """First fit by looking at every granule."""

    def __init__(self):
        self.taken = np.zeros(NUM_GRANULES, bool)
        self.live = {}

    def allocate(self, num_bytes, alignment):
        need = -(-num_bytes // GRANULE)
        for start in range(NUM_GRANULES - need + 1):
            if start * GRANULE % alignment == 0 and not self.taken[start : start + need].any():
                self.taken[start : start + need] = True
                self.live[start * GRANULE] = need
                return start * GRANULE
        return None

    def release(self, offset):
        start = offset // GRANULE
        self.taken[start : start + self.live.pop(offset)] = False

    def free_runs(self):
        edges = np.flatnonzero(np.diff(np.concatenate([[True], self.taken, [True]])))
        return [(a * GRANULE, (b - a) * GRANULE) for a, b in edges.reshape(-1, 2)]


step = st.tuples(st.booleans(), st.integers(1, 20 * GRANULE), st.sampled_from([16, 32, 64, 256, 1024]))


@settings(max_examples=150, deadline=None)
@given(st.lists(step, max_size=60), st.randoms())
def test_equals_the_bitmap(steps, random):
    allocator, model = Allocator(NUM_GRANULES * GRANULE + 5), Model()
    for allocate, num_bytes, alignment in steps:
        if allocate or not model.live:
            block, offset = allocator.allocate(num_bytes, alignment, "x"), model.allocate(num_bytes, alignment)
            assert (block and block.offset) == offset
        else:
            offset = random.choice(sorted(model.live))
            allocator.release(offset)
            model.release(offset)
        runs = model.free_runs()
        assert allocator._free == runs
        assert allocator.free_bytes == sum(extent for _, extent in runs)
        assert allocator.largest_free_bytes == max((extent for _, extent in runs), default=0)
        assert allocator.used_bytes + allocator.free_bytes == NUM_GRANULES * GRANULE
        for at in range(-1, NUM_GRANULES * GRANULE + 1, 7):
            found = allocator.find(at)
            owner = next((o for o, need in model.live.items() if o <= at < o + need * GRANULE), None)
            assert (found and found.offset) == owner


def test_failure_changes_nothing():
    allocator = Allocator(256)
    allocator.allocate(100, 16, "a")
    before = (dict(allocator.blocks), list(allocator._free))
    assert allocator.allocate(200, 16, "b") is None
    assert allocator.allocate(16, 256, "b") is None
    with pytest.raises(KeyError):
        allocator.release(16)
    assert (allocator.blocks, allocator._free) == before
