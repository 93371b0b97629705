"""Writes sysfs trees of nodes with RDMA devices, with the names, links and texts that the kernel uses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

MELLANOX, BROADCOM, PENSANDO = 0x15B3, 0x14E4, 0x1DD8
DRIVERS = {MELLANOX: "mlx5_core", BROADCOM: "bnxt_en", PENSANDO: "ionic"}
EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


@dataclass
class PortFiles:
    """What a port's files say. `gids`: text, type (None: reading it fails), interface."""

    state: str = "4: ACTIVE"
    link_layer: str = "Ethernet"
    rate: str = "400 Gb/sec (4X NDR)"
    lid: str = "0x0"
    gids: list[tuple[str, str | None, str | None]] = field(
        default_factory=lambda: [
            ("fe80:0000:0000:0000:ee0d:9aff:fe00:0001", "IB/RoCE v1", "eth0"),
            ("fe80:0000:0000:0000:ee0d:9aff:fe00:0001", "RoCE v2", "eth0"),
            ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1", "eth0"),
            ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "eth0"),
            (EMPTY_GID, None, None),
        ]
    )


class Node:
    """A sysfs tree under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for directory in ("class/infiniband", "bus/pci/devices", "devices"):
            (root / directory).mkdir(parents=True)

    def pci(
        self, way: str, *, vendor: int, device: int = 0x1021, numa: int | str = 0, driver: str | None = None
    ) -> Path:
        """A PCI device; `way`: such as "pci0000:15/0000:15:01.0/0000:16:00.0", the bridges are made too."""
        path = self.root / "devices" / way
        path.mkdir(parents=True)
        (path / "vendor").write_text(f"{vendor:#06x}\n")
        (path / "device").write_text(f"{device:#06x}\n")
        (path / "numa_node").write_text(f"{numa}\n")
        if driver:
            there = self.root / "bus/pci/drivers" / driver
            there.mkdir(parents=True, exist_ok=True)
            link(path / "driver", there)
        link(self.root / "bus/pci/devices" / path.name, path)
        return path

    def gpu(self, way: str, *, numa: int | str = 0) -> Path:
        return self.pci(way, vendor=0x1002, device=0x75A0, numa=numa, driver="amdgpu")

    def rdma(self, name: str, parent: Path, ports: list[PortFiles] | None = None) -> Path:
        """An RDMA device below the device `parent`."""
        path = parent / "infiniband" / name
        path.mkdir(parents=True)
        link(self.root / "class/infiniband" / name, path)
        link(path / "device", parent)
        for number, port in enumerate([PortFiles()] if ports is None else ports, 1):
            write_port(path / "ports" / str(number), port)
        return path

    def nic(
        self, name: str, way: str, ports: list[PortFiles] | None = None, *, vendor: int = MELLANOX, numa: int | str = 0
    ) -> Path:
        """A card with one RDMA device; the PCI device's directory."""
        card = self.pci(way, vendor=vendor, numa=numa, driver=DRIVERS[vendor])
        self.rdma(name, card, ports)
        return card


def link(at: Path, to: Path) -> None:
    # relative as the kernel's
    at.symlink_to(os.path.relpath(to, at.parent))


def write_port(path: Path, port: PortFiles) -> None:
    for directory in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (path / directory).mkdir(parents=True)
    for file in ("state", "link_layer", "rate", "lid"):
        (path / file).write_text(getattr(port, file) + "\n")
    for index, (gid, kind, interface) in enumerate(port.gids):
        (path / "gids" / str(index)).write_text(gid + "\n")
        for file, text in (("types", kind), ("ndevs", interface)):
            entry = path / "gid_attrs" / file / str(index)
            if text is None:
                # the kernel's read fails, and so does that of a directory
                entry.mkdir()
            else:
                entry.write_text(text + "\n")


def eight_by_eight(root: Path, *, vendor: int = MELLANOX, prefix: str = "mlx5_") -> tuple[Node, list[str]]:
    """Two sockets, four PCIe switches on each, every switch with one GPU and one NIC; and the GPUs' PCI addresses.

    The cards are numbered in another order than the GPUs, as on real nodes, and a ninth, of storage, hangs on socket 0.
    """
    node, gpus = Node(root), []
    # the switch of each NIC, by the NIC's number
    switches = [2, 3, 0, 1, 6, 7, 4, 5]
    for switch in range(8):
        bus = 0x15 + 0x10 * switch
        top = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        numa, number = switch // 4, switches.index(switch)
        node.gpu(f"{top}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0", numa=numa)
        node.nic(
            f"{prefix}{number}", f"{top}/0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0", vendor=vendor, numa=numa
        )
        gpus.append(f"0000:{bus + 3:02x}:00.0")
    storage = [PortFiles(rate="100 Gb/sec (4X EDR)")]
    node.nic(f"{prefix}8", "pci0000:05/0000:05:01.0/0000:06:00.0", storage, vendor=vendor, numa=0)
    return node, gpus
