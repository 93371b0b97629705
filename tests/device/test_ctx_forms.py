"""Every function under MORI's name has a form that takes the context first; what only new code calls, by value."""

from __future__ import annotations

import itertools
import re
import struct
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton import abi
from mori_triton import shmem as host
from mori_triton.device import externs, shmem
from mori_triton.device.launch import launch
from tests.device.pes import SENTINEL, Pes
from tests.device.test_mori_names import CODES, apply
from tests.host.proxy.ucx import needs_ucx

pytestmark = pytest.mark.cpu

SIG, DST, SRC = 4096, 8192, 1024
TRANSPORTS = (
    "p2p",
    "mlx5",
    pytest.param("bnxt_re", marks=pytest.mark.slow),
    pytest.param("ionic", marks=pytest.mark.slow),
    pytest.param("proxy", marks=needs_ucx),
)

# by MORI's name: what new code calls, where a copy's count is bytes and a type no more than its width
FORMS = (
    (r"my_pe|n_pes", r"\g<0>"),
    (r"ptr(_p2p)?", "ptr"),
    (r"(quiet|fence)_thread(_pe)?(_qp)?", r"\1"),
    (r"barrier_all_(thread|block)", "barrier_all"),
    (r"putmem_nbi_signal_(\w+)", r"put_signal_\1"),
    (r"put_size_imm_nbi_thread", "put_small"),
    (r"(put|get)(mem|_uint32|_uint64|_float|_double)(_nbi)?_(thread|warp|block)", r"\1\3_\4"),
    (r"(char|uchar)_p", "put_value_uint8"),
    (r"(short|ushort)_p", "put_value_uint16"),
    (r"(int|uint|int32|uint32|float)_p", "put_value_uint32"),
    (r"(long|ulong|longlong|ulonglong|int64|uint64|double)_p", "put_value_uint64"),
    (r"atomic_size_nonfetch_thread", "atomic_from"),
    (r"atomic_u?int(32|64)_nonfetch_thread|u?int(?P<add>32|64)_atomic_add_thread", r"atomic_uint\1\g<add>"),
    (r"atomic_u?int(32|64)_fetch_thread|u?int(?P<add>32|64)_atomic_fetch_add_thread", r"atomic_fetch_uint\1\g<add>"),
    (r"int64_wait_until_equals", "wait_eq"),
    (r"int64_wait_until_greater_than", "wait_gt"),
    (r"(int32|uint32|uint64)_wait_until_\w+", r"wait_\1"),
)


def form_of(name: str) -> str:
    """Key in `abi.CTX_FUNCTIONS` of the form that takes the context first."""
    found = [match.expand(form) for pattern, form in FORMS if (match := re.fullmatch(pattern, name))]
    assert len(found) == 1, (name, found)
    return f"ctx_{found[0]}"


def test_each_of_moris_functions_has_a_form_that_takes_the_context() -> None:
    names = [*abi.MORI_FUNCTIONS, *abi.EXTRA_FUNCTIONS]
    assert len(names) == 98
    for name in names:
        assert form_of(name) in abi.CTX_FUNCTIONS, name
    # and the document names each of them
    document = (Path(__file__).parents[2] / "docs" / "device.md").read_text()
    for key in {form_of(name).removeprefix("ctx_") for name in names}:
        base = re.sub(r"_(thread|warp|block|u?int(8|16|32|64))$", "", key)
        assert re.search(rf"`[^`]*\b{base}\b", document), key


# ---------------------------------------------------------------------------------------------------------------- waits


@triton.jit(do_not_specialize=["value", "which"])
def wait_kernel(ctx, out, word_ptr, value, which):
    """A wait on a word of the pointer's type. out: of that type, [64], what every thread has got."""
    o = out + tl.arange(0, 64)
    zero = tl.zeros([64], word_ptr.dtype.element_ty)
    if which == 0:
        tl.store(o, zero + shmem.wait_lt(ctx, word_ptr, value, 3, 20))
    else:
        tl.store(o, zero + shmem.wait_eq(ctx, word_ptr, value, 3, 21))


@pytest.mark.parametrize(
    ("dtype", "values"),
    # as a signed number the last one is less than the first
    [(torch.int32, (-5, 3)), (torch.uint32, (3, 2**32 - 5)), (torch.uint64, (3, 2**64 - 5))],
    ids=["int32", "uint32", "uint64"],
)
def test_waits_compare_as_their_word_is(dtype: torch.dtype, values: tuple[int, int]) -> None:
    pes = Pes(1, "gfx1201", timeout_s=0.001)
    bits = 8 * dtype.itemsize
    with pes.current(0) as ctx:
        word = pes.view(0, SIG, 1, dtype)
        # only the word's bits count
        pes.view(0, SIG + dtype.itemsize, 1, torch.int32)[0] = -1
        for which, seen, value in itertools.product(range(2), values, values):
            word.copy_(torch.tensor([seen], dtype=dtype))
            pes.clear_log(0)
            out = torch.full((64,), 77, dtype=dtype)
            launch(wait_kernel, (1,), ctx, out, word, value, which, num_warps=2)
            assert out.tolist() == [seen] * 64
            found = [(r["tag"], r["peer"], r["address"], r["compare"], r["seen"]) for r in pes.records(0)]
            compare = (abi.COMPARE_LT, abi.COMPARE_EQ)[which]
            record = (20 + which, 3, pes.base(0) + SIG, compare, seen % (1 << (64 if seen < 0 else bits)))
            assert found == ([] if (seen < value, seen == value)[which] else [record]), (which, seen, value)


@triton.jit(do_not_specialize=["compare"])
def compare_kernel(ctx, out, word_ptr, compare):
    tl.store(out, externs.ctx_wait_uint32(ctx, word_ptr, 7, compare, 1, 30).to(tl.int64))


@pytest.mark.parametrize("compare", [0, 7, -1])
def test_a_comparison_that_is_none_is_refused(compare: int) -> None:
    pes = Pes(1, "gfx1201", timeout_s=20)
    with pes.current(0) as ctx:
        pes.view(0, SIG, 1, torch.int32)[0] = 7
        out = torch.full((1,), -1)
        launch(compare_kernel, (1,), ctx, out, pes.base(0) + SIG, compare, num_warps=1)
        assert out.tolist() == [0]
        assert [(r["kind"], r["tag"]) for r in pes.records(0)] == [(abi.ERROR_REFUSED, 30)]


# ---------------------------------------------------------------------------------------------- values, over everything


@triton.jit(do_not_specialize=["value"])
def value_kernel(ctx, status, dst_ptr, value):
    tl.store(status, shmem.put_value(ctx, dst_ptr, value, 1))


# element type, what is put, its bytes
VALUES = (
    (torch.int8, -3, struct.pack("<b", -3)),
    (torch.uint16, 65000, struct.pack("<H", 65000)),
    (torch.float16, -2.5, struct.pack("<e", -2.5)),
    (torch.uint32, 2**32 - 5, struct.pack("<I", 2**32 - 5)),
    (torch.float32, 0.5, struct.pack("<f", 0.5)),
    (torch.int64, -(2**40), struct.pack("<q", -(2**40))),
    (torch.float64, -0.25, struct.pack("<d", -0.25)),
)


@pytest.mark.parametrize(("dtype", "value", "raw"), VALUES, ids=lambda part: str(part) if "torch" in str(part) else "")
def test_a_value_is_written_as_its_pointer_says(dtype: torch.dtype, value: float, raw: bytes) -> None:
    pes = Pes(2, "gfx1201")
    with pes.current(0) as ctx:
        status = torch.full((1,), -9, dtype=torch.int32)
        launch(value_kernel, (1,), ctx, status, pes.view(0, DST, 1, dtype), value, num_warps=1)
        assert int(status[0]) == 0
        want = bytes([SENTINEL] * 8) + raw + bytes([SENTINEL] * (16 - len(raw)))
        assert pes.heaps[1][DST - 8 : DST + 16].numpy().tobytes() == want


@triton.jit(do_not_specialize=["op"])
def from_kernel(ctx, status, dst_ptr, operand_ptr, op):
    tl.store(status, shmem.atomic_from(ctx, dst_ptr, operand_ptr, op, 1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_operands_from_memory(dtype: torch.dtype) -> None:
    start, value = 0x0000_00F0_0000_00F0, 0x0000_000F_FFFF_FFF1
    mask = (1 << 8 * dtype.itemsize) - 1
    pes = Pes(2, "gfx1201")
    with pes.current(0) as ctx:
        pes.view(0, SRC, 1, torch.int64)[0] = value
        word, status = pes.view(1, DST, 1, torch.int64), torch.full((1,), -9, dtype=torch.int32)
        for op in [*CODES, 11]:
            word[0] = start
            launch(from_kernel, (1,), ctx, status, pes.view(0, DST, 1, dtype), pes.base(0) + SRC, op, num_warps=2)
            # 11 is no operation; what compares, compares with 0
            after = start & mask if op == 11 else apply(op, start & mask, value & mask, 0) & mask
            assert (int(word[0]), int(status[0])) == ((start & ~mask) | after, -1 if op == 11 else 0), op


@triton.jit
def forms_kernel(ctx, status, bytes_ptr, halves_ptr, words_ptr, small_ptr, ADD: tl.constexpr):
    """What has no other test over a network: a byte, two bytes, eight from memory, an operand from memory."""
    failed = shmem.put_value(ctx, bytes_ptr, 0x91, 1)
    failed |= shmem.put_value(ctx, halves_ptr, 0xB3A2, 1)
    failed |= shmem.put_small(ctx, words_ptr, small_ptr, 8, 1)
    failed |= shmem.atomic_from(ctx, words_ptr + 1, small_ptr, ADD, 1)
    tl.store(status, failed | shmem.quiet(ctx))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_values_of_every_width_over_each_transport(transport: str) -> None:
    def program(pe: int) -> tuple[int, bytes, list[int]]:
        mine = host.mori_shmem_create_tensor((64,), torch.uint8)
        mine.fill_(SENTINEL)
        mine[48:56] = 0
        status = torch.full((1,), -9, dtype=torch.int32)
        # not in any heap
        small = torch.tensor([2**40 + 7])
        host.shmem_barrier_all()
        if pe == 0:
            halves, words = mine[24:].view(torch.int16), mine[40:].view(torch.int64)
            arguments = host.context(), status, mine[9:], halves, words, small
            launch(forms_kernel, (1,), *arguments, ADD=abi.ATOMIC_ADD, num_warps=2)
        host.shmem_barrier_all()
        return int(status[0]), mine.numpy().tobytes(), mine[40:56].view(torch.int64).tolist()

    world = mori.local_world(2, transport=transport, heap_size="1M", timeout_s=20)
    (status, _, _), (_, data, words) = world.run(program)
    assert status == 0
    untouched = bytes([SENTINEL])
    assert data[:40] == untouched * 9 + b"\x91" + untouched * 14 + b"\xa2\xb3" + untouched * 14
    assert words == [2**40 + 7] * 2
    assert data[56:] == untouched * 8


@triton.jit
def handover_kernel(ctx, row_ptr, flag_ptr, seen_ptr, N: tl.constexpr):
    """PE 0 puts a row and, behind a fence, an unsigned 32-bit flag; PE 1 waits for that and reads."""
    offs = tl.arange(0, N)
    if shmem.my_pe(ctx) == 0:
        shmem.put(ctx, row_ptr, row_ptr, N * 4, 1)
        shmem.fence(ctx)
        shmem.put_value(ctx, flag_ptr, 0x80000001, 1)
        shmem.quiet(ctx)
    elif shmem.wait_gt(ctx, flag_ptr, 0x80000000, 0) > 0x80000000:
        tl.store(seen_ptr + offs, tl.load(row_ptr + offs))


@pytest.mark.parametrize("transport", ["p2p", "mlx5"])
def test_a_wait_for_a_narrow_word_acquires(transport: str) -> None:
    def program(pe: int) -> list[int]:
        row = host.mori_shmem_create_tensor((64,), torch.int32)
        flag = host.mori_shmem_create_tensor((1,), torch.int32).view(torch.uint32)
        row[:], flag.view(torch.int32)[:] = 500 * (1 - pe) + torch.arange(64), 0
        seen = torch.full((64,), -1, dtype=torch.int32)
        host.shmem_barrier_all()
        launch(handover_kernel, (1,), host.context(), row, flag, seen, N=64, num_warps=2)
        host.shmem_barrier_all()
        return seen.tolist()

    for seed in range(4):
        network = None if transport == "p2p" else {"late": True, "seed": seed}
        world = mori.local_world(2, transport=transport, seed=seed, weak_memory=True, network=network)
        assert world.run(program)[1] == list(range(500, 564)), seed
