"""Which process this is, told apart from every other one that was or will be."""

from __future__ import annotations

import os
import uuid

_identities: dict[int, str] = {}


def process_identity() -> str:
    """A word that only this process has (a forked child gets another one)."""
    # one step, because the PEs of a world that are threads ask for it at the same time
    return _identities.setdefault(os.getpid(), uuid.uuid4().hex)
