"""The tables of docs/amd_codegen.md are what `python -m mori_triton.inspect docs/amd_codegen.md` writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from mori_triton.device.launch import TARGETS
from mori_triton.inspect import __main__ as command
from mori_triton.inspect import shown
from mori_triton.inspect.kernels import package_launches
from mori_triton.inspect.report import report

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "amd_codegen.md").read_text()
# whose numbers hang on no code but their own
SAMPLE = ("combine_reduce_kernel", "combine_copy_kernel", "rdna4_sum_kernel", "clear_counts_kernel")


def rows(arch: str, text: str = TEXT) -> dict[str, list[str]]:
    """A document's rows for a target, by kernel."""
    section = text.partition(f"### {arch}\n")[2].partition("###")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    assert tuple(cells[0]) == shown.COLUMNS
    return {row[0]: row for row in cells[2:]}


def test_every_kernel_is_in_every_table() -> None:
    names = list(package_launches())
    for arch in TARGETS:
        assert list(rows(arch)) == names, f"{arch}: run python -m mori_triton.inspect docs/amd_codegen.md"


def test_a_sample_is_as_made_now() -> None:
    if f"Made with Triton {triton.__version__}." not in TEXT:
        pytest.skip(f"the tables were made with another Triton than {triton.__version__}")
    for name in SAMPLE:
        made = list(shown.cells(report(package_launches()[name], "gfx1201")))
        assert rows("gfx1201")[name] == made, "run python -m mori_triton.inspect docs/amd_codegen.md"


def test_tables_go_between_the_markers(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text(f"before\n{shown.BEGIN}old\n{shown.END}after\n")
    for _ in range(2):
        shown.replace_tables(document, lambda: "new")
        assert document.read_text() == f"before\n{shown.BEGIN}\nnew\n{shown.END}after\n"


def test_the_command_writes_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one kernel on two targets here; of all of them below."""
    name, targets = "clear_counts_kernel", {arch: TARGETS[arch] for arch in ("gfx1201", "sm_90")}
    chosen = {name: package_launches()[name]}
    monkeypatch.setattr(command, "package_launches", lambda: chosen)
    monkeypatch.setattr(command, "TARGETS", targets)
    document = tmp_path / "document.md"
    document.write_text(f"before\n{shown.BEGIN}old\n{shown.END}after\n")
    command.main([str(document)])
    text = document.read_text()
    assert text.startswith(f"before\n{shown.BEGIN}\nMade with Triton {triton.__version__}.")
    assert text.endswith(f"{shown.END}after\n")
    assert "old" not in text
    for arch in targets:
        (row,) = rows(arch, text).values()
        assert row[:2] == rows(arch)[name][:2]
        if f"Made with Triton {triton.__version__}." in TEXT:
            assert row == rows(arch)[name]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((), "document"), (("no/such/document.md",), "no/such/document.md"), (("no_markers.md",), "tables: begin")],
)
def test_a_wrong_document_is_refused_at_once(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command, "package_launches", lambda: pytest.fail("kernels are compiled"))
    monkeypatch.chdir(tmp_path)
    Path("no_markers.md").write_text("no markers")
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert Path("no_markers.md").read_text() == "no markers"


@pytest.mark.slow
def test_every_row_is_as_made_now(tmp_path: Path) -> None:
    if f"Made with Triton {triton.__version__}." not in TEXT:
        pytest.skip(f"the tables were made with another Triton than {triton.__version__}")
    document = tmp_path / "document.md"
    document.write_text(TEXT)
    subprocess.run([sys.executable, "-m", "mori_triton.inspect", str(document)], check=True, cwd=ROOT)
    assert document.read_text() == TEXT
