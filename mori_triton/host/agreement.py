"""What PEs that have told each other of a collective call make of it: the same error on all, or none."""

from __future__ import annotations

from typing import Any

from mori_triton.errors import HeapError


def agree(what: str, calls: list[dict[str, Any]]) -> None:
    """Raise `HeapError` unless all PEs gave the same facts; it lists every PE's value of the first that differs."""
    for field in calls[0]:
        if any(call[field] != calls[0][field] for call in calls):
            each = "; ".join(f"PE {pe}: {call[field]}" for pe, call in enumerate(calls))
            names = sorted({repr(call["name"]) for call in calls if "name" in call})
            about = f" of {' or '.join(names)}" if names else ""
            raise HeapError(
                f"{what}{about}: the PEs differ in {field} ({each}); all must make the same calls in the same order"
            )


def all_fine(problems: list[str | None]) -> None:
    """Raise `HeapError` with every PE's problem in setting up the heap, if any has one."""
    if any(problems):
        each = "; ".join(f"PE {pe}: {text}" for pe, text in enumerate(problems) if text)
        raise HeapError(f"the symmetric heap could not be set up ({each})")
