"""How PEs of a local world that are not mapped reach each other: a soft HCA, or the proxy, for one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mori_triton.errors import ArgumentError, require
from mori_triton.host.network import Fabric
from mori_triton.host.network.soft import NUM_WQES, Fault, SoftFabric, Wait
from mori_triton.host.nic.soft_hca import FAULTS, PROVIDERS, SoftHca
from mori_triton.host.proxy.fabric import ProxyFabric

CARDS = tuple(PROVIDERS)
# what "auto" takes where there are PEs to be reached
DEFAULT = "mlx5"


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_power(value: Any) -> bool:
    # what all three kinds of queues can have
    return _is_integer(value) and 4 <= value <= 1 << 14 and value & (value - 1) == 0


_SOFT_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "late": (_is_flag, "True or False"),
    "seed": (_is_integer, "an integer"),
    "num_wqes": (_is_power, "a power of two from 4 to 16384"),
    "faults": (lambda value: isinstance(value, (list, tuple)), "a list of dict(pe=, peer=, qp=0, fault=, index=None)"),
}
_PROXY_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "entries": (_is_integer, "a power of two"),
    "options": (lambda value: isinstance(value, Mapping), "UCX settings by name"),
}


def check_options(transport: str, given: Any, n: int) -> None:
    """Raise `ArgumentError` unless `given` are options of a transport, of `n` PEs: `local_world(network=...)`."""
    if given is None:
        return
    require(isinstance(given, Mapping), "network", "None or a dict of options", repr(given))
    known = _SOFT_OPTIONS if transport in CARDS else _PROXY_OPTIONS if transport == "proxy" else {}
    for name, value in given.items():
        want = (
            f"one of {', '.join(known)}" if known else f'no options: PEs do not use a network (transport "{transport}")'
        )
        require(name in known, "network", want, repr(name))
        fits, what = known[name]
        require(fits(value), f"network[{name!r}]", what, repr(value))
    for fault in faults_of(given):
        # one that cannot come up would let a test pass that tests nothing
        there = all(_is_integer(pe) and 0 <= pe < n for pe in (fault.pe, fault.peer)) and fault.pe != fault.peer
        want = f"two PEs, from 0 to {n - 1}"
        require(there, "network['faults']: pe, peer", want, f"{fault.pe}, {fault.peer}")


def faults_of(given: Mapping[str, Any]) -> list[Fault]:
    """The faults that are asked for."""
    faults = []
    for one in given.get("faults", ()):
        try:
            fault = Fault(**one)
        except TypeError as error:
            raise ArgumentError(
                f"network['faults']: want dict(pe=, peer=, qp=0, fault=, index=None), got {one!r}"
            ) from error
        require(fault.fault in FAULTS[1:], "network['faults']: fault", " or ".join(FAULTS[1:]), repr(fault.fault))
        faults.append(fault)
    return faults


class WorldNetwork:
    """For one run. `fabric`: what every PE is opened with, or None.

    Args:
        transport: "p2p", "proxy" or one of `CARDS`.
        options: `local_world(network=...)`.
        wait: how PEs wait on the host, in a world that decides who runs.
    """

    def __init__(self, transport: str, options: Mapping[str, Any] | None, wait: Wait | None = None) -> None:
        given = dict(options or {})
        self.hca: SoftHca | None = None
        self.fabric: Fabric | None = None
        if transport in CARDS:
            self.hca = SoftHca(late=given.get("late", False), seed=given.get("seed", 0))
            self.fabric = SoftFabric(
                transport,
                self.hca,
                num_wqes=given.get("num_wqes", NUM_WQES),
                faults=faults_of(given),
                wait=wait,
            )
        elif transport == "proxy":
            self.fabric = ProxyFabric(**given)

    def errors(self) -> list[str]:
        """What the soft HCA has found wrong, a line each."""
        return [] if self.hca is None else [str(error) for error in self.hca.errors]

    def close(self) -> None:
        """After the last PE has closed its network. Idempotent."""
        if self.hca is not None:
            self.hca.close()
