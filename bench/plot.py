"""A run's picture: medians beside their floors and time per byte by number of tokens, or the host's time of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# the same color for the same thing in every panel
_COLORS = {"dispatch": "tab:blue", "combine": "tab:green", "external combine": "tab:orange"}


def intranode(rows: Sequence[Mapping[str, Any]], path: Path, environment: Mapping[str, Any]) -> Path | None:
    """Draw the phases of `bench_intranode.py` to a new file; None where matplotlib is missing or nothing was timed.

    Raises: FileExistsError: results are never overwritten.
    """
    pyplot = _pyplot()
    phases = [row for row in rows if str(row.get("how", "")).startswith("phase in")]
    if pyplot is None or not phases:
        return None
    sizes = sorted({row["tokens"] for row in phases if row["kind"] == "round"})
    scaling = [row for row in phases if row["kind"] == "scaling"]
    figure, axes = pyplot.subplots(1, len(sizes) + bool(scaling), figsize=(5 * (len(sizes) + 1), 5), squeeze=False)
    for axis, tokens in zip(axes[0], sizes, strict=False):
        _bars(axis, [row for row in phases if row["kind"] == "round" and row["tokens"] == tokens], tokens)
    if scaling:
        axis = axes[0][-1]
        for what, color in _COLORS.items():
            of = [
                row for row in scaling if row["what"] == what and (what != "dispatch" or "external" not in row["pair"])
            ]
            line = sorted((row["tokens"], row["ps_per_byte"]) for row in of)
            axis.plot(*zip(*line, strict=True), marker="o", color=color, label=what)
        axis.axhline(1e3 / scaling[0]["copy_gbs"], color="black", linestyle=":", label="copy")
        axis.set_xscale("log", base=2)
        numbers = sorted({row["tokens"] for row in scaling})
        axis.set_xticks(numbers, [f"{number:,}" for number in numbers])
        axis.set_ylim(bottom=0)
        axis.set(xlabel="tokens per PE", ylabel="ps per byte moved", title="Scaling")
        axis.legend()
    return _saved(figure, path, environment)


def host(rows: Sequence[Mapping[str, Any]], path: Path, environment: Mapping[str, Any]) -> Path | None:
    """Draw the calls of `bench_host_overhead.py`, a panel for each number of PEs, medians with their p90 as a whisker.

    Returns, raises: as `intranode`.
    """
    pyplot = _pyplot()
    calls = [row for row in rows if row["kind"] == "call"]
    if pyplot is None or not calls:
        return None
    worlds = sorted({row["pes"] for row in calls})
    figure, axes = pyplot.subplots(1, len(worlds), figsize=(6 * len(worlds), 4), squeeze=False)
    for axis, pes in zip(axes[0], worlds, strict=True):
        of = [row for row in calls if row["pes"] == pes][::-1]
        medians = [row["median_us"] for row in of]
        above = [row["p90_us"] - row["median_us"] for row in of]
        axis.barh([f"{row['kernel_type']}\n{row['what']}" for row in of], medians, xerr=[[0.0] * len(of), above])
        axis.set(xlabel="µs of host time, slowest PE", title=f"{pes} PEs")
    return _saved(figure, path, environment)


def model(rows: Sequence[Mapping[str, Any]], path: Path, environment: Mapping[str, Any]) -> Path | None:
    """Draw the entries of `model_rdna4.py`: the baseline's model beside its times, then both columns of hidden 7168.

    Returns, raises: as `intranode`.
    """
    pyplot = _pyplot()
    if pyplot is None or not rows:
        return None
    worlds = sorted({row["world_size"] for row in rows})
    figure, axes = pyplot.subplots(1, 1 + len(worlds), figsize=(6 * (1 + len(worlds)), 5), squeeze=False)
    first = axes[0][0]
    for color, world_size in zip(("tab:blue", "tab:orange"), worlds, strict=True):
        for irregular, marker in ((False, "o"), (True, "x")):
            of = [row for row in rows if row["world_size"] == world_size and row["irregular"] is irregular]
            name = f"EP{world_size}{', irregular' if irregular else ''}"
            measured, predicted = [row["rccl_us"] for row in of], [row["model_rccl_us"] for row in of]
            first.loglog(measured, predicted, marker, color=color, markersize=4, label=name)
    ends = [min(row["rccl_us"] for row in rows), max(row["rccl_us"] for row in rows)]
    first.loglog(ends, ends, color="black", linewidth=0.7)
    first.set(xlabel="RCCL, measured, µs", ylabel="model, µs", title="Dense baseline")
    first.legend()
    hidden = 7168
    for axis, world_size in zip(axes[0][1:], worlds, strict=True):
        of = [row for row in rows if row["world_size"] == world_size and row["hidden_size"] == hidden]
        tokens = [row["tokens"] for row in of]
        axis.loglog(tokens, [row["rccl_us"] for row in of], "o", color="tab:gray", label="RCCL, measured")
        axis.loglog(tokens, [row["model_rccl_us"] for row in of], color="tab:gray", label="model of the baseline")
        axis.loglog(tokens, [row["mori_us"] for row in of], "o", color="tab:green", label="MORI, measured")
        low, high = [row["model_low_us"] for row in of], [row["model_high_us"] for row in of]
        axis.fill_between(tokens, low, high, color="tab:green", alpha=0.3, label="model of dispatch + combine")
        axis.set(xlabel="tokens per PE", ylabel="µs of a pair", title=f"EP{world_size}, hidden {hidden}")
        axis.legend()
    return _saved(figure, path, environment)


def _pyplot() -> Any:
    """matplotlib's pyplot, drawing to files; None where it is missing."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _saved(figure: Any, path: Path, environment: Mapping[str, Any]) -> Path:
    versions = "torch {torch}, Triton {triton}, driver {driver}, commit {commit}".format_map(dict(environment))
    figure.suptitle(f"{environment['gpu'] or 'emulated device'}; {versions}", fontsize=9)
    figure.tight_layout()
    with path.open("xb") as file:
        figure.savefig(file, format="png", dpi=120)
    _pyplot().close(figure)
    return path


def _bars(axis: Any, rows: Sequence[Mapping[str, Any]], tokens: int) -> None:
    """One group for each kernel type and dtype: the phase's median, its p90 as a whisker, its floor as a line."""
    groups = sorted({(row["kernel_type"], row["dtype"]) for row in rows})
    width = 1 / (len(_COLORS) + 1)
    for number, (what, color) in enumerate(_COLORS.items()):
        for place, group in enumerate(groups):
            found = [row for row in rows if row["what"] == what and (row["kernel_type"], row["dtype"]) == group]
            if found:
                row, at = found[0], place + number * width
                whisker = [[0.0], [max(0.0, row["p90_us"] - row["median_us"])]]
                label = what if place == 0 else None
                axis.bar(at, row["median_us"], 0.9 * width, yerr=whisker, color=color, label=label)
                axis.hlines(row["floor_us"], at - width / 2, at + width / 2, color="black")
    axis.set_xticks([place + width for place in range(len(groups))], [f"{kind}\n{dtype}" for kind, dtype in groups])
    axis.set(ylabel="µs, all PEs; line: floor", title=f"{tokens} tokens per PE")
    axis.legend()
