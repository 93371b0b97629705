"""A model of a pair's time between PEs behind PCIe, and its fit to measured times. docs/link_model.md derives it.

A phase takes a fixed time, the signals' way, what leaves a PE on its link, and what the PE stores to its own memory:

    launch + hops * hop + (bytes + header * messages) / rate + own bytes / own rate

All peers of a PE share its link, which carries so much in each direction at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.rdna4.traffic import PHASES, CountedPair

# of a PCIe packet: header of 16 bytes, sequence number, CRC and framing
HEADER_BYTES = 24.0
MESSAGE_BYTES = 256
# log errors above this count linearly in a fit
_HUBER = 0.05
# a time is irregular when one of so much less belongs to more bytes
_FALL = 0.05


@dataclass(frozen=True)
class Link:
    """The model's parameters. gbs: 10^9 bytes/s of a PE's link, each direction; own_gbs: of stores to its memory."""

    launch_us: float
    hop_us: float
    gbs: float
    own_gbs: float
    header_bytes: float = HEADER_BYTES


@dataclass(frozen=True)
class Demand:
    """What a phase asks for on each PE. hops: ways of a signal, an answer or a request, one after the other."""

    link_bytes: float
    link_messages: float
    own_bytes: float
    hops: int


@dataclass(frozen=True)
class RowCost:
    """What a phase of a protocol needs beside the payload of each remote row."""

    bytes: float
    messages: float
    own_rows: float  # of a token, stored to the PE's own memory
    hops: int


def phase_us(link: Link, demand: Demand, *, overlap: bool = False) -> float:
    """Microseconds of a phase. overlap: own stores run beside the link's, else after them."""
    wire = (demand.link_bytes + link.header_bytes * demand.link_messages) / link.gbs / 1e3
    own = demand.own_bytes / link.own_gbs / 1e3
    return link.launch_us + demand.hops * link.hop_us + (max(wire, own) if overlap else wire + own)


def pair_us(link: Link, demands: Iterable[Demand], *, overlap: bool = False) -> float:
    """Microseconds of phases one after the other."""
    return sum(phase_us(link, demand, overlap=overlap) for demand in demands)


def dense_demands(world_size: int, row_bytes: int, tokens: int) -> tuple[Demand, Demand]:
    """All-gather and reduce-scatter as rings: a PE sends n - 1 times its tokens, in n - 1 steps, and stores its own."""
    others = (world_size - 1) * tokens * row_bytes
    phase = Demand(others, others / MESSAGE_BYTES, tokens * row_bytes, world_size - 1)
    return phase, phase


def row_costs(counted: CountedPair, hops: Mapping[str, int]) -> dict[str, RowCost]:
    """A protocol's costs by phase, from counted bytes and messages. hops: of each phase."""
    pes, costs = counted.point.world_size, {}
    rows = counted.remote_rows / pes
    payload = rows * counted.row_bytes
    for phase in PHASES:
        traffic = counted.phase(phase)
        costs[phase] = RowCost(
            bytes=(traffic.link_bytes - payload) / rows,
            messages=(traffic.link_messages - payload / MESSAGE_BYTES) / rows,
            own_rows=traffic.own_bytes / (counted.point.capacity * counted.row_bytes),
            hops=hops[phase],
        )
    return costs


def protocol_demands(
    costs: Mapping[str, RowCost], remote_rows: float, row_bytes: int, tokens: int
) -> tuple[Demand, ...]:
    """Dispatch and combine of tokens that go to `remote_rows` other PEs each."""
    rows = remote_rows * tokens
    return tuple(
        Demand(
            rows * (row_bytes + cost.bytes),
            rows * (row_bytes / MESSAGE_BYTES + cost.messages),
            cost.own_rows * tokens * row_bytes,
            cost.hops,
        )
        for cost in (costs[phase] for phase in PHASES)
    )


def fit(pairs: Sequence[tuple[Sequence[Demand], float]], header_bytes: float = HEADER_BYTES) -> Link:
    """The parameters that make the log of predicted over measured times smallest, Huber's loss at 5 %.

    pairs: a pair's phases, none overlapped, and its measured microseconds. The model is linear in launch, hop and the
    inverse rates, so this is Gauss-Newton on that, weighted anew at each step. A parameter that would be negative is 0.

    Raises: AssertionError when the pairs do not tell the parameters apart.
    """
    table = np.array(
        [
            [
                len(demands),
                sum(d.hops for d in demands),
                sum(d.link_bytes + header_bytes * d.link_messages for d in demands) / 1e3,
                sum(d.own_bytes for d in demands) / 1e3,
            ]
            for demands, _ in pairs
        ]
    )
    measured = np.array([us for _, us in pairs])
    kept = list(range(table.shape[1]))
    while True:
        theta = _solve(table[:, kept], measured)
        if (theta >= 0).all():
            break
        kept.pop(int(theta.argmin()))
    values = np.zeros(table.shape[1])
    values[kept] = theta
    launch, hop, per_byte, per_own = values
    gbs, own_gbs = (float(1 / x) if x > 0 else float("inf") for x in (per_byte, per_own))
    return Link(float(launch), float(hop), gbs, own_gbs, header_bytes)


def _solve(table: np.ndarray, measured: np.ndarray) -> np.ndarray:
    assert np.linalg.matrix_rank(table / table.max(0)) == table.shape[1], "the pairs do not tell the parameters apart"
    scaled = table / measured[:, None]
    theta = np.linalg.lstsq(scaled, np.ones(len(measured)), rcond=None)[0]
    for _ in range(200):
        predicted = np.maximum(table @ theta, 1e-3 * measured)
        residual = np.log(predicted / measured)
        weight = np.sqrt(np.minimum(1, _HUBER / np.maximum(np.abs(residual), 1e-12)))[:, None]
        jacobian = table / predicted[:, None]
        step = np.linalg.lstsq(weight * jacobian, -weight[:, 0] * residual, rcond=None)[0]
        theta = theta + step
        if (np.abs(table @ step) <= 1e-12 * measured).all():
            break
    return theta


def irregular(sizes: Sequence[float], times: Sequence[float]) -> list[bool]:
    """Which times no model that grows with size can meet: more than 5 % above that of a larger size."""
    return [any(s > size and t < us * (1 - _FALL) for s, t in zip(sizes, times, strict=True)) for size, us in
            zip(sizes, times, strict=True)]  # fmt: skip


@dataclass(frozen=True)
class Errors:
    """Of predictions, in percent of what was measured."""

    number: int
    median: float  # of absolute values, as the next two
    p90: float
    worst: float
    mean: float  # with its sign: above 0, predictions are too high


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """How far predictions are off."""
    percent = 100 * (np.array(predicted) / np.array(measured) - 1)
    size = np.abs(percent)
    return Errors(len(size), *(float(x) for x in (np.median(size), np.quantile(size, 0.9), size.max(), percent.mean())))
