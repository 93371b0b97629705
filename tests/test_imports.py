"""Imports of the package point down only, and importing it does nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parent.parent / "mori_triton"
# what each unit may import; a unit may always import itself
BELOW = {
    "errors": set(),
    "abi": {"errors"},
    "env": {"errors"},
    "wait_sites": {"errors"},
    "bitcode": {"errors", "abi", "env"},
    "device": {"errors", "abi", "env", "bitcode", "wait_sites"},
    "emulator": {"errors", "abi", "env", "bitcode", "wait_sites"},
    "host": {"errors", "abi", "env", "bitcode", "wait_sites"},
    "shmem": {"errors", "abi", "env", "bitcode", "wait_sites", "device", "emulator", "host"},
    "world": {"errors", "abi", "env", "bitcode", "wait_sites", "device", "emulator", "host", "shmem"},
    "ops": {"errors", "abi", "env", "bitcode", "wait_sites", "device", "emulator", "host", "shmem", "world"},
    "ir": {"errors", "abi", "env", "bitcode", "wait_sites", "device", "host"},
    "alias": {"errors"},
    "inspect": {"errors", "device", "host", "shmem", "world", "ops"},
    "cli": {"errors", "host", "ops", "inspect"},
    "layers": {"errors", "env", "host", "shmem", "world", "ops"},
    "__init__": {"alias", "emulator", "ir", "layers", "ops", "shmem", "world"},
}
NEVER = {"host": {"triton"}, "errors": {"triton", "llvmlite", "numpy"}, "abi": {"torch", "triton", "llvmlite", "numpy"}}


def imported_modules(path: Path) -> set[str]:
    """Every module name that a source file imports, at any depth, relative ones resolved."""
    package = ["mori_triton", *path.relative_to(ROOT).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def unit_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def upward(path: Path) -> list[str]:
    unit, wrong = unit_of(path), []
    for name in imported_modules(path):
        head, *rest = name.split(".")
        if head == "mori_triton":
            target = rest[0] if rest else "__init__"
            if target in BELOW and target not in BELOW[unit] | {unit}:
                wrong.append(name)
        elif head in NEVER.get(unit, ()):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    assert unit_of(path) in BELOW, f"{path} is in no layer"
    assert upward(path) == []


def test_an_upward_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "host").mkdir()
    source = tmp_path / "host" / "heap.py"
    source.write_text(
        "def f():\n    from ..ops import x\n    import triton.language\n    from mori_triton import emulator\n"
    )
    assert sorted(upward(source)) == ["mori_triton.emulator", "mori_triton.ops.x", "triton.language"]


@pytest.mark.parametrize("module", ["mori_triton", "mori_triton.shmem"])
def test_import_has_no_side_effects(module: str) -> None:
    code = (
        f"import os, sys; before = dict(os.environ); import {module}; assert dict(os.environ) == before;"
        "heavy = {'torch', 'triton', 'llvmlite', 'numpy', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attribute() -> None:
    import mori_triton

    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = mori_triton.no_such_thing
