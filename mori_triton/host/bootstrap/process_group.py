"""Bootstrap from a torch process group of any backend.

The group is used once, to hand the unique id of its first rank to the others; collectives then go over TCP, where a
missing or dead PE is noticed and named, and where they cannot mix with what the user does on the group.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from mori_triton.errors import ArgumentError, PeerTimeout, StateError
from mori_triton.host.bootstrap.tcp import UNIQUE_ID_BYTES, TcpBootstrap, new_unique_id

if TYPE_CHECKING:
    import torch


def bootstrap_of_group(group: Any, timeout_s: float, interfaces: tuple[str, ...] | None = None) -> TcpBootstrap:
    """Collective over `group`: its registered name, "default", or the group itself. A PE is a rank *in the group*.

    Raises:
        StateError: torch.distributed is not initialised.
        ArgumentError: no such group, or this process is not in it.
        PeerTimeout: ranks are missing.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise StateError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    group = _resolve(group)
    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ArgumentError("group: want a group that this process belongs to")
    unique_id = new_unique_id(interfaces) if rank == 0 else bytes(UNIQUE_ID_BYTES)
    return TcpBootstrap(_broadcast_first(unique_id, group, timeout_s), rank, n_ranks, timeout_s=timeout_s)


def _resolve(group: Any) -> Any:
    """The group of that name, or the group itself."""
    import torch.distributed as dist

    if not isinstance(group, str):
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ArgumentError(f"group: want a process group or its name, got {group!r}")
        return group
    try:
        from torch._C._distributed_c10d import _resolve_process_group

        # a plain text in every torch so far; newer ones give it a type of its own
        resolve: Any = _resolve_process_group
        return resolve(group)
    except (RuntimeError, ValueError, KeyError) as error:
        # "default" need not be registered; torch knows its default group under a number
        if group == "default":
            return dist.group.WORLD
        raise ArgumentError(
            f'group_name: want "default" or the name of a registered process group, got {group!r}'
        ) from error


def _broadcast_first(data: bytes, group: Any, timeout_s: float) -> bytes:
    """The bytes of the group's first rank, on all of its ranks."""
    import torch
    import torch.distributed as dist

    # the source is given as a global rank, whatever the group
    source = dist.get_global_rank(group, 0)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_device_of(group))
    try:
        work = dist.broadcast(tensor, src=source, group=group, async_op=True)
        if work is not None:
            work.wait(datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerTimeout(
            f"rank {dist.get_rank(group)} of the process group did not hear from its rank 0 within {timeout_s:g} s, "
            f"or a rank has died: {error}"
        ) from error
    return tensor.cpu().numpy().tobytes()


def _device_of(group: Any) -> torch.device:
    """A device whose tensors the group's backend takes."""
    import torch
    import torch.distributed as dist

    backend = dist.get_backend(group)
    # "cpu:gloo,cuda:nccl": a backend for each; that of the CPU minds no ranks that share a GPU
    on_gpu = "nccl" in backend and "cpu:" not in backend
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
