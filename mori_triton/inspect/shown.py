"""Reports as text: tables for a terminal or a document, and assembly with its sources."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from mori_triton.errors import ArgumentError
from mori_triton.inspect.amd import located
from mori_triton.inspect.code import Resources
from mori_triton.inspect.report import Report

COLUMNS = (
    "kernel", "warps", "VGPR", "SGPR", "LDS", "spills", "waves/SIMD", "row load", "row store", "system scope",
    "device scope",
)  # fmt: skip
_LEFT = ("kernel", "system scope", "device scope")
_SHORT = {
    "load": "ld", "store": "st", "atomic": "atomic", "writeback": "wb", "invalidate": "inv", "fence": "fence",
}  # fmt: skip
UNKNOWN = "unknown"


def cells(report: Report) -> tuple[str, ...]:
    """One row of the table, `COLUMNS`."""
    found, scopes = report.resources, report.scopes()
    name, warps = report.launch.name, str(report.launch.num_warps)
    widths = tuple("–" if width is None else f"{width} B" for width in map(report.width, ("load", "store")))
    acts = tuple(" ".join(w for k, w in _SHORT.items() if k in scopes.get(s, ())) or "–" for s in ("system", "device"))
    if found is None:
        return (name, warps, *[UNKNOWN] * 5, *widths, *acts)
    return (
        name, warps, _vgprs(found), "–" if found.sgprs is None else str(found.sgprs), f"{found.lds_bytes} B",
        spills(found), str(report.waves), *widths, *acts,
    )  # fmt: skip


def _vgprs(found: Resources) -> str:
    return f"{found.vgprs}" if not found.agprs else f"{found.vgprs} ({found.agprs} of them accumulation)"


def spills(found: Resources) -> str:
    """ "0", or what is kept where."""
    if found.spills:
        counts = [
            f"{UNKNOWN if number is None else number} {kind}"
            for number, kind in ((found.vgpr_spills, "VGPR"), (found.sgpr_spills, "SGPR"))
            if number != 0 and not (kind == "SGPR" and found.sgprs is None)
        ]
        return ", ".join([*counts, f"{found.scratch_bytes} B scratch"])
    return "0"


def summary(reports: Sequence[Report], arch: str) -> Table:
    """The table of one target."""
    table = Table(title=f"{arch}, Triton {_triton()}", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in _LEFT else "right")
    for report in reports:
        table.add_row(*cells(report))
    return table


def details(report: Report) -> Table:
    """Every access of a block, and everything of a scope beyond a compute unit's, by its place in Python."""
    table = Table(title=f"{report.launch.name} on {report.arch}: accesses to global memory", title_justify="left")
    for column in ("source", "access", "bytes of a lane", "bytes at a time", "instruction"):
        table.add_column(column, justify="right" if column.startswith("bytes") else "left")
    for block in report.blocks:
        remark = "could move 16 at a time; is its pointer known to be aligned?" if block.narrow else ""
        at_a_time = " or ".join(map(str, block.widths)) or "no instruction found"
        table.add_row(str(block.source), block.kind, str(block.bytes_of_lane), at_a_time, remark)
    counts: dict[tuple[str, str, int, str], int] = {}
    for access in report.accesses:
        if access.scope:
            mnemonic = access.text.split()[0]
            key = str(access.source), f"{access.kind}, {access.scope} scope", access.num_bytes, mnemonic
            counts[key] = counts.get(key, 0) + 1
    for (source, kind, num_bytes, mnemonic), count in counts.items():
        times = f"{mnemonic} ×{count}" if count > 1 else mnemonic
        table.add_row(source, kind, "", str(num_bytes) if num_bytes else "–", times)
    return table


def annotated(report: Report) -> str:
    """The kernel's assembly without directives, under the Python that it comes from; rows and scopes marked."""
    rows = {(block.kind, block.source): block for block in report.rows}
    marks: dict[int, str] = {}
    for access in report.accesses:
        block = rows.get((access.kind, access.source))
        words = [f"{access.scope} scope"] if access.scope else []
        words += [f"row, {access.num_bytes} bytes at a time"] if block is not None else []
        if words:
            marks[access.line] = ", ".join(words)
    instructions = {number: (line, source) for number, line, source in located(report.asm)}
    lines: list[str] = []
    before = ""
    for number, raw in enumerate(report.asm.splitlines(), 1):
        if number in instructions:
            line, source = instructions[number]
            if source.line > 0 and str(source) != before:
                before = str(source)
                lines.append(f"; {source}: {linecache.getline(source.path, source.line).strip()}")
            lines.append(f"    {line:<60} ; {marks[number]}" if number in marks else f"    {line}")
        elif _LABEL.match(raw):
            lines.append(raw.split(";")[0].rstrip())
    return "\n".join(lines)


_LABEL = re.compile(r"(\.LBB|\$L__BB)\w+:")


def markdown(reports: Sequence[Report]) -> str:
    """The tables of all targets, for docs/amd_codegen.md."""
    parts = []
    for arch in dict.fromkeys(report.arch for report in reports):
        rows = [COLUMNS, tuple("---" if column in _LEFT else "---:" for column in COLUMNS)]
        rows += [cells(report) for report in reports if report.arch == arch]
        parts.append(f"### {arch}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows))
    return f"Made with Triton {_triton()}.\n\n" + "\n\n".join(parts) + "\n"


def _triton() -> str:
    import triton

    return str(triton.__version__)


BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def replace_tables(path: Path, tables: Callable[[], str]) -> None:
    """Write the tables between the markers of a document. They are made only once the markers are found.

    Raises:
        ArgumentError: the document has no markers, and stays as it is.
    """
    before, begins, rest = path.read_text().partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not begins or not ends:
        raise ArgumentError(f"{path}: want the lines {BEGIN.strip()} and {END.strip()}, got a document without them")
    path.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{after}")
