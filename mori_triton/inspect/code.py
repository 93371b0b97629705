"""What is read from a kernel's code, whoever makes the GPU: resources, and accesses to global memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# how far an access goes: the caches of a compute unit, of a device, or past them all
SCOPES = ("", "workgroup", "device", "system")


class Source(NamedTuple):
    """Where in Python an instruction comes from: the innermost of the functions that were inlined."""

    path: str
    line: int
    column: int
    callers: tuple[str, ...] = ()  # "name.py:line:column" of the calls that led there, inwards out

    def __str__(self) -> str:
        return f"{self.path.rsplit('/', 1)[-1]}:{self.line}"


NOWHERE = Source("", 0, 0)


@dataclass(frozen=True)
class Resources:
    """What a kernel takes, as its compiler recorded it. None: not recorded."""

    vgprs: int  # of a lane; registers of a thread on NVIDIA
    agprs: int  # of these, accumulation registers
    sgprs: int | None  # of a wave; None: there are none
    lds_bytes: int  # of a workgroup
    scratch_bytes: int  # of a lane, in memory
    vgpr_spills: int | None
    sgpr_spills: int | None

    @property
    def spills(self) -> bool:
        """Whether any register is kept in memory. An SGPR's home may be a lane of a VGPR, which costs no memory."""
        return bool(self.vgpr_spills or self.sgpr_spills or self.scratch_bytes)


@dataclass(frozen=True)
class Access:
    """An instruction that touches global memory, or orders who does."""

    kind: str  # load, store, atomic, writeback, invalidate, fence
    num_bytes: int  # of a lane; 0: it moves nothing
    scope: str  # of `SCOPES`
    hint: str  # of what becomes of the cache line: "nt", "TH_STORE_NT", "cs", ...
    text: str  # the instruction
    line: int  # in the code, from 1
    source: Source
