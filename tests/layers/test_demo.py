"""`examples/01_moe_model.py` end to end: what it prints, what it returns to the shell, the picture."""

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytestmark = pytest.mark.cpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "01_moe_model.py"


@pytest.fixture
def demo():
    spec = importlib.util.spec_from_file_location("moe_model", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # short texts, less to emulate
    module.MOST_WORDS = 20
    return module


def test_equal_logits_and_a_picture(demo, tmp_path):
    with demo.console.capture() as captured:
        result = CliRunner().invoke(
            demo.app, ["--device", "cpu", "--pes", "2", "--plot", str(tmp_path / "traffic.png")]
        )
    assert result.exit_code == 0, result.exception
    text = captured.get()
    for name in ("Qwen3MoeForCausalLM", "MixtralForCausalLM"):
        assert f"{name}: tokens sent / received" in text
    assert text.count("allowed 1e-05: equal") == 2
    assert "expert weights: 1152 KiB, each PE keeps 576 KiB" in text
    assert (tmp_path / "traffic.png").read_bytes().startswith(b"\x89PNG")


def test_a_difference_is_an_exit_status(demo, monkeypatch):
    honest = demo.layers.experts.local_experts
    # each expert's output off by 1 %
    monkeypatch.setattr("mori_triton.layers.experts.local_experts", lambda *given: honest(*given) * 1.01)
    with demo.console.capture() as captured:
        result = CliRunner().invoke(demo.app, ["--device", "cpu", "--pes", "2"])
    assert result.exit_code == 1
    assert captured.get().count("DIFFERENT") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "device: want"),
        (["--device", "cuda", "--arch", "gfx942"], 'arch: want None on "cuda"'),
        (["--arch", "gfx90a"], "arch: want gfx942"),
        (["--pes", "3"], "cannot be divided among 3 PEs"),
    ],
)
def test_options_that_cannot_be(demo, arguments, message):
    result = CliRunner().invoke(demo.app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output
