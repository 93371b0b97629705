"""Device libraries with one fault planted in their source, built by clang."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CLANG = shutil.which("clang++-19") or shutil.which("clang++")


class Fault(NamedTuple):
    """What is changed in a file: texts and what they become, each as often as it is there."""

    file: str
    edits: dict[str, str]
    transport: str = "mlx5"
    arch: str = "gfx1201"


FAULTS = {
    # What other waves have stored does not get to where a card reads. gfx1201 writes through the cache in question.
    "a fence removed": Fault(
        "p2p.h",
        {"  i32 status = 0;\n  gather_stores(ctx);\n": "  i32 status = 0;\n  program_barrier();\n"},
        arch="gfx942",
    ),
    "a signal before its data": Fault(
        "transport.h",
        {
            "build(call, queue, index, Verb::kWrite, false,": "build(call, queue, index + 1, Verb::kWrite, true,",
            "build(call, queue, index + n - 1, ": "build(call, queue, index, ",
        },
    ),
    "a wrong doorbell index, mlx5": Fault(
        "nic_mlx5.h", {"swap_bytes((u32)(posted & 0xffff)))": "swap_bytes((u32)((posted - 1) & 0xffff)))"}
    ),
    "a wrong doorbell index, bnxt_re": Fault(
        "nic_bnxt.h", {"at = (u32)posted & (num_wqes - 1)": "at = (u32)(posted - 1) & (num_wqes - 1)"}, "bnxt_re"
    ),
    "a wrong doorbell index, ionic": Fault(
        "nic_ionic.h", {"doorbell_value) | (posted & (fixed": "doorbell_value) | ((posted - 1) & (fixed"}, "ionic"
    ),
    "a reservation not waited for": Fault("queue.h", {"if (index + n - done <= room) {": "if (index + n >= done) {"}),
    "an epoch compared with ==": Fault("shmem_device.cpp", {"CTX_WAIT(ge, kGe)": "CTX_WAIT(ge, kEq)"}),
}  # fmt: skip


def _builder() -> Any:
    spec = importlib.util.spec_from_file_location("bitcode_build", ROOT / "bitcode" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def planted(name: str, directory: Path) -> Path:
    """The amdgcn library with a fault; AssertionError if the source is not what the fault was written for."""
    fault = FAULTS[name]
    shutil.copytree(ROOT / "hip_src", directory / "hip_src")
    path = directory / "hip_src" / fault.file
    text = path.read_text()
    for old, new in fault.edits.items():
        assert old in text, f"{fault.file} no longer has {old!r}"
        text = text.replace(old, new)
    path.write_text(text)
    builder = _builder()
    builder.ROOT = directory
    library = "amdgcn/libmori_shmem_device.bc"
    builder.compile_one(CLANG, library, directory / library)
    return directory / library
