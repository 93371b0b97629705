"""The command `mori-triton`, run as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from mori_triton import cli
from mori_triton.host import drivers
from mori_triton.ops.tune import bench

pytestmark = pytest.mark.cpu

TINY = [
    "--device", "cpu", "--ep", "2", "--hidden", "32", "--topk", "2", "--experts", "4", "--tokens", "1,2",
    "--dtypes", "bf16", "--phases", "dispatch", "--budget", "1",
]  # fmt: skip


def run(*arguments: str) -> Any:
    """In this process."""
    return CliRunner().invoke(cli.app(), arguments)


def start(code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    command = [sys.executable, "-c", f"import sys; sys.argv = ['mori-triton', 'tune']; {code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_tune_writes_tables_and_shows_old_and_new(tmp_path):
    """Twice: the second run finds the first one's rules, and says so."""
    first = run("tune", "--out", str(tmp_path), *TINY)
    assert first.exit_code == 0, first.output
    path = tmp_path / "gfx1201_emulated_IntraNode_ep2_dispatch.json"
    assert [rule["num_tokens"] for rule in json.loads(path.read_text())["rules"]] == [1, 2]
    assert "dispatch bf16, 1 tokens, hidden 32, top-2: new" in first.stdout
    assert "built in" in first.stdout
    second = run("tune", "--out", str(tmp_path), *TINY)
    assert second.exit_code == 0, second.output
    assert "top-2: kept" in second.stdout or "top-2: better" in second.stdout
    assert "built in" not in second.stdout


def test_what_cannot_be_read_is_said_without_a_traceback(tmp_path):
    (tmp_path / "gfx1201_emulated_IntraNode_ep2_dispatch.json").write_text("{")
    done = run("tune", "--out", str(tmp_path), *TINY)
    assert done.exit_code == 2
    assert "the tuning table is not JSON" in done.output
    assert isinstance(done.exception, SystemExit)


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.PeBench, "measure", None)
    (tmp_path / "file").touch()
    for out, journal in (("file", "journal"), ("file/out", "journal"), ("out", "file/journal"), ("out", ".")):
        done = run("tune", "--out", str(tmp_path / out), "--journal", str(tmp_path / journal), *TINY)
        assert done.exit_code == 2, done.output
        name = "out" if out.startswith("file") else "journal"
        assert f"mori-triton tune: {name}: want a" in done.output
        assert str(tmp_path / (out if name == "out" else journal)) in done.output
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]


def test_without_a_gpu_nothing_is_tuned_by_chance(tmp_path, monkeypatch):
    """The default sizes would keep the emulated device busy for hours, for times that say nothing."""
    monkeypatch.setattr(drivers, "default_device", lambda: "cpu")
    done = run("tune", "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "no GPU" in done.output
    assert "--device cpu" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--tokens", "0..4"], "--tokens"), (["--tokens", "4..1"], "--tokens"), (["--tokens", "x"], "--tokens"),
     (["--kernel-type", "Inter"], "--kernel-type"), (["--ep", "0"], "--ep")],
)  # fmt: skip
def test_a_bad_option_is_named(tmp_path, arguments, says):
    done = run("tune", "--out", str(tmp_path), *TINY, *arguments)
    assert done.exit_code == 2
    assert says in done.output
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_message_names_it():
    """None in `sys.modules` is a package that cannot be imported."""
    for missing in ("typer", "rich"):
        done = start(f"sys.modules['{missing}'] = None; from mori_triton.cli import main; main()")
        assert done.returncode == 1
        assert f"{missing} is not installed" in done.stderr
        assert "pip install mori_triton[cli]" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_entry_point_runs_the_command():
    done = start("sys.argv = ['mori-triton', '--help']; from mori_triton.cli import main; main()")
    assert done.returncode == 0
    assert "tune" in done.stdout


def test_a_wrong_result_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.PeBench, "verify", lambda self, call, shape: "PE 1: rows of other tokens came")
    done = run("tune", "--out", str(tmp_path), *TINY)
    assert done.exit_code == 1
    assert "wrong: PE 1: rows of other tokens came" in done.output
    assert not list(tmp_path.glob("*.json"))


def test_token_counts():
    assert cli.token_counts("1..16384") == tuple(1 << i for i in range(15))
    assert cli.token_counts("64, 3,3") == (3, 64)
    assert cli.token_counts("5..21,7") == (5, 7, 10, 20)
