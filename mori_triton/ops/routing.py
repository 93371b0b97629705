"""The routing handle: where the rows of one dispatch went, for its combine and for dispatching along it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mori_triton.errors import check_tensor, require
from mori_triton.ops.config import EpDispatchCombineConfig


@dataclass(frozen=True, eq=False)
class EpDispatchRoutingHandle:
    """What dispatch decided, in memory of its own: any number of handles may be alive, and outlive later dispatches.

    MORI's field names. `M` tokens at most, `k` ids a token, `R` rows of a receive buffer.
    """

    disp_dest_tok_id_map: torch.Tensor  # int32 [M, k]: destination PE * R + slot, -1: not sent
    inter_node_disp_dest_tok_id_map: torch.Tensor  # int32 [0]: of the kernel types that cross nodes
    inter_node_disp_send_map: torch.Tensor  # int32 [0], likewise
    total_recv_token_num: torch.Tensor  # int32 [1]: rows received
    disp_tok_id_to_src_tok_id_local: torch.Tensor  # int32 [R]: source PE * M + token of each row received
    cur_rank_num_token: int  # tokens of this PE in that dispatch
    # a copy of its indices, where the host compares them with combine's
    indices: torch.Tensor | None = field(default=None, repr=False)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors, in order of the fields, as for autograd's `save_for_backward`."""
        return (
            self.disp_dest_tok_id_map,
            self.inter_node_disp_dest_tok_id_map,
            self.inter_node_disp_send_map,
            self.total_recv_token_num,
            self.disp_tok_id_to_src_tok_id_local,
        )

    @classmethod
    def from_tensors(cls, tensors: Any, cur_rank_num_token: int) -> EpDispatchRoutingHandle:
        """The inverse of `tensors`. Raises `ArgumentError` if it is not five tensors and a count."""
        tensors = tuple(tensors)
        want = "the 5 tensors of EpDispatchRoutingHandle.tensors()"
        fits = len(tensors) == 5 and all(isinstance(t, torch.Tensor) for t in tensors)
        require(fits, "tensors", want, [type(t).__name__ for t in tensors])
        require(isinstance(cur_rank_num_token, int), "cur_rank_num_token", "an int", repr(cur_rank_num_token))
        return cls(*tensors, cur_rank_num_token)  # type: ignore[call-arg]


def new_handle(
    config: EpDispatchCombineConfig, device: torch.device, num_tokens: int, indices: torch.Tensor | None = None
) -> EpDispatchRoutingHandle:
    """A handle for a dispatch of `num_tokens` tokens to fill in. `indices`: a copy of theirs, for it to keep."""
    most, k = config.max_num_inp_token_per_rank, config.num_experts_per_token
    return EpDispatchRoutingHandle(
        torch.empty(most, k, dtype=torch.int32, device=device),
        torch.empty(0, dtype=torch.int32, device=device),
        torch.empty(0, dtype=torch.int32, device=device),
        # the caller's kernels may read it behind those of a broken op, which write nothing; no other fill is needed,
        # and the constructor has loaded this one
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.empty(config.max_recv, dtype=torch.int32, device=device),
        num_tokens,
        indices,
    )


def check_handle(
    handle: Any, config: EpDispatchCombineConfig, device: torch.device, num_tokens: int | None = None
) -> None:
    """Raise `ArgumentError` unless `handle` is of an op like this one, and of a dispatch of `num_tokens` tokens."""
    require(isinstance(handle, EpDispatchRoutingHandle), "routing", "an EpDispatchRoutingHandle", type(handle).__name__)
    most, k, rows = config.max_num_inp_token_per_rank, config.num_experts_per_token, config.max_recv
    check_tensor("routing.disp_dest_tok_id_map", handle.disp_dest_tok_id_map, torch.int32, (most, k), device)
    check_tensor("routing.total_recv_token_num", handle.total_recv_token_num, torch.int32, (1,), device)
    sources = handle.disp_tok_id_to_src_tok_id_local
    check_tensor("routing.disp_tok_id_to_src_tok_id_local", sources, torch.int32, (rows,), device)
    count = handle.cur_rank_num_token
    fits = count == num_tokens or (num_tokens is None and 0 <= count <= most)
    want = f"of a dispatch of {'at most ' + str(most) if num_tokens is None else num_tokens} tokens"
    require(fits, "routing", want, f"one of {count}")
