"""Which network link each GPU of a node sends through: the user's choice of devices, then nearness on PCI.

A link is a port of a device that is up. All PEs of a node get the same answer from the same facts, so nobody has to
be asked.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mori_triton.env import DEVICE_FILTER_FORMS, DeviceFilter
from mori_triton.errors import EnvError, StateError
from mori_triton.host.nic.discover import SYSFS, Gid, Port, RdmaDevice, numa_node_of, pci_path_of

_VARIABLE = "MORI_RDMA_DEVICES"


class Distance(enum.IntEnum):
    """How far a device is from a GPU; less is nearer."""

    SWITCH = 0  # below the same PCI root port: traffic between them does not reach the CPU
    ROOT_COMPLEX = 1
    NUMA = 2
    FAR = 3  # on another NUMA node, or nobody knows


@dataclass(frozen=True)
class Link:
    """A port of a device."""

    device: RdmaDevice
    port: Port

    def __str__(self) -> str:
        return f"{self.device.name}:{self.port.number}"


def _name_list(devices: Sequence[RdmaDevice]) -> str:
    return ", ".join(device.name for device in devices) or "none"


def filter_devices(devices: Sequence[RdmaDevice], chosen: DeviceFilter | None) -> tuple[RdmaDevice, ...]:
    """The devices that the user wants (`env.Settings.rdma_devices`): named ones in the order they are named in.

    Unless they are named, virtual functions of a card that is among the devices itself are left out: they would count
    one link twice.

    Raises:
        EnvError: a name that no device has, or no device is left; the message lists what there is.
    """
    by_name = {device.name: device for device in devices}
    unknown = [] if chosen is None else [name for name in chosen.names if name not in by_name]
    if unknown:
        have = f"there is no {', '.join(unknown)}, there are: {_name_list(devices)}"
        raise EnvError(f"{_VARIABLE}: want {DEVICE_FILTER_FORMS}; {have}")
    if chosen is not None and not chosen.exclude:
        return tuple(by_name[name] for name in chosen.names)
    left = [device for device in devices if chosen is None or device.name not in chosen.names]
    if devices and not left:
        raise EnvError(f"{_VARIABLE}: it excludes every device there is: {_name_list(devices)}")
    cards = {device.pci_address for device in left}
    return tuple(device for device in left if device.physical is None or device.physical not in cards)


def links(devices: Sequence[RdmaDevice]) -> tuple[Link, ...]:
    """The links of these devices that are up, in the devices' order.

    Raises:
        StateError: none is up; the message has every port's state and what was wrong with the files that tell it.
    """
    up = tuple(Link(device, port) for device in devices for port in device.ports if port.active)
    if not up:
        states = [
            f"{device.name} port {port.number} is {port.state} ({port.link_layer})"
            for device in devices
            for port in device.ports
        ]
        problems = [problem for device in devices for problem in device.problems]
        raise StateError(f"no RDMA device with a link that is up: {'; '.join([*states, *problems]) or 'no device'}")
    return up


def distance(gpu: tuple[str, ...], gpu_numa: int | None, device: RdmaDevice) -> tuple[Distance, int]:
    """How far a device is from a GPU (`pci_path_of`, `numa_node_of`); below one root port also by how many steps."""
    shared = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(gpu, device.pci_path, strict=False))
    )
    if shared >= 2:
        return Distance.SWITCH, len(gpu) + len(device.pci_path) - 2 * shared
    if shared == 1:
        return Distance.ROOT_COMPLEX, 0
    if gpu_numa is not None and gpu_numa == device.numa_node:
        return Distance.NUMA, 0
    return Distance.FAR, 0


def choose_links(gpus: Sequence[str], candidates: Sequence[Link], root: Path = SYSFS) -> tuple[Link, ...]:
    """The link of each GPU: a nearest one. If several are as near, GPUs with the same choice take turns.

    Args:
        gpus: PCI addresses (`GpuDriver.pci_address`) of the GPUs of all PEs on this node, by the PEs' order on it.
        candidates: `links(...)`; at least one.
        root: of sysfs.
    """
    taken: dict[tuple[int, ...], int] = {}
    chosen = []
    for gpu in gpus:
        way, numa = pci_path_of(gpu, root), numa_node_of(gpu, root)
        distances = [distance(way, numa, link.device) for link in candidates]
        nearest = tuple(at for at, far in enumerate(distances) if far == min(distances))
        turn = taken.get(nearest, 0)
        taken[nearest] = turn + 1
        chosen.append(candidates[nearest[turn % len(nearest)]])
    return tuple(chosen)


def _worth(gid: Gid) -> tuple[bool, bool, bool]:
    # RoCE v2 can be routed, and of its addresses IPv4 ones are those that network administrators set up
    return gid.kind == "RoCE v2", gid.ipv4 is not None, gid.raw[:2] != b"\xfe\x80"


def choose_gid(link: Link, index: int = -1) -> Gid:
    """The address to send from: entry `index` of the port's table. -1: RoCE v2 first, then IPv4, then not link-local.

    Of entries that are worth the same the first is taken, which on InfiniBand is entry 0.

    Raises:
        EnvError: that entry is empty.
        StateError: all are.
    """
    gids = link.port.gids
    if not gids:
        raise StateError(f"{link}: the port has no address: its table of GIDs is empty")
    if index < 0:
        return max(gids, key=lambda gid: (_worth(gid), -gid.index))
    for gid in gids:
        if gid.index == index:
            return gid
    have = ", ".join(f"{gid.index} ({gid})" for gid in gids)
    raise EnvError(f"MORI_IB_GID_INDEX: want an entry that {link} has, {have}; got {index}")
