"""What each function of MORI's table shows over each transport: `python -m tests.ir.conformance` prints the table.

`--write` puts it into docs/conformance.md. PE 0 calls, from programs of 4 and of 8 warps; what came is looked up in the
memory of the PE that it was for, the last one, and the others' must not have changed.
"""

from __future__ import annotations

import ctypes
import queue
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import mori_triton as mori
from mori_triton import abi, ir
from mori_triton.host import state
from mori_triton.host.proxy import layout
from tests.device import mori_kernels as K
from tests.device.pes import SENTINEL, pattern
from tests.device.test_mori_names import CODES, DST, FORMATS, SIG, SRC, apply, element_of
from tests.ir.every_kernel import GROUPS, every_kernel, library_of_calls

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"


class Way(NamedTuple):
    """A world, as `local_world` takes it: PEs of a node are mapped by each other, all others use the transport."""

    num_pes: int
    transport: str
    arch: str = "gfx1201"
    gpus_per_node: int | None = None

    @property
    def network(self) -> dict[str, Any]:
        """Cards deliver as late as they may: who does not wait for them finds nothing."""
        return {"late": True, "seed": 1} if self.transport not in ("p2p", "proxy") else {}


# columns of the table, by header
WAYS = {
    "mapped, 4 PEs": Way(4, "p2p"),
    "mlx5, 3 PEs": Way(3, "mlx5"),
    "bnxt_re, 2 PEs": Way(2, "bnxt_re"),
    "ionic, 2 + 2 PEs": Way(4, "ionic", gpus_per_node=2),
    "proxy, 3 PEs": Way(3, "proxy"),
    "mapped, gfx942, 2 PEs": Way(2, "p2p", "gfx942"),
    "mlx5, gfx942, 2 PEs": Way(2, "mlx5", "gfx942"),
}
WARPS = (4, 8)
# those that a name may have in it
SCOPES = ("thread", "warp", "block")
BUFFER_BYTES = 1 << 16
# outside every heap
FAR_AWAY = 1 << 30
# 100 MHz: limit of waits that are to reach it
SHORT_TICKS = 100_000


class Shown(NamedTuple):
    """What a program with some number of warps has shown of a function."""

    value: bool
    # how often one call happened, and what tells; None: nothing that happens
    operations: int | None = None
    told_by: str = ""
    # what one call has given to the card or the proxy; None: there is none
    requests: int | None = None


Results = Iterator[tuple[str, Shown]]
REFUSED, TIME_OUT, SUM, EPOCH = "records when refused", "records at the limit", "the sum", "the epoch"


class Peers:
    """The PEs of a world, as PE 0. `heaps`: of each, memory at the same offset of its heap."""

    def __init__(self, heaps: list[torch.Tensor], errands: list[queue.Queue], arch: str) -> None:
        self.heaps, self.errands, self.arch, self.provider = heaps, errands, arch, state.current().provider
        # calls are for the last PE
        self.n, self.last, self.warps = len(heaps), len(heaps) - 1, WARPS[0]
        self._context = state.current().heap.ctx.data_ptr()
        self._log, self._sync = self._word(self._field("errors")).value, self._word(self._field("sync")).value
        self.barriers = 0
        self.requests: int | None = None

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

    def _given(self) -> list[int] | None:
        """Requests that I have given to the network until now, and those that it says are carried out."""
        if self.provider == "p2p":
            return None
        network = self._word(self._field("network")).value
        words = {name: self._word(network + field.offset).value for name, field in abi.NETWORK_FIELDS.items()}
        if self.provider == "proxy":
            places = [words["ring"] + getattr(layout.Ring, field).offset for field in ("tail", "head")]
            return [self._word(place).value for place in places]
        per_pe = words["num_qp_per_pe"] & 0xFFFFFFFF
        queues = range(words["queues"], words["queues"] + self.n * per_pe * abi.QUEUE_SIZE, abi.QUEUE_SIZE)
        fields = [abi.QUEUE_FIELDS[name].offset for name in ("reserved", "done")]
        return [sum(self._word(one + field).value for one in queues) for field in fields]

    def call(self, kernel: Any, num_warps: int, *args: Any) -> int:
        """Launch a group's kernel; the last argument says which function it calls. `requests`: what that gave."""
        given = dict.fromkeys(every_kernel.arg_names[1:], 0) | dict(zip(kernel.arg_names[1:], args, strict=True))
        given["group"] = GROUPS.index(kernel)
        out, before = torch.full((1,), -99, dtype=torch.int64), self._given()
        libraries = {abi.LIBRARY: str(library_of_calls(self.arch, self.provider))}
        every_kernel[(1,)](out, **given, num_warps=num_warps, extern_libs=libraries, enable_fp_fusion=False)
        if before is not None:
            self.requests = self._given()[0] - before[0]
        return int(out[0])

    def call_by_all(self, *args: Any) -> int:
        """The same, of all PEs."""
        before = self.epoch()
        done = [threading.Event() for _ in self.errands]
        for errand, event in zip(self.errands, done, strict=True):
            errand.put((args, event))
        result = self.call(*args)
        assert all(event.wait(60) for event in done)
        self.barriers = self.epoch() - before
        return result

    def settle(self) -> None:
        """Have done what was called."""
        kept = self.requests
        assert self.call(K.plain_kernel, self.warps, 0, 0, K.PLAIN.index("quiet_thread")) == 0
        assert len(set(self._given() or ())) <= 1, "quiet has not waited for all"
        self.requests = kept

    def epoch(self) -> int:
        return self._word(self._sync + 8 * (abi.BARRIER_WORDS - 1)).value

    def shorten_waits(self) -> None:
        self._word(self._field("timeout_ticks")).value = SHORT_TICKS


def copies(pes: Peers, num_warps: int, kernel: Any, names: tuple[str, ...]) -> Results:
    here, there = pes.heaps[0].numpy(), pes.heaps[pes.last].numpy()
    for which, name in enumerate(names):
        right = True
        for count in (0, 1, 37):
            num_bytes = count * element_of(name)
            here[512:] = there[512:] = SENTINEL
            source, target = (here, there) if name.startswith("put") else (there, here)
            source[SRC : SRC + num_bytes] = data = pattern(num_bytes, which + count)
            want = target.copy()
            want[DST : DST + num_bytes] = data
            right &= pes.call(kernel, num_warps, pes.base(0) + DST, pes.base(0) + SRC, count, pes.last, which) == 0
            requests = pes.requests
            if "nbi" in name:
                pes.settle()
            right &= bool(np.array_equal(target, want))
        right &= pes.records() == 0
        refused = pes.call(kernel, num_warps, pes.base(0) + DST, pes.base(0) + SRC, 1, pes.n, which) == -1
        yield name, Shown(right and refused, pes.records(), REFUSED, requests)


def put_signals(pes: Peers, num_warps: int) -> Results:
    word, there = pes.view(pes.last, SIG, 1, torch.int64), pes.heaps[pes.last]

    def call(count: int, value: int, op: int, pe: int, which: int) -> int:
        args = pes.base(0) + DST, pes.base(0) + SRC, count, pes.base(0) + SIG
        result = pes.call(K.put_signal_kernel, num_warps, *args, value, op, pe, which)
        pes.settle()
        return result

    for which, name in enumerate(K.PUT_SIGNALS):
        signals, right = "signal" in name, True
        for count in (0, 1, 33) if signals else (16,):
            there[512:].fill_(SENTINEL)
            word[0] = 100
            data = pattern(count, which)
            pes.heaps[0][SRC : SRC + count] = torch.from_numpy(data)
            right &= call(count, 1, abi.SIGNAL_ADD, pes.last, which) == 0
            requests = pes.requests
            right &= there[DST : DST + count].tolist() == data.tolist()
            right &= int(there[DST + count]) == SENTINEL
            added = int(word[0]) - 100
            if signals:
                right &= call(count, -9, abi.SIGNAL_SET, pes.last, which) == 0 and int(word[0]) == -9
        right &= pes.records() == 0
        call(count, 1, abi.SIGNAL_ADD, pes.n, which)
        refused = pes.records()
        # the signal's place and the data's
        right &= refused == (2 if signals else 1)
        yield name, Shown(right, *((added, SUM) if signals else (refused, REFUSED)), requests)


def immediate_puts(pes: Peers, num_warps: int) -> Results:
    value, real = 0x7172_7374_7576_7778, -2.5
    there = pes.heaps[pes.last][DST - 8 : DST + 16]
    for which, name in enumerate(K.PS):
        form = FORMATS[name.removesuffix("_p")]
        size = struct.calcsize(form)
        raw = struct.pack("<" + form, real) if form in "fd" else value.to_bytes(8, "little")[:size]
        there.fill_(SENTINEL)
        right = pes.call(K.p_kernel, num_warps, pes.base(0) + DST, value, real, pes.last, which) == 0
        requests = pes.requests
        pes.settle()
        right &= bytes(there.numpy()) == bytes([SENTINEL] * 8) + raw + bytes([SENTINEL] * (16 - size))
        right &= pes.records() == 0
        pes.call(K.p_kernel, num_warps, pes.base(0) + DST, value, real, pes.n, which)
        yield name, Shown(right, pes.records(), REFUSED, requests)


def atomics(pes: Peers, num_warps: int) -> Results:
    start, value = 0x0000_00F0_0000_00F0, 0x0000_000F_FFFF_FFF1
    operand, word = pes.view(0, SRC, 1, torch.int64), pes.view(pes.last, DST, 1, torch.int64)

    def call(width: int, value: int, compare: int, op: int, which: int) -> int:
        args = pes.base(0) + DST, pes.base(0) + SRC, width, value, compare, op, pes.last, which
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
        yield name, Shown(right and pes.records() == 0, int(word[0]), SUM, pes.requests)


def waits(pes: Peers, num_warps: int) -> Results:
    word = pes.view(0, SIG, 1, torch.int64)
    pes.shorten_waits()
    for which, name in enumerate(K.WAITS):
        greater = "greater" in name
        word[0] = 6 if greater else 5
        right = pes.call(K.wait_kernel, num_warps, pes.base(0) + SIG, 5, which) == (6 if greater else 0)
        right &= pes.records() == 0
        word[0] = 4
        right &= pes.call(K.wait_kernel, num_warps, pes.base(0) + SIG, 5, which) == (4 if greater else -1)
        yield name, Shown(right, pes.records(), TIME_OUT, pes.requests)


def plain(pes: Peers, num_warps: int) -> Results:
    address, here, there = pes.base(0) + DST, pes.heaps[0], pes.heaps[pes.last]
    want = {"my_pe": 0, "n_pes": pes.n, "ptr": address, "ptr_p2p": address}

    def call(address: int, pe: int, which: int) -> int:
        return pes.call(K.plain_kernel, num_warps, address, pe, which)

    for which, name in enumerate(K.PLAIN):
        if name.startswith("barrier"):
            right = pes.call_by_all(K.plain_kernel, num_warps, address, 0, which) == 0
            yield name, Shown(right and pes.records() == 0, pes.barriers, EPOCH, pes.requests)
            continue
        orders = name.startswith(("quiet", "fence"))
        if orders:
            data = pattern(37, which)
            here[SRC : SRC + 37] = torch.from_numpy(data)
            there[DST : DST + 37].fill_(SENTINEL)
            # on queue pair 0, the one that those with a queue pair are given
            args = address, pes.base(0) + SRC, 37, pes.base(0) + SIG, 1, abi.SIGNAL_ADD, pes.last
            pes.call(K.put_signal_kernel, num_warps, *args, K.PUT_SIGNALS.index("putmem_nbi_signal_block"))
        right = call(address, pes.last if orders else 0, which) == want.get(name, 0)
        requests = pes.requests
        if orders:
            right &= there[DST : DST + 37].tolist() == data.tolist()
        if name.startswith("ptr"):
            right &= call(address, pes.n, which) == call(address - FAR_AWAY, 0, which) == 0
            for pe in range(pes.n):
                reached = state.current().heap.reaches(pe)
                right &= call(address, pe, which) == (pes.base(pe) + DST if reached else 0)
        yield name, Shown(right and pes.records() == 0, requests=requests)


def shown_by(pes: Peers, num_warps: int) -> dict[str, Shown]:
    """What each function shows. `waits` is the last: its limit stays."""
    pes.warps = num_warps
    found: dict[str, Shown] = {}
    for kernel, names in ((K.put_kernel, K.PUTS), (K.get_kernel, K.GETS), (K.get_nbi_kernel, K.GETS_NBI)):
        found |= copies(pes, num_warps, kernel, names)
    for group in (put_signals, immediate_puts, atomics, plain, waits):
        found |= group(pes, num_warps)
    for heap in pes.heaps[1:-1]:
        assert bool((heap == SENTINEL).all()), "a PE was written to that no call was for"
    return found


def measure(way: Way, num_warps: int) -> dict[str, Shown]:
    """What each function shows in a program of `num_warps` warps."""
    heaps: list[Any] = [None] * way.num_pes
    errands: list[queue.Queue] = [queue.Queue() for _ in heaps[1:]]

    def program(pe: int) -> dict[str, Shown] | None:
        heaps[pe] = mori.shmem.mori_shmem_create_tensor((BUFFER_BYTES,), torch.uint8)
        heaps[pe].fill_(SENTINEL)
        mori.shmem.shmem_barrier_all()
        mine = Peers(heaps, errands, way.arch)
        if pe > 0:
            for args, done in iter(errands[pe - 1].get, None):
                mine.call(*args)
                done.set()
            return None
        try:
            return shown_by(mine, num_warps)
        finally:
            mine.records()
            for errand in errands:
                errand.put(None)

    options = {"gpus_per_node": way.gpus_per_node, "network": way.network} if way.transport != "p2p" else {}
    world = mori.local_world(
        way.num_pes, device="cpu", arch=way.arch, heap_size="2M", transport=way.transport, timeout_s=60.0, **options
    )
    return world.run(program)[0]


# ------------------------------------------------------------------------------------------------------------ the table


def scope_of(name: str) -> str:
    return next((scope for scope in SCOPES if f"_{scope}" in name), "program")


def column(shown: dict[int, dict[str, Shown]]) -> dict[str, str]:
    """A column's cells, from what programs of some numbers of warps have shown."""
    cells = {}
    for name in ir.MORI_DEVICE_FUNCTIONS:
        rows = [of[name] for of in shown.values()]
        right = all(row.value and row.operations in (1, None) for row in rows)
        counts = [row.operations if row.requests is None else row.requests for row in rows]
        told = ", ".join(str(count) for count in counts if count is not None)
        cells[name] = f"{'right' if right else 'WRONG'}{f': {told}' if told else ''}"
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


def main(write: bool, measured: Callable[[Way, int], dict[str, Shown]] = measure) -> None:
    shown = {title: {warps: measured(way, warps) for warps in WARPS} for title, way in WAYS.items()}
    told_by = {name: row.told_by for name, row in next(iter(shown.values()))[WARPS[0]].items()}
    text = table({title: column(of) for title, of in shown.items()}, told_by)
    sys.stdout.write(text)
    if write:
        lines = DOCUMENT.read_text().splitlines(keepends=True)
        head = "".join(line for line in lines if not line.startswith("|"))
        DOCUMENT.write_text(head.rstrip("\n") + "\n\n" + text)


if __name__ == "__main__":
    main("--write" in sys.argv)
