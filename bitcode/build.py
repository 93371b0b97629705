#!/usr/bin/env python3
"""Build the device bitcode from hip_src/, byte for byte reproducible: `python bitcode/build.py [--check]`.

Needs clang-19 (any path: `--clang`), and this package's Python. Writes

    amdgcn/libmori_shmem_device.bc     linked into kernels for every AMD GPU (no target-cpu)
    nvptx64/libmori_shmem_device.bc    linked into kernels for NVIDIA GPUs
    x86_64/emulator_memory.bc          memory accesses of the emulated device, loaded by its JIT
    x86_64/emulator_scheduler.bc       its scheduler
    x86_64/proxy.bc                    the proxy's progress loop
    x86_64/soft_hca.bc                 a network card in software
    manifest.json                      compiler, ABI hash; per file: hashes of sources and content, exported symbols

The compiler's IR text is cleaned before it becomes bitcode: attributes that tie a function to a GPU or stop inlining
go, and so does whatever depends on where the sources lie.

`--check` builds into a temporary directory and compares with what is checked in: byte for byte when the compiler is the
manifest's, else symbols, signatures, layout, and linking into a kernel for five targets. Exit status 1 on a difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mori_triton import abi, bitcode  # noqa: E402

COMMON = [
    "-std=c++17",
    "-O2",
    "-ffreestanding",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-ident",
    "-fno-strict-aliasing",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fomit-frame-pointer",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-parameter",
]
DEVICE = ["-nogpulib", "-fconvergent-functions"]
AS_IT_IS = ["-nogpulib", "-Xclang", "-disable-llvm-passes", "-fno-ident"]
# from clang 20 on, device atomics are taken to stay off fine-grained and peer memory unless told otherwise
REMOTE_ATOMICS = ["-fatomic-remote-memory", "-fatomic-fine-grained-memory"]
DEVICE_LIBRARY = "libmori_shmem_device.bc"
HOST_TRIPLE = "x86_64-unknown-linux-gnu"

# file -> triple, source, flags
TARGETS: dict[str, tuple[str, str, list[str]]] = {
    # without a code object version the module carries no flag that could contradict the kernel's
    f"amdgcn/{DEVICE_LIBRARY}": (
        "amdgcn-amd-amdhsa",
        "shmem_device.cpp",
        [*DEVICE, "-Xclang", "-mcode-object-version=none"],
    ),
    f"nvptx64/{DEVICE_LIBRARY}": ("nvptx64-nvidia-cuda", "shmem_device.cpp", DEVICE),
    "x86_64/emulator_memory.bc": (HOST_TRIPLE, "emulator/memory.cpp", ["-Wno-psabi"]),
    "x86_64/emulator_scheduler.bc": (HOST_TRIPLE, "emulator/scheduler.cpp", ["-Wno-psabi"]),
    "x86_64/proxy.bc": (HOST_TRIPLE, "proxy.cpp", []),
    "x86_64/soft_hca.bc": (HOST_TRIPLE, "soft_hca.cpp", []),
}


def clean(text: str, device: bool) -> str:
    """Drop from LLVM IR text what ties it to a GPU, a place or a compiler run; on devices every body becomes
    always-inline.
    """
    lines = []
    for line in text.splitlines():
        if re.match(r"; ModuleID|source_filename|!llvm\.(module\.flags|ident)\b", line):
            continue
        if line.startswith("attributes #"):
            line = re.sub(r' "[^"]*"(="[^"]*")?', "", line)  # noqa: PLW2901
            if device:
                line = re.sub(r"\bnoinline\b", "alwaysinline", line)  # noqa: PLW2901
            line = line.replace("{ }", "{ nounwind }")  # noqa: PLW2901
        lines.append(re.sub(r", !srcloc !\d+", "", line))
    return "\n".join(lines) + "\n"


def compile_one(clang: str, name: str, out: Path) -> None:
    """Compile and clean one file."""
    triple, source, flags = TARGETS[name]
    if triple.startswith("amdgcn") and accepts(clang, REMOTE_ATOMICS):
        flags = [*flags, *REMOTE_ATOMICS]
    # read from standard input, with relative includes: the place of the tree gets into nothing
    ir = subprocess.run(
        [clang, f"--target={triple}", *COMMON, *flags, "-I.", "-x", "c++", "-S", "-emit-llvm", "-o", "-", "-"],
        input=f'#include "{source}"\n', capture_output=True, text=True, cwd=ROOT / "hip_src", check=False,
    )  # fmt: skip
    if ir.returncode:
        raise SystemExit(f"{name}: {ir.stderr}")
    out.parent.mkdir(parents=True, exist_ok=True)
    written = subprocess.run(
        [clang, f"--target={triple}", *AS_IT_IS, "-x", "ir", "-c", "-emit-llvm", "-o", str(out), "-"],
        input=clean(ir.stdout, device=triple != HOST_TRIPLE), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if written.returncode:
        raise SystemExit(f"{name}: {written.stderr}")


def accepts(clang: str, flags: list[str]) -> bool:
    """Whether this compiler knows `flags`."""
    probe = [clang, *flags, "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(probe, input="", capture_output=True, text=True, check=False).returncode == 0


def compiler_version(clang: str) -> str:
    text = subprocess.run([clang, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"clang version (\d+\.\d+\.\d+)", text)
    if not match:
        raise SystemExit(f"{clang}: no version in {text!r}")
    return match[1]


def source_hash(name: str) -> str:
    """Hash of what a file is built from: its source and all headers that it includes."""
    digest = hashlib.sha256()
    for path in sorted(included(ROOT / "hip_src" / TARGETS[name][1])):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def included(path: Path) -> set[Path]:
    """A source file and the headers beside it that it includes, directly or not."""
    found, ahead = set(), [path]
    while ahead:
        path = ahead.pop()
        if path not in found:
            found.add(path)
            ahead += [path.parent / name for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)]
    return found


def build(clang: str, out: Path, families: tuple[str, ...] = ()) -> dict[str, Any]:
    """Build every file (or those of `families`, such as `"amdgcn"`) into `out` and return the manifest."""
    files = {}
    for name in TARGETS:
        if families and name.split("/", maxsplit=1)[0] not in families:
            continue
        compile_one(clang, name, out / name)
        files[name] = {
            "source_sha256": source_hash(name),
            "sha256": hashlib.sha256((out / name).read_bytes()).hexdigest(),
            "functions": bitcode.signatures(out / name),
        }
    return {
        "abi": {"version": abi.ABI_VERSION, "hash": abi.abi_hash()},
        "compiler": f"clang {compiler_version(clang)}",
        "files": files,
    }


def check(clang: str, families: tuple[str, ...] = ()) -> list[str]:
    """Differences between a fresh build (of all files or those of `families`) and the checked-in files."""
    here = ROOT / "bitcode"
    old = json.loads((here / "manifest.json").read_text())
    problems = []
    with tempfile.TemporaryDirectory() as tmp:
        new = build(clang, Path(tmp), families)
        if old["abi"] != new["abi"]:
            problems.append(f"manifest abi: {old['abi']}, built {new['abi']}")
        if not families and sorted(old["files"]) != sorted(new["files"]):
            problems.append(f"files: {sorted(old['files'])}, built {sorted(new['files'])}")
        exact = old["compiler"] == new["compiler"]
        for name in sorted(set(old["files"]) & set(new["files"])):
            if old["files"][name]["source_sha256"] != new["files"][name]["source_sha256"]:
                problems.append(f"{name}: built from other sources than those in hip_src")
            committed = (here / name).read_bytes()
            if hashlib.sha256(committed).hexdigest() != old["files"][name]["sha256"]:
                problems.append(f"{name}: the file is not the manifest's")
            if exact and committed != (Path(tmp) / name).read_bytes():
                problems.append(f"{name}: bytes differ from a build with {new['compiler']}")
            if old["files"][name]["functions"] != new["files"][name]["functions"]:
                problems.append(f"{name}: symbols or signatures differ")
            if name.endswith(DEVICE_LIBRARY):
                bitcode.verify(Path(tmp) / name)
        if not exact:
            problems += link_into_kernels(Path(tmp))
    return problems


def link_into_kernels(directory: Path) -> list[str]:
    """Link the built files into a kernel for each of the five targets."""
    from mori_triton.device.launch import TARGETS as KERNEL_TARGETS
    from mori_triton.device.launch import compile_probe

    problems = []
    for arch in KERNEL_TARGETS:
        family = "nvptx64" if arch.startswith("sm_") else "amdgcn"
        try:
            compile_probe(arch, directory / family / DEVICE_LIBRARY)
        except Exception as e:
            problems.append(f"{arch}: {type(e).__name__}: {e}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare a fresh build with the checked-in files")
    parser.add_argument("--clang", default=shutil.which("clang++-19") or shutil.which("clang++") or "clang++")
    parser.add_argument("families", nargs="*", help="amdgcn, nvptx64, x86_64; default all")
    options = parser.parse_args()
    if shutil.which(options.clang) is None:
        parser.error(f"--clang: {options.clang} is not installed; clang-19 is wanted (apt-get install clang-19)")
    if options.check:
        problems = check(options.clang, tuple(options.families))
        sys.stdout.write("\n".join(problems or [f"bitcode: up to date ({compiler_version(options.clang)})"]) + "\n")
        return 1 if problems else 0
    here = ROOT / "bitcode"
    manifest = build(options.clang, here, tuple(options.families))
    if options.families and (here / "manifest.json").is_file():
        manifest["files"] = {**json.loads((here / "manifest.json").read_text())["files"], **manifest["files"]}
    (here / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
