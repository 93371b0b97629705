"""Weakened copies of the device library and of the kernels: every release, acquire and scope, one at a time.

Sites are found in the bitcode's text and in the kernels' sources, so a new one is covered by being there.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import inspect
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite.binding as llvm
import triton

from mori_triton import bitcode

_FENCE = re.compile(r'^  fence (?:syncscope\("(\w+)"\) )?(\w+)')
_ATOMIC = re.compile(r'^  .*(?:atomicrmw|cmpxchg|load atomic|store atomic) .*?(?:syncscope\("([\w-]+)"\) )?'
                     r'(monotonic|acquire|release|acq_rel|seq_cst)')  # fmt: skip
_KEEP_WAIT = re.compile(r'^  (tail )?call void asm sideeffect "", "v')
_NARROWER = {"": "agent", "one-as": "agent-one-as", "agent": "workgroup", "agent-one-as": "workgroup-one-as"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One weakening: `line` of `function` becomes `new` (None: it goes)."""

    function: str
    line: int
    old: str
    new: str | None
    users: frozenset[str]  # exported functions that it is part of

    def __str__(self) -> str:
        name = re.sub(r"^_ZN4moriL?\d+(\w+?)(?:E.*)?$", r"\1", self.function)
        site = re.sub(r"%\d+ = |ptr addrspace\(1\) %\d+|, align \d|%\d+", "", self.old.strip())
        return f"{name}: {' '.join(site.split())} -> {'nothing' if self.new is None else self._scope(self.new)}"

    @staticmethod
    def _scope(text: str) -> str:
        found = re.search(r'syncscope\("([\w-]+)"\)', text)
        return found[1] if found else text.strip()


class Library:
    """The device library that worlds of mapped PEs link, as text, cut into functions."""

    def __init__(self, arch: str) -> None:
        self.text = str(llvm.parse_assembly(bitcode.specialize(arch, provider="p2p").read_text()))
        self.bodies = {re.search(r"@([\w.]+)\(", b)[1]: b for b in re.findall(r"^define .*?^}", self.text, re.M | re.S)}  # type: ignore[index]

    def reachable(self, exported: set[str]) -> dict[str, set[str]]:
        """Functions that run on behalf of `exported`, each with those of `exported` that need it."""
        found: dict[str, set[str]] = {}

        def visit(name: str, user: str) -> None:
            if name in self.bodies and user not in found.setdefault(name, set()):
                found[name].add(user)
                for callee in re.findall(r"call [^\n]*@([\w.]+)\(", self.bodies[name]):
                    visit(callee, user)

        for name in exported:
            visit(name, name)
        return {name: users for name, users in found.items() if users}

    def mutants(self, exported: set[str]) -> list[Mutant]:
        """Every weakening of what orders memory between workgroups or devices, in what `exported` runs.

        Left out: the error report, which runs only when a wait has already failed, and fences of workgroup scope, which
        order a program's own LDS and barriers.
        """
        found = []
        for name, users in sorted(self.reachable(exported).items()):
            if "report_by_one" in name:
                continue
            for number, line in enumerate(self.bodies[name].splitlines()):
                found += [Mutant(name, number, line, new, frozenset(users)) for new in weakenings(line)]
        return found

    def write(self, mutant: Mutant) -> Path:
        """The library as text with one line changed; the name holds a hash of it, as caches of older Triton see names
        only. It lies with Triton's cache: who finds a kernel there finds the library that it was linked with too.
        """
        body = self.bodies[mutant.function]
        lines = body.splitlines()
        assert lines[mutant.line] == mutant.old
        # a release is a fence and, on the next line, what makes every code generator keep its wait for the stores
        keeps_wait = bool(_FENCE.match(mutant.old)) and _KEEP_WAIT.match(lines[mutant.line + 1]) is not None
        lines[mutant.line : mutant.line + 1 + keeps_wait] = [] if mutant.new is None else [mutant.new]
        text = self.text.replace(body, "\n".join(lines))
        llvm.parse_assembly(text).verify()
        # without words that llvmlite's LLVM has learnt since Triton 3.6, whose LLVM cannot read its bitcode either
        data = re.sub(r" nocreateundeforpoison|, target_mem\d: none", "", text).encode()
        folder = Path(triton.knobs.cache.dir, "weakened")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"libmori_shmem_device_{hashlib.sha256(data).hexdigest()[:12]}.bc"
        # another process may be reading it
        part = path.with_suffix(f".{os.getpid()}")
        # with its own path in it: a kernel that Triton finds for these contents was linked with this file
        part.write_bytes(data + f"\n; {path}\n".encode())
        part.replace(path)
        return path


def weakenings(line: str) -> list[str | None]:
    """What an IR line may be weakened to; nothing for a line that orders no memory beyond the workgroup."""
    fence = _FENCE.match(line)
    if fence:
        scope, order = fence[1] or "", fence[2]
        if scope not in _NARROWER:
            return []
        return [None, f'  fence syncscope("{_NARROWER[scope]}") {order}']
    atomic = _ATOMIC.match(line)
    if not atomic:
        return []
    scope, order = atomic[1] or "", atomic[2]
    found: list[str | None] = []
    if scope in _NARROWER:
        head, tail = line[: atomic.end() - len(order)], line[atomic.end() - len(order) :]
        head = head.replace(f'syncscope("{scope}") ', "") if scope else head
        found.append(f'{head}syncscope("{_NARROWER[scope]}") {tail}')
    if order != "monotonic":
        found.append(re.sub(rf"\b{order}\b", "monotonic", line, count=1))
    return found


@dataclasses.dataclass(frozen=True)
class SourceMutant:
    """One keyword of one atomic of a kernel source, changed."""

    kernel: str
    line: int
    keyword: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.keyword}={self.old} -> {self.new}"


_WEAKER = {
    "sem": {"acq_rel": "relaxed", "acquire": "relaxed", "release": "relaxed"},
    "scope": {"sys": "gpu", "gpu": "cta"},
}


def source_mutants(module: ModuleType) -> list[SourceMutant]:
    """Every weakening of a `tl.atomic_*` call in a kernel module. One that leaves order or scope unsaid is refused."""
    found = []
    for function in ast.parse(inspect.getsource(module)).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("tl.atomic_"):
                words = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
                assert {"sem", "scope"} <= set(words), (
                    f"{function.name}: {ast.unparse(call)} leaves sem or scope unsaid"
                )
                for keyword, weaker in _WEAKER.items():
                    old = words[keyword]
                    if old in weaker:
                        found.append(SourceMutant(function.name, call.lineno, keyword, old, weaker[old]))
    return found


def mutated_kernel(module: ModuleType, mutant: SourceMutant, folder: Path) -> Any:
    """The kernel, from a copy of its source with the change."""
    lines = inspect.getsource(module).splitlines()
    old = f'{mutant.keyword}="{mutant.old}"'
    assert old in lines[mutant.line - 1], "an atomic call stands on one line"
    lines[mutant.line - 1] = lines[mutant.line - 1].replace(old, f'{mutant.keyword}="{mutant.new}"')
    path = folder / f"{module.__name__.rsplit('.', 1)[-1]}_{mutant.line}_{mutant.keyword}.py"
    path.write_text("\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location(f"mutant_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return getattr(copy, mutant.kernel)
