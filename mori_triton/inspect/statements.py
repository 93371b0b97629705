"""What Triton's own IR says of loads and stores of blocks: how many bytes each lane moves.

An access that moves 16 bytes or more for each lane can be made of 16-byte instructions. Where it is not, the layout has
too few elements together, which is nearly always a pointer of which Triton does not know that it is aligned.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mori_triton.inspect.code import NOWHERE, Source

_TENSOR = re.compile(r"tensor<([\dx]+)x!tt\.ptr<([a-zA-Z]+)(\d+)\w*>")
_BUFFER_TENSOR = re.compile(r"tensor<([\dx]+)x([a-zA-Z]+)(\d+)\w*,")
_OPERATION = re.compile(r"(?:= |^\s*)(?:tt|amdg|amdgpu|ttg)\.(?:buffer_)?(load|store)\b")
_REFERENCE = re.compile(r"loc\((#loc\d*|\"[^\n]*)\)\s*$")
_FILE = re.compile(r'loc\("([^"]*)":(\d+):(\d+)')


@dataclass(frozen=True)
class Statement:
    """A `tl.load` or `tl.store` of a block."""

    kind: str  # load, store
    source: Source
    bytes_of_lane: int  # that one execution moves for each lane, at most


def statements(ttgir: str, num_threads: int) -> list[Statement]:
    """Every load and store of a block of more than one element in the last IR of Triton's that knows layouts."""
    locations = dict(re.findall(r"^(#loc\d*) = (loc\(.*\))$", ttgir, re.MULTILINE))
    found = []
    for line in ttgir.splitlines():
        operation = _OPERATION.search(line)
        tensor = _TENSOR.search(line) or _BUFFER_TENSOR.search(line)
        if operation and tensor:
            num_elements = math.prod(map(int, tensor[1].split("x")))
            num_bytes = num_elements * max(8, int(tensor[3])) // 8
            reference = _REFERENCE.search(line)
            source = _source(reference[1] if reference else "", locations)
            found.append(Statement(operation[1], source, num_bytes // num_threads))
    return found


def _source(reference: str, locations: dict[str, str]) -> Source:
    """Where a location is in Python, and who called."""
    frames = _frames(reference, locations)
    return frames[0]._replace(callers=tuple(f"{f}:{f.column}" for f in frames[1:])) if frames else NOWHERE


def _frames(reference: str, locations: dict[str, str]) -> list[Source]:
    """The places that a location is made of, the innermost first."""
    text = locations.get(reference, f"loc({reference})")
    if match := _FILE.match(text):
        return [Source(match[1], int(match[2]), int(match[3]))]
    # loc("name"(#loc4)), loc(callsite(#loc4 at #loc9))
    return [
        frame for inner in re.findall(r"#loc\d*", text) if inner != reference for frame in _frames(inner, locations)
    ]
