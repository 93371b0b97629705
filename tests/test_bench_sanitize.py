"""The run for compute-sanitizer is right on the emulated device, and leaves out no kernel of the ops."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import problem, profile_kernels, sanitize
from mori_triton import ops
from mori_triton.device.prepared import PreparedKernel, recording
from mori_triton.errors import ArgumentError
from mori_triton.inspect.kernels import entry_kernels
from mori_triton.ops import config, plans
from mori_triton.ops import dispatch_combine_v2 as v2

pytestmark = [pytest.mark.cpu, pytest.mark.slow]


def ask_only(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Let the run go through its calls without compiling or launching; the names of the kernels that it asks for."""
    asked: set[str] = set()
    run = sanitize.Pe.run

    def record(pe: sanitize.Pe) -> None:
        with recording() as found:
            run(pe)
        asked.update(one.kernel.__name__ for one in found)

    monkeypatch.setattr(sanitize.Pe, "run", record)
    # nothing is computed, so there is nothing to compare
    for name in ("check_dispatch", "check_combine"):
        monkeypatch.setattr(problem, name, lambda *args, **named: None)
    unwritten = lambda config, *args: torch.full((config.num_experts_per_rank,), -1, dtype=torch.int32)  # noqa: E731
    monkeypatch.setattr(ops, "local_expert_count_torch", unwritten)
    # what is kept in it was only asked for; the package shows the function of that name
    monkeypatch.setattr(importlib.import_module("mori_triton.ops.local_expert_count"), "_prepared", {})
    return asked


def test_every_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ask_only(monkeypatch)
    for this in sanitize.VARIANTS.values():
        sanitize.run_world(1, this, "cpu", split=False)
    sanitize.run_world(3, sanitize.VARIANTS["bf16"], "cpu", split=True)
    for num_pes in sanitize.RDNA4_PES:
        sanitize.run_world(num_pes, sanitize.RDNA4, "cpu", split=True)
    # whose run is below
    of_plans = entry_kernels(Path(v2.__file__).parent)
    assert asked == entry_kernels(Path(ops.__file__).parent) - of_plans
    assert len(asked) >= 14


@pytest.mark.parametrize(("num_pes", "name", "split"), [(1, "bf16", False), (2, "RDNA4", True)])
def test_the_run_is_right(num_pes: int, name: str, split: bool) -> None:
    sanitize.run_world(num_pes, {**sanitize.VARIANTS, "RDNA4": sanitize.RDNA4}[name], "cpu", split)


def test_the_run_of_plans_is_right_and_launches_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()
    call = PreparedKernel.__call__

    def record(kernel: PreparedKernel, *args: Any, **named: Any) -> None:
        launched.add(kernel.name)
        call(kernel, *args, **named)

    monkeypatch.setattr(PreparedKernel, "__call__", record)
    sanitize.run_staged("cpu")
    of_plans = entry_kernels(Path(v2.__file__).parent)
    assert of_plans
    assert of_plans <= launched


def test_pes_load_and_launch_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that follows one launch at a time gets no second one meanwhile, nor a kernel to load."""
    busy, overlaps, num_calls = threading.Lock(), [], Counter()

    def watched(name: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        num_calls[name] += 1
        free = busy.acquire(blocking=False)
        if not free:
            overlaps.append(name)
        try:
            # long enough for another PE to come too, were it let
            time.sleep(0.002)
            return call(*args, **named)
        finally:
            if free:
                busy.release()

    call = PreparedKernel.__call__
    monkeypatch.setattr(PreparedKernel, "__call__", lambda *args, **named: watched("launch", call, *args, **named))
    monkeypatch.setattr(plans, "prepare", partial(watched, "load", plans.prepare))
    sanitize.run_world(2, sanitize.VARIANTS["bf16"], "cpu", split=True)
    assert overlaps == []
    assert num_calls["launch"] > 20
    assert num_calls["load"] >= 10


def test_a_pe_that_fails_lets_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pe: sanitize.Pe) -> None:
        pe.meet("somebody fails after this")
        if pe.pe == 1:
            raise KeyError("mine")
        pe.meet("and nobody comes here")

    monkeypatch.setattr(sanitize.Pe, "run", fail)
    with pytest.raises(KeyError, match="mine"):
        sanitize.run_world(3, sanitize.BASE, "cpu", split=True)


HANGS = """
import threading
from bench import sanitize
def never(*args): threading.Event().wait()
sanitize.run_variant = never
sanitize.main(device="cpu", pes="2", only="odd rows", concurrent=False, limit_s=0.5)
"""


def test_a_run_that_does_not_end_says_where_it_is() -> None:
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=root, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert "in never" in done.stderr


def test_runs_that_are_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sanitize, "run_variant", lambda *args: None)

    def runs(pes: str, *, only: str = "", concurrent: bool = False) -> list[str]:
        sanitize.main(device="cpu", pes=pes, only=only, concurrent=concurrent, limit_s=60.0)
        return [line.split(": right")[0] for line in capsys.readouterr().out.splitlines()]

    assert runs("4") == ["4 PEs, RDNA4, split calls"]
    assert runs("1")[:2] == ["1 PEs, EPv2, whole calls", "1 PEs, bf16, whole calls"]
    assert len(runs("1")) == 1 + len(sanitize.VARIANTS)
    # one of them has no sending half that waits for nobody
    assert len(runs("2")) == len(sanitize.VARIANTS)
    assert runs("3", only="determin") == []
    assert runs("3", only="determin", concurrent=True) == ["3 PEs, deterministic, whole calls"]
    assert sorted(runs("1,2,3,4")) == sorted(line for pes in ("1", "2", "3", "4") for line in runs(pes))
    with pytest.raises(ArgumentError, match="pes"):
        runs("5")


def test_what_is_poisoned_is_there() -> None:
    """Regions that are called otherwise in every pipeline would be left as they were, and nobody would notice."""
    layouts = [ops.ep_buffer_layout(this.config(0)) for this in (sanitize.BASE, replace(sanitize.RDNA4, num_pes=2))]
    assert set(problem._WRITTEN) <= {region.name for layout in layouts for region in layout.regions}


def test_the_run_for_a_profiler(capsys: pytest.CaptureFixture[str]) -> None:
    profile_kernels.main(device="cpu", pes=2, tokens=5, hidden=256, topk=2, experts=4)
    assert "right" in capsys.readouterr().out


def test_every_codec_and_kernel_type_has_a_variant() -> None:
    fields = [dict(this.fields) for this in sanitize.VARIANTS.values()]
    assert {f.get("quant_type", "none") for f in fields} == set(config.QUANT_TYPES)
    kinds = {this.kernel_type for this in (*sanitize.VARIANTS.values(), sanitize.RDNA4)}
    assert kinds == {kind.name for kind in ops.SUPPORTED_KERNEL_TYPES}
    assert set(sanitize.SENDS_WAIT) <= set(sanitize.VARIANTS)
