"""The package's own torch references against numpy."""

from __future__ import annotations

import pytest
import torch

from mori_triton.ops.combine import combine_torch
from mori_triton.ops.dispatch import check_dispatch, dispatch_torch
from tests.ops import reference
from tests.ops.cases import Case, config_of, experts, round_of, to_numpy, to_scales, to_torch

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    "case",
    [
        Case(num_pes=1, routing="nowhere"),
        Case(num_pes=3, routing="out_of_range", scales=(5, 4)),
        Case(num_pes=4, routing="none_to_last", tokens="zero", dtype="float16"),
        Case(num_pes=2, routing="duplicates", weights=False, dtype="float32"),
    ],
    ids=str,
)
def test_references_agree(case: Case) -> None:
    config, pes = config_of(case, 0), range(case.num_pes)
    sent = [round_of(case, pe, 0) for pe in pes]
    given = [
        check_dispatch(
            config,
            torch.device("cpu"),
            to_torch(r.tokens),
            None if r.weights is None else torch.from_numpy(r.weights),
            to_scales(case, r.scales),
            torch.from_numpy(r.indices),
        )
        for r in sent
    ]
    got = dispatch_torch(config, given)
    for pe, want in enumerate(reference.received([r.indices for r in sent], case.experts_per_pe)):
        assert got[pe].sources == sorted(want)
        for row, (source, token) in enumerate(got[pe].sources):
            assert to_numpy(got[pe].tokens[row]).tobytes() == sent[source].tokens[token].tobytes()
            assert got[pe].indices[row].tolist() == sent[source].indices[token].tolist()
            assert (got[pe].weights is not None) == case.weights
    rows = [dict(zip(got[pe].sources, experts(pe, got[pe].tokens), strict=True)) for pe in pes]
    if any(rows):
        back = combine_torch(config, [g.indices for g in given], rows)
        for pe in pes:
            want = reference.combined(pe, sent[pe].tokens, sent[pe].indices, case.num_pes, case.experts_per_pe)
            assert to_numpy(back[pe]).tobytes() == want.tobytes()
