"""The least time that memory allows: the bytes that must move, over the rate at which this GPU copies.

A row that is sent is written once (dispatch) or read once (combine); a token is read once (dispatch) or written once
(combine). Ids, weights and the source of a row (8 * k + 4 bytes) are not counted, nor are reads that a cache serves.
On one GPU all of it goes through one memory. Rows are counted once per distinct destination PE.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from bench import clock

# several times the cache of any GPU (H200: 60 MB), so that a copy is of memory
COPY_BYTES = 2 << 30
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Traffic:
    """What one round moves, all PEs together."""

    num_tokens: int
    num_rows: int  # (token, distinct destination PE) pairs
    dispatch_row_bytes: int  # payload and scales
    combine_row_bytes: int
    wire_row_bytes: int  # of a row of an external combine on its way: less with a codec

    @property
    def dispatch_bytes(self) -> int:
        """Tokens read, rows written."""
        return (self.num_tokens + self.num_rows) * self.dispatch_row_bytes

    @property
    def combine_bytes(self) -> int:
        """Zero copy: rows read, tokens written."""
        return (self.num_rows + self.num_tokens) * self.combine_row_bytes

    @property
    def external_combine_bytes(self) -> int:
        """Rows of the caller's own buffer read, written where peers read them, and read again; tokens written."""
        return (self.num_rows + self.num_tokens) * self.combine_row_bytes + 2 * self.num_rows * self.wire_row_bytes

    def written_bytes_of(self, what: str) -> int:
        """Those of `bytes_of` that are written."""
        parts = {
            "dispatch": self.num_rows * self.dispatch_row_bytes,
            "combine": self.num_tokens * self.combine_row_bytes,
            "external combine": self.num_rows * self.wire_row_bytes + self.num_tokens * self.combine_row_bytes,
        }
        return sum(parts[part] for part in what.split(" + "))

    def bytes_of(self, what: str) -> int:
        """Of "dispatch", "combine", "external combine", or a sum: "dispatch + combine"."""
        parts = {
            "dispatch": self.dispatch_bytes,
            "combine": self.combine_bytes,
            "external combine": self.external_combine_bytes,
        }
        return sum(parts[part] for part in what.split(" + "))


def floor_us(num_bytes: int, copy_gbs: float) -> float:
    """Microseconds that `num_bytes` take at `copy_gbs` (10^9 bytes per second, read and written ones counted)."""
    return num_bytes / (copy_gbs * 1e9) * MICROSECONDS


@dataclass(frozen=True)
class Rates:
    """What memory does at its best, in 10^9 bytes per second."""

    copy_gbs: float  # read plus written, half each: what floors are made of
    fill_gbs: float  # written only: dispatch writes five bytes for each that it reads, combine the reverse


def rates(device: torch.device, num_bytes: int = COPY_BYTES, repeats: int = 20, places: int = 4) -> Rates:
    """Rates of a copy from device memory to device memory, and of filling it: medians of `repeats`.

    The best of several places in memory, as some are a percent or two faster than others. Random contents: a GPU may
    copy zeros faster. Timed by events; on the CPU by the host's clock.
    """
    clocked = clock.host_times if device.type == "cpu" else clock.event_times
    copy_s, fill_s, held = [], [], []
    for _ in range(places):
        source = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        copy_s.append(clocked(partial(target.copy_, source), repeats).median / MICROSECONDS)
        assert torch.equal(source, target)
        fill_s.append(clocked(partial(target.fill_, 0x5A), repeats).median / MICROSECONDS)
        # so that the next ones are elsewhere
        held.append((source, target))
    return Rates(2 * num_bytes / min(copy_s) / 1e9, num_bytes / min(fill_s) / 1e9)


@dataclass(frozen=True)
class Peer:
    """Times of another library on the same work, measured elsewhere on the same kind of GPU."""

    name: str
    tokens: int  # per PE
    what: str
    us: float


# DeepEP's intranode kernels, 8 ranks in one process on one H200, hidden 7168, top-8 of 256, bf16, 16 SMs a rank, the
# best of its chunk sizes; "dispatch" with its notify. Not measured by this benchmark.
PEERS = (
    Peer("DeepEP", 128, "dispatch", 91.0),
    Peer("DeepEP", 128, "combine", 109.0),
    Peer("DeepEP", 4096, "dispatch", 2433.0),
    Peer("DeepEP", 4096, "combine", 2064.0),
)
PEER_GPU = "NVIDIA H200"
