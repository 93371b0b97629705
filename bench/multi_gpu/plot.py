"""A run's picture: the time of a round, each way beside the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(rows: Sequence[Mapping[str, Any]], path: Path, environment: Mapping[str, Any]) -> Path | None:
    """Draw the rounds of `compare` to a new file; None where matplotlib is missing or nothing was timed.

    Raises: FileExistsError: results are never overwritten.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    rounds = [row for row in rows if row.get("what") == "dispatch + combine"]
    if not rounds:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    problems = sorted({(row["tokens"], row["dtype"]) for row in rounds})
    figure, axes = pyplot.subplots(1, len(problems), figsize=(5 * len(problems), 5), squeeze=False)
    hows = list(dict.fromkeys(row["how"] for row in rounds))
    for axis, problem in zip(axes[0], problems, strict=True):
        here = [row for row in rounds if (row["tokens"], row["dtype"]) == problem]
        ways = list(dict.fromkeys(row["way"] for row in here))
        for number, how in enumerate(hows):
            found = {row["way"]: row for row in here if row["how"] == how}
            places = [ways.index(way) + number / (len(hows) + 1) for way in found]
            medians = [row["median_us"] for row in found.values()]
            above = [max(0.0, row["p90_us"] - row["median_us"]) for row in found.values()]
            axis.bar(places, medians, 1 / (len(hows) + 1), yerr=[[0.0] * len(above), above], capsize=2, label=how)
        axis.set_xticks(range(len(ways)), [way.replace(", ", ",\n").replace(" + ", " +\n") for way in ways], fontsize=7)
        axis.set(ylabel="µs, slowest PE: median, p90", title=f"{problem[0]} tokens/PE, {problem[1]}")
        axis.legend(fontsize=8)
    versions = "torch {torch}, Triton {triton}, driver {driver}, commit {commit}".format_map(dict(environment))
    name = environment["gpu"] or "emulated device"
    figure.suptitle(f"{rounds[0]['pes']} PEs on {rounds[0]['gpus']} x {name}; {versions}", fontsize=9)
    figure.tight_layout()
    with path.open("xb") as file:
        figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)
    return path
