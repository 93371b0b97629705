"""What a benchmark hands on: one JSON line per measurement, each with all that is needed to repeat it, and tables.

results = Results("intranode", out, environment())
results.add("round", tokens=128, median_us=62.0)
show("128 tokens", results.of("round"), [Column("tokens"), Column("median_us", "median, µs", ".1f")])
"""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# without a terminal rich folds tables to 80 columns
_WIDTH_WITHOUT_TERMINAL = 160


def environment(commit: str | None = None, device: str = "cuda") -> dict[str, Any]:
    """What a measurement depends on besides the code's own arguments: command, date, commit, versions, machine.

    Args:
        commit: of the sources, where they are a copy without `.git`; None: ask git.
        device: "cuda", "hip" or "cpu": a CPU run on a machine with a GPU does not claim the GPU.
    """
    import torch
    import triton

    return {
        "command": _command(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **(_no_gpu() if device == "cpu" else _gpu()),
    }


def _command() -> str:
    """As typed, the script's path from the repository's root; without where results go and what the commit is."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name
    words, left_out = iter(sys.argv[1:]), ("--out", "--output", "--commit")
    kept = []
    for word in words:
        if word in left_out:
            next(words, None)
        elif word.split("=")[0] not in left_out:
            kept.append(word)
    return shlex.join(["python3", name, *kept])


def _cpu() -> str:
    """The processor's name, where Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _run(*command: str) -> str | None:
    """Its output, None where there is no such program or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _commit() -> str:
    commit = _run("git", "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("+changes" if _run("git", "status", "--porcelain", "--untracked-files=no") else "")


def _no_gpu() -> dict[str, Any]:
    return {"gpu": None, "num_gpus": 0, "driver": None, "cpu": _cpu()}


def _gpu() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return _no_gpu()
    driver = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if torch.version.cuda else None
    return {
        "gpu": torch.cuda.get_device_name(0),
        "num_gpus": torch.cuda.device_count(),
        "driver": driver.splitlines()[0] if driver else None,
        "cpu": _cpu(),
    }


class Results:
    """Measurements of one run, in memory and, given a directory, in a file of its own: a line each, written at once.

    Args:
        name: of the benchmark; the file is `<date>-<name>-<gpu>.jsonl`, with a number behind if there is one already.
        out: directory, made if missing; None: no file.
        environment: put into every line.
    """

    def __init__(self, name: str, out: Path | str | None, environment: Mapping[str, Any]) -> None:
        self.name, self.environment = name, dict(environment)
        self.rows: list[dict[str, Any]] = []
        self.path = None if out is None else _new_file(Path(out), name, self.environment)

    def add(self, kind: str, **values: Any) -> dict[str, Any]:
        """Take down a measurement; `kind` tells which of the run's tables it belongs to."""
        row = {"bench": self.name, "kind": kind, **values}
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({**row, **self.environment}, default=str) + "\n")
        return row

    def of(self, kind: str, **values: Any) -> list[dict[str, Any]]:
        """The measurements of this kind that have these values."""
        wanted = {"kind": kind, **values}
        return [row for row in self.rows if wanted.items() <= row.items()]


def _new_file(out: Path, name: str, environment: Mapping[str, Any]) -> Path:
    """An empty file that was not there before: results are never overwritten."""
    out.mkdir(parents=True, exist_ok=True)
    gpu = str(environment.get("gpu") or "cpu").lower().replace("nvidia", "").strip().replace(" ", "-")
    stem = f"{str(environment['date'])[:10]}-{name}-{gpu}"
    number = 1
    while True:
        path = out / (f"{stem}.jsonl" if number == 1 else f"{stem}-{number}.jsonl")
        try:
            path.touch(exist_ok=False)
            return path
        except FileExistsError:
            number += 1


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Column:
    """One column of a table: a row's value under `key`, in `format` where it is a number; nothing where it is None."""

    key: str
    header: str | None = None  # None: the key
    format: str = ""

    @property
    def title(self) -> str:
        return self.key if self.header is None else self.header

    def text(self, row: Mapping[str, Any]) -> str:
        value = row.get(self.key)
        if value is None:
            return ""
        return format(value, self.format) if isinstance(value, int | float) else str(value)


def show(title: str, rows: Iterable[Mapping[str, Any]], columns: Sequence[Column]) -> None:
    """Print a table, numbers to the right."""
    rows = list(rows)
    table = Table(title=title, title_justify="left")
    for column in columns:
        is_text = any(isinstance(row.get(column.key), str) for row in rows)
        table.add_column(column.title, justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        table.add_row(*(column.text(row) for column in columns))
    console().print(table)


def markdown(rows: Iterable[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    """The same table for a page."""
    lines = ["| " + " | ".join(c.title for c in columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(c.text(row) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def console() -> Console:
    """Where benches print."""
    there = Console()
    return there if there.is_terminal else Console(width=_WIDTH_WITHOUT_TERMINAL)
