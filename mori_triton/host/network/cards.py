"""Real network cards as a transport: those that kernels of a PE may post to, and who takes which."""

from __future__ import annotations

from pathlib import Path

from mori_triton.env import Settings
from mori_triton.errors import StateError
from mori_triton.host.agreement import together
from mori_triton.host.network.fabric import Links, Site
from mori_triton.host.network.queue_pairs import QueuePairLinks
from mori_triton.host.nic.agree import own_link, postable_links
from mori_triton.host.nic.card import NicCard
from mori_triton.host.nic.discover import SYSFS, discover
from mori_triton.host.nic.select import Link, filter_devices, links


def usable_cards(settings: Settings, root: Path = SYSFS) -> tuple[tuple[Link, ...], str | None]:
    """The links to whose cards kernels of this PE may post; why not to others that there are, None if to all.

    Raises:
        EnvError: `MORI_RDMA_DEVICES` asks for what there is not.
    """
    chosen = filter_devices(discover(root), settings.rdma_devices)
    try:
        usable, reasons = postable_links(links(chosen), settings.ibverbs_lib)
    except StateError as error:
        return (), str(error)
    return usable, "; ".join(reasons) or None


class CardFabric:
    """Queue pairs of real cards of one kind, one card for each GPU. `name`: of `CARDS`."""

    heap_kind = None

    def __init__(self, name: str, root: Path = SYSFS) -> None:
        self.name, self._root = name, root

    def open(self, site: Site) -> Links:
        """See `Fabric`."""
        candidates = together(site.bootstrap, f"the network over {self.name}", lambda: self._candidates(site.settings))
        link = own_link(site.bootstrap, site.node, site.driver.pci_address, candidates, self._root)
        return QueuePairLinks(site, self.name, lambda: NicCard(site.driver, link, site.settings))

    def _candidates(self, settings: Settings) -> tuple[Link, ...]:
        usable, reason = usable_cards(settings, self._root)
        mine = tuple(link for link in usable if link.device.provider == self.name)
        if not mine:
            others = f"those that there are, are others: {', '.join(map(str, usable))}" if usable else None
            raise StateError(f"no {self.name} card: {'; '.join(filter(None, (reason, others)))}")
        return mine
