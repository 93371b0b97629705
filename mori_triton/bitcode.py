"""Find the device bitcode of a target and verify it against `abi`.

The files are checked in under `bitcode/` and ship in the wheel as `mori_triton/_bitcode`. What Triton gets is a copy in
the cache directory, under a directory named by the content's hash: before 3.9 Triton's cache key for AMD kernels has
the path of a library in it, not its content.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mori_triton import abi, env
from mori_triton.errors import BitcodeError

if TYPE_CHECKING:
    import llvmlite.binding as llvm

DEVICE_LIBRARY = "libmori_shmem_device.bc"

_TRIPLES = {"amdgcn": "amdgcn-amd-amdhsa", "nvptx64": "nvptx64-nvidia-cuda"}
_LLVM_TYPES = {"float32": "float", "float64": "double"}
# data symbols that may be external beside the functions
_DATA_SYMBOLS = {abi.CONTEXT_SYMBOL, abi.LAYOUT_SYMBOL, f"{abi.LIBRARY}_broadcast"}


def directory() -> Path:
    """Where the checked-in files lie: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
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
        return _cached_copy(directory() / wanted / DEVICE_LIBRARY)
    found = _cached_copy(Path(override))
    with _parsed(found, found.read_bytes()) as module:
        triple = module.triple
    if triple != _TRIPLES[wanted]:
        _fail(Path(override), f"target triple of MORI_SHMEM_BC for {target}", _TRIPLES[wanted], triple)
    return found


def _cached_copy(source: Path) -> Path:
    try:
        stat = source.stat()
    except OSError as e:
        raise BitcodeError(f"device bitcode: {source} cannot be read: {e.strerror}") from e
    wanted = source, stat.st_mtime_ns, stat.st_size, env.cache_dir()
    found = _copy_of(*wanted)
    if not found.is_file():
        # somebody has emptied the cache while this process runs
        _copy_of.cache_clear()
        found = _copy_of(*wanted)
    return found


@lru_cache(maxsize=64)
def _copy_of(source: Path, mtime_ns: int, size: int, cache: Path) -> Path:
    data = source.read_bytes()
    verify(source)
    return _stored(cache / "bitcode" / hashlib.sha256(data).hexdigest()[:32] / source.name, data)


def labelled_copy(path: Path | str, label: str) -> Path:
    """A copy of what `find_bitcode` gave that has the same code and other content, in a directory called `label`.

    For Triton, which knows libraries by content or by path, kernels that are linked with it are different ones.
    """
    target = Path(path).parent / label / Path(path).name
    if target not in _labelled or not target.is_file():
        # LLVM's bitcode wrapper (magic, version, offset, size, CPU type); nobody reads what lies before the offset
        data, text = Path(path).read_bytes(), label.encode()
        text = text.ljust(-(-len(text) // 4) * 4, b"\0")
        header = struct.pack("<5I", 0x0B17C0DE, 0, 20 + len(text), len(data), 0xFFFFFFFF)
        _stored(target, header + text + data)
        _labelled.add(target)
    return target


_labelled: set[Path] = set()


def _stored(target: Path, data: bytes) -> Path:
    """`target`, with `data` in it."""
    if not (target.is_file() and target.read_bytes() == data):
        target.parent.mkdir(parents=True, exist_ok=True)
        # another process may write the same file: whoever renames last replaces equal by equal
        handle, temporary = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        os.replace(temporary, target)
    return target


# --------------------------------------------------------------------------------------------------------------- verify

_verified: set[str] = set()


def verify(path: Path | str) -> None:
    """Check that a device library matches `abi`; the result is kept per content.

    Raises:
        BitcodeError: names the symbol (or property), what was expected, what was found.
    """
    path = Path(path)
    data = path.read_bytes()
    # the directory says for which family it is meant
    key = f"{path.parent.name}/{hashlib.sha256(data).hexdigest()}"
    if key in _verified:
        return
    with _parsed(path, data) as module:
        text = str(module)
        _check_target(path, module, text)
        _check_functions(path, module)
        _check_layout(path, text)
        _check_metadata(path, text)
    _verified.add(key)


@contextmanager
def _parsed(path: Path, data: bytes) -> Iterator[Any]:
    import llvmlite.binding as llvm

    context = llvm.create_context()
    try:
        module = llvm.parse_bitcode(data, context)
    except RuntimeError as e:
        raise BitcodeError(f"{path}: not LLVM bitcode: {e}") from e
    try:
        yield module
    finally:
        # a module that outlives its context is freed twice
        module.close()


def _fail(path: Path, what: str, expected: object, found: object) -> None:
    raise BitcodeError(f"{path}: {what}: expected {expected}, found {found}")


def _check_target(path: Path, module: Any, text: str) -> None:
    triple = module.triple
    if triple not in _TRIPLES.values():
        _fail(path, "target triple", " or ".join(_TRIPLES.values()), repr(triple))
    in_tree = path.parent.name
    if in_tree in _TRIPLES and _TRIPLES[in_tree] != triple:
        _fail(path, "target triple", _TRIPLES[in_tree], triple)
    layout = module.data_layout
    # what the structs and the address spaces rely on: 64-bit global pointers; on amdgcn 32-bit LDS pointers and allocas
    # in 5
    wanted = {"amdgcn-amd-amdhsa": ("p1:64:64", "p3:32:32", "A5"), "nvptx64-nvidia-cuda": ("i64:64",)}[triple]
    if not {"e", *wanted} <= set(layout.split("-")):
        _fail(path, "data layout", f"little endian with {', '.join(wanted)}", repr(layout))
    for attribute in ("target-cpu", "target-features", "amdgpu-waves-per-eu", "amdgpu-flat-work-group-size"):
        found = re.search(rf'"{attribute}"="[^"]*"', text)
        if found:
            _fail(path, f"function attribute {attribute}", "none (one file serves every GPU)", found[0])


def _llvm_type(name: str) -> str:
    return _LLVM_TYPES.get(name) or "i" + name.lstrip("uint")


def signatures(path: Path | str) -> dict[str, str]:
    """Every function that a bitcode file defines with external linkage: name -> `ret(arg, ...)` in LLVM's types."""
    path = Path(path)
    with _parsed(path, path.read_bytes()) as module:
        return dict(sorted(_signatures(module).items()))


def _signatures(module: Any) -> dict[str, str]:
    import llvmlite.binding as llvm

    found = {}
    for function in module.functions:
        if not function.is_declaration and function.linkage == llvm.Linkage.external:
            arguments = ", ".join(str(a.type) for a in function.arguments)
            ret = str(function.global_value_type).split("(", maxsplit=1)[0].strip()
            found[function.name] = f"{ret}({arguments})"
    return found


def _check_functions(path: Path, module: Any) -> None:
    import llvmlite.binding as llvm

    expected = {f.symbol: f"{_llvm_type(f.ret)}({', '.join(map(_llvm_type, f.args))})" for f in abi.FUNCTIONS.values()}
    found = _signatures(module)
    for symbol, signature in expected.items():
        if symbol not in found:
            _fail(path, symbol, signature, "no such function")
        if found[symbol] != signature:
            _fail(path, symbol, signature, found[symbol])
    for symbol in found:
        if symbol not in expected:
            _fail(path, symbol, "no such function (abi.FUNCTIONS)", found[symbol])
    for function in module.functions:
        if function.is_declaration and not function.name.startswith("llvm."):
            _fail(path, function.name, "a definition", "an undefined function")
    for variable in module.global_variables:
        if variable.is_declaration:
            _fail(path, variable.name, "a definition", "an undefined variable")
        if variable.linkage == llvm.Linkage.external and variable.name not in _DATA_SYMBOLS:
            _fail(path, variable.name, f"one of {', '.join(sorted(_DATA_SYMBOLS))}", "another variable")
    names = {v.name: v for v in module.global_variables}
    if abi.CONTEXT_SYMBOL not in names:
        _fail(path, abi.CONTEXT_SYMBOL, "i64", "no such variable")
    if str(names[abi.CONTEXT_SYMBOL].global_value_type) != "i64":
        _fail(path, abi.CONTEXT_SYMBOL, "i64", names[abi.CONTEXT_SYMBOL].global_value_type)


def _check_layout(path: Path, text: str) -> None:
    match = re.search(rf"^@{abi.LAYOUT_SYMBOL} = .*? constant \[\d+ x i32\] \[([^\]]*)\]", text, re.MULTILINE)
    if not match:
        _fail(path, abi.LAYOUT_SYMBOL, f"a constant of {len(abi.LAYOUT)} words", "no such constant")
        return
    found = [int(word.split()[1]) for word in match[1].split(",")]
    if len(found) != len(abi.LAYOUT):
        _fail(path, abi.LAYOUT_SYMBOL, f"{len(abi.LAYOUT)} words", f"{len(found)} words")
    for (what, expected), word in zip(abi.LAYOUT, found, strict=True):
        if word != expected:
            _fail(path, what, expected, word)


def _check_metadata(path: Path, text: str) -> None:
    # "no remote memory" lets the code generator use an atomic that is lost on memory of another device
    found = re.search(r"!(amdgpu\.no\.(remote|fine\.grained)\S*)", text)
    if found:
        _fail(path, "metadata on atomics", "none", found[1])
