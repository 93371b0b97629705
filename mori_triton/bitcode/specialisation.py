"""Make the device library for one provider: the variables that choose code become constants, the rest of it goes.

A kernel that is linked with the result carries nothing of other providers, of debugging or of profiling, and Triton has
less to read. Only constants are propagated, and what then is unreachable, unused or without users is dropped: every
other instruction stays as it was built. Code generation is Triton's business.

The result is LLVM IR as text, which LLVM reads as well as bitcode: bitcode of a newer LLVM than Triton's, which
llvmlite's may be, it does not read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from mori_triton import abi, env
from mori_triton.bitcode.files import DEVICE_LIBRARY, cached_copy, find_bitcode, host_machine, stored
from mori_triton.bitcode.verification import is_text, parsed, switches, verify
from mori_triton.errors import ArgumentError, BitcodeError, NotSupported

# attributes of functions in the libraries as built; intrinsics have theirs from whatever LLVM reads them
_ATTRIBUTES = frozenset(
    {"alwaysinline", "builtin", "cold", "convergent", "hot", "mustprogress", "nobuiltin", "nofree", "norecurse"}
    | {"noreturn", "nosync", "nounwind", "speculatable", "willreturn"}
)


def specialize(
    path_or_target: Path | str | Any, *, provider: str = "any", debug: bool = False, profiler: bool = False
) -> Path:
    """Path of the device library with these choices made, in the cache under the hash of all that it depends on.

    Args:
        path_or_target: a device library, or what `find_bitcode` takes: `"gfx942"`, `"sm_90"`, Triton's `GPUTarget`, ...
        provider: who carries what goes to PEs that are not mapped: `"mlx5"`, `"bnxt_re"`, `"ionic"`, `"proxy"`;
            `"p2p"`: nobody; `"any"`: kernels look it up, as they do in the library as it was built.
        debug: check also what costs time, and name the function in every error record.
        profiler: record when each operation began and ended.

    Raises:
        ArgumentError: another provider.
        BitcodeError: no such library, or one that does not match `abi`.
        NotSupported: the library was specialised before, for something else; names the transport.
    """
    if provider not in abi.PROVIDERS:
        raise ArgumentError(f"provider: want {', '.join(abi.PROVIDERS)}, got {provider!r}")
    if isinstance(path_or_target, Path) or (isinstance(path_or_target, str) and os.sep in path_or_target):
        source = cached_copy(Path(path_or_target))
    else:
        source = find_bitcode(path_or_target)
    wanted = abi.PROVIDERS[provider], int(debug), int(profiler)
    stat = source.stat()
    question = source, stat.st_ctime_ns, stat.st_size, env.cache_dir(), wanted
    found = _specialised(*question)
    if not found.is_file():
        # somebody has emptied the cache while this process runs
        _specialised.cache_clear()
        found = _specialised(*question)
    return found


_answer: Callable[[], str | None] | None = None


def answer_provider(answer: Callable[[], str | None]) -> None:
    """Let `answer` say which provider the calling code's PE has; None: the code runs as no PE."""
    global _answer
    _answer = answer


def provider_here() -> str | None:
    """Which provider the calling code's PE has, None if it runs as no PE."""
    return None if _answer is None else _answer()


def provider_of(path: Path | str) -> str:
    """For which provider a device library is, `"any"` for all of them."""
    path = Path(path)
    stat = path.stat()
    return _provider_of(path, stat.st_ctime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _provider_of(path: Path, ctime_ns: int, size: int) -> str:
    data = path.read_bytes()
    if is_text(data):
        text = data.decode()
    else:
        with parsed(path, data) as module:
            text = str(module)
    code, _ = switches(path, text)[abi.SWITCHES[0]]
    return next(name for name, value in abi.PROVIDERS.items() if value == code)


@lru_cache(maxsize=64)
def _specialised(source: Path, ctime_ns: int, size: int, cache: Path, wanted: tuple[int, ...]) -> Path:
    import llvmlite.binding as llvm

    data = source.read_bytes()
    # what the result is made from, and by what
    made_from = repr((hashlib.sha256(data).hexdigest(), wanted, llvm.llvm_version_info)).encode()
    name = hashlib.sha256(made_from + Path(__file__).read_bytes()).hexdigest()[:32]
    target = cache / "bitcode" / name / DEVICE_LIBRARY
    try:
        verify(target)
    except (OSError, BitcodeError):
        # not there, or damaged
        made = _made(source, data, wanted).encode()
        verify(target, made)
        stored(target, made)
    return target


def _made(path: Path, data: bytes, wanted: tuple[int, ...]) -> str:
    with parsed(path, data) as module:
        text = str(module)
    chosen = []
    for (variable, (present, fixed)), value in zip(switches(path, text).items(), wanted, strict=True):
        # "any" serves every provider, and what is on is not switched off
        keep = fixed and (present == 0 if variable == abi.SWITCHES[0] else value == 0)
        if fixed and not keep and present != value:
            names = {code: name for name, code in abi.PROVIDERS.items()}
            raise NotSupported(
                f"transport {names[wanted[0]]}: {path} was specialised before, with {variable} = {present}: "
                f"want {value}; give the library as it was built"
            )
        chosen.append(present if keep else value)
        # external, so that its value can be looked up; who does not load it does not link it
        text = re.sub(
            rf"^(@{variable} = .*?)(global|constant) i32 \d+", rf"\1constant i32 {chosen[-1]}", text, flags=re.MULTILINE
        )
    header = f"; {', '.join(f'{v} = {c}' for v, c in zip(abi.SWITCHES, chosen, strict=True))}\n"
    with parsed(path, (header + text).encode()) as module:
        _fold(module)
        return header + _readable_by_all(str(module))


def _fold(module: Any) -> None:
    import llvmlite.binding as llvm

    passes = llvm.create_new_module_pass_manager()
    passes.add_sccp_pass()
    passes.add_dead_code_elimination_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_verifier()
    # none of them asks what the machine is
    passes.run(module, llvm.create_pass_builder(host_machine(0), llvm.create_pipeline_tuning_options()))


def _readable_by_all(text: str) -> str:
    """IR text without what only the LLVM that wrote it knows."""
    lines = []
    for line in text.splitlines():
        if line.startswith(("; ", "source_filename")):
            continue
        if line.startswith("attributes #"):
            head, inside = line.rstrip(" }").split("{ ", maxsplit=1)
            memory = re.search(r"memory\(([^)]*)\)", inside)
            kept = [word for word in inside.split() if word in _ATTRIBUTES]
            if memory:
                known = [part for part in memory[1].split(", ") if not re.match(r"(target_mem|errnomem)", part)]
                kept.append(f"memory({', '.join(known)})")
            # a group cannot be empty
            lines.append(f"{head}{{ {' '.join(kept) or 'nounwind'} }}")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"
