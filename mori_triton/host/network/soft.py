"""The soft HCA as a transport: kernels of a world in one process post to queue pairs that a thread of it serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mori_triton.errors import PeerTimeout
from mori_triton.host.drivers.base import MemoryKind
from mori_triton.host.network.fabric import Links, Site
from mori_triton.host.network.queue_pairs import PortFacts, QueuePair, QueuePairLinks
from mori_triton.host.nic import verbs_api
from mori_triton.host.nic.connection import ConnectionFacts, QueuePairEnd
from mori_triton.host.nic.soft_hca import CQ_FILL, SoftHca, doorbell_values
from mori_triton.host.peers import undo_all

NUM_WQES = 256
_FACTS = PortFacts("Ethernet", 1, verbs_api.MTU_4096, 0, 0, bytes(16), bytes(6))
_SLOT_BYTES = {"mlx5": 64, "bnxt_re": 48, "ionic": 64}
_CQE_BYTES = {"mlx5": 64, "bnxt_re": 32, "ionic": 32}
# words that different sides write are this far apart
_LINE = 64
_LOOK_S = 1e-4

Wait = Callable[[Callable[[], bool], object], None]


@dataclass(frozen=True)
class Fault:
    """Request `index` of connection `qp` of `pe` with `peer` is to fail with `fault`. None: the next that is posted."""

    pe: int
    peer: int
    qp: int = 0
    fault: str = "retry"
    index: int | None = None


class SoftFabric:
    """See `Fabric`.

    Args:
        name: whose queues they are, of `soft_hca.PROVIDERS`.
        hca: of all PEs; it runs, or is stepped by whoever made it.
        num_wqes: requests of a queue pair that may be under way, plus one: a power of two.
        wait: returns when a predicate is true, or raises; None: look again and again, until the limit of waits.
    """

    # the hca is a thread of the host: heaps and rings have to be memory that it sees
    heap_kind = MemoryKind.FINE_GRAINED

    def __init__(
        self,
        name: str,
        hca: SoftHca,
        *,
        num_wqes: int = NUM_WQES,
        faults: Sequence[Fault] = (),
        wait: Wait | None = None,
    ) -> None:
        self.name, self.hca, self.num_wqes, self.faults, self.wait = name, hca, num_wqes, faults, wait

    def open(self, site: Site) -> Links:
        """See `Fabric`."""
        return QueuePairLinks(site, self.name, lambda: SoftCard(self, site))


class SoftCard:
    """See `queue_pairs.Card`."""

    facts = _FACTS
    memory_kind = MemoryKind.FINE_GRAINED

    def __init__(self, fabric: SoftFabric, site: Site) -> None:
        self._fabric, self._hca, self._driver, self._pe = fabric, fabric.hca, site.driver, site.pe
        self._limit_s = site.settings.wait_timeout_s
        self._keys: list[int] = []
        self._rings: list[int] = []
        self._queue_pairs: list[int] = []

    def register(self, address: int, num_bytes: int) -> tuple[int, int]:
        """See `Card`."""
        key = self._hca.add_memory(self._pe, address, num_bytes)
        self._keys.append(key)
        return key, key

    def create(self, peer: int, at: int) -> QueuePair:
        """See `Card`."""
        provider, num_wqes = self._fabric.name, self._fabric.num_wqes
        sizes = {"num_wqes": num_wqes, "num_cqes": 1, "num_psns": 0}
        if provider == "ionic":
            # as few as there may be: what is given back too late shows
            sizes["num_cqes"] = num_wqes
        if provider == "bnxt_re":
            sizes["num_psns"] = 2 * num_wqes
        parts = {"sq": num_wqes * _SLOT_BYTES[provider], "cq": sizes["num_cqes"] * _CQE_BYTES[provider], "doorbell": 8}
        if provider == "mlx5":
            parts["record"] = 4
        elif provider == "bnxt_re":
            parts["psn_table"] = sizes["num_psns"] * 8
        else:
            parts["cq_doorbell"] = 8
        block = self._driver.alloc(sum(map(_lines, parts.values())), kind=self.memory_kind)
        self._rings.append(block)
        places, end = {}, block
        for name, num_bytes in parts.items():
            places[name], end = end, end + _lines(num_bytes)
        if CQ_FILL[provider]:
            self._driver.memset(places["cq"], CQ_FILL[provider], parts["cq"])
        number = self._hca.add_queue_pair(provider, self._pe, **places, **sizes)
        self._queue_pairs.append(number)
        fields = places | sizes
        if provider == "ionic":
            fields["doorbell_value"], fields["cq_doorbell_value"] = doorbell_values(number)
        for fault in self._fabric.faults:
            if (fault.pe, fault.peer, fault.qp) == (self._pe, peer, at):
                self._hca.inject(number, fault.fault, fault.index)
        # no two of them share a line, so all of it may be touched
        memory = [(places[name], _lines(num_bytes), name) for name, num_bytes in parts.items()]
        return QueuePair(number, fields, memory, None)

    def connect(
        self, made: QueuePair, own: ConnectionFacts, peer: ConnectionFacts, ends: tuple[QueuePairEnd, QueuePairEnd]
    ) -> None:
        """See `Card`."""
        self._hca.connect(made.number, ends[1].number)

    def quiet(self, queues: Sequence[tuple[QueuePair, Mapping[str, int]]]) -> None:
        """See `Card`: of all PEs' queue pairs, for they are of one process."""
        wait = self._fabric.wait or self._look
        wait(lambda: not self._hca.pending(), f"PE {self._pe}: waiting for the soft HCA to be done with what is posted")

    def _look(self, predicate: Callable[[], bool], what: object) -> None:
        until = time.monotonic() + self._limit_s
        while not predicate():
            if time.monotonic() > until:
                lines = "; ".join(self._hca.describe())
                raise PeerTimeout(f"{what} for {self._limit_s:g} s ({lines})")
            time.sleep(_LOOK_S)

    def failures(self) -> list[tuple[int, str]]:
        """See `Card`."""
        return [(found.number, str(found)) for found in self._hca.errors if found.pe == self._pe]

    def close(self) -> None:
        """See `Card`."""
        undo: list[Callable[[], None]] = [
            *(partial(self._hca.remove_queue_pair, number) for number in self._queue_pairs),
            *(partial(self._hca.remove_memory, key) for key in self._keys),
            *(partial(self._driver.free, block) for block in self._rings),
        ]
        self._queue_pairs, self._keys, self._rings = [], [], []
        undo_all(undo)


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
