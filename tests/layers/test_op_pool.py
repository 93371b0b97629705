"""Layers of one shape share one op, sized by what the PEs agree on, and give its memory back."""

import copy

import pytest
import torch

from mori_triton import layers
from mori_triton.errors import ArgumentError, StateError
from mori_triton.host.state import current
from mori_triton.layers import op_pool
from mori_triton.layers.op_pool import ops_of
from tests.layers.small_models import forward, mixtral, qwen, tokens, world

pytestmark = pytest.mark.cpu


def on_mori(model):
    mine = copy.deepcopy(model)
    mine.set_experts_implementation("mori_ep")
    return mine


def capacities():
    return [capacity for capacity, _ in ops_of(current())._ops.values()]


def test_one_op_per_shape_that_grows_and_is_freed():
    models = [qwen(), mixtral()]

    def program(pe):
        before = current().heap.used_bytes
        large, small = (on_mori(model) for model in models)
        with torch.no_grad():
            forward(large, tokens(1, 3 + 2 * pe))
            first = capacities()
            forward(large, tokens(1, 20 * pe + 1))
            grown = capacities()
            forward(large, tokens(1, 30))
            forward(small, tokens(1, 2))
            both = capacities()
        layers.close_ops()
        return first, grown, both, capacities(), current().heap.used_bytes - before

    assert world(2).run(program) == [([16], [32], [32, 16], [], 0)] * 2


def test_a_fixed_capacity_needs_no_agreement(monkeypatch):
    model = qwen()
    monkeypatch.setattr(op_pool, "_agree", None)

    def program(pe):
        mine = on_mori(model)
        with torch.no_grad(), layers.shared_ops(max_tokens=7):
            got = forward(mine, tokens(1, 7))
            with pytest.raises(ArgumentError, match="at most max_tokens=7, got 8"):
                forward(mine, tokens(1, 8))
            with pytest.raises(StateError, match="nest"), layers.shared_ops():
                pass
            # still in working order
            torch.testing.assert_close(forward(mine, tokens(1, 7)), got, rtol=0, atol=1e-5)
            sizes = capacities()
        return sizes, capacities()

    assert world(2).run(program) == [([7], [])] * 2


def test_max_tokens_must_be_positive():
    def program(pe):
        with pytest.raises(ArgumentError, match=r"max_tokens.*got 0"), layers.shared_ops(max_tokens=0):
            pass

    world(1).run(program)


def test_pes_that_run_different_models():
    models = [qwen(), mixtral()]

    def program(pe):
        with (
            torch.no_grad(),
            pytest.raises(ArgumentError, match=r"PEs run different layers: PE \d calls .* PE \d calls"),
        ):
            forward(on_mori(models[pe]), tokens(1, 3))

    world(2).run(program)


def test_outside_a_pe():
    for attempt in (layers.close_ops, lambda: layers.shared_ops().__enter__()):
        with pytest.raises(StateError, match="init"):
            attempt()
