"""What the PEs of a node settle together: the links whose libraries can be opened, and who takes which of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mori_triton.errors import StateError
from mori_triton.host.bootstrap.base import Bootstrap
from mori_triton.host.nic.discover import SYSFS
from mori_triton.host.nic.libraries import open_provider, open_verbs
from mori_triton.host.nic.select import Link, choose_links

LIBRARIES = {"mlx5": "libmlx5", "bnxt_re": "libbnxt_re", "ionic": "libionic"}


def postable_links(links: Sequence[Link], ibverbs_lib: str | None = None) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """The links to whose cards device code can post, and why not to the others, one text for each kind of card.

    Opens libibverbs (`ibverbs_lib`: as `libraries.open_verbs`) and the providers' libraries of these cards, no others.
    """
    reasons: dict[str, str | None] = {}
    for provider in dict.fromkeys(link.device.provider for link in links):
        names = ", ".join(str(link) for link in links if link.device.provider == provider)
        if provider not in LIBRARIES:
            reasons[provider] = f"{names}: device code can post to {', '.join(LIBRARIES)} cards only"
            continue
        try:
            open_verbs(ibverbs_lib)
            open_provider(LIBRARIES[provider])
            reasons[provider] = None
        except StateError as error:
            reasons[provider] = f"{names}: {error}"
    good = tuple(link for link in links if reasons[link.device.provider] is None)
    return good, tuple(reason for reason in reasons.values() if reason)


def own_link(bootstrap: Bootstrap, node: str, gpu: str, candidates: Sequence[Link], root: Path = SYSFS) -> Link:
    """The link that this PE takes. Collective: every PE, same order.

    Args:
        node: identity of this PE's node, the same for all PEs on it.
        gpu: PCI address of its GPU, or "" if it has none.
        candidates: `select.links(...)`, the same on all PEs of a node.
        root: of sysfs.

    Raises:
        StateError: PEs of one node differ in their candidates; on all PEs of all nodes.
    """
    told = {"node": node, "gpu": gpu, "links": [str(link) for link in candidates]}
    everyone = [json.loads(data) for data in bootstrap.allgather(json.dumps(told).encode(), "choice of network links")]
    for pe, one in enumerate(everyone):
        first = next(at for at, other in enumerate(everyone) if other["node"] == one["node"])
        if one["links"] != everyone[first]["links"]:
            each = "; ".join(f"PE {at}: {', '.join(everyone[at]['links']) or 'none'}" for at in (first, pe))
            raise StateError(f"PEs of node {one['node']} do not see the same network links ({each})")
    if not candidates:
        raise StateError(f"PE {bootstrap.pe}: node {node} has no network link to choose")
    here = [pe for pe, one in enumerate(everyone) if one["node"] == node]
    chosen = choose_links([everyone[pe]["gpu"] for pe in here], candidates, root)
    return chosen[here.index(bootstrap.pe)]
