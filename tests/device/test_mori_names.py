"""Every function under MORI's name: its arguments, the context from the module's global, one operation a program."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from mori_triton import abi
from mori_triton.device.launch import check_linked, get_extern_libs
from tests.device import mori_kernels as K
from tests.device.pes import SENTINEL, Pes, pattern

pytestmark = pytest.mark.cpu

DST, SRC, SIG = 8192, 1024, 16384
ELEMENT = {"mem": 1, "uint32": 4, "uint64": 8, "float": 4, "double": 8}


class Caller:
    """Launches a group's kernel as PE 0, its module's global set to a context."""

    def __init__(self, pes: Pes, kernel: Any, num_warps: int = 2):
        self.pes, self.kernel, self.num_warps = pes, kernel, num_warps

    def __call__(self, *args: Any, context: int | None = None) -> int:
        out = torch.full((1,), -99, dtype=torch.int64)
        # a first launch loads the module: with `which` -1 it calls nothing
        options = {"num_warps": self.num_warps, "extern_libs": get_extern_libs(), "enable_fp_fusion": False}
        compiled = self.kernel[(1,)](out, *args[:-1], -1, **options)
        check_linked(compiled)
        assert int(out[0]) == -7
        value = self.pes.contexts[0].data_ptr() if context is None else context
        compiled.module.symbol(abi.CONTEXT_SYMBOL, np.uint64)[0] = value
        self.kernel[(1,)](out, *args, **options)
        return int(out[0])


def element_of(name: str) -> int:
    return next(size for word, size in ELEMENT.items() if word in name)


def test_groups_hold_every_function() -> None:
    groups = (K.PUTS, K.GETS_NBI, K.GETS, K.PUT_SIGNALS, K.PS, K.ATOMICS, K.WAITS, K.PLAIN)
    names = [name for group in groups for name in group]
    assert sorted(names) == sorted([*abi.MORI_FUNCTIONS, *abi.EXTRA_FUNCTIONS])


@pytest.mark.parametrize(
    ("kernel", "names"),
    [(K.put_kernel, K.PUTS), (K.get_kernel, K.GETS), (K.get_nbi_kernel, K.GETS_NBI)],
    ids=["put", "get", "get_nbi"],
)
def test_typed_copies_count_elements(kernel: Any, names: tuple[str, ...]) -> None:
    pes = Pes(2, "gfx1201")
    with pes.current(0):
        call = Caller(pes, kernel)
        for which, name in enumerate(names):
            for count in (0, 1, 37):
                num_bytes = count * element_of(name)
                for heap in pes.heaps:
                    heap[512:].fill_(SENTINEL)
                here, there = (heap.numpy() for heap in pes.heaps)
                source, target = (here, there) if name.startswith("put") else (there, here)
                data = pattern(num_bytes, 100 * which + count)
                source[SRC : SRC + num_bytes] = data
                want = target.copy()
                want[DST : DST + num_bytes] = data
                assert call(pes.base(0) + DST, pes.base(0) + SRC, count, 1, which) == 0
                np.testing.assert_array_equal(target, want, err_msg=f"{name} {count}")
            assert pes.count(0) == 0
            # a count whose bytes do not fit 64 bits is refused, not wrapped
            assert call(pes.base(0) + DST, pes.base(0) + SRC, (1 << 62) + 1, 1, which) == -1
            assert call(pes.base(0) + DST, pes.base(0) + SRC, 1, 2, which) == -1
            assert [r["kind"] for r in pes.records(0)] == [abi.ERROR_REFUSED] * 2
            pes.clear_log(0)


def test_put_signals_and_small_put_from_memory() -> None:
    pes = Pes(2, "gfx1201")
    with pes.current(0):
        call = Caller(pes, K.put_signal_kernel, num_warps=4)
        word = pes.view(1, SIG, 1, torch.int64)
        for which, name in enumerate(K.PUT_SIGNALS):
            for count in (16,) if "imm" in name else (0, 1, 33):
                pes.heaps[1][512:].fill_(SENTINEL)
                word[0] = 100
                data = pattern(count, which)
                pes.heaps[0][SRC : SRC + count] = torch.from_numpy(data)
                args = (pes.base(0) + DST, pes.base(0) + SRC, count, pes.base(0) + SIG)
                assert call(*args, 5, abi.SIGNAL_ADD, 1, which) == 0
                assert pes.heaps[1][DST : DST + count].tolist() == data.tolist()
                assert int(pes.heaps[1][DST + count]) == SENTINEL
                assert int(word[0]) == (100 if "imm" in name else 105), name
                if "signal" in name:
                    assert call(*args, -9, abi.SIGNAL_SET, 1, which) == 0
                    assert int(word[0]) == -9


FORMATS = {"char": "b", "uchar": "B", "short": "h", "ushort": "H", "int": "i", "uint": "I", "int32": "i", "uint32": "I"}
FORMATS |= {"long": "q", "ulong": "Q", "longlong": "q", "ulonglong": "Q", "int64": "q", "uint64": "Q"}
FORMATS |= {"float": "f", "double": "d"}


def test_immediate_puts_write_their_width() -> None:
    value, real = 0x7172_7374_7576_7778, -2.718281828459045
    pes = Pes(2, "gfx1201")
    with pes.current(0):
        call = Caller(pes, K.p_kernel)
        for which, name in enumerate(K.PS):
            form = FORMATS[name.removesuffix("_p")]
            size = struct.calcsize(form)
            raw = struct.pack("<" + form, real) if form in "fd" else value.to_bytes(8, "little")[:size]
            pes.heaps[1][DST - 8 : DST + 16].fill_(SENTINEL)
            # `real` is passed as fp32 by Triton; double_p then gets the rounded value
            if form == "d":
                raw = struct.pack("<d", struct.unpack("<f", struct.pack("<f", real))[0])
            assert call(pes.base(0) + DST, value, real, 1, which) == 0
            want = bytes([SENTINEL] * 8) + raw + bytes([SENTINEL] * (16 - size))
            assert bytes(pes.heaps[1][DST - 8 : DST + 16].numpy()) == want, name
            assert call(pes.base(0) + DST, value, real, 9, which) == -1
            if size > 1:
                assert call(pes.base(0) + DST + 1, value, real, 1, which) == -1
            assert bytes(pes.heaps[1][DST - 8 : DST + 16].numpy()) == want, name


def apply(op: int, word: int, value: int, compare: int) -> int:
    return {
        abi.ATOMIC_INC: word + 1,
        abi.ATOMIC_FETCH_INC: word + 1,
        abi.ATOMIC_SET: value,
        abi.SIGNAL_SET: value,
        abi.ATOMIC_SWAP: value,
        abi.ATOMIC_ADD: word + value,
        abi.SIGNAL_ADD: word + value,
        abi.ATOMIC_FETCH_ADD: word + value,
        abi.ATOMIC_AND: word & value,
        abi.ATOMIC_FETCH_AND: word & value,
        abi.ATOMIC_OR: word | value,
        abi.ATOMIC_FETCH_OR: word | value,
        abi.ATOMIC_XOR: word ^ value,
        abi.ATOMIC_FETCH_XOR: word ^ value,
        abi.ATOMIC_FETCH: word,
        abi.ATOMIC_COMPARE_SWAP: value if word == compare else word,
    }[op]


CODES = sorted(
    {v for k, v in vars(abi).items() if k.startswith("ATOMIC_")} | {abi.SIGNAL_SET, abi.SIGNAL_ADD},
)


def test_atomics_every_code_in_both_widths() -> None:
    start, value, compare = 0x0000_00F0_0000_00F0, 0x0000_000F_FFFF_FFF1, 0x0000_00F0_0000_00F0
    pes = Pes(2, "gfx1201")
    with pes.current(0):
        call = Caller(pes, K.atomic_kernel)
        operand = pes.view(0, SRC, 1, torch.int64)
        operand[0] = value
        word = pes.view(1, DST, 1, torch.int64)
        for which, name in enumerate(K.ATOMICS):
            by_code = name.startswith("atomic_")
            widths = (4, 8) if "size" in name else (4,) if "32" in name else (8,)
            for width in widths:
                mask = (1 << 8 * width) - 1
                for op in CODES if by_code else (abi.ATOMIC_ADD,):
                    word[0] = start
                    got = call(pes.base(0) + DST, pes.base(0) + SRC, width, value, compare, op, 1, which)
                    # an operand in memory has no compare value: 0
                    against = 0 if "size" in name or "nonfetch" in name else compare & mask
                    after = apply(op, start & mask, value & mask, against) & mask
                    assert int(word[0]) == (start & ~mask) | after, (name, op)
                    fetched = "fetch" in name and "nonfetch" not in name
                    assert got == ((start & mask) if fetched else 0), (name, op)
            assert pes.count(0) == 0
            # unknown code, bad PE: nothing changes
            word[0] = start
            for op, pe in ((11, 1), (abi.ATOMIC_ADD, -1)):
                if by_code or pe != 1:
                    args = (pes.base(0) + DST, pes.base(0) + SRC, 8, value, compare, op, pe, which)
                    assert call(*args) == (0 if "fetch" in name and "nonfetch" not in name else -1)
                    assert pes.records(0)[-1]["kind"] == abi.ERROR_REFUSED
            assert int(word[0]) == start
            pes.clear_log(0)


def test_waits_of_every_type_and_their_limit() -> None:
    pes = Pes(1, "gfx1201", timeout_s=0.001)
    with pes.current(0):
        call = Caller(pes, K.wait_kernel)
        word = pes.view(0, SIG, 1, torch.int64)
        for which, name in enumerate(K.WAITS):
            bits, unsigned = (32 if "32" in name else 64), name.startswith("u")
            # -1 is the greatest unsigned, and less than 5 signed; the upper half is not part of 32 bits
            word[0] = -1
            seen = (2**bits - 1) if unsigned and bits == 32 else -1
            arrived = unsigned and "greater" in name
            got = call(pes.base(0) + SIG, 5, which)
            assert got == (seen if "greater" in name else -1), name
            assert pes.count(0) == (0 if arrived else 1)
            if not arrived:
                (record,) = pes.records(0)
                assert (record["tag"], record["peer"], record["kind"]) == (
                    abi.TAG_WAIT_UNTIL,
                    -1,
                    abi.ERROR_WAIT_TIMEOUT,
                )
                assert record["compare"] == (abi.COMPARE_GT if "greater" in name else abi.COMPARE_EQ)
            pes.clear_log(0)
            word[0] = 6 if "greater" in name else 5
            assert call(pes.base(0) + SIG, 5, which) == (6 if "greater" in name else 0)
            assert pes.count(0) == 0


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_who_where_order_barrier(arch: str) -> None:
    pes = Pes(1, arch)
    with pes.current(0):
        call = Caller(pes, K.plain_kernel)
        address = pes.base(0) + DST
        want = {"my_pe": 0, "n_pes": 1, "ptr": address, "ptr_p2p": address}
        for which, name in enumerate(K.PLAIN):
            assert call(address, 0, which) == want.get(name, 0), name
        for pe in (-1, 1, 2**31 - 1):
            assert call(address, pe, K.PLAIN.index("ptr")) == 0
            assert call(address, pe, K.PLAIN.index("ptr_p2p")) == 0
        assert pes.count(0) == 0
        # two barriers were called
        assert int(pes.view(0, 0, abi.BARRIER_WORDS, torch.int64)[-1]) == 2


def test_before_the_host_has_set_the_global_everything_is_refused() -> None:
    pes = Pes(1, "gfx1201")
    with pes.current(0):
        before = pes.heaps[0].clone()
        address = pes.base(0) + DST
        call = Caller(pes, K.plain_kernel)
        want = {"my_pe": -1, "n_pes": 0, "ptr": 0, "ptr_p2p": 0, "barrier_all_thread": -1, "barrier_all_block": -1}
        for which, name in enumerate(K.PLAIN):
            assert call(address, 0, which, context=0) == want.get(name, 0), name
        assert Caller(pes, K.put_kernel)(address, address + 64, 1, 0, 0, context=0) == -1
        # no limit is set either, and it still ends
        assert Caller(pes, K.wait_kernel)(address, 5, K.WAITS.index("int64_wait_until_equals"), context=0) == -1
        assert torch.equal(pes.heaps[0], before)
