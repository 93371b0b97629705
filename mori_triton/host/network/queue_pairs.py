"""Transports whose kernels post to queue pairs of a card: what each PE makes, and what they tell each other of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from mori_triton import abi
from mori_triton.errors import DriverError, NetworkError
from mori_triton.host.agreement import together
from mori_triton.host.drivers.base import MemoryKind
from mori_triton.host.network import records
from mori_triton.host.network.fabric import Site
from mori_triton.host.nic.connection import NO_QUEUE_PAIR, ConnectionFacts, QueuePairEnd, exchange
from mori_triton.host.peers import undo_all
from mori_triton.host.tables import Region

_RESULT_BYTES = (abi.RESULT_WORDS + 1) * 8


@dataclass(frozen=True)
class PortFacts:
    """Of the port that a card sends through; fields as those of `ConnectionFacts`."""

    link_layer: str
    port: int
    mtu: int
    lid: int
    gid_index: int
    gid: bytes
    mac: bytes


@dataclass(frozen=True)
class QueuePair:
    """A queue pair that a card has made.

    `fields`: those of `abi.QUEUE_FIELDS` that are its own: rings, doorbells, sizes. `memory`: what kernels touch, as
    (address, bytes, what it is). `handle`: the card's own.
    """

    number: int
    fields: Mapping[str, int]
    memory: Sequence[tuple[int, int, str]]
    handle: Any = field(repr=False)


class Card(Protocol):
    """A card that a PE has opened. What it makes lives until `close`."""

    facts: PortFacts
    memory_kind: MemoryKind
    """Of memory that both the card and kernels write."""

    def register(self, address: int, num_bytes: int) -> tuple[int, int]:
        """Let the card reach memory; its local and its remote key."""
        ...

    def create(self, peer: int, at: int) -> QueuePair:
        """An end of connection `at` with a peer."""
        ...

    def connect(
        self, made: QueuePair, own: ConnectionFacts, peer: ConnectionFacts, ends: tuple[QueuePairEnd, QueuePairEnd]
    ) -> None:
        """To where it can send. `ends`: this PE's and the peer's of the connection."""
        ...

    def quiet(self, queues: Sequence[tuple[QueuePair, Mapping[str, int]]]) -> None:
        """Return when what has been posted is done. Queues: as kernels, which have ended, have left them; those that
        kernels have seen fail are left out.

        Raises:
            NetworkError: some of it failed, or takes longer than a wait in a kernel may.
        """
        ...

    def failures(self) -> list[tuple[int, str]]:
        """What has gone wrong so far, as far as the card tells the host: numbers of queue pairs, what happened."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


class QueuePairLinks:
    """`Links` of one PE over a card. Collective to create; raises as `Fabric.open`, and as `connection.exchange`."""

    queues = ring = 0

    def __init__(self, site: Site, provider: str, open_card: Callable[[], Card]) -> None:
        self.provider = provider
        self._site, self._driver = site, site.driver
        self._num_qp = site.settings.num_qp_per_pe
        self._card: Card | None = None
        self._num_told = 0
        self._memory: list[int] = []
        self._made: dict[tuple[int, int], QueuePair] = {}
        self.regions: list[Region] = []
        what = f"the network over {provider}"
        try:
            own = together(site.bootstrap, what, partial(self._make, open_card))
            everyone = exchange(site.bootstrap, own)
            together(site.bootstrap, f"{what}: its connections", partial(self._connect, everyone))
        except BaseException:
            # what all have heard of counts, not what then cannot be given back
            with contextlib.suppress(DriverError):
                self.close()
            raise

    def _make(self, open_card: Callable[[], Card]) -> ConnectionFacts:
        site = self._site
        card = self._card = open_card()
        self._keys = card.register(site.address, site.num_bytes)
        for peer in site.peers:
            for at in range(self._num_qp):
                self._made[peer, at] = card.create(peer, at)
        self._results, self._result_key = 0, 0
        if self._made:
            num_bytes = len(self._made) * _RESULT_BYTES
            # memory that a GPU may share is in whole pages, as a card that reaches it by a dma-buf wants it
            self._results = self._alloc(num_bytes, card.memory_kind, "results of fetches", exportable=True)
            self._result_key, _ = card.register(self._results, num_bytes)
        ends = [NO_QUEUE_PAIR] * (site.n_pes * self._num_qp)
        for (peer, at), made in self._made.items():
            ends[peer * self._num_qp + at] = QueuePairEnd(made.number, 0)
            named = f"connection {at} with PE {peer} of PE {site.pe}"
            self.regions += [Region(start, size, f"{what}, {named}", site.pe) for start, size, what in made.memory]
        return ConnectionFacts(
            pe=site.pe,
            n_pes=site.n_pes,
            num_qp_per_pe=self._num_qp,
            provider=self.provider,
            heap_address=site.address,
            heap_bytes=site.num_bytes,
            heap_rkey=self._keys[1],
            queue_pairs=tuple(ends),
            **vars(card.facts),
        )

    def _connect(self, everyone: Sequence[ConnectionFacts]) -> None:
        card, own = self._card, everyone[self._site.pe]
        assert card is not None
        queues: list[dict[str, int] | None] = [None] * (self._site.n_pes * self._num_qp)
        for nth, ((peer, at), made) in enumerate(self._made.items()):
            there = everyone[peer]
            card.connect(made, own, there, (own.end(peer, at), there.end(own.pe, at)))
            num_wqes = made.fields["num_wqes"]
            queues[peer * self._num_qp + at] = {
                **made.fields,
                "number": made.number,
                "lkey": self._keys[0],
                "rkey": there.heap_rkey,
                "results_lkey": self._result_key,
                # 1 stands for 256
                "mtu": 128 << min(own.mtu, there.mtu),
                "remote_base": there.heap_address,
                "remote_bytes": there.heap_bytes,
                "results": self._results + nth * _RESULT_BYTES,
                "ready": self._alloc(num_wqes * 8, MemoryKind.CACHED, f"requests to PE {peer} that are whole"),
            }
        table = records.pack_queues(queues)
        self.queues = self._alloc(len(table), MemoryKind.CACHED, "queue pairs")
        self._driver.write(self.queues, table)

    def _alloc(self, num_bytes: int, kind: MemoryKind, what: str, *, exportable: bool = False) -> int:
        address = self._driver.alloc(num_bytes, kind=kind, exportable=exportable)
        self._memory.append(address)
        pe = self._site.pe
        self.regions.append(Region(address, num_bytes, f"{what} of PE {pe}", pe))
        return address

    def _left(self) -> list[tuple[QueuePair, Mapping[str, int]]]:
        """Queues as kernels have left them, without those that they have seen fail."""
        if not self._made:
            return []
        table = self._driver.read(self.queues, self._site.n_pes * self._num_qp * abi.QUEUE_SIZE)
        queues = [
            (made, records.unpack_queue(table, peer * self._num_qp + at)) for (peer, at), made in self._made.items()
        ]
        return [(made, queue) for made, queue in queues if not queue["error"]]

    def quiet(self) -> None:
        """See `Links`."""
        if self._card is not None:
            self._card.quiet(self._left())

    def check(self) -> None:
        """See `Links`. A failure that no kernel has seen is raised once."""
        failures = [] if self._card is None else self._card.failures()
        new = failures[self._num_told :]
        if new:
            self._num_told = len(failures)
            unseen = {made.number for made, _ in self._left()}
            lines = [text for number, text in new if number in unseen]
            if lines:
                raise NetworkError(
                    "\n  ".join(["operations over the network failed that no kernel waited for:", *lines])
                )

    def close(self) -> None:
        """See `Links`. The card first: it may be writing to the rest."""
        card, self._card = self._card, None
        memory, self._memory = self._memory, []
        undo: list[Callable[[], None]] = [card.close] if card is not None else []
        undo_all([*undo, *(partial(self._driver.free, address) for address in memory)])
