"""Which network link each GPU takes: the user's filter, nearness on PCI, ties."""

from __future__ import annotations

from pathlib import Path

import pytest

from mori_triton import env
from mori_triton.errors import EnvError, StateError
from mori_triton.host.nic.discover import discover, numa_node_of, pci_path_of
from mori_triton.host.nic.select import Distance, choose_gid, choose_links, distance, filter_devices, links
from tests.host.nic.sysfs_trees import Node, PortFiles, eight_by_eight, link

pytestmark = pytest.mark.cpu

NAME = "MORI_RDMA_DEVICES"


def read(text: str | None):
    return env.snapshot({} if text is None else {NAME: text}).rdma_devices


def names(devices) -> list[str]:
    return [device.name for device in devices]


@pytest.fixture
def twelve(tmp_path: Path):
    """mlx5_0 to mlx5_11."""
    node = Node(tmp_path)
    for number in range(12):
        node.nic(f"mlx5_{number}", f"pci0000:00/0000:{number + 1:02x}:00.0")
    return discover(tmp_path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("mlx5_3,mlx5_1", ["mlx5_3", "mlx5_1"]),
        (" mlx5_3 ,\tmlx5_1 ", ["mlx5_3", "mlx5_1"]),
        ("mlx5_1", ["mlx5_1"]),
        ("mlx5_10", ["mlx5_10"]),
        (",mlx5_3,,mlx5_1,", ["mlx5_3", "mlx5_1"]),
        ("mlx5_3,mlx5_1,mlx5_3", ["mlx5_3", "mlx5_1"]),
        ("^mlx5_1", [f"mlx5_{number}" for number in range(12) if number != 1]),
        (" ^ mlx5_1 , mlx5_0", [f"mlx5_{number}" for number in range(2, 12)]),
        (None, [f"mlx5_{number}" for number in range(12)]),
        ("", [f"mlx5_{number}" for number in range(12)]),
        ("^", [f"mlx5_{number}" for number in range(12)]),
    ],
)
def test_j2_filter(twelve, text: str | None, wanted: list[str]) -> None:
    assert names(filter_devices(twelve, read(text))) == wanted


@pytest.mark.parametrize(
    "text", [",", " , ", "^,", "^^mlx5_1", "mlx5_0,^mlx5_1", "mlx5_0 mlx5_1", "mlx5_0;/dev", "a^b", "/sys/mlx5_0"]
)
def test_j2_malformed(text: str) -> None:
    with pytest.raises(EnvError) as caught:
        read(text)
    for part in (NAME, repr(text), "mlx5_0,mlx5_1", "^mlx5_2"):
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["mlx5_1,mlx5_12", "^mlx5_12", "MLX5_1", "mlx5_", "mlx5_*"])
def test_j2_unknown_names(twelve, text: str) -> None:
    with pytest.raises(EnvError, match=NAME) as caught:
        filter_devices(twelve, read(text))
    assert ", ".join(names(twelve)) in str(caught.value)
    with pytest.raises(EnvError, match="there are: none"):
        filter_devices((), read(text))


def test_j2_nothing_left(twelve) -> None:
    with pytest.raises(EnvError, match=r"excludes every device there is: mlx5_0, mlx5_1, .*mlx5_11"):
        filter_devices(twelve, read("^" + ",".join(names(twelve))))


def test_virtual_functions_do_not_count_a_link_twice(tmp_path: Path) -> None:
    node = Node(tmp_path)
    card = node.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0")
    link(node.nic("mlx5_1", "pci0000:00/0000:00:01.0/0000:01:00.1") / "physfn", card)
    devices = discover(tmp_path)
    assert names(filter_devices(devices, None)) == ["mlx5_0"]
    assert names(filter_devices(devices, read("^mlx5_0"))) == ["mlx5_1"]
    assert names(filter_devices(devices, read("mlx5_1,mlx5_0"))) == ["mlx5_1", "mlx5_0"]
    # a container may have been given functions only
    assert names(filter_devices(devices[1:], None)) == ["mlx5_1"]


def test_each_gpu_takes_the_card_of_its_switch(tmp_path: Path) -> None:
    _, gpus = eight_by_eight(tmp_path)
    up = links(filter_devices(discover(tmp_path), None))
    assert len(up) == 9
    chosen = choose_links(gpus, up, tmp_path)
    assert [str(one) for one in chosen] == [f"mlx5_{number}:1" for number in (2, 3, 0, 1, 6, 7, 4, 5)]
    # whatever order they are listed in
    assert choose_links(gpus[::-1], up[::-1], tmp_path) == chosen[::-1]
    assert choose_links(gpus[5:6], up, tmp_path) == chosen[5:6]


def test_distances(tmp_path: Path) -> None:
    node = Node(tmp_path)
    gpu = "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0"
    node.gpu(gpu, numa=1)
    ways = {
        "near": gpu.replace("12:00.0/0000:13:00.0", "12:01.0/0000:14:00.0"),
        "switch_above": "pci0000:10/0000:10:01.0/0000:15:00.0/0000:16:00.0/0000:17:00.0/0000:18:00.0",
        "root_complex": "pci0000:10/0000:10:02.0/0000:19:00.0",
    }
    for name, way in ways.items():
        node.nic(name, way, numa=1)
    node.nic("numa", "pci0000:20/0000:20:01.0/0000:21:00.0", numa=1)
    node.nic("other", "pci0000:30/0000:30:01.0/0000:31:00.0", numa=0)
    node.nic("unknown", "pci0000:40/0000:40:01.0/0000:41:00.0", numa=-1)
    devices = {device.name: device for device in discover(tmp_path)}
    way, numa = pci_path_of("0000:13:00.0", tmp_path), numa_node_of("0000:13:00.0", tmp_path)
    found = {name: distance(way, numa, device) for name, device in devices.items()}
    assert found == {
        "near": (Distance.SWITCH, 4),
        "switch_above": (Distance.SWITCH, 7),
        "root_complex": (Distance.ROOT_COMPLEX, 0),
        "numa": (Distance.NUMA, 0),
        "other": (Distance.FAR, 0),
        "unknown": (Distance.FAR, 0),
    }
    # nearest first, and each takes over when those before it are gone
    order = ["near", "switch_above", "root_complex", "numa", "other"]
    for at, name in enumerate(order):
        (chosen,) = choose_links(
            ["0000:13:00.0"], links([devices[left] for left in [*order[at:], "unknown"]]), tmp_path
        )
        assert chosen.device.name == name
    # without knowing where the GPU is all are the same
    assert distance((), None, devices["unknown"]) == (Distance.FAR, 0)


def test_ties_are_spread_over_gpus_with_the_same_choice(tmp_path: Path) -> None:
    """Two sockets with two cards each, far from the GPUs; the GPUs alternate between the sockets."""
    node, gpus = Node(tmp_path), []
    for number in range(4):
        way = f"pci0000:{number:02x}/0000:{number:02x}:01.0/0000:{number + 0x10:02x}:00.0"
        node.nic(f"mlx5_{number}", way, numa=number // 2)
    for number in range(8):
        node.gpu(f"pci0000:{number + 0x80:02x}/0000:{number + 0x90:02x}:00.0", numa=number % 2)
        gpus.append(f"0000:{number + 0x90:02x}:00.0")
    up = links(discover(tmp_path))
    assert [one.device.name for one in choose_links(gpus, up, tmp_path)] == [
        f"mlx5_{number}" for number in (0, 2, 1, 3, 0, 2, 1, 3)
    ]
    # GPUs that this node's sysfs does not show, and two PEs on one
    assert [one.device.name for one in choose_links(["0000:ff:00.0"] * 5, up, tmp_path)] == [
        f"mlx5_{number}" for number in (0, 1, 2, 3, 0)
    ]


def test_ports_of_a_card_are_links_of_their_own(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", [PortFiles(), PortFiles(state="1: DOWN"), PortFiles()])
    node.nic("mlx5_1", "pci0000:00/0000:00:02.0/0000:02:00.0", [PortFiles(state="2: INIT")])
    up = links(discover(tmp_path))
    assert [str(one) for one in up] == ["mlx5_0:1", "mlx5_0:3"]
    assert [str(one) for one in choose_links(["0000:03:00.0"] * 3, up, tmp_path)] == [
        "mlx5_0:1",
        "mlx5_0:3",
        "mlx5_0:1",
    ]


def test_no_link_is_up(tmp_path: Path) -> None:
    card = Node(tmp_path).nic("mlx5_0", "pci0000:00/0000:01:00.0", [PortFiles(state="1: DOWN"), PortFiles()])
    (card / "infiniband/mlx5_0/ports/2/state").write_text("?")
    with pytest.raises(StateError, match=r"mlx5_0 port 1 is DOWN .*port 2 is unknown .*ports/2/state: cannot be"):
        links(discover(tmp_path))
    with pytest.raises(StateError, match="no device"):
        links(())


def test_gid(tmp_path: Path) -> None:
    node = Node(tmp_path)
    v6 = ("2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2", "eth0")
    local = ("fe80:0000:0000:0000:ee0d:9aff:fe00:0001", "RoCE v2", "eth0")
    old = ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1", "eth0")
    infiniband = [("fe80::2:c903:f:1", "IB/RoCE v1", None), ("fe80::2:c903:f:2", "IB/RoCE v1", None)]
    tables = [PortFiles().gids, [old, local, v6, v6], [old, local], infiniband, []]
    node.nic("mlx5_0", "pci0000:00/0000:01:00.0", [PortFiles(gids=table) for table in tables])
    best, routed, only_local, fabric, none = links(discover(tmp_path))
    assert [choose_gid(one).index for one in (best, routed, only_local, fabric)] == [3, 2, 1, 0]
    assert choose_gid(best, env.get("MORI_IB_GID_INDEX", {})).index == 3
    assert choose_gid(best, env.get("MORI_IB_GID_INDEX", {"MORI_IB_GID_INDEX": "0"})).index == 0
    with pytest.raises(EnvError, match=r"MORI_IB_GID_INDEX: .*mlx5_0:1.*3 \(10\.0\.0\.1\).* got 4"):
        choose_gid(best, 4)
    with pytest.raises(StateError, match="mlx5_0:5: the port has no address"):
        choose_gid(none)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("MORI_IB_GID_INDEX", {"-1": -1, " 3 ": 3, "255": 255}, ["-2", "256", "", "x", "1.0", "0x1"]),
        ("MORI_RDMA_SL", {"0": 0, "15": 15}, ["-1", "16", ""]),
        ("MORI_RDMA_TC", {"0": 0, "255": 255}, ["-1", "256", "high"]),
        ("MORI_IBVERBS_LIB", {" /opt/libibverbs.so.1 ": "/opt/libibverbs.so.1"}, [" "]),
    ],
)
def test_variables(name: str, good: dict[str, object], bad: list[str]) -> None:
    for text, value in good.items():
        assert env.get(name, {name: text}) == value
    for text in bad:
        with pytest.raises(EnvError, match=name):
            env.get(name, {name: text})
