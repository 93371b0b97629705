"""Which transport a world's PEs take to those that they do not map: what is asked for, or what is there."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mori_triton.env import TRANSPORTS
from mori_triton.errors import HeapError, NotSupported, StateError
from mori_triton.host.agreement import agree, together
from mori_triton.host.drivers.base import MemoryKind
from mori_triton.host.network import Network
from mori_triton.host.network.fabric import Fabric, Site
from mori_triton.host.nic.discover import SYSFS

_VARIABLE = "MORI_TRITON_TRANSPORT"
# what is tried first
CARDS = ("mlx5", "bnxt_re", "ionic")

Move = Callable[[MemoryKind], Site]
"""Give the heap up for a new one of this kind. Collective."""


def open_network(site: Site, move: Move, fabric: Fabric | None = None, root: Path = SYSFS) -> Network | None:
    """Connect the PEs of a world; None where all reach each other, or are to do with those they reach. Collective.

    Args:
        move: for a transport that wants the heap in other memory than it is in.
        fabric: what to use instead of looking for one.
        root: of sysfs.

    Raises:
        HeapError, NotSupported, StateError: on every PE, when what is asked for, or everything, is missing on one.
    """
    if site.n_pes == 1:
        return None
    same = {"transport": site.settings.transport, "queue pairs to each PE": site.settings.num_qp_per_pe}
    mine = {"far": len(site.peers), "same": same}
    told = site.bootstrap.allgather(json.dumps(mine).encode(), "choice of transport")
    everyone = [json.loads(data) for data in told]
    agree("choice of transport", [one["same"] for one in everyone])
    transport = site.settings.transport
    if transport == "p2p" or not any(one["far"] for one in everyone):
        return None
    if fabric is not None:
        return _over(fabric, site, move)
    if transport in CARDS:
        return _over(_cards(transport, root), site, move)
    if transport == "proxy":
        return _over(_proxy(), site, move)
    assert transport == "auto", f"{transport} is not one of {TRANSPORTS}"
    return _best(site, move, root)


# what a world does not use is not imported


def _cards(provider: str, root: Path) -> Fabric:
    from mori_triton.host.network.cards import CardFabric

    return CardFabric(provider, root)


def _proxy() -> Fabric:
    from mori_triton.host.proxy.fabric import ProxyFabric

    return ProxyFabric()


def _over(fabric: Fabric, site: Site, move: Move) -> Network:
    kind = fabric.heap_kind
    # to the CPU all memory is of one kind
    if kind is None or kind is site.kind or site.driver.name == "cpu":
        return Network(fabric, site)
    return Network(fabric, move(kind))


def _best(site: Site, move: Move, root: Path) -> Network:
    """A network over cards if all PEs have some of one kind, else over the proxy."""
    from mori_triton.host.network.cards import usable_cards
    from mori_triton.host.proxy.fabric import unavailable

    usable, reason = together(site.bootstrap, "the choice of network cards", lambda: usable_cards(site.settings, root))
    mine = {"cards": sorted({link.device.provider for link in usable}), "reason": reason, "proxy": unavailable()}
    told = site.bootstrap.allgather(json.dumps(mine).encode(), "transports that there are")
    everyone = [json.loads(data) for data in told]
    common = [card for card in CARDS if all(card in one["cards"] for one in everyone)]
    if common:
        if reason and site.pe == 0:
            warnings.warn(
                f"some network cards are not used ({reason}); MORI_RDMA_DEVICES says which to look at",
                RuntimeWarning,
                stacklevel=2,
            )
        try:
            return _over(_cards(common[0], root), site, move)
        except (HeapError, NotSupported, StateError) as error:
            # the same on every PE
            why = str(error)
    else:
        has = [f"has {', '.join(one['cards'])} cards only" if one["cards"] else None for one in everyone]
        why = _each([", ".join(filter(None, (text, one["reason"]))) for text, one in zip(has, everyone, strict=True)])
    lacking = [one["proxy"] for one in everyone]
    if any(lacking):
        raise HeapError(
            f"PEs of this world do not reach each other by load and store, and there is no other transport: no network "
            f"cards ({why}), no proxy ({_each(lacking)}). {_VARIABLE}=p2p does without those PEs"
        )
    if site.pe == 0:
        warnings.warn(
            f"no network card is used ({why}); PEs that do not reach each other by load and store go through the "
            f"proxy, a host thread with UCX, which is slower. {_VARIABLE}=proxy asks for that",
            RuntimeWarning,
            stacklevel=2,
        )
    return _over(_proxy(), site, move)


def _each(texts: Sequence[Any]) -> str:
    """The texts of all PEs; once, if all have the same."""
    if len(set(texts)) == 1:
        return f"on every PE: {texts[0]}"
    return "; ".join(f"PE {pe}: {text}" for pe, text in enumerate(texts) if text)
