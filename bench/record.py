"""Turn a run's JSONL file into a page for `docs/measurements/`: `python bench/record.py RUN.jsonl [PAGE.md]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bench.report import Column, console, markdown, read_rows

# what a table shows, by kind of row; other benches' rows show all that differs
COLUMNS = {
    "round": (
        Column("what"),
        Column("how"),
        Column("median_us", "median, µs", ".1f"),
        Column("p90_us", "p90, µs", ".1f"),
        Column("share_us", "share, µs", ".1f"),
        Column("skew_us", "skew, µs", ".1f"),
        Column("floor_us", "floor, µs", ".1f"),
        Column("ratio", "/ floor", ".3f"),
        Column("write_us", "writes alone, µs", ".1f"),
        Column("gbs", "GB/s", ".0f"),
        Column("peer_us", "DeepEP, µs (elsewhere)", ".0f"),
        Column("peer_ratio", "times faster", ".1f"),
    ),
    "scaling": (
        Column("pes", "PEs"),
        Column("tokens", "tokens/PE"),
        Column("what"),
        Column("how"),
        Column("median_us", "median, µs", ".1f"),
        Column("floor_us", "floor, µs", ".1f"),
        Column("ratio", "/ floor", ".3f"),
        Column("ps_per_byte", "ps/byte", ".4f"),
        Column("gbs", "GB/s", ".0f"),
    ),
}
COLUMNS["worlds"] = COLUMNS["scaling"]
_ENVIRONMENT = ("command", "date", "commit", "gpu", "num_gpus", "driver", "torch", "triton", "python", "cpu")


def page(path: Path) -> str:
    """The page: what was run and where, then a table for each problem."""
    rows = read_rows(path)
    assert rows, f"{path} has no measurement"
    first, parts = rows[0], [f"# {rows[0]['bench']} on {rows[0]['gpu'] or 'the emulated device'}", ""]
    shown = [{"": name, " ": f"`{first[name]}`" if name == "command" else first[name]} for name in _ENVIRONMENT]
    parts += [markdown([row for row in shown if row[" "] is not None], [Column(""), Column(" ")]), ""]
    parts.append(f"Data: `{path.name}`. What is timed and what the floor is: [benchmarks](../benchmarks.md).")
    picture = path.with_suffix(".png")
    if picture.exists():
        parts += ["", f"![medians and floors]({picture.name})"]
    for title, group in _groups(rows):
        parts += ["", f"## {title}", "", markdown(group, _columns(group))]
    return "\n".join(parts) + "\n"


def _groups(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Tables with their titles, in the order of the file."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        title = str(row["kind"])
        if row["kind"] == "round":
            title = "{pes} PEs, {tokens} tokens each, hidden {hidden}, top-{top_k} of {experts}, {dtype}, {kernel_type}"
            if row["codec"] != "none":
                title += ", combine {codec}"
            title = title.format_map(row)
        groups.setdefault(title, []).append(row)
    for kind in ("scaling", "worlds"):
        if kind in groups:
            groups[kind] = phases_of(groups[kind])
    return list(groups.items())


def _columns(group: list[dict[str, Any]]) -> list[Column]:
    """The kind's columns, or every field of other rows; none that is empty throughout."""
    columns = COLUMNS.get(group[0]["kind"])
    if columns is None:
        names = dict.fromkeys(name for row in group for name in row)
        numbers = {name: any(isinstance(row.get(name), float) for row in group) for name in names}
        left_out = (*_ENVIRONMENT, "bench", "kind")
        columns = tuple(Column(name, None, ".5g" if numbers[name] else "") for name in names if name not in left_out)
    return [column for column in columns if any(row.get(column.key) is not None for row in group)]


def phases_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that time a phase of chained rounds, dispatch only beside zero copy, and the chained pairs; by what."""
    wanted = [row for row in rows if row["how"].startswith("phase in")]
    wanted = [row for row in wanted if row["what"] != "dispatch" or row["pair"] == "dispatch + combine"]
    whole = {f"graph of {row['chain']}, {by}" for row in rows for by in ("events", "host clock")}
    wanted += [row for row in rows if " + " in row["what"] and row["how"] in whole]
    return sorted(wanted, key=lambda row: str(row["what"]))


def write(path: Path, target: Path) -> Path:
    """Write the page to a new file.

    Raises: FileExistsError: a record is never overwritten.
    """
    with target.open("x") as file:
        file.write(page(path))
    return target


def main(
    run: Annotated[Path, typer.Argument(help="a run's .jsonl")],
    target: Annotated[Path | None, typer.Argument(help="the page; left out: beside the run, .md")] = None,
) -> None:
    """Write the page of a run."""
    console().print(f"wrote {write(run, target or run.with_suffix('.md'))}")


if __name__ == "__main__":
    typer.run(main)
