"""The staging buffer: its size by hand, its regions, what is refused."""

from __future__ import annotations

import pytest
import torch

from mori_triton.errors import StagingError
from mori_triton.ops.dispatch_combine_v2 import ep_staging_bytes
from mori_triton.ops.dispatch_combine_v2.staging import (
    allocate_staging,
    check_staging,
    scale_stride_bytes,
    staging_constants,
    staging_layout,
)

pytestmark = pytest.mark.cpu

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("world_size", "max_tokens", "published", "unit"),
    [(4, 4096, 24.3, MIB), (4, 16384, 97.0, MIB), (8, 16384, 388.0, MIB), (32, 4096, 1.52, GIB)],
)
def test_published_sizes(world_size: int, max_tokens: int, published: float, unit: int) -> None:
    """The four figures that were published for scale rows of 224 bytes, to the digits that were printed."""
    digits = len(str(published).split(".")[1])
    given = ep_staging_bytes(world_size, world_size * max_tokens, 224, max_tokens)
    assert round(given / unit, digits) == published
    # 0 means the worst case, and is not a size of 0
    assert ep_staging_bytes(world_size, 0, 224, max_tokens) == given


def test_size_by_hand() -> None:
    rows = 3 * 7
    ids = 1408  # 21 rows of 16 ids of 4 bytes are 1344
    assert rows * 16 * 4 == 1344
    blocks = 512 * 3 * 4
    assert ep_staging_bytes(3, 7, 0, 0) == 2 * ids + 128 + 2 * blocks
    assert ep_staging_bytes(3, 7, 1, 0) == 2 * ids + 128 + rows * 128 + 2 * blocks
    assert ep_staging_bytes(3, 7, 129, 5) == 2 * ids + 128 + rows * 256 + 2 * blocks
    # the last size of docs/ep_v2.md, which was not published: 32 * 32 * 8192 rows
    assert ep_staging_bytes(32, 0, 224, 8192) == 32 * 32 * 8192 * (64 + 64 + 4 + 256) + 2 * 512 * 32 * 4
    assert round(ep_staging_bytes(32, 0, 224, 8192) / GIB, 2) == 3.03
    assert [scale_stride_bytes(n) for n in (0, 1, 128, 224, 257)] == [0, 128, 128, 256, 384]


def test_regions_are_aligned_and_apart() -> None:
    for shape in ((3, 7, 5, 0), (4, 0, 224, 33), (1, 1, 0, 0), (32, 0, 224, 8192)):
        layout = staging_layout(*shape)
        end = 0
        for region in layout.regions:
            assert region.offset % 128 == 0
            assert region.offset >= end
            end = region.offset + region.num_bytes
        assert end <= layout.num_bytes == ep_staging_bytes(*shape) < end + 128
        assert staging_constants(layout) == {f"{r.name.upper()}_AT": r.offset for r in layout.regions}
    assert layout["scales"].offset + layout["scales"].num_bytes > 1 << 31


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((4, 0, 224, 0), "max_recv"),
        ((0, 4, 0, 1), "world_size"),
        ((4, -1, 0, 1), "max_recv"),
        ((4, 4, -1, 1), "scale_bytes"),
        ((4, 4, 0, 1.5), "max_tok_per_rank"),
        ((64, 0, 0, 1 << 20), "world_size \\* max_recv"),
    ],
)
def test_sizes_that_are_none(args: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: want"):
        ep_staging_bytes(*args)


def test_bases_that_are_refused() -> None:
    layout, cpu = staging_layout(2, 0, 0, 3), torch.device("cpu")
    buffer = allocate_staging(layout, cpu)
    assert (buffer.data_ptr() % 128, buffer.numel()) == (0, layout.num_bytes)
    assert check_staging(buffer, None, layout, cpu) == buffer.data_ptr()
    assert check_staging(buffer.data_ptr(), None, layout, cpu) == buffer.data_ptr()
    assert check_staging(buffer.data_ptr(), layout.num_bytes, layout, cpu) == buffer.data_ptr()
    refused = [
        (0, None, "got 0"),
        (None, None, "got None"),
        (buffer.data_ptr() + 64, None, "aligned to 128"),
        (buffer.data_ptr(), layout.num_bytes - 1, f"want .* = {layout.num_bytes} bytes, got {layout.num_bytes - 1}"),
        (buffer[:-1], None, f"got {layout.num_bytes - 1}"),
        (buffer, layout.num_bytes - 1, f"got {layout.num_bytes - 1}"),
        (torch.empty(2, 2 * layout.num_bytes, dtype=torch.uint8).t(), None, "contiguous"),
        (torch.empty(layout.num_bytes, dtype=torch.uint8, device="meta"), None, "got meta"),
    ]
    for base, num_bytes, why in refused:
        with pytest.raises(RuntimeError, match=f"^staging_base: .*{why}") as error:
            check_staging(base, num_bytes, layout, cpu)
        assert isinstance(error.value, StagingError)
