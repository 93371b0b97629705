"""What a run of `bench_rdna4_ep.py` says: one entry for each point and baseline, and numbers over many of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# a point whose slowest round's p50 is more than so many times its fastest one's is named
SPREAD_LIMIT = 1.20


@dataclass(frozen=True)
class Entry:
    """One point. Times are p50 of pairs, None where a backend was wrong and not timed."""

    world_size: int
    hidden_size: int
    tokens: int
    mori_us: float | None
    baseline_us: float | None
    spread: float = 1.0  # the larger one of both backends

    @property
    def correct(self) -> bool:
        return self.mori_us is not None and self.baseline_us is not None

    @property
    def speedup(self) -> float:
        """Baseline over MORI: above 1 MORI is faster."""
        assert self.mori_us is not None
        assert self.baseline_us is not None
        return self.baseline_us / self.mori_us

    @property
    def reduction_percent(self) -> float:
        return 100 * (1 - 1 / self.speedup)


@dataclass(frozen=True)
class Summary:
    """Over entries, each of the same weight."""

    points: int
    correct: int
    faster: int
    unstable: int
    median_reduction_percent: float | None
    geomean_speedup: float | None
    least_speedup: float | None

    def __str__(self) -> str:
        text = f"correct {self.correct}/{self.points}, MORI faster {self.faster}/{self.points}"
        if self.geomean_speedup is not None:
            text += (
                f", median latency reduction {self.median_reduction_percent:.2f} %, geomean speed-up "
                f"{self.geomean_speedup:.3f}, least {self.least_speedup:.3f}"
            )
        return f"{text}; spread of rounds above {SPREAD_LIMIT:.2f}: {self.unstable}"


def summarise(entries: Sequence[Entry]) -> Summary:
    """Numbers over the correct ones."""
    good = [entry for entry in entries if entry.correct]
    gains = [entry.speedup for entry in good]
    return Summary(
        points=len(entries),
        correct=len(good),
        faster=sum(gain > 1 for gain in gains),
        unstable=sum(entry.spread > SPREAD_LIMIT for entry in good),
        median_reduction_percent=statistics.median(e.reduction_percent for e in good) if good else None,
        geomean_speedup=statistics.geometric_mean(gains) if good else None,
        least_speedup=min(gains, default=None),
    )


def p50(us: np.ndarray) -> float:
    """Over all samples of all rounds."""
    return float(np.median(us))


def spread(us: np.ndarray) -> float:
    """The largest p50 of a round over the smallest one. `us`: `[rounds, samples]`."""
    of_rounds = np.median(us, axis=1)
    return float(of_rounds.max() / of_rounds.min())


def entry_of(row: Mapping[str, Any]) -> Entry:
    """Of a "pair" line of the results."""
    names = "world_size", "hidden_size", "tokens", "mori_us", "baseline_us", "spread"
    return Entry(**{name: row[name] for name in names})


def groups_of(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], list[Entry]]:
    """Entries of "pair" lines by what a summary is over: world, dtype, top-k, weights, baseline."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for row in rows:
        key = row["world_size"], row["dtype"], row["topk"], row["weights"], row["baseline"]
        groups.setdefault(key, []).append(entry_of(row))
    return groups


def title_of(key: tuple[Any, ...]) -> str:
    """Of a group."""
    world, dtype, topk, weights, baseline = key
    return f"EP{world}, {dtype}, top-{topk}, weights {'on' if weights else 'off'}, against {baseline}"


def heat_map(groups: Mapping[tuple[Any, ...], Sequence[Entry]], path: Path, subtitle: str) -> Path | None:
    """Draw speed-ups, hidden size by tokens, a panel for each group, to a new file; None without matplotlib.

    Raises: FileExistsError: results are never overwritten.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(groups), 1, figsize=(11, 3.6 * len(groups)), squeeze=False)
    for axis, (key, entries) in zip(axes[:, 0], groups.items(), strict=True):
        hidden, tokens = (sorted({getattr(e, name) for e in entries}) for name in ("hidden_size", "tokens"))
        grid = np.full((len(hidden), len(tokens)), np.nan)
        # a point that was not measured stays empty
        for entry in entries:
            row, column = hidden.index(entry.hidden_size), tokens.index(entry.tokens)
            grid[row, column] = entry.speedup if entry.correct else np.nan
            text = f"{entry.speedup:.2f}" if entry.correct else "wrong"
            axis.text(column, row, text, ha="center", va="center", fontsize=8)
        shown = axis.imshow(np.log2(grid), cmap="RdYlGn", vmin=-1, vmax=1, aspect="auto")
        axis.set_xticks(range(len(tokens)), [f"{number:,}" for number in tokens])
        axis.set_yticks(range(len(hidden)), [f"{number:,}" for number in hidden])
        axis.set(xlabel="tokens per PE", ylabel="hidden size", title=f"{title_of(key)}: speed-up")
        figure.colorbar(shown, ax=axis, label="log2")
    figure.suptitle(subtitle, fontsize=8)
    figure.tight_layout()
    with path.open("xb") as file:
        figure.savefig(file, format="png", dpi=110)
    pyplot.close(figure)
    return path
