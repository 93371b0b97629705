"""What PEs settle: links that can be posted to, and whose link is whose."""

from __future__ import annotations

from pathlib import Path

import pytest

from mori_triton.errors import StateError
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.nic import agree
from mori_triton.host.nic.agree import own_link, postable_links
from mori_triton.host.nic.discover import discover
from mori_triton.host.nic.select import links
from tests.host.nic.sysfs_trees import BROADCOM, PENSANDO, Node, eight_by_eight
from tests.host.worlds import run_threads

pytestmark = pytest.mark.cpu


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch):
    """What is opened, and by `broken[name]` what cannot be."""
    calls: list[object] = []
    broken: dict[str, str] = {}

    def provider(name: str) -> None:
        calls.append(name)
        if name in broken:
            raise StateError(broken[name])

    monkeypatch.setattr(agree, "open_verbs", lambda override: (calls.append(override), provider("libibverbs")))
    monkeypatch.setattr(agree, "open_provider", provider)
    return calls, broken


def four_makers(root: Path):
    node = Node(root)
    node.nic("bnxt_re0", "pci0000:00/0000:01:00.0", vendor=BROADCOM)
    node.nic("ionic_0", "pci0000:00/0000:02:00.0", vendor=PENSANDO)
    node.rdma("irdma0", node.pci("pci0000:00/0000:03:00.0", vendor=0x8086, driver="ice"))
    for number in (0, 1):
        node.nic(f"mlx5_{number}", f"pci0000:00/0000:{number + 4:02x}:00.0")
    return links(discover(root))


def test_k2_a_kind_of_card_that_cannot_be_opened_is_left_out(tmp_path: Path, opened) -> None:
    calls, broken = opened
    up = four_makers(tmp_path)
    good, reasons = postable_links(up, "/opt/libibverbs.so.1")
    assert [str(link) for link in good] == ["bnxt_re0:1", "ionic_0:1", "mlx5_0:1", "mlx5_1:1"]
    assert reasons == ("irdma0:1: device code can post to mlx5, bnxt_re, ionic cards only",)
    assert "/opt/libibverbs.so.1" in calls
    broken["libmlx5"] = "libibverbs.so.1: version `IBVERBS_PRIVATE_34' not found"
    good, reasons = postable_links(up)
    assert [str(link) for link in good] == ["bnxt_re0:1", "ionic_0:1"]
    assert reasons[1:] == ("mlx5_0:1, mlx5_1:1: libibverbs.so.1: version `IBVERBS_PRIVATE_34' not found",)


def test_k1_without_libibverbs_there_is_none(tmp_path: Path, opened) -> None:
    calls, broken = opened
    broken["libibverbs"] = "libibverbs cannot be opened"
    good, reasons = postable_links(four_makers(tmp_path))
    assert good == ()
    assert [reason.endswith("libibverbs cannot be opened") for reason in reasons] == [True, True, False, True]
    assert set(calls) == {None, "libibverbs"}
    calls.clear()
    # a node without cards does not want it
    assert postable_links(()) == ((), ())
    assert calls == []


def each_pe(n_pes: int, program):
    group = ThreadGroup(n_pes)

    def run(pe: int):
        try:
            return program(pe, group.bootstrap(pe))
        except StateError as error:
            return str(error)

    return run_threads(n_pes, run)


def test_sixteen_pes_of_two_nodes(tmp_path: Path) -> None:
    _, gpus = eight_by_eight(tmp_path)
    up = links(discover(tmp_path))
    # PEs of the nodes in turn, each node with its GPUs in its order
    chosen = each_pe(16, lambda pe, bootstrap: own_link(bootstrap, f"node{pe % 2}", gpus[pe // 2], up, tmp_path))
    assert [link.device.name for link in chosen[0::2]] == [f"mlx5_{number}" for number in (2, 3, 0, 1, 6, 7, 4, 5)]
    assert chosen[0::2] == chosen[1::2]


def test_pes_without_gpus_take_turns(tmp_path: Path) -> None:
    up = four_makers(tmp_path)
    chosen = each_pe(3, lambda pe, bootstrap: own_link(bootstrap, "a", "", up, tmp_path))
    assert chosen == list(up[:3])


def test_pes_that_see_other_links(tmp_path: Path) -> None:
    up = four_makers(tmp_path)
    errors = each_pe(3, lambda pe, bootstrap: own_link(bootstrap, "a", "", up[: 2 - pe // 2], tmp_path))
    text = "PEs of node a do not see the same network links (PE 0: bnxt_re0:1, ionic_0:1; PE 2: bnxt_re0:1)"
    assert errors == [text] * 3
    assert each_pe(1, lambda pe, bootstrap: own_link(bootstrap, "a", "", (), tmp_path)) == [
        "PE 0: node a has no network link to choose"
    ]
