"""Settings every test shares."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

# Triton's cache knows a kernel by its source, not by its file, whose path is in the binary and in what faults say: two
# checkouts that share a cache get each other's paths
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "triton-cache"))
# before anything imports torch: each core has a worker, and worlds threads of their own; more only wait for one another
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def cpu_tests_need_no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that `cpu` tests start would take a GPU where there is one."""
    if request.node.get_closest_marker("cpu"):
        monkeypatch.setenv("MORI_TRITON_DEVICE", "cpu")


def _called() -> None:
    """Something that is called."""


@pytest.fixture(autouse=True)
def lifting_is_measured_by_its_own_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coverage makes the lifter three times as slow, a third of what a kernel costs; tests/emulator reach all of it."""
    if sys.gettrace() is None or "emulator" in request.path.parts:
        return
    from mori_triton.emulator import module

    lift = module._lift

    def untraced(text: str, entry: str) -> Any:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return lift(text, entry)
        finally:
            sys.settrace(trace)
            # coverage takes up its own way of being called at the next call, and has to see this function's return
            _called()

    monkeypatch.setattr(module, "_lift", untraced)
