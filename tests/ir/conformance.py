"""What each function of MORI's table shows over each transport: `python -m tests.ir.conformance` prints the table.

`--write` puts it into docs/conformance.md. PE 0 calls, from programs of 4 and of 8 warps; what came is looked up in the
memory of the PE that it was for.
"""

from __future__ import annotations

import ctypes
import queue
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton import abi, ir
from mori_triton.device.launch import get_extern_libs
from mori_triton.host import state
from tests.device import mori_kernels as K
from tests.device.pes import SENTINEL, pattern
from tests.device.test_mori_names import CODES, DST, FORMATS, SIG, SRC, apply, element_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
TRANSPORTS = ("mapped", "mlx5", "bnxt_re", "ionic", "proxy")
WARPS = (4, 8)
# those that a name may have in it
SCOPES = ("thread", "warp", "block")
BUFFER_BYTES = 1 << 16
# outside every heap
FAR_AWAY = 1 << 30
# 100 MHz: limit of waits that are to reach it
SHORT_TICKS = 100_000


@cache
def selected(kernel: Any) -> Any:
    """A group's kernel with `which` as a constexpr: a network's code for all of a group is too much at once."""
    function = kernel.fn
    alone = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    alone.__annotations__ = {"which": tl.constexpr}
    alone.__module__, alone.__qualname__ = function.__module__, function.__qualname__
    return triton.jit(alone, do_not_specialize=[name for name in kernel.arg_names if name not in ("out", "which")])


class Shown(NamedTuple):
    """What a program with some number of warps has shown of a function."""

    value: bool
    # how often one call happened, and what tells; None: nothing that happens
    operations: int | None = None
    told_by: str = ""


Results = Iterator[tuple[str, Shown]]
REFUSED, TIME_OUT, SUM, EPOCH = "records when refused", "records at the limit", "the sum", "the epoch"


class Pair:
    """Two PEs of a world, as one of them. `heaps`: of each, memory at the same offset of its heap."""

    def __init__(self, heaps: list[torch.Tensor], errands: queue.Queue) -> None:
        self.heaps, self.errands = heaps, errands
        self._context = state.current().heap.ctx.data_ptr()
        self._log, self._sync = self._word(self._field("errors")).value, self._word(self._field("sync")).value
        self.barriers = 0

    def _field(self, name: str) -> int:
        return self._context + abi.CONTEXT_FIELDS[name].offset

    @staticmethod
    def _word(address: int) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_address(address)

    def base(self, pe: int) -> int:
        return self.heaps[pe].data_ptr()

    def view(self, pe: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self.heaps[pe][offset : offset + count * dtype.itemsize].view(dtype)

    def records(self) -> int:
        """Records of mine since the last call."""
        count, self._word(self._log).value = self._word(self._log).value, 0
        ctypes.memset(self._log + abi.ERROR_LOG_FIELDS["records"].offset, 0, abi.ERROR_RECORD_SIZE * abi.ERROR_CAPACITY)
        return count

    def call(self, kernel: Any, num_warps: int, *args: Any) -> int:
        """Launch a group's kernel; the last argument says which function it calls."""
        out = torch.full((1,), -99, dtype=torch.int64)
        options = {"num_warps": num_warps, "extern_libs": get_extern_libs(), "enable_fp_fusion": False}
        (selected(kernel) if state.current().provider != "p2p" else kernel)[(1,)](out, *args, **options)
        return int(out[0])

    def call_by_all(self, *args: Any) -> int:
        """The same, of both PEs."""
        before = self.epoch()
        done = threading.Event()
        self.errands.put((args, done))
        result = self.call(*args)
        assert done.wait(60)
        self.barriers = self.epoch() - before
        return result

    def settle(self) -> None:
        """Have done what was called."""
        assert self.call(K.plain_kernel, 4, 0, 0, K.PLAIN.index("quiet_thread")) == 0

    def epoch(self) -> int:
        return self._word(self._sync + 8 * (abi.BARRIER_WORDS - 1)).value

    def shorten_waits(self) -> None:
        self._word(self._field("timeout_ticks")).value = SHORT_TICKS


def copies(pes: Pair, num_warps: int, kernel: Any, names: tuple[str, ...]) -> Results:
    for which, name in enumerate(names):
        right = True
        for count in (0, 1, 37):
            num_bytes = count * element_of(name)
            for heap in pes.heaps:
                heap[512:].fill_(SENTINEL)
            here, there = (heap.numpy() for heap in pes.heaps)
            source, target = (here, there) if name.startswith("put") else (there, here)
            source[SRC : SRC + num_bytes] = data = pattern(num_bytes, which + count)
            want = target.copy()
            want[DST : DST + num_bytes] = data
            right &= pes.call(kernel, num_warps, pes.base(0) + DST, pes.base(0) + SRC, count, 1, which) == 0
            if "nbi" in name:
                pes.settle()
            right &= bool(np.array_equal(target, want))
        right &= pes.records() == 0
        refused = pes.call(kernel, num_warps, pes.base(0) + DST, pes.base(0) + SRC, 1, 2, which) == -1
        yield name, Shown(right and refused, pes.records(), REFUSED)


def put_signals(pes: Pair, num_warps: int) -> Results:
    word = pes.view(1, SIG, 1, torch.int64)

    def call(count: int, value: int, op: int, pe: int, which: int) -> int:
        args = pes.base(0) + DST, pes.base(0) + SRC, count, pes.base(0) + SIG
        result = pes.call(K.put_signal_kernel, num_warps, *args, value, op, pe, which)
        pes.settle()
        return result

    for which, name in enumerate(K.PUT_SIGNALS):
        signals, right = "signal" in name, True
        for count in (0, 1, 33) if signals else (16,):
            pes.heaps[1][512:].fill_(SENTINEL)
            word[0] = 100
            data = pattern(count, which)
            pes.heaps[0][SRC : SRC + count] = torch.from_numpy(data)
            right &= call(count, 1, abi.SIGNAL_ADD, 1, which) == 0
            right &= pes.heaps[1][DST : DST + count].tolist() == data.tolist()
            right &= int(pes.heaps[1][DST + count]) == SENTINEL
            added = int(word[0]) - 100
            if signals:
                right &= call(count, -9, abi.SIGNAL_SET, 1, which) == 0 and int(word[0]) == -9
        right &= pes.records() == 0
        call(count, 1, abi.SIGNAL_ADD, 2, which)
        refused = pes.records()
        yield name, Shown(right, added, SUM) if signals else Shown(right, refused, REFUSED)


def immediate_puts(pes: Pair, num_warps: int) -> Results:
    value, real = 0x7172_7374_7576_7778, -2.5
    for which, name in enumerate(K.PS):
        form = FORMATS[name.removesuffix("_p")]
        size = struct.calcsize(form)
        raw = struct.pack("<" + form, real) if form in "fd" else value.to_bytes(8, "little")[:size]
        pes.heaps[1][DST - 8 : DST + 16].fill_(SENTINEL)
        right = pes.call(K.p_kernel, num_warps, pes.base(0) + DST, value, real, 1, which) == 0
        pes.settle()
        found = bytes(pes.heaps[1][DST - 8 : DST + 16].numpy())
        right &= found == bytes([SENTINEL] * 8) + raw + bytes([SENTINEL] * (16 - size))
        right &= pes.records() == 0
        pes.call(K.p_kernel, num_warps, pes.base(0) + DST, value, real, 2, which)
        yield name, Shown(right, pes.records(), REFUSED)


def atomics(pes: Pair, num_warps: int) -> Results:
    start, value = 0x0000_00F0_0000_00F0, 0x0000_000F_FFFF_FFF1
    operand, word = pes.view(0, SRC, 1, torch.int64), pes.view(1, DST, 1, torch.int64)

    def call(width: int, value: int, compare: int, op: int, which: int) -> int:
        args = pes.base(0) + DST, pes.base(0) + SRC, width, value, compare, op, 1, which
        result = pes.call(K.atomic_kernel, num_warps, *args)
        pes.settle()
        return result

    for which, name in enumerate(K.ATOMICS):
        fetches, right = "fetch" in name and "nonfetch" not in name, True
        width = 4 if "32" in name else 8
        mask = (1 << 8 * width) - 1
        operand[0] = value
        for op in CODES if name.startswith("atomic_") else (abi.ATOMIC_ADD,):
            word[0] = start
            got = call(width, value, start, op, which)
            against = 0 if "nonfetch" in name else start & mask
            right &= int(word[0]) == (start & ~mask) | apply(op, start & mask, value & mask, against) & mask
            right &= got == ((start & mask) if fetches else 0)
        word[0], operand[0] = 0, 1
        call(width, 1, 0, abi.ATOMIC_ADD, which)
        yield name, Shown(right and pes.records() == 0, int(word[0]), SUM)


def waits(pes: Pair, num_warps: int) -> Results:
    word = pes.view(0, SIG, 1, torch.int64)
    pes.shorten_waits()
    for which, name in enumerate(K.WAITS):
        greater = "greater" in name
        word[0] = 6 if greater else 5
        right = pes.call(K.wait_kernel, num_warps, pes.base(0) + SIG, 5, which) == (6 if greater else 0)
        right &= pes.records() == 0
        word[0] = 4
        right &= pes.call(K.wait_kernel, num_warps, pes.base(0) + SIG, 5, which) == (4 if greater else -1)
        yield name, Shown(right, pes.records(), TIME_OUT)


def plain(pes: Pair, num_warps: int) -> Results:
    address = pes.base(0) + DST
    want = {"my_pe": 0, "n_pes": 2, "ptr": address, "ptr_p2p": address}

    def call(address: int, pe: int, which: int) -> int:
        return pes.call(K.plain_kernel, num_warps, address, pe, which)

    for which, name in enumerate(K.PLAIN):
        if name.startswith("barrier"):
            right = pes.call_by_all(K.plain_kernel, num_warps, address, 0, which) == 0
            yield name, Shown(right and pes.records() == 0, pes.barriers, EPOCH)
            continue
        if name.startswith(("quiet", "fence")):
            data = pattern(37, which)
            pes.heaps[0][SRC : SRC + 37] = torch.from_numpy(data)
            pes.heaps[1][DST : DST + 37].fill_(SENTINEL)
            put = K.PUTS.index("putmem_nbi_block")
            pes.call(K.put_kernel, num_warps, pes.base(0) + DST, pes.base(0) + SRC, 37, 1, put)
        # to the PE that the put went to
        right = call(address, int(name.startswith(("quiet", "fence"))), which) == want.get(name, 0)
        if name.startswith(("quiet", "fence")):
            right &= pes.heaps[1][DST : DST + 37].tolist() == data.tolist()
        if name.startswith("ptr"):
            right &= call(address, 2, which) == call(address - FAR_AWAY, 0, which) == 0
            there = call(address, 1, which)
            right &= there == (pes.base(1) + DST if state.current().heap.reaches(1) else 0)
        yield name, Shown(right and pes.records() == 0)


def shown_by(pes: Pair, num_warps: int) -> dict[str, Shown]:
    """What each function shows; over a network, from other than 4 warps, only those whose operations add up.

    `waits` is the last: its limit stays.
    """
    found: dict[str, Shown] = {}
    if num_warps != WARPS[0] and state.current().provider != "p2p":
        for group in (put_signals, atomics, plain):
            found |= group(pes, num_warps)
        return {name: shown for name, shown in found.items() if shown.told_by in (SUM, EPOCH)}
    for kernel, names in ((K.put_kernel, K.PUTS), (K.get_kernel, K.GETS), (K.get_nbi_kernel, K.GETS_NBI)):
        found |= copies(pes, num_warps, kernel, names)
    for group in (put_signals, immediate_puts, atomics, plain, waits):
        found |= group(pes, num_warps)
    return found


def measure(transport: str, num_warps: int, arch: str = "gfx1201") -> dict[str, Shown]:
    """What each function shows in a program of `num_warps` warps."""
    heaps: list[Any] = [None, None]
    errands: queue.Queue = queue.Queue()

    def program(pe: int) -> dict[str, Shown] | None:
        heaps[pe] = mori.shmem.mori_shmem_create_tensor((BUFFER_BYTES,), torch.uint8)
        heaps[pe].fill_(SENTINEL)
        mori.shmem.shmem_barrier_all()
        mine = Pair(heaps, errands)
        if pe == 1:
            for args, done in iter(errands.get, None):
                mine.call(*args)
                done.set()
            return None
        try:
            return shown_by(mine, num_warps)
        finally:
            mine.records()
            errands.put(None)

    way = "p2p" if transport == "mapped" else transport
    world = mori.local_world(2, device="cpu", arch=arch, heap_size="2M", transport=way, timeout_s=60.0)
    return world.run(program)[0]


# ------------------------------------------------------------------------------------------------------------ the table


def scope_of(name: str) -> str:
    return next((scope for scope in SCOPES if f"_{scope}" in name), "program")


def column(shown: dict[int, dict[str, Shown]]) -> dict[str, str]:
    """A transport's cells, from what programs of some numbers of warps have shown."""
    cells = {}
    for name in ir.MORI_DEVICE_FUNCTIONS:
        rows = [of[name] for of in shown.values() if name in of]
        counts = ", ".join(str(row.operations) for row in rows if row.operations is not None)
        cells[name] = f"{'right' if all(row.value for row in rows) else 'WRONG'}{f': {counts}' if counts else ''}"
    return cells


def table(columns: dict[str, dict[str, str]], told_by: dict[str, str]) -> str:
    """The table of docs/conformance.md: a row for each function, in the order of MORI's table."""
    lines = [
        f"| symbol | scope | {' | '.join(columns)} | operations told by |",
        "| --- | --- |" + " --- |" * (len(columns) + 1),
    ]
    for name, entry in ir.MORI_DEVICE_FUNCTIONS.items():
        cells = (f"`{entry['symbol']}`", scope_of(name), *(of[name] for of in columns.values()), told_by[name] or "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def documented() -> dict[str, dict[str, str]]:
    """The columns of the document, by header, then by symbol."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {title: {row[0].strip("`"): row[i] for row in rows} for i, title in enumerate(header)}


def main(write: bool, measured: Callable[[str, int], dict[str, Shown]] = measure) -> None:
    shown = {transport: {warps: measured(transport, warps) for warps in WARPS} for transport in TRANSPORTS}
    told_by = {name: row.told_by for name, row in shown["mapped"][WARPS[0]].items()}
    text = table({transport: column(of) for transport, of in shown.items()}, told_by)
    sys.stdout.write(text)
    if write:
        lines = DOCUMENT.read_text().splitlines(keepends=True)
        head = "".join(line for line in lines if not line.startswith("|"))
        DOCUMENT.write_text(head.rstrip("\n") + "\n\n" + text)


if __name__ == "__main__":
    main("--write" in sys.argv)
