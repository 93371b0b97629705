"""Where the bitcode files are, and copies of them in the cache."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mori_triton import env
from mori_triton.bitcode.verification import TRIPLES, fail, parsed, verify
from mori_triton.errors import BitcodeError

if TYPE_CHECKING:
    import llvmlite.binding as llvm

DEVICE_LIBRARY = "libmori_shmem_device.bc"


def directory() -> Path:
    """Where the checked-in files lie: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "_bitcode", package.parent / "bitcode"):
        if (candidate / "manifest.json").is_file():
            return candidate
    raise BitcodeError(
        f"device bitcode: no manifest.json in {package / '_bitcode'} nor in {package.parent / 'bitcode'}"
    )


def host_file(name: str) -> Path:
    """One of the files that this machine's own CPU runs, such as "proxy.bc". `BitcodeError` if it is not there."""
    path = directory() / "x86_64" / name
    if not path.is_file():
        raise BitcodeError(f"{path} does not exist: bitcode/build.py makes it")
    return path


def host_machine(level: int) -> llvm.TargetMachine:
    """A code generator of optimisation `level`, 0 to 3, for this machine's CPU; an engine that is given it owns it."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return llvm.Target.from_default_triple().create_target_machine(opt=level, cpu=cpu, features=features, jit=True)


def family(target: Any) -> str:
    """`"amdgcn"` or `"nvptx64"` for `"gfx942"`, `"sm_90"`, or an object with `backend` such as Triton's GPUTarget.

    Raises:
        BitcodeError: no bitcode is built for this target.
    """
    name = getattr(target, "backend", target)
    if isinstance(name, str):
        if name == "hip" or re.fullmatch(r"gfx[0-9a-f]+(-\w+)?(:.*)?", name):
            return "amdgcn"
        if name == "cuda" or re.fullmatch(r"sm_?\d+a?", name):
            return "nvptx64"
    raise BitcodeError(f"device bitcode: want a target like 'gfx942' or 'sm_90', got {target!r}")


def find_bitcode(target: Any) -> Path:
    """Path of the verified device library for `target`, in the cache under its content's hash.

    Args:
        target: `"gfx942"`, `"gfx1201"`, `"sm_90"`, ..., or Triton's `GPUTarget`.

    Raises:
        BitcodeError: no such target, no file, or a file that does not match `abi`.
    """
    wanted, override = family(target), env.bitcode_override()
    if override is None:
        return cached_copy(directory() / wanted / DEVICE_LIBRARY)
    found = cached_copy(Path(override))
    with parsed(found, found.read_bytes()) as module:
        triple = module.triple
    if triple != TRIPLES[wanted]:
        fail(Path(override), f"target triple of MORI_SHMEM_BC for {target}", TRIPLES[wanted], triple)
    return found


def cached_copy(source: Path) -> Path:
    """`source`, verified, in the cache under its content's hash."""
    try:
        stat = source.stat()
    except OSError as e:
        raise BitcodeError(f"device bitcode: {source} cannot be read: {e.strerror}") from e
    # of its times the one that nobody can set: copies and archives keep the other
    wanted = source, stat.st_ctime_ns, stat.st_size, env.cache_dir()
    found = _copy_of(*wanted)
    if not found.is_file():
        # somebody has emptied the cache while this process runs
        _copy_of.cache_clear()
        found = _copy_of(*wanted)
    return found


@lru_cache(maxsize=64)
def _copy_of(source: Path, ctime_ns: int, size: int, cache: Path) -> Path:
    data = source.read_bytes()
    verify(source)
    return stored(cache / "bitcode" / hashlib.sha256(data).hexdigest()[:32] / source.name, data)


def labelled_copy(path: Path | str, label: str) -> Path:
    """A copy of what `specialize` gave that has the same code and other content, in a directory called `label`.

    For Triton, which knows libraries by content or by path, kernels that are linked with it are different ones.
    """
    target = Path(path).parent / label / Path(path).name
    if target not in _labelled or not target.is_file():
        stored(target, f"; {label}\n".encode() + Path(path).read_bytes())
        _labelled.add(target)
    return target


_labelled: set[Path] = set()


def stored(target: Path, data: bytes) -> Path:
    """`target`, with `data` in it."""
    if not (target.is_file() and target.read_bytes() == data):
        target.parent.mkdir(parents=True, exist_ok=True)
        # another process may write the same file: whoever renames last replaces equal by equal
        handle, temporary = tempfile.mkstemp(dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(data)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    return target
