"""The routing kernels of `deterministic=True` by themselves: buffers, launches, and what numpy says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton

from mori_triton.host import state as host_state
from mori_triton.ops.kernels.deterministic import dispatch_assign_kernel, dispatch_count_kernel
from mori_triton.ops.kernels.finish import DISPATCH_EPOCH
from tests.ops import reference

TAG = 4711
# tokens of a block
BLOCK_T = 2


def wanted_routes(ids: list[np.ndarray], experts_per_pe: int, capacity: int) -> tuple[list[np.ndarray], list[int]]:
    """By PE the forward map, and how many rows it is sent: slots in the order of (source PE, token), as many as fit."""
    asked, forward = [0] * len(ids), [np.full(mine.shape, -1, np.int32) for mine in ids]
    for pe, mine in enumerate(ids):
        for token, row in enumerate(mine):
            for owner in reference.owners(row, len(ids), experts_per_pe):
                column = [e // experts_per_pe if e >= 0 else -1 for e in row.tolist()].index(owner)
                if asked[owner] < capacity:
                    forward[pe][token, column] = owner * capacity + asked[owner]
                asked[owner] += 1
    return forward, asked


class Routes:
    """One PE's buffers. Collective to make."""

    def __init__(self, max_tokens: int, top_k: int) -> None:
        self.state = host_state.current()
        heap, n = self.state.heap, self.state.n_pes
        self.device = heap.ctx.device
        self.matrix = heap.tensor((n, n), torch.int32)
        self.signals = heap.tensor((n,), torch.int64)
        self.slots = heap.tensor((1,), torch.int32)
        for word in (self.signals, self.slots):
            word.zero_()
        self.matrix.fill_(-77)
        blocks = triton.cdiv(max_tokens, BLOCK_T)

        def ints(*shape: int, dtype: torch.dtype = torch.int32, value: int = -77) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        self.counts, self.begins, self.bases = ints(blocks, n), ints(blocks, n), ints(n)
        self.forward = ints(max_tokens, top_k)
        self.control = ints(64, dtype=torch.int64, value=0)
        self.state.driver.synchronize()
        self.state.bootstrap.barrier("routes are clear")

    def run(
        self,
        launch: Callable[..., Any],
        ids: np.ndarray,
        *,
        experts_per_pe: int,
        capacity: int,
        num_programs: int = 3,
        num_warps: int = 2,
    ) -> tuple[np.ndarray, int]:
        """A round: the forward map and the number of rows that this PE is sent."""
        n, k = ids.shape
        self.forward.fill_(-77)
        self.slots.fill_(-77)
        indices = torch.from_numpy(ids.copy()).to(self.device)
        sizes = {
            "BLOCK_T": BLOCK_T,
            "BLOCK_K": triton.next_power_of_2(k),
            "BLOCK_P": triton.next_power_of_2(self.state.n_pes),
        }
        grid = (max(1, min(num_programs, triton.cdiv(n, BLOCK_T))),)
        launch(
            dispatch_count_kernel, grid,
            self.state.heap.ctx, indices, self.counts, self.begins, self.bases, self.matrix, self.signals, self.slots,
            self.control, n, k, experts_per_pe,
            **sizes, BLOCK_B=2, TAG=TAG, num_warps=num_warps,
        )  # fmt: skip
        if n > 0:
            launch(
                dispatch_assign_kernel, grid,
                self.state.heap.ctx, indices, self.begins, self.bases, self.forward, self.control,
                n, k, experts_per_pe, capacity,
                **sizes, num_warps=num_warps,
            )  # fmt: skip
        # what the end of a dispatch does
        self.control[DISPATCH_EPOCH.value] += 1
        assert (self.forward[n:] == -77).all(), "rows past the tokens"
        return self.forward[:n].cpu().numpy().copy(), int(self.slots)
