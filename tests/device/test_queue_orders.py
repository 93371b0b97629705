"""Orders that the fences of docs/queue_pairs.md keep, and a GPU without them need not: the other one is found.

The emulated device carries out accesses of system scope in the order of the program, so a fence between two of them is
not missed there. Here the two change places, as without the fence they may, and a program may be stopped between them.
In their own order, and stopped as well, nothing is wrong.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.device.planted import CLANG, PAUSE, SEEDS, Edit, Program, both, crowd, failures

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.slow,
    pytest.mark.skipif(CLANG is None, reason="orders are changed in the sources: no clang here to build them"),
]


class Order(NamedTuple):
    """What changes places, over which card that is looked for, and the pattern of what shows it."""

    edits: tuple[Edit, ...]
    provider: str
    shows: str
    program: Program = crowd


def moved(file: str, what: str, behind: str, *, pause: str = PAUSE, only: str = "") -> tuple[Edit, ...]:
    """A text moves behind a later one, if `only` holds there."""
    return (
        Edit(file, what, "", what + pause),
        Edit(file, behind, behind + pause + only + what),
    )


# of every poll, of which there are many
_SHORT_PAUSE = PAUSE.replace("4000", "60")
_PAUSE_0, _PAUSE_1 = (f"  if (program_index() == {i}) {{\n  {PAUSE}  }}\n" for i in range(2))
_PAUSE_TAKEN = f"  if (program_index() == 0 && taken != consumed) {{\n  {PAUSE}  }}\n"
_EXPECTED = r"queue pair on PE 0 to PE 1: expected \d+ requests done"

# queue.h
_ROOM = "if (index + n - done <= room) {"
_COMMIT = "  u64 ready = fixed(&facts(queue)->ready), mask = fixed(&facts(queue)->num_wqes) - 1;\n  release"
_WAIT_FOR_ROOM = """  while (!is_broken(queue) && index + n - load_system<u64>(MORI_WORD(queue, done)) > mask) {
    poll(call, queue, 1);
    pause_by_one(0);
  }
"""
_WHOLE = """#pragma clang loop unroll(disable)
  for (u32 i = 0; i < n; ++i, ++index) store_system<u64>(word_at(ready, index & mask), index + 1);
"""
_RING, _RING_CALL = "void ring(Call call, u64 queue) {", "  ring(call, queue);\n"
_COME = ", come = add_system<u64>(ringing, 1) + 1;\n"
_EARLY_COME = "  u64 come = add_system<u64>(MORI_WORD(queue, ringing), 1) + 1;\n"
_FIRST, _EARLY = (
    "first = load_system<u64>(MORI_WORD(queue, posted))",
    "early = load_system<u64>(MORI_WORD(queue, posted));\n",
)
_IS_READY = "load_system<u64>(word_at(ready, posted & mask)) == posted + 1"
_SCAN = f"    while ({_IS_READY}) posted += 1;\n"
_EARLY_SCAN = f"""    for (;;) {{
      u64 early = load_system<u64>(mlx5::slot(queue, posted));
      {PAUSE}
      if (!({_IS_READY})) break;
      bytes = early;
      posted += 1;
    }}
"""
_POSTED = "      store_system<u64>(MORI_WORD(queue, posted), posted);\n"
_RUNG = "      // the next one's doorbell must not overtake this one\n"
_LEAVE = "    if (now == come) return;\n"
_LOOK = "    u64 now = compare_swap_system<u64>(ringing, come, 0);\n" + _LEAVE + "    come = now;\n"
_RESULT, _BIT = "  *old = load_first<u64>(place);\n", "  give_bit(MORI_WORD(queue, free_results), bit);\n"
# nic_mlx5.h
_MLX5_RING, _MLX5_CALL = "void ring(Call call, u64 queue, u64 posted) {", "mlx5::ring(call, queue, posted);"
_BEGINNING = "beginning = load_system<u64>(slot(queue, posted - 1));"
_RECORD = "  store_system<u32>(fixed(&facts(queue)->record), swap_bytes((u32)(posted & 0xffff)));\n"
_BELL = "  store_system<u64>(fixed(&facts(queue)->doorbell), beginning);\n"
_LATE_BELL = "    if (bell != 0) store_system<u64>(fixed(&facts(queue)->doorbell), bell);\n"
# nic_bnxt.h
_BNXT_RING = "void ring(Call call, u64 queue, u64 first, u64 posted) {"
_BNXT_CALL = "bnxt::ring(call, queue, first, posted);"
_BNXT_DOORBELL = "  store_system<u64>(fixed(&facts(queue)->doorbell),\n                    (u64)"
_BNXT_VALUE = "((fixed(&facts(queue)->number) & 0xfffff) | valid) << 32 | (at * 3 | epoch << 24));\n"
_NUMBER, _BNXT_BELL = "  number_packets(queue, first, posted);\n", "(at * 3 | epoch << 24));\n"
_BNXT_DONE = "u64 before = load_first<u64>(MORI_WORD(queue, done)), delta = completed(queue, before);\n"
_DONE_FIRST = f"""u64 before = load_first<u64>(MORI_WORD(queue, done));
  {_SHORT_PAUSE}
  u64 delta = completed(queue, before);
"""
_DONE_LAST = f"""u64 number = completed(queue, 0);
  {_SHORT_PAUSE}
  u64 before = load_first<u64>(MORI_WORD(queue, done));
  u64 delta = (number - before) & (fixed(&facts(queue)->num_wqes) - 1);
"""
# nic_ionic.h
_CONSUMED = "    store_system<u64>(MORI_WORD(queue, consumed), taken);\n"
_GIVE_BACK = """    store_system<u64>(fixed(&facts(queue)->cq_doorbell),
                      fixed(&facts(queue)->cq_doorbell_value) | (taken & (num_cqes - 1)));
"""
_ADVANCE, _FREE = "    advance_done(queue, before, delta);\n", "  store_system<u64>(polling, 0);\n"
_FLAGS = "    u32 flags = swap_bytes(load_first<u32>(cqe + 28));\n"
_COUNT = "u64 now = (swap_bytes(load_system<u32>(cqe + 4))"

ORDERS = {
    "room, slot": Order(
        (
            Edit("queue.h", _ROOM, "if (true) {"),
            Edit("queue.h", _COMMIT, _COMMIT.replace("  release", _WAIT_FOR_ROOM + "  release"),
                 _COMMIT.replace("  release", PAUSE + "  release")),
        ),
        "mlx5",
        r"the network card of PE 0.*\n  reads sq",
    ),
    # program 1 takes its index before 0, comes while that one rings, and is slow to say that its request is whole
    "ready, ringing": Order(
        (
            Edit("queue.h", _WHOLE, _PAUSE_1 + _EARLY_COME + PAUSE + _PAUSE_1 + _WHOLE,
                 _PAUSE_1 + _WHOLE + PAUSE + _PAUSE_1),
            Edit("queue.h", _RING_CALL, "  ring(call, queue, come);\n"),
            Edit("queue.h", _RING, "void ring(Call call, u64 queue, u64 come) {"),
            Edit("queue.h", _COME, ";\n"),
        ),
        "mlx5",
        _EXPECTED,
        functools.partial(crowd, programs=2, rounds=4),
    ),
    "ringing, ready": Order(
        (
            Edit("queue.h", _LOOK, f"    bool more = {_IS_READY};\n" + PAUSE + _LOOK + "    if (!more) {\n" + _LOOK
                 + "    }\n", PAUSE + _LOOK),
        ),
        "mlx5",
        _EXPECTED,
    ),
    "ringing, posted": Order(
        (
            Edit("queue.h", _COME, ", come;\n  u64 " + _EARLY + PAUSE + "  come = add_system<u64>(ringing, 1) + 1;\n",
                 _COME + PAUSE),
            Edit("queue.h", _FIRST, "first = early"),
            Edit("queue.h", _LOOK, _EARLY + _LOOK),
        ),
        "bnxt_re",
        "packet number table",
    ),
    "ready, bytes": Order(
        (
            Edit("queue.h", "u64 " + _FIRST, "u64 bytes = 0, " + _FIRST),
            Edit("queue.h", _SCAN, _EARLY_SCAN, _EARLY_SCAN.replace("bytes = early", "(void)early")),
            Edit("queue.h", _MLX5_CALL, "mlx5::ring(call, queue, posted, bytes);"),
            Edit("nic_mlx5.h", _MLX5_RING, "void ring(Call call, u64 queue, u64 posted, u64 bytes) {"),
            Edit("nic_mlx5.h", _BEGINNING, "beginning = bytes;"),
        ),
        "mlx5",
        "doorbell: want|doorbell names: want",
    ),
    "record, doorbell": Order(moved("nic_mlx5.h", _RECORD, _BELL), "mlx5", "want one that the record covers"),
    "packet numbers, doorbell": Order(moved("nic_bnxt.h", _NUMBER, _BNXT_BELL), "bnxt_re", "packet number table"),
    "posted, doorbell": Order(
        (Edit("queue.h", _POSTED, "", _POSTED + PAUSE), Edit("queue.h", _RUNG, PAUSE + _POSTED)), "ionic", _EXPECTED
    ),
    # program 0 is slow, and its doorbell comes after newer ones
    "doorbell, ringing": Order(
        (
            Edit("nic_bnxt.h", _BNXT_RING, _BNXT_RING.replace("void", "u64")),
            Edit("nic_bnxt.h", _BNXT_DOORBELL + _BNXT_VALUE, "  return (u64)" + _BNXT_VALUE.replace(");\n", ";\n"),
                 _BNXT_DOORBELL + _BNXT_VALUE + _PAUSE_0),
            Edit("queue.h", "u64 " + _FIRST, "u64 bell = 0, " + _FIRST),
            Edit("queue.h", _BNXT_CALL, "bell = " + _BNXT_CALL),
            Edit("queue.h", _LEAVE, _PAUSE_0 + _LATE_BELL + _LEAVE),
        ),
        "bnxt_re",
        "epoch in the doorbell|packet number table|requests under way|" + _EXPECTED,
    ),
    "done, completion": Order(
        (Edit("nic_bnxt.h", _BNXT_DONE, _DONE_LAST, _DONE_FIRST),), "bnxt_re", "epoch in the doorbell",
    ),
    "result, its bit": Order(moved("queue.h", _RESULT, _BIT), "mlx5", "numbers drawn"),
    "completions given back, room": Order(
        moved("nic_ionic.h", _GIVE_BACK, _ADVANCE), "ionic", "completions not acknowledged"
    ),
    # program 0 is slow, and its old word comes after newer ones
    "consumed, polling": Order(
        moved("nic_ionic.h", _CONSUMED, _FREE, pause=_PAUSE_TAKEN, only="  if (taken != consumed)\n"),
        "ionic",
        _EXPECTED,
        functools.partial(crowd, programs=4, rounds=12),
    ),
    "color, completion": Order(
        (
            Edit("nic_ionic.h", _FLAGS, "    u32 count = load_system<u32>(cqe + 4);\n" + PAUSE + _FLAGS,
                 _FLAGS + PAUSE),
            Edit("nic_ionic.h", _COUNT, "u64 now = (swap_bytes(count)"),
        ),
        "ionic",
        _EXPECTED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_the_other_order_is_found(name: str, tmp_path: Path) -> None:
    order = ORDERS[name]
    wrong, right = both(order.edits, tmp_path)
    tried = functools.partial(failures, program=order.program, arch="gfx1201", provider=order.provider)
    seed, text = next(((seed, text) for seed, text in enumerate(tried(wrong)) if text), (SEEDS, ""))
    assert re.search(order.shows, text), f"seed {seed}: {text}"
    # the same seeds, and one more
    assert not any(tried(right, seeds=seed + 2))
