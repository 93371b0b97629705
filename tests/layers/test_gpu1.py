"""Models with their experts spread over the PEs of one GPU, and the demo there."""

import importlib.util
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mori_triton import layers
from tests.layers.small_models import MODELS, spread, tokens

pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"),
]

DEVICE = "hip" if torch.version.hip else "cuda"
LIMIT = 1e-5
EXAMPLE = Path(__file__).parents[2] / "examples" / "01_moe_model.py"


@torch.no_grad()
def logits_of(model, ids):
    return model(ids.cuda()).logits.cpu() if ids.numel() else torch.empty(*ids.shape, model.config.vocab_size)


@pytest.mark.parametrize("parts", [
    [tokens(2, 9)],
    [tokens(1, 3), tokens(2, 10)],
    [tokens(1, 17), tokens(1, 1), tokens(0, 5), tokens(3, 6)],
], ids=["one PE", "two PEs, uneven", "four PEs, one without tokens"])  # fmt: skip
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_logits_equal_the_unmodified_model(make, parts):
    model = make().cuda()
    for (got, _), ids in zip(spread(model, parts, device=DEVICE), parts, strict=True):
        assert got.device.type == "cuda"
        torch.testing.assert_close(got.cpu(), logits_of(model, ids), rtol=0, atol=LIMIT)


def test_traffic_is_what_the_router_says():
    calls = []

    def after(pe, mine):
        with layers.watch_traffic(mine, calls.append):
            mine(tokens(1, 4 + pe).cuda())

    spread(MODELS["qwen"](), [tokens(1, 3), tokens(1, 5)], after, device=DEVICE)
    by_layer = {}
    for call in calls:
        by_layer.setdefault(call.layer, {})[call.pe] = call
    assert len(by_layer) == 2
    for layer in by_layer.values():
        assert [layer[pe].num_tokens for pe in (0, 1)] == [4, 5]
        for sender in (0, 1):
            for receiver in (0, 1):
                assert layer[sender].sent[receiver] == layer[receiver].received[sender]


def test_the_demo():
    spec = importlib.util.spec_from_file_location("moe_model", EXAMPLE)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    with demo.console.capture() as captured:
        result = CliRunner().invoke(demo.app, [])
    assert result.exit_code == 0, result.exception
    assert captured.get().count("allowed 1e-05: equal") == 2
    assert torch.cuda.get_device_name() in captured.get()
