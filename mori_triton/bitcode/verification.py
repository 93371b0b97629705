"""Check a device library against `abi`: target, every signature, the layout of every struct, what must not be in it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mori_triton import abi
from mori_triton.errors import BitcodeError

TRIPLES = {"amdgcn": "amdgcn-amd-amdhsa", "nvptx64": "nvptx64-nvidia-cuda"}
_LLVM_TYPES = {"float32": "float", "float64": "double"}
# data symbols that may be external beside the functions
_DATA_SYMBOLS = {abi.CONTEXT_SYMBOL, abi.LAYOUT_SYMBOL, f"{abi.LIBRARY}_broadcast", *abi.SWITCHES}

_verified: set[str] = set()


def verify(path: Path | str, data: bytes | None = None) -> None:
    """Check that a device library, with `data` in it if it is still to be written, matches `abi`. Known per content.

    Raises:
        BitcodeError: names the symbol (or property), what was expected, what was found.
    """
    path = Path(path)
    if data is None:
        data = path.read_bytes()
    # the directory says for which family it is meant
    key = f"{path.parent.name}/{hashlib.sha256(data).hexdigest()}"
    if key in _verified:
        return
    with parsed(path, data) as module:
        text = str(module)
        _check_target(path, module, text)
        _check_functions(path, module)
        switches(path, text)
        _check_layout(path, text)
        _check_metadata(path, text)
    _verified.add(key)


def is_text(data: bytes) -> bool:
    """Whether a library is LLVM IR as text, as `specialize` writes it: it begins with a comment."""
    return data[:1] == b";"


@contextmanager
def parsed(path: Path, data: bytes) -> Iterator[Any]:
    import llvmlite.binding as llvm

    context = llvm.create_context()
    try:
        text = data.decode() if is_text(data) else None
        module = llvm.parse_bitcode(data, context) if text is None else llvm.parse_assembly(text, context)
    except (RuntimeError, UnicodeDecodeError) as e:
        raise BitcodeError(f"{path}: not LLVM bitcode: {e}") from e
    try:
        yield module
    finally:
        # a module that outlives its context is freed twice
        module.close()


def fail(path: Path, what: str, expected: object, found: object) -> None:
    raise BitcodeError(f"{path}: {what}: expected {expected}, found {found}")


def _check_target(path: Path, module: Any, text: str) -> None:
    triple = module.triple
    if triple not in TRIPLES.values():
        fail(path, "target triple", " or ".join(TRIPLES.values()), repr(triple))
    in_tree = path.parent.name
    if in_tree in TRIPLES and TRIPLES[in_tree] != triple:
        fail(path, "target triple", TRIPLES[in_tree], triple)
    layout = module.data_layout
    # what the structs and the address spaces rely on: 64-bit global pointers; on amdgcn 32-bit LDS pointers and allocas
    # in 5
    wanted = {"amdgcn-amd-amdhsa": ("p1:64:64", "p3:32:32", "A5"), "nvptx64-nvidia-cuda": ("i64:64",)}[triple]
    if not {"e", *wanted} <= set(layout.split("-")):
        fail(path, "data layout", f"little endian with {', '.join(wanted)}", repr(layout))
    for attribute in ("target-cpu", "target-features", "amdgpu-waves-per-eu", "amdgpu-flat-work-group-size"):
        found = re.search(rf'"{attribute}"="[^"]*"', text)
        if found:
            fail(path, f"function attribute {attribute}", "none (one file serves every GPU)", found[0])


def _llvm_type(name: str) -> str:
    return _LLVM_TYPES.get(name) or "i" + name.lstrip("uint")


def signatures(path: Path | str) -> dict[str, str]:
    """Every function that a bitcode file defines with external linkage: name -> `ret(arg, ...)` in LLVM's types."""
    path = Path(path)
    with parsed(path, path.read_bytes()) as module:
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
            fail(path, symbol, signature, "no such function")
        if found[symbol] != signature:
            fail(path, symbol, signature, found[symbol])
    for symbol in found:
        if symbol not in expected:
            fail(path, symbol, "no such function (abi.FUNCTIONS)", found[symbol])
    for function in module.functions:
        if function.is_declaration and not function.name.startswith("llvm."):
            fail(path, function.name, "a definition", "an undefined function")
    for variable in module.global_variables:
        if variable.is_declaration:
            fail(path, variable.name, "a definition", "an undefined variable")
        if variable.linkage == llvm.Linkage.external and variable.name not in _DATA_SYMBOLS:
            fail(path, variable.name, f"one of {', '.join(sorted(_DATA_SYMBOLS))}", "another variable")
    names = {v.name: v for v in module.global_variables}
    if abi.CONTEXT_SYMBOL not in names:
        fail(path, abi.CONTEXT_SYMBOL, "i64", "no such variable")
    if str(names[abi.CONTEXT_SYMBOL].global_value_type) != "i64":
        fail(path, abi.CONTEXT_SYMBOL, "i64", names[abi.CONTEXT_SYMBOL].global_value_type)


def switches(path: Path, text: str) -> dict[str, tuple[int, bool]]:
    """Of each variable that chooses code: its value, and whether it is a constant, as in what `specialize` makes."""
    found = {}
    for name in abi.SWITCHES:
        pattern = rf"^@{name} = protected (?:\w+ )*addrspace\(1\) (global|constant) i32 (\d+)"
        match = re.search(pattern, text, re.MULTILINE)
        if not match:
            fail(path, name, "protected addrspace(1) i32", "no such variable")
        else:
            found[name] = int(match[2]), match[1] == "constant"
    return found


def _check_layout(path: Path, text: str) -> None:
    match = re.search(rf"^@{abi.LAYOUT_SYMBOL} = .*? constant \[\d+ x i32\] \[([^\]]*)\]", text, re.MULTILINE)
    if not match:
        fail(path, abi.LAYOUT_SYMBOL, f"a constant of {len(abi.LAYOUT)} words", "no such constant")
        return
    found = [int(word.split()[1]) for word in match[1].split(",")]
    if len(found) != len(abi.LAYOUT):
        fail(path, abi.LAYOUT_SYMBOL, f"{len(abi.LAYOUT)} words", f"{len(found)} words")
    for (what, expected), word in zip(abi.LAYOUT, found, strict=True):
        if word != expected:
            fail(path, what, expected, word)


def _check_metadata(path: Path, text: str) -> None:
    # "no remote memory" lets the code generator use an atomic that is lost on memory of another device
    found = re.search(r"!(amdgpu\.no\.(remote|fine\.grained)\S*)", text)
    if found:
        fail(path, "metadata on atomics", "none", found[1])
