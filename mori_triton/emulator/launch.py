"""One kernel launch: the argument block, the start state of its waves, and the places its workgroups run in."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mori_triton.emulator import state as lay
from mori_triton.emulator.device import Device, nearest
from mori_triton.emulator.hostcalls import HostcallBuffer
from mori_triton.emulator.module import Module, aligned_buffer
from mori_triton.errors import ArgumentError, require

TTMP_IDS, NO_REGISTER = (1 << 64) - 2, (1 << 64) - 1
# a workgroup's header, `Group` of wave.h
GROUP_BYTES = 64
# as on the hardware: threads of a workgroup; workgroups in y and z where both numbers share one register
MAX_THREADS, MAX_GRID_YZ = 1024, 65535
MAX_RESIDENT = 64  # workgroups of one launch in flight
_INT = {1: "B", 2: "H", 4: "I", 8: "Q"}
_FLOAT = {"fp16": "e", "fp32": "f", "fp64": "d"}
_FLOAT_TYPES: dict[str, Any] = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}


class LaunchControl(ctypes.Structure):
    """`Launch` of wave.h."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("left", "next", "groups", "grid_x", "grid_y", "grid_z", "num_waves", "wave_stride"),
            *("slots", "slot_stride", "lds_offset", "waves_offset", "free_slots", "num_free", "wave_template"),
            *("warp_size", "id_x", "id_y", "id_z", "first_wave", "ended", "weak_records"),
        )
    ]


def _bf16_bits(x: float) -> int:
    """Nearest-even bfloat16; NaN stays NaN."""
    if math.isnan(x):
        return 0x7FC0
    (u,) = struct.unpack("<I", struct.pack("<f", x))
    return (u + 0x7FFF + ((u >> 16) & 1)) >> 16


@dataclass(frozen=True)
class KernelType:
    """What a module and a launch shape fix: computed once, used by every launch of that shape."""

    num_waves: int
    lds_bytes: int
    template: bytes  # 1024 bytes of scalar registers and header
    kernarg_bytes: int
    pack: struct.Struct  # explicit arguments, hidden ones
    formats: tuple[str, ...]  # of the explicit arguments
    hidden: tuple[str, ...]
    kernarg_register: int
    preload: int  # scalar registers filled with arguments
    ids: tuple[int, int, int]
    sends_messages: bool


def _kernel_type(module: Module, types: Sequence[str] | None, num_warps: int, shared: int) -> KernelType:
    code, directives = module.code, module.code.directives
    most = MAX_THREADS // code.warp_size
    require(0 < num_warps <= most, "num_warps", f"1 to {most} on {code.arch}", num_warps)

    def flag(name: str) -> int:
        return int(directives.get(name, "0"), 0)

    # one format for the whole argument block, with the gaps as padding
    text, at = "<", 0
    formats: list[str] = []
    hidden: list[str] = []
    for offset, size, kind in sorted(code.args):
        text += f"{offset - at}x"
        at = offset + size
        if kind.startswith("hidden"):
            hidden.append(kind)
            text += _INT[size]
            continue
        given = types[len(formats)] if types is not None and len(formats) < len(types) else ""
        if given in _FLOAT and struct.calcsize(_FLOAT[given]) == size:
            text += _FLOAT[given]
        elif size in _INT:
            text += _INT[size]
        elif given == "tensordesc":
            text += f"{size}s"
        else:
            raise ArgumentError(f"argument {len(formats)} of {code.name}: want 1, 2, 4 or 8 bytes, got {size}")
        formats.append(given or f"i{8 * size}")
    template = bytearray(lay.VREGS)

    def put(field: int, value: int) -> None:
        struct.pack_into("<Q", template, field, value)

    # the variable that the compiler gave a fixed place comes first, the launch's dynamic part after it
    lds = -(-code.lds_bytes // 16) * 16 + shared if shared else code.lds_bytes
    put(lay.PC, code.labels[code.name])
    put(lay.FN, code.function)
    put(lay.LDS_SIZE, lds)
    put(lay.DATA, module.address)
    struct.pack_into(f"<{code.warp_size // 32}I", template, 4 * lay.EXEC, *[0xFFFFFFFF] * (code.warp_size // 32))
    user = flag("user_sgpr_count") or 2
    register = 4 * flag("user_sgpr_private_segment_buffer") + 2 * flag("user_sgpr_dispatch_ptr")
    register += 2 * flag("user_sgpr_queue_ptr")
    if code.arch.startswith("gfx12"):
        ids = [TTMP_IDS] * 3
    else:
        ids = []
        for d in "xyz":
            wanted = flag(f"system_sgpr_workgroup_id_{d}")
            ids.append(user if wanted else NO_REGISTER)
            user += wanted
    return KernelType(
        num_waves=num_warps,
        lds_bytes=lds,
        template=bytes(template),
        kernarg_bytes=max(at, flag("kernarg_size")),
        pack=struct.Struct(text),
        formats=tuple(formats),
        hidden=tuple(hidden),
        kernarg_register=register,
        preload=flag("user_sgpr_kernarg_preload_length"),
        ids=(ids[0], ids[1], ids[2]),
        sends_messages="MSG_INTERRUPT" in code.text,
    )


@dataclass(frozen=True)
class TileDescriptor:
    """An argument that is data for gfx1250's tensor data mover, and the tensor that this gives access to."""

    data: bytes
    base: Any


@dataclass(frozen=True)
class WaveView:
    """A wave of a launch in flight, for reports."""

    launch: Launch
    address: int
    group: int
    index: int

    def get(self, field: int) -> int:
        """A 64-bit word of the header."""
        return ctypes.c_uint64.from_address(self.address + field).value

    def describe(self, instruction: int | None = None) -> str:
        """kernel, PE, workgroup, wave, line and instruction (the current one when None)."""
        x, y, _ = self.launch.grid
        ids = (self.group % x, self.group // x % y, self.group // (x * y))
        named = f"{self.group}" if self.launch.grid[1:] == (1, 1) else f"{ids}"
        pc = self.get(lay.PC) & 0xFFFFFFFF if instruction is None else instruction
        at = self.launch.module.code.instruction(pc)
        state = " at a barrier" if instruction is None and self.get(lay.STATUS) == lay.BARRIER else ""
        return f"{self.launch.who}, workgroup {named}, wave {self.index}{state}, {at}"


class Launch:
    """A kernel with its grid and arguments. `Machine.submit` gives it places to run in."""

    def __init__(
        self,
        module: Module,
        grid: tuple[int, int, int],
        args: Sequence[Any],
        *,
        num_warps: int = 4,
        shared: int = 0,
        types: tuple[str, ...] | None = None,
        names: Sequence[str] | None = None,
        device: Device | None = None,
        scratch: tuple[int, int] = (0, 0),
    ):
        """
        Args:
            module: loaded on `device`.
            grid: workgroups in x, y, z; any may be 0. gfx12 has 65535 at most in y and in z.
            args: the kernel's explicit arguments: CPU tensors, numpy arrays, numbers, None.
            num_warps: waves of a workgroup.
            shared: bytes of LDS beside what the code declares.
            types: Triton's type of each argument ("*fp32", "i32", "bf16", ...); None: by the argument and its size.
            names: of the arguments, for reports.
            device: whose allowed memory the kernel may touch; None: only the arguments'.
            scratch: bytes per workgroup of Triton's global and profile scratch.

        Raises: `ArgumentError` for a tensor that is not on the CPU, the wrong number of arguments, a workgroup or grid
            that is too large.
        """
        most = MAX_GRID_YZ if module.code.arch.startswith("gfx12") else (1 << 31) - 1
        for axis, size in enumerate(grid):
            limit = most if axis else (1 << 31) - 1
            require(0 <= size <= limit, f"grid[{axis}]", f"0 to {limit} on {module.code.arch}", size)
        key = types, num_warps, shared
        kind = module.plans.get(key)
        if kind is None:
            kind = module.plans[key] = _kernel_type(module, types, num_warps, shared)
        self.module, self.grid, self.kind, self.device = module, grid, kind, device
        self.num_waves, self.num_groups = num_warps, grid[0] * grid[1] * grid[2]
        stride = module.code.state_bytes
        waves_offset = GROUP_BYTES + -(-kind.lds_bytes // 64) * 64
        self.slot_bytes = waves_offset + num_warps * stride
        self.control = LaunchControl(
            self.num_groups, 0, self.num_groups, *grid, num_warps, stride, 0, self.slot_bytes, GROUP_BYTES, waves_offset
        )
        self.address = ctypes.addressof(self.control)
        self.arena: np.ndarray | None = None
        self.resident = 0
        # what each wave's WEAK word becomes, uint64 [workgroups * waves]; None: ordinary memory
        self.weak_records: np.ndarray | None = None
        self.kernarg = aligned_buffer(kind.kernarg_bytes + 64)
        self.hostcalls = HostcallBuffer(min(self.num_groups, MAX_RESIDENT) * num_warps) if kind.sends_messages else None
        self._keep = list(args)
        self.named_ranges = self._pack(args, names, scratch)

    @property
    def who(self) -> str:
        """The kernel and its PE, for reports."""
        return f"{self.module.code.name} of {self.device.who}" if self.device else self.module.code.name

    def _pack(self, args: Sequence[Any], names: Sequence[str] | None, scratch: tuple[int, int]) -> list:
        """Fill the argument block; returns the memory the arguments give access to."""
        kind, ranges = self.kind, []
        values: list[int | float | bytes] = []
        scratch_args = len(kind.formats) - len(args)
        require(scratch_args in (0, 2), f"arguments of {self.module.code.name}", f"{len(kind.formats)}", len(args))
        for i, (value, form) in enumerate(zip(args, kind.formats, strict=False)):
            if isinstance(value, (int, np.integer, np.bool_)):
                bits = 64 if form[0] == "*" else int(form[1:]) if form[0] in "iu" else 0
                values.append(int(value) & ((1 << max(bits, 8)) - 1) if bits else float(value))
                if form == "bf16":
                    values[-1] = _bf16_bits(float(value))
            elif isinstance(value, (float, np.floating)):
                values.append(self._float(float(value), form))
            elif value is None:
                values.append(0)
            else:
                tile = value if isinstance(value, TileDescriptor) else None
                tensor = tile.base if tile else value
                low, high = _memory(tensor, i, names)
                ranges.append((low, max(high, low), f"argument {names[i] if names else i}"))
                address = tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr()
                values.append(tile.data if tile else int(address))
        for num_bytes in scratch[:scratch_args]:
            area = aligned_buffer(max(num_bytes * self.num_groups, 0))
            self._keep.append(area)
            if len(area):
                ranges.append((area.ctypes.data, area.ctypes.data + len(area), "Triton's scratch"))
            values.append(area.ctypes.data if len(area) else 0)
        values += [self._hidden(name) for name in kind.hidden]
        kind.pack.pack_into(self.kernarg.data, 0, *values)
        start = self.kernarg.ctypes.data
        ranges.append((start, start + len(self.kernarg), "the kernel's arguments"))
        if self.hostcalls is not None:
            start = self.hostcalls.address
            ranges.append((start, start + self.hostcalls.num_bytes, "the hostcall buffer"))
        data = self.module.address
        ranges.append((data, data + len(self.module.data), "the module's variables"))
        return ranges

    @staticmethod
    def _float(value: float, form: str) -> int | float:
        if form == "bf16":
            return _bf16_bits(value)
        if form in _FLOAT:
            # too large becomes infinity, as in C
            with np.errstate(over="ignore"):
                return float(_FLOAT_TYPES[form](value))
        # no type was given: by size
        bits = int(form[1:])
        return int.from_bytes(struct.pack({16: "<e", 32: "<f", 64: "<d"}[bits], value), "little")

    def _hidden(self, name: str) -> int:
        if name.startswith("hidden_block_count_"):
            return self.grid["xyz".index(name[-1])]
        if name.startswith("hidden_group_size_"):
            return self.num_waves * self.module.code.warp_size if name[-1] == "x" else 1
        if name == "hidden_hostcall_buffer" and self.hostcalls is not None:
            return self.hostcalls.address
        return 3 if name == "hidden_grid_dims" else 0

    def bind(self, arena: np.ndarray, resident: int, clock: int, first_wave: int) -> None:
        """Give the launch memory for `resident` workgroups and finish its waves' start state."""
        kind, control = self.kind, self.control
        self.arena, self.resident = arena, resident
        merged = merge([*(self.device.ranges if self.device else ()), *self.named_ranges])
        self._table = np.array(merged, np.uint64)
        self._free = np.arange(resident - 1, -1, -1, dtype=np.uint64)
        template = bytearray(kind.template)
        kernarg = self.kernarg.ctypes.data
        struct.pack_into("<Q", template, 4 * kind.kernarg_register, kernarg)
        if kind.preload:
            at = 4 * (kind.kernarg_register + 2)
            template[at : at + 4 * kind.preload] = self.kernarg[: 4 * kind.preload].tobytes()
        struct.pack_into("<QQ", template, lay.RANGES, self._table.ctypes.data, len(merged))
        struct.pack_into("<Q", template, lay.CLOCK, clock)
        if self.device is not None and self.device.ledger is not None:
            self._counts = self.device.ledger(self.module.code.name)
            struct.pack_into("<Q", template, lay.LEDGER, self._counts.address)
        self._template = (ctypes.c_char * len(template)).from_buffer(template)
        control.slots, control.wave_template = arena.ctypes.data, ctypes.addressof(self._template)
        control.free_slots, control.num_free = self._free.ctypes.data, resident
        control.warp_size, control.first_wave = self.module.code.warp_size, first_wave
        if self.weak_records is not None:
            control.weak_records = self.weak_records.ctypes.data
        control.id_x, control.id_y, control.id_z = kind.ids

    # ------------------------------------------------------------------------------------------------ reports
    def owns(self, wave_address: int) -> bool:
        """Whether a wave's state lies in this launch's memory."""
        return self.arena is not None and 0 <= wave_address - self.control.slots < self.resident * self.slot_bytes

    def wave(self, address: int) -> WaveView:
        """The wave whose state starts at `address`."""
        slot, rest = divmod(address - self.control.slots, self.slot_bytes)
        base = self.control.slots + slot * self.slot_bytes
        number = ctypes.c_uint64.from_address(base + 32).value
        return WaveView(self, address, number, (rest - self.control.waves_offset) // self.control.wave_stride)

    def live_waves(self) -> Iterator[WaveView]:
        """Waves that have started and not ended, by place."""
        free = set(self._free[: self.control.num_free].tolist())
        for slot in range(self.resident):
            if slot in free:
                continue
            first = self.control.slots + slot * self.slot_bytes + self.control.waves_offset
            for i in range(self.num_waves):
                wave = self.wave(first + i * self.control.wave_stride)
                if wave.get(lay.STATUS) != lay.DONE:
                    yield wave

    def nearest(self, address: int) -> str:
        """The allocation nearest to an address, in words."""
        return nearest(sorted([*(self.device.ranges if self.device else ()), *self.named_ranges]), address)


def merge(ranges: list[tuple[int, int, str]]) -> list[tuple[int, int]]:
    """Bounds by address; overlapping ranges become one, neighbours stay apart."""
    merged: list[tuple[int, int]] = []
    for low, high, _ in sorted(ranges):
        if merged and low < merged[-1][1]:
            if high > merged[-1][1]:
                merged[-1] = (merged[-1][0], high)
        elif high > low:
            merged.append((low, high))
    return merged


def _memory(value: Any, index: int, names: Sequence[str] | None) -> tuple[int, int]:
    """Bounds of the memory that an argument gives access to: the whole storage of a tensor."""
    if isinstance(value, np.ndarray):
        return value.ctypes.data, value.ctypes.data + value.nbytes
    name = names[index] if names else f"argument {index}"
    # triton.reinterpret() wraps the tensor
    value = getattr(value, "base", value) if not hasattr(value, "untyped_storage") else value
    if not hasattr(value, "untyped_storage"):
        if hasattr(value, "data_ptr"):
            return value.data_ptr(), value.data_ptr()
        raise ArgumentError(f"{name}: want a CPU tensor, a number or None, got {type(value).__name__}")
    if value.device.type != "cpu":
        raise ArgumentError(f"{name}: want a tensor on the CPU, where the emulated device is, got {value.device}")
    storage = value.untyped_storage()
    low = storage.data_ptr()
    return low, low + storage.nbytes()
