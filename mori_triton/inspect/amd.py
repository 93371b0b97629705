"""Reading AMD assembly as Triton's LLVM writes it: the kernel's metadata, and every access to global memory.

Source of the scopes: LLVM's AMDGPU usage guide, memory models of gfx942 and gfx12.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mori_triton.errors import ArgumentError
from mori_triton.inspect.code import NOWHERE, Access, Resources, Source

_BYTES = {
    "ubyte": 1, "sbyte": 1, "byte": 1, "u8": 1, "i8": 1, "b8": 1,
    "ushort": 2, "sshort": 2, "short": 2, "u16": 2, "i16": 2, "b16": 2, "f16": 2, "bf16": 2,
    "dword": 4, "b32": 4, "u32": 4, "i32": 4, "f32": 4, "dwordx2": 8, "b64": 8, "u64": 8, "i64": 8, "f64": 8, "x2": 8,
    "dwordx3": 12, "b96": 12, "dwordx4": 16, "b128": 16,
}  # fmt: skip
_ACCESS = re.compile(r"(global|buffer|flat)_(load|store|atomic)_(\w+)")
_FENCES = {
    "global_wb": "writeback", "global_wbinv": "writeback", "buffer_wbl2": "writeback",
    "global_inv": "invalidate", "buffer_inv": "invalidate",
}  # fmt: skip
_GFX12_SCOPES = {"SCOPE_CU": "", "SCOPE_SE": "workgroup", "SCOPE_DEV": "device", "SCOPE_SYS": "system"}
_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_INLINED = re.compile(r"inlined_at (\d+) (\d+) (\d+)")
_CALLER = re.compile(r"@\[ (\S+)")
_COMMENT = re.compile(r";|//")
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")


def resources(text: str, dynamic_lds: int = 0) -> Resources:
    """What the code's `.amdgpu_metadata` says of its only kernel.

    Args:
        dynamic_lds: bytes of LDS that the launch adds, Triton's `metadata.shared`.

    Raises:
        ArgumentError: the text has no metadata, or not all of it.
    """
    _, begins, rest = text.partition(".amdgpu_metadata")
    block, ends, _ = rest.partition(".end_amdgpu_metadata")
    found = dict(re.findall(r"^\s*(?:- )?\.(\w+):\s+(\d+)\s*$", block, re.MULTILINE))
    try:
        agprs = int(found.get("agpr_count", 0))
        return Resources(
            vgprs=int(found["vgpr_count"]),
            agprs=agprs,
            sgprs=int(found["sgpr_count"]),
            lds_bytes=int(found["group_segment_fixed_size"]) + dynamic_lds,
            scratch_bytes=int(found["private_segment_fixed_size"]),
            vgpr_spills=int(found["vgpr_spill_count"]),
            sgpr_spills=int(found["sgpr_spill_count"]),
        )
    except KeyError as error:
        what = f"no .{error.args[0]}" if begins and ends else "no .amdgpu_metadata"
        raise ArgumentError(f"the assembly of an AMD kernel: want its resources in the metadata, got {what}") from error


def located(text: str) -> Iterator[tuple[int, str, Source]]:
    """(number from 1, instruction without comment, where it comes from) of every line of `text` in a function."""
    lines = text.splitlines()
    files = {m[1]: f"{m[2]}/{m[3]}" if m[3] else m[2] for m in map(_FILE.match, lines) if m}
    known: dict[tuple[str, ...], Source] = {}
    source, in_inline, in_metadata = NOWHERE, False, False
    for number, raw in enumerate(lines, 1):
        if "inline asm" in raw:
            in_inline = "begin" in raw
        if match := _LOC.match(raw):
            # in inline assembly LLVM counts its lines on from the statement's
            if not in_inline:
                source = Source(files.get(match[1], ""), int(match[2]), int(match[3]), tuple(_CALLER.findall(raw)))
                if inlined := _INLINED.search(raw):
                    # PTX names one caller, whose own place was named before
                    caller = known.get(inlined.groups(), NOWHERE)
                    source = source._replace(callers=(f"{caller}:{caller.column}", *caller.callers))
                known[match.groups()] = source
        elif raw.startswith((".Lfunc_end", "\t.section")):
            source = NOWHERE
        elif "amdgpu_metadata" in raw:
            in_metadata = ".end_" not in raw
        else:
            # PTX ends an instruction with what begins a comment elsewhere
            line = _COMMENT.split(raw)[0].strip()
            if line and not in_metadata and not line.startswith(".") and not line.endswith(":"):
                yield number, line, source


def accesses(text: str, arch: str) -> list[Access]:
    """Every access to global memory and every cache maintenance instruction, in the order of the text."""
    scope_of = _scope_of_gfx9 if arch.startswith("gfx9") else _scope_of_gfx12
    found = []
    for number, line, source in located(text):
        name, *words = line.replace(",", " ").split()
        kind, num_bytes = _FENCES.get(name), 0
        if kind is None and (match := _ACCESS.fullmatch(name)):
            kind, num_bytes = match[2], _width(match[2], match[3].split("_"))
            if num_bytes == 0:
                raise ArgumentError(f"assembly: line {number}: want an access of a known width, got {name}")
        if kind is not None:
            hints = [word.removeprefix("th:") for word in words if word.startswith("th:") or word == "nt"]
            found.append(Access(kind, num_bytes, scope_of(words, kind), " ".join(hints), line, number, source))
    return found


def _width(kind: str, words: list[str]) -> int:
    """Bytes of a lane, by the words of the name; 0: not known."""
    sizes = [_BYTES[word] for word in words if word in _BYTES]
    # gfx9 names no type of the atomics of 4 bytes; two packed halves are 4 bytes
    if kind == "atomic" and (not sizes or "pk" in words):
        return 4
    return sizes[-1] if sizes else 0


def _scope_of_gfx12(words: list[str], kind: str) -> str:
    return next((_GFX12_SCOPES[w.removeprefix("scope:")] for w in words if w.startswith("scope:")), "")


def _scope_of_gfx9(words: list[str], kind: str) -> str:
    sc0, sc1 = "sc0" in words, "sc1" in words
    if kind == "atomic":
        # sc0 asks for the value before, and the least it acts at is the device's cache
        return "system" if sc1 else "device"
    return {(False, False): "", (True, False): "workgroup", (False, True): "device", (True, True): "system"}[sc0, sc1]
