"""What a tuning run has done so far, a JSON line each, so that an interrupted one goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mori_triton.errors import ArgumentError


class Journal:
    """The lines of one run. The first says what the run is: a journal of another run is not gone on with. One that has
    come to its "end" is started over.

    Args:
        path: the file; None: in memory only.
        run: what must be the same for results to be comparable (device, versions, problem).
        fresh: forget the run that is there.

    Raises:
        ArgumentError: the file holds another run, is no journal, or cannot be read or written.
    """

    def __init__(self, path: Path | None, run: Mapping[str, Any], *, fresh: bool = False) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        if path is None:
            return
        try:
            self._open(path, run, fresh)
        except OSError as error:
            raise ArgumentError(f"journal: want a file that can be written, got {path}: {error.strerror}") from error

    def _open(self, path: Path, run: Mapping[str, Any], fresh: bool) -> None:
        if path.exists():
            self.lines = _read(path)
        if fresh or not self.lines or self.lines[-1]["kind"] == "end":
            self.lines = []
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"kind": "run", **run}) + "\n", encoding="utf-8")
            return
        there = {k: v for k, v in self.lines[0].items() if k != "kind"}
        wanted = json.loads(json.dumps(run))
        if there != wanted:
            names = [n for n in {**there, **wanted} if there.get(n) != wanted.get(n)]
            each = ", ".join(f"{n}: {there.get(n)!r} there, {wanted.get(n)!r} now" for n in names)
            raise ArgumentError(
                f"{path}: this is the journal of another run ({each}); give another path or start afresh"
            )
        # without the half line of a run that was killed
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")
        self.lines = self.lines[1:]

    def add(self, kind: str, **values: Any) -> None:
        """Write a line; it is in the file when this returns."""
        line = {"kind": kind, **values}
        self.lines.append(line)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def find(self, kind: str, **values: Any) -> dict[str, Any] | None:
        """The last line of this kind with these values."""
        wanted = {"kind": kind, **json.loads(json.dumps(values))}
        return next((line for line in reversed(self.lines) if wanted.items() <= line.items()), None)


def _read(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    texts = path.read_text(encoding="utf-8").split("\n")
    for number, text in enumerate(texts, 1):
        if not text:
            continue
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and "kind" in line and (lines or line["kind"] == "run"):
            lines.append(line)
        elif number < len(texts) or not lines:
            raise ArgumentError(f"{path}:{number}: want a line of a tuning journal, got {text[:60]!r}")
    return lines
