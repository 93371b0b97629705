"""What sysfs says of RDMA devices, on trees of whole nodes and of odd ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from mori_triton.host.nic.discover import discover, numa_node_of, pci_path_of
from tests.host.nic.sysfs_trees import BROADCOM, MELLANOX, PENSANDO, Node, PortFiles, eight_by_eight, link

pytestmark = pytest.mark.cpu


def test_eight_nics_of_a_node(tmp_path: Path) -> None:
    _, gpus = eight_by_eight(tmp_path)
    devices = discover(tmp_path)
    assert [device.name for device in devices] == [f"mlx5_{number}" for number in range(9)]
    first = devices[0]
    assert first.pci_path == ("pci0000:35", "0000:35:01.0", "0000:36:00.0", "0000:37:01.0", "0000:39:00.0")
    assert (first.pci_address, first.numa_node, first.physical) == ("0000:39:00.0", 0, None)
    assert (first.provider, first.driver, first.vendor_id, first.device_id) == ("mlx5", "mlx5_core", 0x15B3, 0x1021)
    assert [device.numa_node for device in devices] == [0, 0, 0, 0, 1, 1, 1, 1, 0]
    assert all(device.problems == () for device in devices)
    (port,) = first.ports
    assert (port.number, port.state, port.active, port.link_layer) == (1, "ACTIVE", True, "Ethernet")
    assert (port.gbit_s, port.lid) == (400.0, 0)
    assert devices[8].ports[0].gbit_s == 100.0
    # the empty entry is left out, the indices stay
    assert [(gid.index, gid.kind, gid.interface) for gid in port.gids] == [
        (0, "IB/RoCE v1", "eth0"), (1, "RoCE v2", "eth0"), (2, "IB/RoCE v1", "eth0"), (3, "RoCE v2", "eth0"),
    ]  # fmt: skip
    assert str(port.gids[3]) == "10.0.0.1"
    assert str(port.gids[0]) == "fe80::ee0d:9aff:fe00:1"
    assert port.gids[0].ipv4 is None
    assert pci_path_of(gpus[2].upper(), tmp_path)[:3] == first.pci_path[:3]
    assert numa_node_of(gpus[7], tmp_path) == 1


@pytest.mark.parametrize(("vendor", "provider"), [(MELLANOX, "mlx5"), (BROADCOM, "bnxt_re"), (PENSANDO, "ionic")])
def test_k7_the_provider_is_told_by_the_card_not_by_the_name(tmp_path: Path, vendor: int, provider: str) -> None:
    Node(tmp_path).nic("roceP2p1s0", "pci0002:00/0002:00:01.0/0002:01:00.0", vendor=vendor)
    (device,) = discover(tmp_path)
    assert (device.name, device.provider) == ("roceP2p1s0", provider)


def test_other_cards_and_drivers_are_other(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.rdma("irdma0", node.pci("pci0000:00/0000:01:00.0", vendor=0x8086, driver="ice"))
    node.rdma("mlx4_0", node.pci("pci0000:00/0000:02:00.0", vendor=MELLANOX, driver="mlx4_core"))
    assert [(device.name, device.provider) for device in discover(tmp_path)] == [
        ("irdma0", "other"),
        ("mlx4_0", "other"),
    ]


def test_no_rdma_at_all(tmp_path: Path) -> None:
    assert discover(tmp_path) == ()
    Node(tmp_path / "empty")
    assert discover(tmp_path / "empty") == ()


def test_numbers_are_in_their_order(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for number in (10, 2, 0):
        node.nic(f"mlx5_{number}", f"pci0000:00/0000:{number + 1:02x}:00.0")
    assert [device.name for device in discover(tmp_path)] == ["mlx5_0", "mlx5_2", "mlx5_10"]


def test_two_ports_of_which_one_is_down(tmp_path: Path) -> None:
    infiniband = PortFiles(link_layer="InfiniBand", lid="0x1a", gids=[("fe80::2:c903:f:1", "IB/RoCE v1", None)])
    down = PortFiles(state="1: DOWN", rate="2.5 Gb/sec (1X SDR)", gids=[])
    Node(tmp_path).nic("mlx5_0", "pci0000:00/0000:01:00.0", [infiniband, down], numa=-1)
    (device,) = discover(tmp_path)
    one, two = device.ports
    assert (one.number, one.link_layer, one.lid, one.gids[0].interface) == (1, "InfiniBand", 26, None)
    assert (two.number, two.state, two.active, two.gbit_s, two.gids) == (2, "DOWN", False, 2.5, ())
    assert device.numa_node is None
    assert device.problems == ()


def test_virtual_functions_name_their_card(tmp_path: Path) -> None:
    node = Node(tmp_path)
    card = node.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0")
    link(node.nic("mlx5_1", "pci0000:00/0000:00:01.0/0000:01:00.1") / "physfn", card)
    assert [device.physical for device in discover(tmp_path)] == [None, "0000:01:00.0"]


def test_a_part_of_a_card_finds_the_card(tmp_path: Path) -> None:
    """A subfunction's parent is an auxiliary device below the PCI device."""
    node = Node(tmp_path)
    card = node.pci("pci0000:00/0000:01:00.0", vendor=MELLANOX, driver="mlx5_core", numa=1)
    (card / "mlx5_core.sf.2").mkdir()
    node.rdma("mlx5_4", card / "mlx5_core.sf.2")
    (device,) = discover(tmp_path)
    assert (device.pci_address, device.provider, device.numa_node) == ("0000:01:00.0", "mlx5", 1)


def test_a_device_without_pci(tmp_path: Path) -> None:
    """Soft RoCE has no parent at all."""
    node = Node(tmp_path)
    path = tmp_path / "devices/virtual/infiniband/rxe0"
    path.mkdir(parents=True)
    link(tmp_path / "class/infiniband/rxe0", path)
    node.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    soft = discover(tmp_path)[1]
    assert (soft.name, soft.provider, soft.pci_path, soft.pci_address) == ("rxe0", "other", (), None)
    assert (soft.numa_node, soft.vendor_id, soft.driver) == (None, None, None)
    assert soft.ports == ()
    assert any("no ports" in problem for problem in soft.problems)


@pytest.mark.parametrize(
    ("file", "text", "field", "value"),
    [
        ("state", "", "state", "unknown"), ("state", "ACTIVE", "state", "unknown"), ("state", "4:", "state", "unknown"),
        ("rate", "fast", "gbit_s", None), ("lid", "zero", "lid", None),
        ("link_layer", "Token Ring", "link_layer", "unknown"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named(tmp_path: Path, file: str, text: str, field: str, value: object) -> None:
    port = Node(tmp_path).nic("mlx5_0", "pci0000:00/0000:01:00.0") / "infiniband/mlx5_0/ports/1"
    (port / file).write_text(text)
    (device,) = discover(tmp_path)
    assert getattr(device.ports[0], field) == value
    (problem,) = device.problems
    assert problem.endswith(f"ports/1/{file}: cannot be understood")


def test_missing_files_are_named(tmp_path: Path) -> None:
    card = Node(tmp_path).nic("mlx5_0", "pci0000:00/0000:01:00.0")
    (card / "vendor").unlink()
    (card / "numa_node").write_text("near\n")
    (card / "infiniband/mlx5_0/ports/1/state").unlink()
    (card / "infiniband/mlx5_0/ports/1/gids/1").write_text("not a gid\n")
    (device,) = discover(tmp_path)
    assert (device.provider, device.numa_node, device.ports[0].active) == ("other", None, False)
    assert [gid.index for gid in device.ports[0].gids] == [0, 2, 3]
    assert [Path(problem.split(": ")[0]).name for problem in device.problems] == ["vendor", "numa_node", "state", "1"]


def test_gpus_without_a_place(tmp_path: Path) -> None:
    Node(tmp_path).gpu("pci0000:00/0000:01:00.0", numa=-1)
    assert numa_node_of("0000:01:00.0", tmp_path) is None
    assert numa_node_of("0000:99:00.0", tmp_path) is None
    assert pci_path_of("0000:99:00.0", tmp_path) == ()
