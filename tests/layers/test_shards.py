"""Each PE keeps its own experts' weights only."""

import copy
import gc
import weakref

import pytest
import torch

from mori_triton import layers
from mori_triton.errors import ArgumentError, StateError
from tests.layers.small_models import forward, mixtral, qwen, spread, tokens, world

pytestmark = pytest.mark.cpu

EXPERTS = "experts."


def expert_weights(model):
    return {name: parameter for name, parameter in model.named_parameters() if EXPERTS in name}


def stored_bytes(model):
    return sum(parameter.untyped_storage().nbytes() for parameter in expert_weights(model).values())


@pytest.mark.parametrize("num_pes", [1, 2, 4])
def test_a_forward_keeps_the_local_experts(num_pes):
    model = qwen()
    parts = [tokens(1, 3)] * num_pes
    kept = spread(model, parts, after=lambda pe, mine: (expert_weights(mine), stored_bytes(mine)))
    for pe, (_, (weights, num_bytes)) in enumerate(kept):
        assert num_bytes * num_pes == stored_bytes(model)
        assert len(weights) == 4
        for name, whole in expert_weights(model).items():
            assert torch.equal(weights[name], whole.chunk(num_pes)[pe])


def test_keep_local_experts_frees_memory_at_once():
    model = qwen()

    def program(pe):
        mine = copy.deepcopy(model)
        mine.set_experts_implementation("mori_ep")
        others = [parameter for name, parameter in mine.named_parameters() if EXPERTS not in name]
        storages = [parameter.untyped_storage() for parameter in expert_weights(mine).values()]
        gone = [weakref.ref(storage) for storage in storages]
        parameters = list(expert_weights(mine).values())
        parameters[0].grad = torch.ones_like(parameters[0])
        freed = layers.keep_local_experts(mine)
        assert parameters[0].grad is None
        # the same Parameter objects, so that whoever holds them sees the slice
        assert all(a is b for a, b in zip(parameters, expert_weights(mine).values(), strict=True))
        del storages
        gc.collect()
        assert not any(reference() for reference in gone)
        assert layers.keep_local_experts(mine) == 0
        assert all(parameter.shape[0] not in (0,) for parameter in others)
        return freed, stored_bytes(mine)

    for freed, left in world(2).run(program):
        assert freed == left == stored_bytes(model) // 2


def test_experts_that_cannot_be_divided():
    model = mixtral(num_experts=4)

    def program(pe):
        mine = copy.deepcopy(model)
        mine.set_experts_implementation("mori_ep")
        for attempt in (lambda: layers.keep_local_experts(mine), lambda: mine(tokens(1, 4))):
            with pytest.raises(ArgumentError, match="multiple of the 3 PEs, got 4"):
                attempt()
        return stored_bytes(mine)

    # refused as a whole: nothing is narrowed
    assert world(3).run(program) == [stored_bytes(model)] * 3


def test_one_model_for_two_pes_is_refused():
    model = qwen()
    model.set_experts_implementation("mori_ep")

    def program(pe):
        try:
            layers.keep_local_experts(model)
        except StateError as error:
            return str(error)
        return ""

    messages = world(2).run(program)
    refused = [message for message in messages if message]
    assert len(refused) == 1
    assert "deepcopy" in refused[0]
    assert "of 2" in refused[0]


def test_a_narrowed_model_in_another_world():
    model = qwen()

    def take_half(pe):
        mine = copy.deepcopy(model)
        layers.keep_local_experts(mine)
        return mine

    half = world(2).run(take_half)[1]
    half.set_experts_implementation("mori_ep")

    def program(pe):
        with pytest.raises(StateError, match="experts of PE 1 of 2, but PE 0 of 1"):
            forward(half, tokens(1, 3))

    world(1).run(program)


def test_weights_that_someone_else_has_divided():
    model = qwen()
    module = model.model.layers[0].mlp.experts
    module.down_proj.data = module.down_proj.data[:2].clone()

    def program(pe):
        with pytest.raises(ArgumentError, match=r"down_proj: want the weights of all 8 experts, got 2"):
            layers.keep_local_experts(model)

    world(1).run(program)


def test_a_model_without_experts():
    def program(pe):
        model = torch.nn.Linear(2, 2)
        for call in (layers.keep_local_experts, layers.forward_idle):
            with pytest.raises(ArgumentError, match=r"experts modules.*got Linear"):
                call(model)
        with pytest.raises(ArgumentError, match="experts modules"), layers.watch_traffic(model, print):
            pass

    world(1).run(program)


def test_outside_a_pe():
    with pytest.raises(StateError, match="init"):
        layers.keep_local_experts(qwen())
