"""Code objects (shared by every device of the process) and modules (one per device, with variables of its own)."""

from __future__ import annotations

import base64
import functools
import struct
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mori_triton.emulator import asm, jit, lift, runtime
from mori_triton.emulator import state as lay
from mori_triton.errors import BitcodeError


@dataclass
class Code:
    """A kernel's machine code and what a launch needs to know of its text. Immutable, shared between modules."""

    name: str
    arch: str
    warp_size: int
    directives: dict[str, str]
    args: list[tuple[int, int, str]]  # offset, bytes, kind
    data: bytes  # initial module-level variables
    symbols: dict[str, int]  # variable -> offset in data
    relocs: list[tuple[int, str, int]]  # offset in data, symbol, addend
    got: dict[str, int]  # symbol -> offset in data of a slot that holds its address
    labels: dict[str, int]  # code label -> instruction number
    num_vregs: int
    state_bytes: int  # of one wave
    lds_bytes: int  # static
    text: str = field(default="", repr=False)
    function: int = 0  # address of run(wave, budget)

    @functools.cached_property
    def program(self) -> asm.Program:
        """The parsed text; only reports need it once the object is cached."""
        return asm.parse(self.text)

    def instruction(self, index: int) -> str:
        """ "line 12 `s_sleep 1`" for a report."""
        insts = self.program.insts
        if not 0 <= index < len(insts):
            return f"instruction {index}"
        return f"line {insts[index].line} `{insts[index].text}`"


_codes: dict[str, Code] = {}
_building: dict[str, threading.Lock] = {}
_lock = threading.Lock()


def load_code(text: str) -> Code:
    """The code object of an AMDGPU assembly text; compiled once a process, and from the object cache when known.

    Raises `UnsupportedInstruction` for an instruction that the emulated device does not know.
    """
    key = jit.digest(text)
    with _lock:
        code = _codes.get(key)
        if code is not None:
            return code
        building = _building.setdefault(key, threading.Lock())
    with building:
        code = _codes.get(key)
        if code is None:
            entry = "k" + key[:24]
            runtime.ensure()
            facts = jit.load(key, lambda: _lift(text, entry))
            facts["data"] = base64.b64decode(facts["data"])
            code = Code(**facts, text=text, function=jit.address(entry))
            _codes[key] = code
    return code


def _lift(text: str, entry: str) -> tuple[str, dict[str, Any]]:
    program = asm.parse(text)
    lifter = lift.Lifter(program, entry)
    source = lifter.lift()
    static = int(program.directives.get("group_segment_fixed_size", "0"))
    code = Code(
        name=program.name,
        arch=program.arch,
        warp_size=program.warp_size,
        directives=dict(program.directives),
        args=list(program.args),
        data=bytes(program.data),
        symbols=dict(program.symbols),
        relocs=list(program.relocs),
        got=dict(lifter.got),
        labels={name: program.labels[name] for name in {program.name, *program.functions} & set(program.labels)},
        num_vregs=lifter.num_vregs,
        state_bytes=-(-lifter.state_size // 64) * 64,
        lds_bytes=static,
    )
    facts = asdict(code)
    facts["data"] = base64.b64encode(code.data).decode()
    del facts["text"], facts["function"]
    return source, facts


def aligned_buffer(num_bytes: int, align: int = 64) -> np.ndarray:
    """Zeroed bytes at an aligned address, uint8 `[num_bytes]`."""
    raw = np.zeros(num_bytes + align, np.uint8)
    return raw[-raw.ctypes.data % align :][:num_bytes]


class Module:
    """A loaded kernel: shared code, and a copy of its module-level variables that belongs to one device."""

    def __init__(self, code: Code, device: int = 0):
        self.code, self.device = code, device
        slots = [offset + 8 for offset in code.got.values()]
        self.num_bytes = max([len(code.data), *slots])
        self.data = aligned_buffer(max(self.num_bytes, 8))
        self.address = self.data.ctypes.data
        self.data[: len(code.data)] = np.frombuffer(code.data, np.uint8)
        for offset, symbol, addend in [*code.relocs, *((offset, symbol, 0) for symbol, offset in code.got.items())]:
            struct.pack_into("<Q", self.data.data, offset, self._address(symbol) + addend)
        self.plans: dict[Any, Any] = {}  # launch layouts, see launch.py

    def _address(self, symbol: str) -> int:
        if symbol in self.code.symbols:
            return self.address + self.code.symbols[symbol]
        if symbol not in self.code.labels:
            raise BitcodeError(
                f"{self.code.name} calls {symbol}, which is not linked: launch it with "
                "mori_triton.device.launch.launch(kernel, grid, ...), or pass extern_libs= with the library that has it"
            )
        return lay.CODE_BASE + 4 * self.code.labels[symbol]

    def symbol_address(self, name: str) -> tuple[int, int]:
        """Address and bytes (to the next variable) of a module-level variable. Raises `KeyError` when there is none."""
        start = self.code.symbols[name]
        end = min([s for s in self.code.symbols.values() if s > start] + [len(self.code.data)])
        return self.address + start, end - start

    def symbol(self, name: str, dtype: Any = np.uint8) -> np.ndarray:
        """The host's view of a module-level variable."""
        start, num_bytes = self.code.symbols[name], self.symbol_address(name)[1]
        return self.data[start : start + num_bytes].view(dtype)

    def write(self, name: str, value: bytes) -> None:
        """Set a module-level variable; nothing happens when the kernel has none of this name."""
        if name in self.code.symbols:
            self.symbol(name)[: len(value)] = np.frombuffer(value, np.uint8)
