"""The command `mori-triton inspect`, run as its users run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mori_triton import cli

pytestmark = pytest.mark.compile

THEIRS = str(Path(__file__).parent / "codegen" / "kernels.py")
SEND = (f"{THEIRS}:send_kernel", "--signature", "*i8,*i8,*u64,i64,i32")
COPY = f"{THEIRS}:copy_kernel"


def run(*arguments: str) -> Any:
    """In this process."""
    return CliRunner().invoke(cli.app(), ["inspect", *arguments])


def test_a_kernel_of_the_package():
    done = run("sync_kernel", "--arch", "gfx1201")
    assert done.exit_code == 0, done.output
    assert "gfx1201, Triton" in done.output
    assert "ld st atomic wb inv" in done.output
    assert "global_inv" in done.output


def test_an_authors_kernel_as_json():
    done = run(*SEND, "--arch", "gfx1201,gfx942", "--num-warps", "2", "--json")
    assert done.exit_code == 0, done.output
    reports = json.loads(done.output)
    assert [(r["kernel"], r["arch"], r["num_warps"]) for r in reports] == [
        ("send_kernel", "gfx1201", 2), ("send_kernel", "gfx942", 2),
    ]  # fmt: skip
    for report in reports:
        assert report["resources"]["vgprs"] > 0
        assert report["resources"]["scratch_bytes"] == 0
        assert report["scopes"]["system"]["store"] >= 1
        assert 1 <= report["waves_per_simd"] <= 16


def test_the_assembly_stands_under_its_source():
    done = run(COPY, "--signature", "*bf16:16,*bf16:16,i32:16,2048", "--asm")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("; kernels.py:") and "tl.store(" in line)
    loads = [line for line in lines[at:] if "buffer_load_b128" in line or "global_load_b128" in line]
    assert loads
    assert all("row, 16 bytes at a time" in line for line in loads)
    assert not any(line.strip().startswith((".loc", ".cfi", ".byte")) for line in lines)


def test_a_narrow_copy_is_pointed_out():
    """Nothing is known of these pointers but that they hold bfloat16."""
    done = run(COPY, "--signature", "*bf16,*bf16,i32,2048")
    assert done.exit_code == 0, done.output
    assert done.output.count("could move 16 at a time") == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("no_such_kernel",), "dispatch_copy_kernel"),
        (("sync_kernel", "--arch", "gfx90a"), "--arch"),
        (("sync_kernel", "--signature", "i32"), "--signature"),
        (("no/such/file.py:kernel", "--signature", "i32"), "FILE.py:NAME"),
        ((f"{THEIRS}:nothing",), "@triton.jit"),
        ((COPY, "--signature", "*bf16:16,i32"), "one entry for each of src_ptr, dst_ptr, num_elements, BLOCK"),
        ((COPY, "--signature", "*bf16:8,*bf16,i32,2048"), "*bf16 or *bf16:16"),
        ((COPY, "--signature", "*bf16,*bf16,i32,what"), "BLOCK"),
        ((COPY, "--signature", "*bf16,*bf16,i32,*bf16"), "BLOCK"),
    ],
)
def test_what_is_wrong_is_said(arguments, says):
    done = run(*arguments)
    assert done.exit_code == 2
    assert says in done.output
    assert "mori-triton inspect:" in done.output
    assert isinstance(done.exception, SystemExit)
