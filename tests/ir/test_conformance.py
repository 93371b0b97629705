"""Every symbol with every scope over mapped memory: its value and how often it happens, as docs/conformance.md has it.

`python -m pytest tests/ir/test_conformance.py -s` prints the table.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from mori_triton import abi, ir
from tests.device import mori_kernels as K
from tests.device.pes import SENTINEL, Pes, pattern
from tests.device.test_mori_names import CODES, DST, FORMATS, SIG, SRC, Caller, apply, element_of

pytestmark = pytest.mark.cpu

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
WARPS = (4, 8)
# those that a name may have in it
SCOPES = ("thread", "warp", "block")


class Shown(NamedTuple):
    """What a program with some number of warps has shown of a function."""

    value: bool
    # how often one call happened, and what tells; None: nothing that happens
    operations: int | None = None
    told_by: str = ""


Results = Iterator[tuple[str, Shown]]
REFUSED, TIME_OUT, SUM, EPOCH = "records when refused", "records at the limit", "the sum", "the epoch"


def new_pes(arch: str, n: int = 2) -> Pes:
    # the limit of waits that are to reach it
    return Pes(n, arch, timeout_s=0.001)


def records(pes: Pes) -> int:
    """Records since the last call."""
    count = pes.count(0)
    pes.clear_log(0)
    return count


def copies(arch: str, num_warps: int, kernel: Any, names: tuple[str, ...]) -> Results:
    pes = new_pes(arch)
    with pes.current(0):
        call = Caller(pes, kernel, num_warps)
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
                right &= call(pes.base(0) + DST, pes.base(0) + SRC, count, 1, which) == 0
                right &= bool(np.array_equal(target, want))
            right &= records(pes) == 0
            refused = call(pes.base(0) + DST, pes.base(0) + SRC, 1, 2, which) == -1
            yield name, Shown(right and refused, records(pes), REFUSED)


def put_signals(arch: str, num_warps: int) -> Results:
    pes = new_pes(arch)
    with pes.current(0):
        call = Caller(pes, K.put_signal_kernel, num_warps)
        word = pes.view(1, SIG, 1, torch.int64)
        for which, name in enumerate(K.PUT_SIGNALS):
            signals, right = "signal" in name, True
            for count in (0, 1, 33) if signals else (16,):
                pes.heaps[1][512:].fill_(SENTINEL)
                word[0] = 100
                data = pattern(count, which)
                pes.heaps[0][SRC : SRC + count] = torch.from_numpy(data)
                args = (pes.base(0) + DST, pes.base(0) + SRC, count, pes.base(0) + SIG)
                right &= call(*args, 1, abi.SIGNAL_ADD, 1, which) == 0
                right &= pes.heaps[1][DST : DST + count].tolist() == data.tolist()
                right &= int(pes.heaps[1][DST + count]) == SENTINEL
                added = int(word[0]) - 100
                if signals:
                    right &= call(*args, -9, abi.SIGNAL_SET, 1, which) == 0 and int(word[0]) == -9
            right &= records(pes) == 0
            call(*args, 1, abi.SIGNAL_ADD, 2, which)
            refused = records(pes)
            yield name, Shown(right, added, SUM) if signals else Shown(right, refused, REFUSED)


def immediate_puts(arch: str, num_warps: int) -> Results:
    value, real = 0x7172_7374_7576_7778, -2.5
    pes = new_pes(arch)
    with pes.current(0):
        call = Caller(pes, K.p_kernel, num_warps)
        for which, name in enumerate(K.PS):
            form = FORMATS[name.removesuffix("_p")]
            size = struct.calcsize(form)
            raw = struct.pack("<" + form, real) if form in "fd" else value.to_bytes(8, "little")[:size]
            pes.heaps[1][DST - 8 : DST + 16].fill_(SENTINEL)
            right = call(pes.base(0) + DST, value, real, 1, which) == 0
            found = bytes(pes.heaps[1][DST - 8 : DST + 16].numpy())
            right &= found == bytes([SENTINEL] * 8) + raw + bytes([SENTINEL] * (16 - size))
            right &= records(pes) == 0
            call(pes.base(0) + DST, value, real, 2, which)
            yield name, Shown(right, records(pes), REFUSED)


def atomics(arch: str, num_warps: int) -> Results:
    start, value = 0x0000_00F0_0000_00F0, 0x0000_000F_FFFF_FFF1
    pes = new_pes(arch)
    with pes.current(0):
        call = Caller(pes, K.atomic_kernel, num_warps)
        operand, word = pes.view(0, SRC, 1, torch.int64), pes.view(1, DST, 1, torch.int64)
        for which, name in enumerate(K.ATOMICS):
            fetches, right = "fetch" in name and "nonfetch" not in name, True
            width = 4 if "32" in name else 8
            mask = (1 << 8 * width) - 1
            operand[0] = value
            for op in CODES if name.startswith("atomic_") else (abi.ATOMIC_ADD,):
                word[0] = start
                got = call(pes.base(0) + DST, pes.base(0) + SRC, width, value, start, op, 1, which)
                against = 0 if "nonfetch" in name else start & mask
                right &= int(word[0]) == (start & ~mask) | apply(op, start & mask, value & mask, against) & mask
                right &= got == ((start & mask) if fetches else 0)
            word[0], operand[0] = 0, 1
            call(pes.base(0) + DST, pes.base(0) + SRC, width, 1, 0, abi.ATOMIC_ADD, 1, which)
            yield name, Shown(right and records(pes) == 0, int(word[0]), SUM)


def waits(arch: str, num_warps: int) -> Results:
    pes = new_pes(arch)
    with pes.current(0):
        call = Caller(pes, K.wait_kernel, num_warps)
        word = pes.view(0, SIG, 1, torch.int64)
        for which, name in enumerate(K.WAITS):
            greater = "greater" in name
            word[0] = 6 if greater else 5
            right = call(pes.base(0) + SIG, 5, which) == (6 if greater else 0) and records(pes) == 0
            word[0] = 4
            right &= call(pes.base(0) + SIG, 5, which) == (4 if greater else -1)
            yield name, Shown(right, records(pes), TIME_OUT)


def plain(arch: str, num_warps: int) -> Results:
    pes = new_pes(arch, 1)
    with pes.current(0):
        call = Caller(pes, K.plain_kernel, num_warps)
        address, epoch = pes.base(0) + DST, pes.view(0, 0, abi.BARRIER_WORDS, torch.int64)
        want = {"my_pe": 0, "n_pes": 1, "ptr": address, "ptr_p2p": address}
        for which, name in enumerate(K.PLAIN):
            before = int(epoch[-1])
            right = call(address, 0, which) == want.get(name, 0) and records(pes) == 0
            if name.startswith("ptr"):
                right &= call(address, 1, which) == call(address - (1 << 20), 0, which) == 0
            if name.startswith("barrier"):
                yield name, Shown(right, int(epoch[-1]) - before, EPOCH)
            else:
                yield name, Shown(right)


def measure(num_warps: int, arch: str = "gfx1201") -> dict[str, Shown]:
    """What each function shows in a program of `num_warps` warps."""
    found: dict[str, Shown] = {}
    for kernel, names in ((K.put_kernel, K.PUTS), (K.get_kernel, K.GETS), (K.get_nbi_kernel, K.GETS_NBI)):
        found |= copies(arch, num_warps, kernel, names)
    for group in (put_signals, immediate_puts, atomics, waits, plain):
        found |= group(arch, num_warps)
    return found


def table(shown: dict[int, dict[str, Shown]]) -> str:
    """The table of docs/conformance.md: a row for each function, in the order of MORI's table."""
    warps = ", ".join(map(str, shown))
    lines = [
        f"| symbol | scope | value | operations of a program of {warps} warps | told by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, entry in ir.MORI_DEVICE_FUNCTIONS.items():
        rows = [of[name] for of in shown.values()]
        scope = next((scope for scope in SCOPES if f"_{scope}" in name), "program")
        value = "right" if all(row.value for row in rows) else "WRONG"
        counts = ", ".join("" if row.operations is None else str(row.operations) for row in rows)
        cells = (f"`{entry['symbol']}`", scope, value, counts.strip(", ") or "–", rows[0].told_by or "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_what_the_document_has() -> None:
    shown = {num_warps: measure(num_warps) for num_warps in WARPS}
    printed = table(shown)
    print(printed)
    assert all(set(of) == set(ir.MORI_DEVICE_FUNCTIONS) for of in shown.values())
    assert "WRONG" not in printed
    assert {row.operations for of in shown.values() for row in of.values()} == {1, None}
    assert printed in DOCUMENT.read_text()


@pytest.mark.slow
def test_waves_of_64_show_the_same() -> None:
    shown = measure(4, "gfx942")
    assert all(row.value and row.operations in (1, None) for row in shown.values()), shown
    assert {name: row.told_by for name, row in shown.items()} == {name: row.told_by for name, row in measure(4).items()}
