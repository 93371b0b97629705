"""Models with their experts spread over PEs give the unmodified model's logits."""

import copy
import inspect
import types

import pytest
import torch
from transformers.integrations.moe import batched_mm_experts_forward, use_experts_implementation

from mori_triton import layers
from mori_triton.errors import StateError
from mori_triton.layers.experts import local_experts
from tests.layers.small_models import MODELS, forward, mixtral, qwen, spread, tokens, world

pytestmark = pytest.mark.cpu

LIMIT = 1e-5
PARTS = {
    "one PE": [tokens(2, 9)],
    "two PEs, uneven": [tokens(1, 3), tokens(2, 10)],
    "four PEs, one without tokens": [tokens(1, 17), tokens(1, 1), tokens(0, 5), tokens(3, 6)],
}


@torch.no_grad()
def logits_of(model, ids):
    return model(ids).logits if ids.numel() else torch.empty(*ids.shape, model.config.vocab_size)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_logits_equal_the_unmodified_model(make, parts):
    model = make()
    for (got, _), ids in zip(spread(model, parts), parts, strict=True):
        torch.testing.assert_close(got, logits_of(model, ids), rtol=0, atol=LIMIT)


def test_logits_equal_in_weak_memory():
    model, parts = qwen(), [tokens(1, 3), tokens(1, 7)]
    for (got, _), ids in zip(spread(model, parts, seed=1, weak_memory=True), parts, strict=True):
        torch.testing.assert_close(got, logits_of(model, ids), rtol=0, atol=LIMIT)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_the_experts_matter(make):
    model, ids = make(), tokens(2, 9)
    without = copy.deepcopy(model)
    for module in without.modules():
        if hasattr(module, "down_proj") and hasattr(module, "num_experts"):
            module.down_proj.data.zero_()
    assert (logits_of(model, ids) - logits_of(without, ids)).abs().max() > 1000 * LIMIT


def test_two_models_one_after_another_and_a_growing_batch():
    models = [qwen(), mixtral()]
    batches = [[tokens(1, 5), tokens(1, 2)], [tokens(1, 30), tokens(2, 20)], [tokens(1, 1), tokens(0, 1)]]

    def program(pe):
        mine = [copy.deepcopy(model) for model in models]
        for model in mine:
            model.set_experts_implementation("mori_ep")
        with torch.no_grad(), layers.shared_ops():
            return [[forward(model, batch[pe]) for batch in batches] for model in mine]

    results = world(2).run(program)
    for pe, per_model in enumerate(results):
        for model, per_batch in zip(models, per_model, strict=True):
            for got, batch in zip(per_batch, batches, strict=True):
                torch.testing.assert_close(got, logits_of(model, batch[pe]), rtol=0, atol=LIMIT)


def test_bf16_is_as_exact_as_the_unmodified_model():
    model = mixtral().to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    parts = [tokens(1, 12), tokens(1, 4)]
    for (got, _), ids in zip(spread(model, parts), parts, strict=True):
        wanted = logits_of(exact, ids)
        own_error = (logits_of(model, ids).float() - wanted).abs().max()
        assert got.dtype == torch.bfloat16
        assert (got.float() - wanted).abs().max() <= 1.5 * own_error


def test_generation_one_token_at_a_time():
    model = qwen()
    prompts = [tokens(1, 6), tokens(1, 2)]
    arguments = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}

    def program(pe):
        mine = copy.deepcopy(model)
        mine.set_experts_implementation("mori_ep")
        with layers.shared_ops():
            return mine.generate(prompts[pe], **arguments)

    for got, prompt in zip(world(2).run(program), prompts, strict=True):
        assert torch.equal(got, model.generate(prompt, **arguments))


def test_traffic_is_what_the_router_says():
    model, num_pes = qwen(), 4
    parts = [tokens(1, 17), tokens(1, 1), tokens(0, 5), tokens(3, 6)]
    seen: list[layers.LayerTraffic] = []

    def program(pe):
        mine = copy.deepcopy(model)
        mine.set_experts_implementation("mori_ep")
        with torch.no_grad(), layers.shared_ops():
            with layers.watch_traffic(mine, seen.append):
                forward(mine, parts[pe])
            forward(mine, parts[pe])  # nobody watches any more

    world(num_pes).run(program)
    names = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert sorted((call.layer, call.pe) for call in seen) == [(name, pe) for name in names for pe in range(num_pes)]
    for number, name in enumerate(names):
        calls = {call.pe: call for call in seen if call.layer == name}
        for pe, ids in enumerate(parts):
            wanted = [0] * num_pes
            if ids.numel():
                with torch.no_grad():
                    router = model(ids, output_router_logits=True).router_logits[number]
                for row in router.topk(model.config.num_experts_per_tok).indices.tolist():
                    for owner in {expert * num_pes // model.config.num_experts for expert in row}:
                        wanted[owner] += 1
            assert calls[pe].num_tokens == ids.numel()
            assert list(calls[pe].sent) == wanted
            assert [calls[receiver].received[pe] for receiver in range(num_pes)] == wanted


def test_backward_raises_and_forward_with_gradients_works():
    model, ids = mixtral(), tokens(1, 4)

    def program(pe):
        mine = copy.deepcopy(model)
        mine.set_experts_implementation("mori_ep")
        with layers.shared_ops():
            logits = mine(ids).logits
        with pytest.raises(StateError, match="no backward pass"):
            logits.sum().backward()
        return logits.detach()

    torch.testing.assert_close(world(1).run(program)[0], logits_of(model, ids), rtol=0, atol=LIMIT)


def test_outside_a_pe():
    model = mixtral()
    model.set_experts_implementation("mori_ep")
    with pytest.raises(StateError, match="init"):
        model(tokens(1, 4))


def test_tensors_that_do_not_fit():
    module = mixtral().model.layers[0].mlp.experts

    def program(pe):
        x, index, weights = torch.zeros(3, 32), torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2)
        with layers.shared_ops():
            for bad, name in [
                ((x[:2], index, weights), "hidden_states"),
                ((x, index, weights[:, :1]), "top_k_weights"),
            ]:
                with pytest.raises(ValueError, match=name):
                    layers.mori_ep_experts_forward(module, *bad)
            assert not layers.mori_ep_experts_forward(module, x, index, weights).any()

    world(1).run(program)


def test_an_output_outlives_the_next_layer_call():
    modules = [mixtral().model.layers[number].mlp.experts for number in range(2)]
    x, index, weights = torch.ones(3, 32), torch.tensor([[0, 1]] * 3), torch.ones(3, 2)

    def program(pe):
        with torch.no_grad(), layers.shared_ops():
            first = layers.mori_ep_experts_forward(modules[0], x, index, weights)
            before = first.clone()
            second = layers.mori_ep_experts_forward(modules[1], x, index, weights)
        assert not torch.equal(first, second)
        assert torch.equal(first, before)

    world(1).run(program)


def experts_module(num_experts, hidden, **layout):
    """An experts module in one of transformers' weight layouts, with random weights."""
    transposed, bias, gate = (layout.get(key, default) for key, default in _DEFAULTS.items())
    inner = 10

    @use_experts_implementation(**layout)
    class Experts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = num_experts
            self.act_fn = torch.nn.functional.silu
            self.post_expert_norm = torch.nn.LayerNorm(hidden)
            up = ("gate_up_proj", 2 * inner, hidden) if gate else ("up_proj", inner, hidden)
            for name, rows, columns in (up, ("down_proj", hidden, inner)):
                shape = (num_experts, columns, rows) if transposed else (num_experts, rows, columns)
                setattr(self, name, torch.nn.Parameter(torch.randn(shape)))
                if bias:
                    setattr(self, f"{name}_bias", torch.nn.Parameter(torch.randn(num_experts, rows)))

        def forward(self, *args):
            raise NotImplementedError

    return Experts(types.SimpleNamespace(_experts_implementation="eager"))


_DEFAULTS = {"is_transposed": False, "has_bias": False, "has_gate": True}


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"is_transposed": True, "has_bias": True, "is_concatenated": False},
        {"has_gate": False},
        {"has_post_expert_norm": True, "has_bias": True},
    ],
    ids=lambda layout: " ".join(layout) or "plain",
)
@torch.no_grad()
def test_every_weight_layout(layout):
    missing = set(layout) - set(inspect.signature(use_experts_implementation).parameters)
    if missing:
        pytest.skip(f"this transformers has no {missing}")
    torch.manual_seed(0)
    num_pes, num_experts, hidden, k = 3, 6, 16, 4
    module = experts_module(num_experts, hidden, **layout)
    x, weights = torch.randn(11, hidden), torch.rand(11, k)
    index = torch.rand(11, num_experts).argsort()[:, :k]
    # ids outside the model are skipped, and the same expert twice counts twice
    index[0, 1], index[1, 2], index[2, 0] = -1, num_experts, index[2, 1]
    total = torch.zeros(11, hidden)
    for pe in range(num_pes):
        mine, shard = copy.deepcopy(module), layers.ExpertShard(pe, num_pes, num_experts)
        layers.shards.narrow(mine, shard)
        total += local_experts(mine, shard, x, index.int(), weights)
    valid = (index >= 0) & (index < num_experts)
    wanted = batched_mm_experts_forward(module, x, index.where(valid, 0), weights * valid)
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-5)
