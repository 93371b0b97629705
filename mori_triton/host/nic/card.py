"""A network card as a PE uses it: queue pairs that its kernels post to, whatever maker they are of."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mori_triton.env import Settings
from mori_triton.errors import DriverError, NetworkError, NotSupported
from mori_triton.host.drivers.base import Driver, MemoryKind
from mori_triton.host.network.queue_pairs import PortFacts, QueuePair
from mori_triton.host.nic import bnxt_re, ionic, mlx5, verbs_api
from mori_triton.host.nic.agree import LIBRARIES
from mori_triton.host.nic.completions import progress
from mori_triton.host.nic.connection import ConnectionFacts, QueuePairEnd
from mori_triton.host.nic.libraries import RdmaLibrary, open_provider, open_verbs
from mori_triton.host.nic.rings import NO_DMA_BUF, unreachable
from mori_triton.host.nic.select import Link, choose_gid
from mori_triton.host.nic.verbs import OpenDevice

_PAGE = 4096
_REGISTER_BYTES = 8
_LOOK_S = 1e-4


class NicCard:
    """See `network.queue_pairs.Card`. Opens the card of a link.

    Args:
        driver: of the device whose kernels post.

    Raises:
        StateError: the card, its port or a library cannot be used.
        NotSupported: the card lacks what kernels need.
        DriverError: a library failed.
    """

    memory_kind = MemoryKind.UNCACHED

    def __init__(self, driver: Driver, link: Link, settings: Settings) -> None:
        self._driver, self._settings = driver, settings
        self._port = link.port.number
        self._mapped: dict[int, int] = {}
        self._provider = provider = link.device.provider
        self._device = OpenDevice(open_verbs(settings.ibverbs_lib), link.device.name)
        try:
            attributes, port = self._device.attributes(), self._device.port(self._port)
            if attributes.atomic_cap == verbs_api.ATOMIC_NONE:
                raise NotSupported(
                    f"transport {provider}: {link} has no atomics (atomic_cap is 0), which signals are made of"
                )
            self._maker = MAKERS[provider](self._device, open_provider(LIBRARIES[provider]), driver)
            gid = choose_gid(link, settings.ib_gid_index)
            self.facts = PortFacts(
                link_layer=link.port.link_layer,
                port=self._port,
                mtu=port.active_mtu,
                lid=port.lid,
                gid_index=gid.index,
                gid=gid.raw,
                mac=self._maker.mac(self._port, gid.index, link.port.link_layer),
            )
        except BaseException:
            self.close()
            raise

    def register(self, address: int, num_bytes: int) -> tuple[int, int]:
        """See `Card`: by a dma-buf where there is one, else the kernel's RDMA core has to know the GPU's driver."""
        descriptor = self._driver.export_dma_buf(address, num_bytes)
        if descriptor is None or not self._device.library.has("reg_dmabuf_mr"):
            try:
                region = self._device.register(address, num_bytes)
            except DriverError as error:
                how = NO_DMA_BUF if descriptor is None else "libibverbs is too old for dma-bufs"
                raise unreachable(error, how) from error
            finally:
                if descriptor is not None:
                    os.close(descriptor)
        else:
            try:
                region = self._device.register_dma_buf(descriptor, 0, address, num_bytes)
            finally:
                # the device holds what it stands for
                os.close(descriptor)
        return region.lkey, region.rkey

    def create(self, peer: int, at: int) -> QueuePair:
        """See `Card`."""
        return self._maker.create(self, self._port, at)

    def connect(
        self, made: QueuePair, own: ConnectionFacts, peer: ConnectionFacts, ends: tuple[QueuePairEnd, QueuePairEnd]
    ) -> None:
        """See `Card`."""
        chosen = {"service_level": self._settings.rdma_sl, "traffic_class": self._settings.rdma_tc}
        self._maker.device.connect(made.handle, own, peer, ends, **chosen)

    def mapped(self, address: int, num_bytes: int, *, registers: bool = False) -> int:
        """Where the driver's device sees memory of this process that is none of the driver's, such as doorbells."""
        first, end = address // _PAGE * _PAGE, -(-(address + num_bytes) // _PAGE) * _PAGE
        # doorbells of several queues may be in one page, which can be mapped once only
        if first not in self._mapped:
            self._mapped[first] = self._driver.map_host(first, end - first, registers=registers)
            self._device.owns(partial(self._unmap, first))
        return self._mapped[first] + address - first

    def _unmap(self, first: int) -> None:
        del self._mapped[first]
        self._driver.unmap_host(first)

    def quiet(self, queues: Sequence[tuple[QueuePair, Mapping[str, int]]]) -> None:
        """See `Card`: asks the completions that kernels have not taken."""
        until = time.monotonic() + self._settings.wait_timeout_s
        for made, queue in queues:
            while not (found := progress(self._provider, queue, self._driver.read)).done:
                what = f"transport {self._provider}: {self._device.name}, queue pair {made.number:#x}"
                if found.failed:
                    raise NetworkError(f"{what}: a request has failed with status {found.failed:#x}")
                if time.monotonic() > until:
                    raise NetworkError(
                        f"{what}: {queue['posted']} requests were not done within {self._settings.wait_timeout_s:g} s"
                    )
                time.sleep(_LOOK_S)

    def failures(self) -> list[tuple[int, str]]:
        """See `Card`: what goes wrong is in completions, which kernels look at."""
        return []

    def close(self) -> None:
        """See `Card`."""
        self._device.close()


class _Mlx5:
    def __init__(self, device: OpenDevice, library: RdmaLibrary, driver: Driver) -> None:
        self.device = mlx5.Mlx5Device(device, library, driver)

    def mac(self, port: int, gid_index: int, link_layer: str) -> bytes:
        return bytes(6) if link_layer == "InfiniBand" else self.device.mac(port, gid_index)

    def create(self, card: NicCard, port: int, at: int) -> QueuePair:
        made = self.device.create(port)
        fields = {"sq": made.sq_address, "cq": made.cq_address, "record": made.record_address}
        fields |= {"num_wqes": mlx5.SQ_WQES, "num_cqes": 1}
        fields["doorbell"] = card.mapped(made.doorbell_address, _REGISTER_BYTES, registers=True)
        memory = [
            (made.sq_address, mlx5.SQ_BYTES, "send ring"),
            (made.cq_address, 64, "completion"),
            (made.record_address, 4, "doorbell record"),
            (fields["doorbell"], _REGISTER_BYTES, "doorbell"),
        ]
        return QueuePair(made.number, fields, memory, made)


class _BnxtRe:
    def __init__(self, device: OpenDevice, library: RdmaLibrary, driver: Driver) -> None:
        self.device = bnxt_re.BnxtDevice(device, library, driver)

    def mac(self, port: int, gid_index: int, link_layer: str) -> bytes:
        return bytes(6)

    def create(self, card: NicCard, port: int, at: int) -> QueuePair:
        made = self.device.create(port)
        fields = {"sq": made.sq_address, "cq": made.cq_address, "psn_table": made.psn_table_address}
        fields |= {"num_wqes": bnxt_re.NUM_WQES, "num_cqes": 1, "num_psns": bnxt_re.NUM_PSNS}
        fields["doorbell"] = card.mapped(made.doorbell_address, _REGISTER_BYTES, registers=True)
        memory = [
            (made.sq_address, bnxt_re.SQ_BYTES, "send ring and packet numbers"),
            (made.cq_address, 32, "completion"),
            (fields["doorbell"], _REGISTER_BYTES, "doorbell"),
        ]
        return QueuePair(made.number, fields, memory, made)


class _Ionic:
    def __init__(self, device: OpenDevice, library: RdmaLibrary, driver: Driver) -> None:
        self.device = ionic.IonicDevice(device, library)

    def mac(self, port: int, gid_index: int, link_layer: str) -> bytes:
        return bytes(6)

    def create(self, card: NicCard, port: int, at: int) -> QueuePair:
        made = self.device.create(port, at % ionic.PIPELINES)
        fields, memory = {}, []
        for queue, ring, doorbell, entries, entry_bytes, what in (
            (made.send, "sq", "doorbell", "num_wqes", 64, "send ring"),
            (made.completions, "cq", "cq_doorbell", "num_cqes", 32, "completions"),
        ):
            num_bytes = queue.num_entries * entry_bytes
            # libionic's own memory
            fields[ring] = card.mapped(queue.address, num_bytes)
            fields[doorbell] = card.mapped(queue.doorbell_address, _REGISTER_BYTES, registers=True)
            fields |= {f"{doorbell}_value": queue.doorbell_value, entries: queue.num_entries}
            memory += [(fields[ring], num_bytes, what), (fields[doorbell], _REGISTER_BYTES, f"doorbell of the {what}")]
        return QueuePair(made.number, fields, memory, made)


MAKERS: dict[str, Callable[[OpenDevice, RdmaLibrary, Driver], Any]] = {
    "mlx5": _Mlx5, "bnxt_re": _BnxtRe, "ionic": _Ionic,
}  # fmt: skip
