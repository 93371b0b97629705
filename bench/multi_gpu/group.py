"""The processes of a run: a torch process group, a GPU for each where there are enough, and shmem over all of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mori_triton import emulator, shmem
from mori_triton.host import state as host_state
from mori_triton.host.state import PeState

# of each of the two buffers that a peer copy moves between
PEER_COPY_BYTES = 512 << 20
_REPEATS = 10


@dataclass(frozen=True)
class Group:
    """This process among the others. A PE is a rank."""

    rank: int
    size: int
    device: torch.device
    num_gpus: int  # that the PEs use; 0 on the emulated device
    state: PeState

    @property
    def shares_gpu(self) -> bool:
        """Whether several PEs use one GPU: everything can be tried so, but times say nothing."""
        return 0 < self.num_gpus < self.size

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def meet(self) -> None:
        """Return when everybody's device is done with everything."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        dist.barrier()


def join(device: str) -> Group:
    """Join the processes that torchrun has started, over gloo; what is timed makes groups of its own."""
    num_gpus = torch.cuda.device_count() if device != "cpu" else 0
    rank_device = torch.device("cpu")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if device == "cpu":
        emulator.activate()
    else:
        rank_device = torch.device("cuda", rank % num_gpus)
        torch.cuda.set_device(rank_device)
    shmem.shmem_torch_process_group_init("default")
    return Group(rank, size, rank_device, min(num_gpus, size), host_state.current())


def leave(group: Group) -> None:
    """The end, for everybody at once."""
    group.meet()
    shmem.shmem_finalize()
    dist.destroy_process_group()


def peer_access(group: Group) -> list[str]:
    """One line for each pair of this rank's GPU and another that cannot reach it; and for each PE out of reach."""
    missing = [
        f"PE {group.rank} does not reach PE {pe}" for pe in range(group.size) if not group.state.heap.reaches(pe)
    ]
    if group.device.type != "cpu":
        others = [gpu for gpu in range(group.num_gpus) if gpu != group.device.index]
        missing += [
            f"no peer access from GPU {group.device.index} to {gpu}"
            for gpu in others
            if not torch.cuda.can_device_access_peer(group.device.index, gpu)
        ]
    return missing


@dataclass(frozen=True)
class PeerRates:
    """10^9 bytes per second that each PE moves while all do, the slowest one's: to, and from, the next PE."""

    write_gbs: float
    read_gbs: float


def peer_rates(group: Group, num_bytes: int = PEER_COPY_BYTES) -> PeerRates:
    """Copy between this PE's memory and the next PE's heap, all PEs at once; both contents are compared."""
    heap = group.state.heap
    mine = heap.tensor((num_bytes,), torch.uint8)
    there = heap.peer_tensor(mine, (group.rank + 1) % group.size)
    local = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=group.device)
    write = _copy_gbs(group, there, local)
    before = (group.rank - 1) % group.size
    # everybody's heap now holds what the one before has written
    sums = group.gather(int(local.sum(dtype=torch.int64)))
    assert int(mine.sum(dtype=torch.int64)) == sums[before], f"PE {group.rank}: peers' copies did not arrive whole"
    group.meet()
    back = torch.empty_like(local)
    read = _copy_gbs(group, back, there)
    assert torch.equal(back, local), f"PE {group.rank}: what was read back is not what was written"
    group.meet()
    rates = group.gather((write, read))
    return PeerRates(min(w for w, _ in rates), min(r for _, r in rates))


def _copy_gbs(group: Group, to: torch.Tensor, source: torch.Tensor) -> float:
    times_s = []
    for _ in range(2 + _REPEATS):
        group.meet()
        start_s = time.perf_counter()
        if group.device.type == "cpu":
            to.copy_(source)
            times_s.append(time.perf_counter() - start_s)
        else:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            to.copy_(source)
            end.record()
            end.synchronize()
            times_s.append(start.elapsed_time(end) / 1e3)
    group.meet()
    return to.numel() / sorted(times_s[2:])[_REPEATS // 2] / 1e9
