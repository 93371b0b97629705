"""Machine code from LLVM IR: one engine a process, objects kept on disk.

An object file on disk is named by everything that decides its content: the source text or bitcode, the lifter's own
sources, the versions of llvmlite and LLVM, the host CPU and the optimisation level. So it is never stale, only unused.
A file is written beside its place and renamed, and carries a checksum: a damaged one is built again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from mori_triton import bitcode, env

# code generation levels. Measured: a kernel at level 2 runs 13 % faster than at level 0 and takes 2.4 times as long to
# compile, since most of the time goes to the emulator's own functions; those are compiled once
KERNEL_LEVEL, OWN_LEVEL = 0, 2
_MAGIC = b"mori-triton-object-1\n"

_lock = threading.RLock()
_engine: llvm.ExecutionEngine | None = None


@functools.cache
def _generator(level: int) -> llvm.TargetMachine:
    return bitcode.host_machine(level)


def _start() -> llvm.ExecutionEngine:
    """The process' engine; made at the first use, under the lock."""
    global _engine
    if _engine is None:
        # the engine owns the machine that it is given, so it gets its own
        _engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), bitcode.host_machine(0))
    return _engine


# sources that have no part in what an object contains
_NO_PART = {"__init__.py", "device.py", "driver.py", "hostcalls.py", "launch.py", "ledger.py", "machine.py"}
_NO_PART |= {"printf.py", "scheduler.py"}


@functools.cache
def _host() -> str:
    """What decides how LLVM turns a module into an object here."""
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return repr((llvmlite.__version__, llvm.llvm_version_info, llvm.get_default_triple(), cpu, features))


@functools.cache
def _lifter() -> str:
    """Hash of the sources that turn assembly text into LLVM IR."""
    sha = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted(here.rglob("*.py")):
        if path.parent != here or path.name not in _NO_PART:
            sha.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()


def _digest(*parts: str | bytes) -> str:
    sha = hashlib.sha256(_host().encode())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()


def digest(*parts: str | bytes) -> str:
    """Key of the object that the lifter makes of `parts`."""
    return _digest(_lifter(), str(KERNEL_LEVEL), *parts)


def _read(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """Facts and object code of a cache file; None when it is missing or damaged."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + 32
    body = raw[start:]
    if raw[:start] != _MAGIC + hashlib.sha256(body).digest():
        return None
    facts, _, code = body.partition(b"\n")
    return json.loads(facts), code


def _write(path: Path, facts: dict[str, Any], code: bytes) -> None:
    """Best effort: a cache that cannot be written (read-only, full) costs time, not the run."""
    body = json.dumps(facts).encode() + b"\n" + code
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(body).digest() + body)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
    except OSError:
        return


def compile_object(source: str | bytes, level: int) -> bytes:
    """Object code for the host CPU from LLVM IR text or bitcode."""
    with _lock:
        generator = _generator(level)
        module = llvm.parse_assembly(source) if isinstance(source, str) else llvm.parse_bitcode(source)
        module.verify()
        return generator.emit_object(module)


def load(
    key: str, build: Callable[[], tuple[str | bytes, dict[str, Any]]], level: int = KERNEL_LEVEL
) -> dict[str, Any]:
    """Link the object called `key` (a hex digest), from the cache or else from `build()`.

    `build` returns LLVM IR (text or bitcode) and a JSON-able dict of facts, which is returned and kept with the object.
    """
    path = env.cache_dir() / "objects" / key[:2] / f"{key}.o"
    found = _read(path)
    if found is None:
        source, facts = build()
        found = facts, compile_object(source, level)
        _write(path, *found)
    _link(found[1])
    return found[0]


def _link(code: bytes) -> None:
    with _lock:
        engine = _start()
        engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
        engine.finalize_object()


@functools.cache
def load_bitcode(name: str) -> None:
    """Link one of the emulator's own bitcode files, once a process."""
    source = bitcode.host_file(name).read_bytes()
    load(_digest(source, str(OWN_LEVEL)), lambda: (source, {}), OWN_LEVEL)


def address(name: str) -> int:
    """Address of a function of a linked object."""
    with _lock:
        value = _start().get_function_address(name)
    assert value, f"{name} is not linked"
    return value
