"""What PEs that have told each other of a collective call make of it: the same error on all, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from mori_triton.errors import HeapError, MoriError, NotSupported
from mori_triton.host.bootstrap.base import Bootstrap

T = TypeVar("T")


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


def all_fine(problems: list[str | None], what: str = "the symmetric heap", error: type[MoriError] = HeapError) -> None:
    """Raise `error` with every PE's problem in setting up `what`, if any has one."""
    if any(problems):
        each = "; ".join(f"PE {pe}: {text}" for pe, text in enumerate(problems) if text)
        raise error(f"{what} could not be set up ({each})")


def together(bootstrap: Bootstrap, what: str, part: Callable[[], T]) -> T:
    """Do this PE's part of setting up `what`; what it returned, when every PE has done its own. Collective.

    Raises:
        NotSupported: on every PE, when some cannot serve what is asked of them, and nothing else is wrong.
        HeapError: on every PE, when any other error of the package came up on one; it has every PE's text.
    """
    result, problem, kind = None, None, ""
    try:
        result = part()
    except MoriError as error:
        problem, kind = str(error), "not supported" if isinstance(error, NotSupported) else "failed"
    told = bootstrap.allgather(json.dumps([problem, kind]).encode(), f"set-up of {what}")
    everyone = [json.loads(data) for data in told]
    failed = any(kind == "failed" for _, kind in everyone)
    all_fine([text for text, _ in everyone], what, HeapError if failed else NotSupported)
    return result  # type: ignore[return-value]
