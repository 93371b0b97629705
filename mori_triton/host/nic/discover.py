"""The RDMA devices of this node, as the kernel's sysfs tells of them. Opens no library and no device.

What a file should say and does not is not guessed: the value is `None` (or a port's state "unknown"), and
`RdmaDevice.problems` names the file and what is wrong with it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSFS = Path("/sys")
# device names vary with the system's naming rules; who made a card does not
PROVIDERS = {0x15B3: "mlx5", 0x14E4: "bnxt_re", 0x1DD8: "ionic"}
# made by the vendor of mlx5 cards, and not one of them
_OTHER_DRIVERS = ("mlx4_core",)
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_PCI_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


@dataclass(frozen=True)
class Gid:
    """An address of a port. `kind`: "RoCE v2", "IB/RoCE v1", or None where the kernel does not say."""

    index: int
    raw: bytes
    kind: str | None
    interface: str | None  # the network interface it belongs to

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        """The IPv4 address that it stands for, if it does for one."""
        return ipaddress.IPv6Address(self.raw).ipv4_mapped

    def __str__(self) -> str:
        return str(self.ipv4 or ipaddress.IPv6Address(self.raw))


@dataclass(frozen=True)
class Port:
    """A port of a device. `gbit_s`: of the link as it is now, per direction. `gids`: those that are not empty."""

    number: int
    state: str  # "ACTIVE", "DOWN", "INIT", "ARMED", ..., "unknown"
    link_layer: str  # "Ethernet", "InfiniBand", "unknown"
    gbit_s: float | None
    lid: int | None
    gids: tuple[Gid, ...]

    @property
    def active(self) -> bool:
        """Whether something can be sent through it."""
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class RdmaDevice:
    """A device of /sys/class/infiniband.

    `pci_path` names the PCI devices from the root complex down to it, both ends included; empty for a device that is
    not on PCI (soft RoCE, iWARP over TCP). `physical` is the PCI address of the card whose virtual function it is.
    """

    name: str
    provider: str  # "mlx5", "bnxt_re", "ionic", "other"
    driver: str | None  # the kernel's, such as "mlx5_core"
    vendor_id: int | None  # of PCI
    device_id: int | None
    pci_path: tuple[str, ...]
    numa_node: int | None
    physical: str | None
    ports: tuple[Port, ...]
    problems: tuple[str, ...]

    @property
    def pci_address(self) -> str | None:
        """Such as "0000:17:00.0"."""
        return self.pci_path[-1] if self.pci_path else None


class _Reader:
    """Reads files, and keeps what was wrong with them."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def value(self, path: Path, parse: Callable[[str], Any]) -> Any:
        """`parse` of the text of a file; None if there is no reading it."""
        try:
            return parse(path.read_text().strip())
        except OSError as error:
            self.problems.append(f"{path}: {error.strerror}")
        except ValueError:
            self.problems.append(f"{path}: cannot be understood")
        return None


def _number(text: str) -> int:
    return int(text, 0)


def _state(text: str) -> str:
    # such as "4: ACTIVE"
    number, _, word = text.partition(":")
    int(number)
    if not word.strip():
        raise ValueError(text)
    return word.strip()


def _rate(text: str) -> float:
    # such as "400 Gb/sec (4X NDR)"
    match = re.match(r"(\d+(?:\.\d+)?) Gb/sec", text)
    if match is None:
        raise ValueError(text)
    return float(match.group(1))


def _link_layer(text: str) -> str:
    if text not in ("Ethernet", "InfiniBand"):
        raise ValueError(text)
    return text


def _numbered(directory: Path) -> list[Path]:
    """Entries whose names are numbers, in order; none if there is no such directory."""
    try:
        return sorted((entry for entry in directory.iterdir() if entry.name.isdecimal()), key=lambda e: int(e.name))
    except OSError:
        return []


def _optional(path: Path) -> str | None:
    # the kernel fails the read for an entry of a table that is empty
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _gids(port: Path, reader: _Reader) -> tuple[Gid, ...]:
    gids = []
    for entry in _numbered(port / "gids"):
        text = _optional(entry)
        if text is None:
            continue
        try:
            raw = ipaddress.IPv6Address(text).packed
        except ValueError:
            reader.problems.append(f"{entry}: cannot be understood")
            continue
        if any(raw):
            kind = _optional(port / "gid_attrs" / "types" / entry.name)
            interface = _optional(port / "gid_attrs" / "ndevs" / entry.name)
            gids.append(Gid(int(entry.name), raw, kind, interface))
    return tuple(gids)


def _port(path: Path, reader: _Reader) -> Port:
    return Port(
        number=int(path.name),
        state=reader.value(path / "state", _state) or "unknown",
        link_layer=reader.value(path / "link_layer", _link_layer) or "unknown",
        gbit_s=reader.value(path / "rate", _rate),
        lid=reader.value(path / "lid", _number),
        gids=_gids(path, reader),
    )


def pci_path(device: Path) -> tuple[str, ...]:
    """The PCI devices on the way to a device's directory, root complex first; () if it is not on PCI."""
    parts = device.resolve().parts
    roots = [at for at, part in enumerate(parts) if _PCI_ROOT.fullmatch(part)]
    if not roots:
        return ()
    on_pci = [part for part in parts[roots[0] + 1 :] if _PCI_ADDRESS.fullmatch(part)]
    return (parts[roots[0]], *on_pci) if on_pci else ()


def pci_path_of(address: str, root: Path = SYSFS) -> tuple[str, ...]:
    """The same for a PCI address such as "0000:18:00.0"; () if this node has no such device."""
    entry = root / "bus" / "pci" / "devices" / address.lower()
    return pci_path(entry) if entry.exists() else ()


def numa_node_of(address: str, root: Path = SYSFS) -> int | None:
    """The NUMA node of a PCI device; None where the kernel knows of none."""
    try:
        node = int((root / "bus" / "pci" / "devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _device(path: Path) -> RdmaDevice:
    reader = _Reader()
    way = pci_path(path / "device")
    vendor = device = numa = driver = physical = None
    if way:
        # the PCI device itself: `device` may be a part of it that a driver has made
        card = (path / "device").resolve()
        while card.name != way[-1]:
            card = card.parent
        vendor, device = (reader.value(card / file, _number) for file in ("vendor", "device"))
        numa = reader.value(card / "numa_node", _number)
        driver = (card / "driver").resolve().name if (card / "driver").exists() else None
        physical = (card / "physfn").resolve().name if (card / "physfn").exists() else None
    provider = "other" if vendor is None or driver in _OTHER_DRIVERS else PROVIDERS.get(vendor, "other")
    ports = tuple(_port(entry, reader) for entry in _numbered(path / "ports"))
    if not ports:
        reader.problems.append(f"{path / 'ports'}: no ports")
    return RdmaDevice(
        name=path.name,
        provider=provider,
        driver=driver,
        vendor_id=vendor,
        device_id=device,
        pci_path=way,
        # -1 stands for none
        numa_node=numa if numa is not None and numa >= 0 else None,
        physical=physical,
        ports=ports,
        problems=tuple(reader.problems),
    )


def _natural(name: str) -> list[tuple[int, int | str]]:
    # mlx5_2 before mlx5_10
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part]


def discover(root: Path = SYSFS) -> tuple[RdmaDevice, ...]:
    """Every RDMA device, those without an active port too, by name with numbers in their order. `root`: of sysfs."""
    try:
        names = sorted((entry.name for entry in (root / "class" / "infiniband").iterdir()), key=_natural)
    except OSError:
        # no RDMA in this kernel, or in this container
        return ()
    return tuple(_device(root / "class" / "infiniband" / name) for name in names)
