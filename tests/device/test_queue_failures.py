"""A request that fails among others: the record says why, although all behind it are flushed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mori_triton import abi
from mori_triton import shmem as host
from tests.device import network_kernels as kernels
from tests.device.planted import CLANG, PAUSE, ROOT, Edit, crowd, failures, planted
from tests.device.queue_pairs import Card, QueuePairs
from tests.device.test_queue_posts import copy
from tests.network_programs import put_kernel, symmetric

pytestmark = pytest.mark.cpu
needs_clang = pytest.mark.skipif(CLANG is None, reason="the source is changed: no clang here to build it")

LIBRARY = ROOT / "bitcode" / "amdgcn" / "libmori_shmem_device.bc"
PROVIDERS = ("mlx5", "bnxt_re", "ionic")
# what completions say: why a request has failed, and that one was flushed
STATUS = {"mlx5": (0x13, 0x05), "bnxt_re": (7, 11), "ionic": (9, 4)}
# of a program's third round in `crowd`: data, not signaled, in front of its signal
INDEX = 6
FAULTS = [{"pe": 0, "peer": 1, "fault": "remote_access", "index": INDEX}]
_FAILED = re.compile(r"request (\d+): status (0x[0-9a-f]+)")


def recorded(text: str) -> list[tuple[int, int]]:
    """Index and status of each record in what a world has ended with."""
    return [(int(index), int(status, 16)) for index, status in _FAILED.findall(text)]


@pytest.mark.parametrize("programs", [1, 6])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_one_that_is_not_signaled_fails_in_a_batch(provider: str, programs: int) -> None:
    run = functools.partial(crowd, programs=programs, rounds=6)
    reason, flushed = STATUS[provider]
    with_reason = 0
    for text in failures(LIBRARY, run, arch="gfx1201", provider=provider, num_wqes=16, faults=FAULTS):
        ((index, status),) = recorded(text)
        # no other index with the reason, and none in front of it
        assert index == INDEX if status == reason else (index > INDEX and status == flushed), text
        with_reason += status == reason
    # of one completion, written over, a flushed request's may be all that anybody has seen
    assert with_reason == 12 if provider == "ionic" else with_reason >= 3


@pytest.mark.parametrize("provider", ["mlx5", "bnxt_re"])
def test_a_reason_that_comes_after_a_flushed_request_is_recorded_too(provider: str) -> None:
    reason, flushed = STATUS[provider]
    pairs = QueuePairs("gfx1201", provider, num_wqes=8, timeout_s=60)
    with pairs.current() as ctx, Card(pairs) as card:
        card.hold.set()
        for _ in range(3):
            assert copy(pairs, ctx, kernels.PUT_NBI) == 0
        for index, status, want in (
            (2, flushed, [(2, flushed)]),
            (1, flushed, [(2, flushed)]),
            # as a program that has read it long ago says it now
            (1, reason, [(2, flushed), (1, reason)]),
            (2, flushed, [(2, flushed), (1, reason)]),
            (0, reason, [(2, flushed), (1, reason)]),
        ):
            pairs.rings[0].complete(index, 0, status)
            assert copy(pairs, ctx, kernels.QUIET) == -1
            records = [(record["expected"], record["seen"] & 0xFF) for record in pairs.pes.records(0)]
            assert records == want
            assert pairs.queue()["error"] & (1 << 63 | 0xFF) == 1 << 63 | want[-1][1]
    assert {record["kind"] for record in pairs.pes.records(0)} == {abi.ERROR_NETWORK_FAILED}


_WORD = "  u32 word = load_system<u32>(cqe + 60);"
_BNXT_DONE = "  u64 before = load_first<u64>(MORI_WORD(queue, done)), delta = completed(queue, before);\n"
# provider -> file, where a completion is read, where it is recorded, and whether it has a reason
_BREAK = {
    "mlx5": ("nic_mlx5.h", _WORD, "    break_queue(call, queue, pe, before + (u16)", "syndrome != 0x05"),
    "bnxt_re": ("nic_bnxt.h", _BNXT_DONE, "  break_queue(call, queue, pe, delta == 0", "status != 11"),
}


@needs_clang
@pytest.mark.slow
@pytest.mark.parametrize("provider", _BREAK)
def test_who_has_read_the_reason_may_be_the_last_to_say_so(provider: str, tmp_path: Path) -> None:
    """Programs are stopped with the reason in their hands, and others look later, at what was written over it."""
    file, read, record, is_reason = _BREAK[provider]
    edits = (
        Edit(file, read, f"  if (program_index() != 0) {{\n  {PAUSE.replace('4000', '400')}  }}\n" + read),
        Edit(file, record, f"  if ({is_reason}) {{\n  {PAUSE}  }}\n" + record),
    )
    library = planted(edits, wrong=True, directory=tmp_path / "slow")
    run = functools.partial(crowd, rounds=4)
    reason, flushed = STATUS[provider]
    seen = [
        [status for _, status in recorded(text)]
        for text in failures(library, run, arch="gfx1201", provider=provider, num_wqes=16, faults=FAULTS)
    ]
    # what only those know who have been stopped is not lost
    assert [flushed, reason] in seen
    assert all(statuses in ([reason], [flushed], [flushed, reason]) for statuses in seen)


# ------------------------------------------------------------------------------------------- the order of a completion
def puts(pe: int, run: Callable[..., Any]) -> None:
    """PE 0's puts, one after the other; AssertionError when one that has failed, or a later one, says it has not."""
    x, status = symmetric(64), symmetric(8, torch.int64)
    host.shmem_barrier_all()
    if pe == 0:
        for nth in range(8):
            run(put_kernel, (1,), host.context(), x, status[nth:], 100, 1)
        assert (status[:INDEX] == 100).all()
        assert (status[INDEX:] < 100).all(), "a put that has failed is said to be complete"
    host.shmem_barrier_all()


_SHORT_PAUSE = PAUSE.replace("4000", "60")
_REASON = "    u32 reason = load_system<u32>(cqe + 52), syndrome = reason >> 24;\n"
_NUMBER = ", delta = completed(queue, before);\n"
_STATUS = "  u32 status = load_first<u32>(fixed(&facts(queue)->cq) + 24) >> 8 & 0xff;\n"
ORDERS = {
    "mlx5": (
        Edit("nic_mlx5.h", _WORD, "  u32 reason = load_system<u32>(cqe + 52);\n" + _SHORT_PAUSE + _WORD),
        Edit("nic_mlx5.h", _REASON, "    u32 syndrome = reason >> 24;\n", _SHORT_PAUSE + _REASON),
    ),
    "bnxt_re": (
        Edit("nic_bnxt.h", _NUMBER + _STATUS,
             ";\n" + _STATUS + _SHORT_PAUSE + "  u64 delta = completed(queue, before);\n",
             _NUMBER + _SHORT_PAUSE + _STATUS),
    ),
}  # fmt: skip


@needs_clang
@pytest.mark.slow
@pytest.mark.parametrize("provider", ORDERS)
def test_the_other_order_of_a_completion_is_found(provider: str, tmp_path: Path) -> None:
    """mlx5: its reason before the word that says that there is one. bnxt_re: its status before its number."""

    def is_wrong(text: str) -> bool:
        return "said to be complete" in text or any(status not in STATUS[provider] for _, status in recorded(text))

    found = {}
    for wrong in (True, False):
        library = planted(ORDERS[provider], wrong=wrong, directory=tmp_path / str(wrong))
        texts = list(failures(library, puts, arch="gfx1201", provider=provider, faults=FAULTS))
        assert all(texts)
        found[wrong] = any(map(is_wrong, texts))
    assert found == {True: True, False: False}
