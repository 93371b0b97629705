"""What staging is for: fewer and larger writes to peers, counted on the emulated device beside a dispatch without."""

from __future__ import annotations

import dataclasses

import pytest

from mori_triton import local_world
from tests.ops import cases
from tests.ops.cases import Case, round_of
from tests.ops.v2.rounds import dispatch_round, start

pytestmark = pytest.mark.cpu

# every token goes to both PEs; shares its kernels with test_rounds
CASE = Case(num_pes=2, hidden=32, top_k=6, tokens="full", routing="spread", rounds=1)
ROW_BYTES = CASE.hidden * 2


def staged(pe: int) -> None:
    op = start(CASE, pe, dispatch_block_num=1)
    dispatch_round(op, CASE, round_of(CASE, pe, 0))
    op.close()


def plain(pe: int) -> None:
    op = cases.start(CASE, pe)
    cases.dispatch_round(op, CASE, round_of(CASE, pe, 0))
    op.close()


def test_metadata_goes_in_runs() -> None:
    world = local_world(2, heap_size="4M")
    with world.byte_ledger() as new:
        world.run(staged)
    with world.byte_ledger() as old:
        world.run(plain)
    n = CASE.max_tokens
    for pe in range(2):
        peer = 1 - pe
        sent, before = (ledger.total(pe, peer, "store") for ledger in (new, old))
        # payload, ids, weights and sources of every token; the signal
        assert sent.bytes == before.bytes == n * (ROW_BYTES + 2 * 4 * CASE.top_k + 4) + 8
        # a message at least for each row that is written, and the signal
        assert before.messages >= n + 1 + 3 * n
        # three runs, none of which has more than a head, a body of whole 16 bytes, and a tail
        assert sent.messages <= n + 1 + 3 * 3
        # slots: one add of the block
        assert new.total(pe, peer, "atomic", kernel="dispatch_stage_kernel").operations == 1
        assert new.total(pe, peer, "store", kernel="dispatch_stage_kernel").bytes == 0


def test_the_payload_goes_past_the_buffer() -> None:
    """Rows ten times as long make the buffer no longer, and what is stored in it no more."""
    wide = dataclasses.replace(CASE, hidden=10 * CASE.hidden)

    def program(pe: int, case: Case) -> tuple[int, int]:
        op = start(case, pe)
        dispatch_round(op, case, round_of(case, pe, 0))
        written = int((op._staging != 255).sum())
        size = op.staging_bytes
        op.close()
        return written, size

    world = local_world(2, heap_size="4M")
    assert world.run(program, CASE) == world.run(program, wide)
