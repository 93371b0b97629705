"""The run for compute-sanitizer is right on the emulated device, and leaves out no kernel of the ops."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

from bench import profile_kernels, sanitize
from mori_triton import ops
from mori_triton.ops import config, plans

pytestmark = [pytest.mark.cpu, pytest.mark.slow]


def kernels_of_ops() -> set[str]:
    """Every kernel under `ops/kernels`."""
    names = set()
    for path in (Path(ops.__file__).parent / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                names.add(node.name)
    return names


def test_every_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: set[str] = set()
    # the package shows the function of that name
    counting = importlib.import_module("mori_triton.ops.local_expert_count")
    monkeypatch.setattr(counting, "_prepared", {})
    for module in (plans, counting):
        true = module.prepare

        def prepare(kernel: Any, *args: Any, true: Any = true, **named: Any) -> Any:
            prepared.add(kernel.__name__)
            return true(kernel, *args, **named)

        monkeypatch.setattr(module, "prepare", prepare)
    for this in sanitize.VARIANTS.values():
        sanitize.run_world(1, this, "cpu", split=False)
    sanitize.run_world(3, sanitize.VARIANTS["bf16"], "cpu", split=True)
    sanitize.run_world(2, sanitize.VARIANTS["IntraNodeLL"], "cpu", split=True)
    assert prepared == kernels_of_ops()
    assert len(prepared) >= 10


def test_the_run_for_a_profiler(capsys: pytest.CaptureFixture[str]) -> None:
    profile_kernels.main(device="cpu", pes=2, tokens=5, hidden=256, topk=2, experts=4)
    assert "right" in capsys.readouterr().out


def test_every_codec_and_kernel_type_has_a_variant() -> None:
    fields = [dict(this.fields) for this in sanitize.VARIANTS.values()]
    assert {f.get("quant_type", "none") for f in fields} == set(config.QUANT_TYPES)
    kinds = {this.kernel_type for this in sanitize.VARIANTS.values()}
    assert kinds == {kind.name for kind in ops.SUPPORTED_KERNEL_TYPES}
    assert set(sanitize.SENDS_WAIT) <= set(sanitize.VARIANTS)
