"""The tables of docs/amd_codegen.md are what `python -m mori_triton.inspect docs/amd_codegen.md` writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import triton

from mori_triton.device.launch import TARGETS
from mori_triton.inspect import shown
from mori_triton.inspect.kernels import package_launches
from mori_triton.inspect.report import report

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "amd_codegen.md").read_text()
# whose numbers hang on no code but their own
SAMPLE = ("combine_reduce_kernel", "combine_copy_kernel", "rdna4_sum_kernel", "clear_counts_kernel")


def rows(arch: str) -> dict[str, list[str]]:
    """The document's rows for a target, by kernel."""
    section = TEXT.partition(f"### {arch}\n")[2].partition("###")[0]
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
        shown.replace_tables(document, "new")
        assert document.read_text() == f"before\n{shown.BEGIN}\nnew\n{shown.END}after\n"
    document.write_text("no markers")
    with pytest.raises(ValueError, match="tables: begin"):
        shown.replace_tables(document, "new")


@pytest.mark.slow
def test_every_row_is_as_made_now(tmp_path: Path) -> None:
    if f"Made with Triton {triton.__version__}." not in TEXT:
        pytest.skip(f"the tables were made with another Triton than {triton.__version__}")
    document = tmp_path / "document.md"
    document.write_text(TEXT)
    subprocess.run([sys.executable, "-m", "mori_triton.inspect", str(document)], check=True, cwd=ROOT)
    assert document.read_text() == TEXT
