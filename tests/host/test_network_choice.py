"""Which transport PEs come to, by what is asked for and what there is."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from mori_triton.env import DeviceFilter
from mori_triton.errors import HeapError, NotSupported, StateError
from mori_triton.host.agreement import together
from mori_triton.host.network import cards as real_cards
from mori_triton.host.network.choose import open_network
from mori_triton.host.nic import agree
from mori_triton.host.proxy import fabric as proxy_fabric
from tests.host.nic.sysfs_trees import BROADCOM, MELLANOX, Node
from tests.host.noted_network import NotedFabric, each, same, site_of

pytestmark = pytest.mark.cpu


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch):
    """The proxy is a double; `proxy.missing[pe]` is why a PE has none."""
    fabric = NotedFabric("proxy")
    fabric.missing = None
    monkeypatch.setattr(proxy_fabric, "ProxyFabric", lambda: fabric)
    monkeypatch.setattr(proxy_fabric, "unavailable", lambda: fabric.missing)
    return fabric


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A node with these cards, whose libraries can be opened; a function that adds one."""
    node = Node(tmp_path)
    for name in ("open_verbs", "open_provider"):
        monkeypatch.setattr(agree, name, lambda *_: None)

    def add(name: str, vendor: int = MELLANOX) -> None:
        node.nic(
            name, f"pci0000:00/0000:{len(list((tmp_path / 'class/infiniband').iterdir())) + 1:02x}:00.0", vendor=vendor
        )

    add.root = tmp_path
    return add


def opened(n: int, root: Path, fabric=None, **settings):
    def program(pe: int, bootstrap):
        own = {name: value[pe] if isinstance(value, list) else value for name, value in settings.items()}
        return open_network(site_of(pe, bootstrap, **own), lambda kind: pytest.fail("no other heap"), fabric, root)

    return each(n, program)


def test_no_network_where_none_is_wanted(tmp_path: Path, proxy) -> None:
    assert opened(1, tmp_path, transport="mlx5") == [None]
    assert opened(2, tmp_path, far=False) == [None, None]
    assert opened(2, tmp_path, far=False, transport="proxy") == [None, None]
    assert opened(2, tmp_path, transport="p2p") == [None, None]
    assert opened(2, tmp_path, NotedFabric(), transport="p2p") == [None, None]
    assert proxy.sites == []


def test_all_take_part_where_one_cannot_reach_another(tmp_path: Path, proxy) -> None:
    networks = opened(3, tmp_path, transport="proxy", far=[False, False, True])
    assert [network.name for network in networks] == ["proxy"] * 3
    assert sorted(site.peers for site in proxy.sites) == [(), (), (0, 1)]


def test_pes_that_want_different_things(tmp_path: Path) -> None:
    error = same(opened(3, tmp_path, transport=["p2p", "auto", "p2p"]))
    assert isinstance(error, HeapError)
    assert "choice of transport: the PEs differ in transport (PE 0: p2p; PE 1: auto; PE 2: p2p)" in str(error)
    error = same(opened(2, tmp_path, num_qp_per_pe=[4, 2]))
    assert "the PEs differ in queue pairs to each PE (PE 0: 4; PE 1: 2)" in str(error)


def test_falling_back_to_the_proxy_warns_once(tmp_path: Path, proxy) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        networks = opened(3, tmp_path)
    assert [network.name for network in networks] == ["proxy"] * 3
    (warning,) = said
    assert warning.category is RuntimeWarning
    text = str(warning.message)
    assert text.startswith("no network card is used (on every PE: no RDMA device with a link that is up: no device)")
    assert "proxy" in text
    assert "slower" in text
    assert "MORI_TRITON_TRANSPORT=proxy asks for that" in text


def test_the_proxy_when_asked_for_warns_of_nothing(tmp_path: Path, proxy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opened(2, tmp_path, transport="proxy")[0].provider == "proxy"


def test_neither_cards_nor_ucx(tmp_path: Path, proxy) -> None:
    proxy.missing = "UCX cannot be loaded: libucp.so.0: no such file. Debian: libucx0"
    error = same(opened(2, tmp_path))
    assert isinstance(error, HeapError)
    for part in ("no network cards (on every PE: no RDMA device", "no proxy (on every PE: UCX cannot be loaded",
                 "Debian: libucx0", "MORI_TRITON_TRANSPORT=p2p"):  # fmt: skip
        assert part in str(error)


def test_a_library_that_is_missing_says_where_it_was_looked_for(monkeypatch, proxy, cards) -> None:
    cards("mlx5_0")

    def missing(*_):
        raise StateError(
            "libmlx5 cannot be opened; tried libmlx5.so.1: no. It is in Debian and Ubuntu: ibverbs-providers"
        )

    monkeypatch.setattr(agree, "open_provider", missing)
    with pytest.warns(
        RuntimeWarning, match=r"mlx5_0:1: libmlx5 cannot be opened; tried libmlx5.so.1.*ibverbs-providers"
    ):
        assert opened(2, cards.root)[1].name == "proxy"


def test_cards_that_all_have_go_first(monkeypatch, proxy, cards) -> None:
    made = []
    monkeypatch.setattr(real_cards, "CardFabric", lambda name, root: made.append(NotedFabric(name)) or made[-1])
    cards("bnxt_re0", BROADCOM)
    cards("mlx5_0")
    assert [network.name for network in opened(2, cards.root)] == ["mlx5", "mlx5"]
    # the user may see to it that some PEs have others
    only = [DeviceFilter(("bnxt_re0",), False), None]
    assert [network.name for network in opened(2, cards.root, rdma_devices=only)] == ["bnxt_re"] * 2
    apart = [DeviceFilter(("bnxt_re0",), False), DeviceFilter(("mlx5_0",), False)]
    with pytest.warns(RuntimeWarning, match="PE 0: has bnxt_re cards only; PE 1: has mlx5 cards only"):
        assert opened(2, cards.root, rdma_devices=apart)[0].name == "proxy"


def test_a_card_that_cannot_be_used_falls_back_too(monkeypatch, proxy, cards) -> None:
    cards("mlx5_0")

    class Broken(NotedFabric):
        def open(self, site):
            return together(site.bootstrap, "the network over mlx5", self.fail)

        def fail(self):
            raise NotSupported("mlx5_0:1 has no atomics")

    monkeypatch.setattr(real_cards, "CardFabric", lambda name, root: Broken(name))
    with pytest.warns(RuntimeWarning, match="no network card is used .*mlx5_0:1 has no atomics"):
        assert opened(2, cards.root)[1].name == "proxy"
    # but not where it was asked for
    error = same(opened(2, cards.root, transport="mlx5"))
    assert isinstance(error, NotSupported)
    assert str(error) == (
        "the network over mlx5 could not be set up (PE 0: mlx5_0:1 has no atomics; PE 1: mlx5_0:1 has no atomics)"
    )


def test_cards_that_are_asked_for_and_not_there(proxy, cards) -> None:
    error = same(opened(2, cards.root, transport="ionic"))
    assert isinstance(error, HeapError)
    assert "the network over ionic could not be set up (PE 0: no ionic card: no RDMA device" in str(error)
    cards("mlx5_0")
    error = same(opened(2, cards.root, transport="ionic"))
    assert "no ionic card: those that there are, are others: mlx5_0:1" in str(error)


def test_devices_that_there_are_not(proxy, cards) -> None:
    cards("mlx5_0")
    wanted = [DeviceFilter(("mlx5_7",), False), None]
    for transport in ("auto", "mlx5"):
        error = same(opened(2, cards.root, rdma_devices=wanted, transport=transport))
        assert "could not be set up (PE 0: MORI_RDMA_DEVICES" in str(error)
        assert "there is no mlx5_7, there are: mlx5_0" in str(error)
    assert proxy.sites == []
