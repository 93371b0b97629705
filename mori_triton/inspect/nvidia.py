"""Reading what ptxas made, for comparison with the AMD targets: resources from the cubin, accesses from the PTX."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from mori_triton.inspect.amd import located
from mori_triton.inspect.code import Access, Resources

_SCOPES = {"cta": "workgroup", "cluster": "workgroup", "gpu": "device", "sys": "system"}
_KINDS = {"ld": "load", "st": "store", "atom": "atomic", "red": "atomic", "fence": "fence", "membar": "fence"}
_HINTS = ("cs", "cg", "ca", "wt", "nc", "volatile", "mmio")


def resources(cubin: bytes, dynamic_shared: int) -> Resources | None:
    """What `cuobjdump`, which Triton's wheel carries, reads in a cubin of one kernel; None where it is not there."""
    import triton

    try:
        tool = triton.knobs.nvidia.cuobjdump.path
    except RuntimeError:
        # how Triton says that it has none
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False, timeout=60)
    return read_usage(done.stdout, dynamic_shared)


def read_usage(text: str, dynamic_shared: int) -> Resources | None:
    """`cuobjdump -res-usage` of a cubin of one kernel; None where it is of none.

    How many registers were spilled is written nowhere: none where a thread has no stack, else unknown.
    """
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if found is None:
        return None
    registers, stack, shared, local = map(int, found.groups())
    scratch = stack + local
    return Resources(
        vgprs=registers, agprs=0, sgprs=None, lds_bytes=shared + dynamic_shared, scratch_bytes=scratch,
        vgpr_spills=None if scratch else 0, sgpr_spills=None,
    )  # fmt: skip


def accesses(ptx: str) -> list[Access]:
    """Every access to global memory, and every fence. ptxas keeps their widths and scopes."""
    found = []
    for number, line, source in located(ptx):
        # perhaps behind a predicate, or the brace that opens inline assembly
        match = re.match(r"(?:\{\s*)?(?:@!?%?\w+\s+)?(ld|st|atom|red|fence|membar)((?:\.[\w:]+)+)", line)
        if match is None:
            continue
        kind, words = _KINDS[match[1]], match[2].split(".")
        if kind != "fence" and "global" not in words:
            continue
        scope = next((_SCOPES[word] for word in words if word in _SCOPES), "")
        if kind == "atomic" and not scope:
            scope = "device"
        hint = " ".join(word for word in words if word in _HINTS)
        found.append(Access(kind, 0 if kind == "fence" else _width(words), scope, hint, line, number, source))
    return found


def _width(words: list[str]) -> int:
    many = next((int(word[1:]) for word in words if re.fullmatch(r"v[248]", word)), 1)
    bits = next((int(word[1:]) for word in reversed(words) if re.fullmatch(r"[busf]\d+", word)), 32)
    return many * bits // 8
