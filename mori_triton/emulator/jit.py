"""Machine code from LLVM IR: one engine a process, objects kept on disk.

An object file on disk is named by everything that decides its content: the source text or bitcode, the lifter's own
sources, the versions of llvmlite and LLVM, the host CPU and the optimisation level. So it is never stale, only unused.
A file is written beside its place and renamed, and carries a checksum: a damaged one is built again.

The lifter's helper functions cost more to compile than the kernels that call them, and kernels have many of them in
common. So each is an object of its own, named by its text, and a kernel's file lists those that it calls.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from mori_triton import bitcode, env

# code generation levels. Measured: a kernel at level 2 runs 13 % faster than at level 0 and takes 2.4 times as long to
# compile, since most of the time goes to the emulator's own functions; those are compiled once
KERNEL_LEVEL, OWN_LEVEL = 0, 2
_MAGIC = b"mori-triton-object-2\n"

_lock = threading.RLock()
_engine: llvm.ExecutionEngine | None = None
# helper functions that the engine has
_linked: set[str] = set()


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
_NO_PART |= {"descriptors.py", "printf.py", "scheduler.py"}


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


def _path(key: str) -> Path:
    return env.cache_dir() / "objects" / key[:2] / f"{key}.o"


def _read(path: Path) -> tuple[dict[str, Any], list[str], bytes] | None:
    """Facts, names of the helpers and object code of a cache file; None when it is missing or damaged."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + 32
    body = raw[start:]
    if raw[:start] != _MAGIC + hashlib.sha256(body).digest():
        return None
    head, _, code = body.partition(b"\n")
    facts, helpers = json.loads(head)
    return facts, helpers, code


def _write(path: Path, facts: dict[str, Any], helpers: list[str], code: bytes) -> None:
    """Best effort: a cache that cannot be written (read-only, full) costs time, not the run."""
    body = json.dumps([facts, helpers]).encode() + b"\n" + code
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


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time, as far as the cache's file system lets it: PEs want the same kernels at the same time."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
            # closing is not enough: a child that was forked meanwhile has the descriptor too, and the lock with it
            stack.callback(fcntl.flock, folder, fcntl.LOCK_UN)
        yield


def compile_object(source: str | bytes, level: int) -> bytes:
    """Object code for the host CPU from LLVM IR text or bitcode."""
    with _lock:
        generator = _generator(level)
        module = llvm.parse_assembly(source) if isinstance(source, str) else llvm.parse_bitcode(source)
        module.verify()
        return generator.emit_object(module)


_FUNCTION = re.compile(r"^(?=define )", re.MULTILINE)
_INTERNAL = re.compile(r"define internal (\w+) @([\w.]+)\((.*)\) \{")
_NAMED = re.compile(r"@([\w.]+)\(")
_PARAMETER = re.compile(r" %\w+")


def split(source: str) -> tuple[str, dict[str, str]]:
    """The lifter's IR text without its helpers, and the helpers as modules, by the name that both give them.

    A helper is an internal function that calls no other; its name is a hash of its text, so it means the same in all.
    """
    head, *functions = _FUNCTION.split(source)
    declared = {name: line for line in head.splitlines() for name in _NAMED.findall(line)}
    kept: list[str] = []
    renamed: dict[str, str] = {}
    helpers: dict[str, str] = {}
    for text in functions:
        match = _INTERNAL.match(text)
        called = sorted(set(_NAMED.findall(text, match.end()))) if match else []
        if match is None or not declared.keys() >= set(called):
            kept.append(text)
            continue
        ret, name, parameters = match.groups()
        before, after = "".join(f"{declared[callee]}\n" for callee in called), f"({parameters}) {{{text[match.end() :]}"
        renamed[name] = f"mori_emu_{hashlib.sha256(f'{before}{ret}{after}'.encode()).hexdigest()[:32]}"
        helpers[renamed[name]] = f"{before}define {ret} @{renamed[name]}{after}"
        declared[renamed[name]] = f"declare {ret} @{renamed[name]}({_PARAMETER.sub('', parameters)})"
    main = _NAMED.sub(lambda match: f"@{renamed.get(match[1], match[1])}(", "".join(kept))
    return "".join(f"{line}\n" for line in declared.values()) + main, helpers


def _helpers(names: Iterable[str], texts: Mapping[str, str] | None = None) -> dict[str, bytes] | None:
    """Object code of those helpers that the engine lacks; compiled and kept where the cache lacks them.

    None: without `texts`, where it lacks one.
    """
    codes = {}
    for name in names:
        path = _path(_digest(str(KERNEL_LEVEL), name))
        if name in _linked and (texts is None or path.exists()):
            continue
        found = _read(path)
        if found is None:
            if texts is None:
                return None
            found = {}, [], compile_object(texts[name], KERNEL_LEVEL)
            _write(path, *found)
        codes[name] = found[2]
    return codes


_Found = tuple[dict[str, Any], dict[str, bytes], bytes]


def _kept(path: Path) -> _Found | None:
    found = _read(path)
    helpers = found and _helpers(found[1])
    return None if found is None or helpers is None else (found[0], helpers, found[2])


def _built(path: Path, build: Callable[[], tuple[str | bytes, dict[str, Any]]], level: int) -> _Found:
    source, facts = build()
    main, texts = split(source) if isinstance(source, str) else (source, {})
    helpers, code = _helpers(texts, texts), compile_object(main, level)
    assert helpers is not None
    # after what it calls
    _write(path, facts, list(texts), code)
    return facts, helpers, code


def load(
    key: str, build: Callable[[], tuple[str | bytes, dict[str, Any]]], level: int = KERNEL_LEVEL
) -> dict[str, Any]:
    """Link the object called `key` (a hex digest), from the cache or else from `build()`.

    `build` returns LLVM IR (the lifter's text, or bitcode) and a JSON-able dict of facts, which is returned and kept
    with the object.
    """
    path = _path(key)
    found = _kept(path)
    if found is None:
        with _alone(path):
            # made by another process meanwhile?
            found = _kept(path) or _built(path, build, level)
    facts, helpers, code = found
    with _lock:
        new = helpers.keys() - _linked
        for name in new:
            _add(helpers[name])
        _linked.update(new)
        _link(code)
    return facts


def _add(code: bytes) -> None:
    _start().add_object_file(llvm.object_file.ObjectFileRef.from_data(code))


def _link(code: bytes) -> None:
    with _lock:
        _add(code)
        _start().finalize_object()


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
