"""What one pair moves between PEs, counted by the byte ledger on the emulated gfx1201.

A pair is a dispatch and a combine of an op, or a dense all-gather and a reduce-scatter.

counted = count_pair(Point(4, capacity=64), "IntraNodeRDNA4")
counted.phase("dispatch").link_bytes  # that leave a PE, mean over PEs

Every element of what came out is checked in the same run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mori_triton as mori
from bench.rdna4.backends import Dense, Team, dense_in_heaps
from mori_triton import ops
from mori_triton.emulator.ledger import ByteLedger, Entry, Traffic
from tests.ops import rdna4_checks as checks
from tests.ops.rdna4_checks import Point, Sent

DENSE = "dense"
PHASES = ("dispatch", "combine")
# kernels of the second phase; all others of a pair are of the first
_SECOND = ("combine", "rdna4_push", "rdna4_sum", "push_kernel", "sum_landed", "sum_pulled")
# of no pair: what a world does as it starts and ends
_OTHER = ("barrier",)


@dataclass(frozen=True)
class PhaseTraffic:
    """One phase, mean over PEs. A link message is a write, an answer to a load, or the request of a load."""

    link_bytes: float  # that leave a PE's memory or kernels for another PE
    link_messages: float
    own_bytes: float  # stored by a PE's kernels to memory of its own


@dataclass(frozen=True)
class CountedPair:
    """One pair: rows[source][destination] of dispatch, and all that kernels did."""

    point: Point
    kind: str
    rows: list[list[int]]
    ledger: ByteLedger

    @property
    def row_bytes(self) -> int:
        return 2 * self.point.hidden

    @property
    def remote_rows(self) -> int:
        """Of all PEs."""
        return sum(n for source, row in enumerate(self.rows) for pe, n in enumerate(row) if pe != source)

    def entries(self, phase: str) -> list[Entry]:
        """What the kernels of a phase did."""
        found = [entry for entry in self.ledger.entries() if not any(name in entry.kernel for name in _OTHER)]
        return [entry for entry in found if phase == PHASES[any(name in entry.kernel for name in _SECOND)]]

    def between(self, phase: str, src: int, dst: int, kind: str) -> Traffic:
        """What kernels of `src` did in memory of `dst`."""
        found = [entry[4:] for entry in self.entries(phase) if (entry.src, entry.dst, entry.kind) == (src, dst, kind)]
        return Traffic(*map(sum, zip(*found, strict=True))) if found else Traffic(0, 0, 0)

    def phase(self, phase: str) -> PhaseTraffic:
        """Sums over what is between PEs, and what stays on one."""
        pes, bytes_, messages, own = self.point.world_size, 0, 0, 0
        for entry in self.entries(phase):
            if entry.dst in (None, entry.src):
                own += entry.bytes if entry.kind == "store" else 0
            else:
                bytes_ += entry.bytes
                # a load is a message there and one back
                messages += entry.messages * (2 if entry.kind == "load" else 1)
        return PhaseTraffic(bytes_ / pes, messages / pes, own / pes)


def expected_rows(world_size: int, top_k: int, experts: int) -> float:
    """Remote rows of a token: distinct PEs other than its own, of `top_k` distinct experts drawn uniformly."""
    others = math.comb(experts - experts // world_size, top_k)
    return (world_size - 1) * (1 - others / math.comb(experts, top_k))


def count_pair(
    point: Point, kind: str, *, seed: int = 1, form: str = "push", options: Mapping[str, Any] | None = None
) -> CountedPair:
    """Run one pair of `kind`, the name of an op's kernel type or `DENSE`, on full batches, and check every element.

    seed: of the inputs. form: of the dense baseline, see `dense.FORMS`. options: of the world.

    Raises: AssertionError for a wrong element.
    """
    everyone = [checks.draw(point, pe, seed, point.capacity) for pe in range(point.world_size)]
    rows = [[0] * point.world_size for _ in everyone]
    for source, sent in enumerate(everyone):
        owners = checks.owners(point, sent.ids)
        for pe in range(point.world_size):
            rows[source][pe] = int((owners == pe).sum())
    world = mori.local_world(point.world_size, heap_size=checks.heap_bytes(point), **(options or {}))
    with world.byte_ledger() as ledger:
        world.run(_dense if kind == DENSE else _op, point, form if kind == DENSE else kind, everyone)
    return CountedPair(point, kind, rows, ledger)


def _op(pe: int, point: Point, kind: str, everyone: list[Sent]) -> None:
    kernel_type = ops.EpDispatchCombineKernelType[kind]
    op = ops.EpDispatchCombineOp(dataclasses.replace(point.config(pe), kernel_type=kernel_type))
    mine = everyone[pe]
    out = op.dispatch(*mine.args())
    checks.check_dispatch(point, pe, everyone, out, op.get_dispatch_src_token_pos(), poisoned=False)
    total = int(out[4])
    weights = checks.expert_weights(pe, out[1][:total], 0) if point.weights else None
    result = op.combine(checks.expert(pe, out[0][:total], 0), weights, mine.ids)
    checks.check_combine(point, mine, result, 0)
    op.close()


def _dense(pe: int, point: Point, form: str, everyone: list[Sent]) -> None:
    dense = dense_in_heaps(Team(), point, everyone, form)
    assert isinstance(dense, Dense)
    dense.check()
    dense.close()


def per_token(counted: CountedPair) -> dict[str, float]:
    """Of a token of one PE: remote rows, bytes and messages on the link in each phase; for tables."""
    point = counted.point
    rows = counted.remote_rows / point.world_size
    found = {"rows": (point.world_size - 1) * point.capacity if counted.kind == DENSE else rows}
    for phase in PHASES:
        traffic = counted.phase(phase)
        found[f"{phase} bytes"], found[f"{phase} messages"] = traffic.link_bytes, traffic.link_messages
        found[f"{phase} own bytes"] = traffic.own_bytes
    return {name: value / point.capacity for name, value in found.items()}
