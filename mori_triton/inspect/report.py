"""What `mori-triton inspect` says of a kernel on a target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mori_triton.device.launch import TARGETS
from mori_triton.inspect import amd, nvidia
from mori_triton.inspect.code import SCOPES, Access, Resources, Source
from mori_triton.inspect.kernels import Launch
from mori_triton.inspect.occupancy import waves_per_simd
from mori_triton.inspect.statements import Statement, statements

# bytes of a lane in the widest access to global memory that there is
WIDEST = 16


@dataclass(frozen=True)
class BlockAccess:
    """How the instructions of a `tl.load` or `tl.store` of a block came out."""

    kind: str
    source: Source
    bytes_of_lane: int  # what it moves for each lane
    widths: tuple[int, ...]  # bytes of its instructions, narrowest first; empty: none was found

    @property
    def narrow(self) -> bool:
        """Whether it could move 16 bytes at a time and does not, as far as its instructions were found."""
        return self.bytes_of_lane >= WIDEST > min(self.widths, default=WIDEST)


@dataclass(frozen=True)
class Report:
    """One kernel's code on one target."""

    launch: Launch
    arch: str
    resources: Resources | None  # None: nothing here can read them
    waves: int | None  # of a SIMD at a time
    accesses: list[Access]
    blocks: list[BlockAccess]
    asm: str = field(repr=False)

    @property
    def rows(self) -> list[BlockAccess]:
        """The accesses that move rows: 16 bytes or more for each lane, or 8 and these at a time."""
        return [b for b in self.blocks if b.bytes_of_lane >= WIDEST or b.bytes_of_lane >= 8 <= min(b.widths, default=0)]

    def width(self, kind: str) -> int | None:
        """Bytes of the narrowest instruction that loads or stores rows; None: it does not."""
        return min((width for b in self.rows if b.kind == kind for width in b.widths), default=None)

    def scopes(self) -> dict[str, dict[str, int]]:
        """scope -> what acts at it -> how many instructions; those beyond a compute unit's own caches."""
        counts: dict[str, Counter[str]] = {scope: Counter() for scope in reversed(SCOPES[1:])}
        for access in self.accesses:
            if access.scope:
                counts[access.scope][access.kind] += 1
        return {scope: dict(count) for scope, count in counts.items() if count}

    def as_json(self) -> dict[str, Any]:
        resources = self.resources
        return {
            "kernel": self.launch.name,
            "arch": self.arch,
            "num_warps": self.launch.num_warps,
            "resources": None if resources is None else vars(resources),
            "waves_per_simd": self.waves,
            "row_load_bytes": self.width("load"),
            "row_store_bytes": self.width("store"),
            "scopes": self.scopes(),
            "blocks": [
                {"kind": b.kind, "source": str(b.source), "bytes_of_lane": b.bytes_of_lane, "widths": list(b.widths)}
                for b in self.blocks
            ],
        }


def report(launch: Launch, arch: str) -> Report:
    """Compile a kernel for a target, or take it from Triton's cache, and read its code."""
    built = launch.build(arch)
    moved = statements(built.asm["ttgir"], TARGETS[arch] * launch.num_warps)
    shared = int(built.metadata.shared)
    found: Resources | None
    if arch.startswith("sm_"):
        asm = built.asm["ptx"]
        found, accesses = nvidia.resources(built.asm["cubin"], shared), nvidia.accesses(asm)
    else:
        asm = built.asm["amdgcn"]
        found, accesses = amd.resources(asm, shared), amd.accesses(asm, arch)
    waves = None
    if found is not None:
        waves = waves_per_simd(
            arch, vgprs=found.vgprs, sgprs=found.sgprs or 0, lds_bytes=found.lds_bytes, num_waves=launch.num_warps
        )
    return Report(launch, arch, found, waves, accesses, block_accesses(moved, accesses), asm)


def block_accesses(moved: Iterable[Statement], accesses: Iterable[Access]) -> list[BlockAccess]:
    """Each statement with the widths of its instructions, those that move little only where there are any."""
    widths: dict[str, dict[Source, set[int]]] = {}
    for access in accesses:
        widths.setdefault(access.kind, {}).setdefault(access.source, set()).add(access.num_bytes)
    moved = list(moved)
    claimed = {(statement.kind, statement.source) for statement in moved}
    blocks: dict[tuple[str, Source], BlockAccess] = {}
    for statement in moved:
        kind, there = statement.kind, widths.get(statement.kind, {})
        at = statement.source
        if at not in there:
            # LLVM may give an access the place of what uses it, a few lines on
            same = [s for s in there if (s.path, s.callers) == (at.path, at.callers)]
            near = [s for s in same if 0 <= s.line - at.line <= _NEAR]
            at = min((s for s in near if (kind, s) not in claimed), key=lambda s: s.line, default=at)
        if at in there or statement.bytes_of_lane >= WIDEST:
            key = kind, statement.source
            before = blocks[key].bytes_of_lane if key in blocks else 0
            most = max(before, statement.bytes_of_lane)
            blocks[key] = BlockAccess(kind, statement.source, most, tuple(sorted(there.get(at, ()))))
    return list(blocks.values())


_NEAR = 3
