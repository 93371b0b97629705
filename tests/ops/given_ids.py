"""Rounds whose expert ids a test gives, in worlds on the emulated device."""

from __future__ import annotations

from typing import Any

import numpy as np

from mori_triton import local_world
from tests.ops.cases import STORED, Case, Round, check_rounds, payload, run_rounds


def world(num_pes: int, **options: Any) -> Any:
    return local_world(num_pes, heap_size="16M", **options)


def with_ids(case: Case, ids: list[list[list[int]]]) -> list[Round]:
    """A round with these ids on each PE."""
    rounds = []
    for pe, rows in enumerate(ids):
        rng = np.random.default_rng(pe)
        indices = np.array(rows, np.int32).reshape(-1, case.top_k)
        tokens = payload(rng, (len(rows), case.hidden), STORED[case.dtype])
        weights = rng.random((len(rows), case.top_k)).astype(np.float32) if case.weights else None
        rounds.append(Round(tokens, indices, weights, None))
    return rounds


def run_sent(case: Case, sent: list[list[Round]], **options: Any) -> list[list[dict[str, Any]]]:
    """Run rounds given as [round][PE] on one op and check them; outcomes as [PE][round]."""

    def program(pe: int) -> list[list[dict[str, Any]]]:
        return run_rounds(pe, case, [[given[pe] for given in sent]])

    results = [result[0] for result in world(case.num_pes, **options).run(program)]
    check_rounds(case, sent, results)
    return results
