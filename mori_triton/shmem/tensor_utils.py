"""Tensors on the symmetric heap, by MORI's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mori_triton.errors import require
from mori_triton.host import state

if TYPE_CHECKING:
    import torch


class MoriShmemBuffer:
    """Memory at an address, for libraries that take the array interfaces (numpy, torch, cupy). Owns nothing.

    Args:
        ptr: address, for example of `shmem_malloc`.
        nbytes: size in bytes; the interfaces show that many uint8.
        dtype: what the bytes are; kept for the caller.
    """

    def __init__(self, ptr: int, nbytes: int, dtype: torch.dtype) -> None:
        self.ptr, self.nbytes, self.dtype = ptr, nbytes, dtype
        interface = {"data": (ptr, False), "shape": (nbytes,), "typestr": "|u1", "strides": None, "version": 3}
        on_gpu = state.current().driver.name != "cpu"
        setattr(self, "__cuda_array_interface__" if on_gpu else "__array_interface__", interface)


def mori_shmem_create_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised symmetric tensor, which only `mori_shmem_free_tensor` frees. Collective."""
    return state.current().heap.tensor(shape, dtype)


def symm_mori_shmem_tensor(tensor: torch.Tensor, peer: int) -> torch.Tensor:
    """What `tensor`, a symmetric tensor or a view of one, is on PE `peer`: a view of that PE's memory.

    Raises `ArgumentError` if it is not on the heap or `peer` does not exist, `StateError` if that PE cannot be reached.
    """
    here = state.current()
    return tensor if peer == here.pe else here.heap.peer_tensor(tensor, peer)


def mori_shmem_free_tensor(tensor: torch.Tensor) -> None:
    """Free a tensor of `mori_shmem_create_tensor`, on every PE before the next allocation. Errors as `shmem_free`."""
    state.current().heap.free_tensor(tensor)


def mori_shmem_create_tensor_list_intra_node(
    shape: tuple[int, ...], dtype: torch.dtype, num_ranks: int
) -> list[torch.Tensor]:
    """A symmetric tensor as each of PEs 0 to `num_ranks - 1` has it. Collective; errors of `symm_mori_shmem_tensor`."""
    here = state.current()
    require(0 < num_ranks <= here.n_pes, "num_ranks", f"1 to {here.n_pes}", num_ranks)
    tensor = mori_shmem_create_tensor(shape, dtype)
    return [symm_mori_shmem_tensor(tensor, peer) for peer in range(num_ranks)]
