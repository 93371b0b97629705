"""Settings every test shares."""

import os
import sys
from collections.abc import Callable
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


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, out of coverage's sight."""

    def call(*args: Any, **named: Any) -> Any:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return function(*args, **named)
        finally:
            sys.settrace(trace)
            # coverage takes up its own way of being called at the next call, and has to see this function's return
            _called()

    return call


@pytest.fixture(autouse=True)
def what_only_costs_is_not_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coverage makes the lifter, and what Triton's compiler does in Python, take two to three times as long.

    They are most of what a kernel costs. tests/emulator reach all of the lifter; Triton is not measured, and what it
    calls of the package is reached by tests/device and tests/ir.
    """
    if sys.gettrace() is None:
        return
    import triton

    from mori_triton.emulator import module

    if not {"device", "ir"} & set(request.path.parts):
        # of launches, and of `cross_compile`
        monkeypatch.setattr(triton.JITFunction, "_do_compile", _untraced(triton.JITFunction._do_compile))
        monkeypatch.setattr(triton, "compile", _untraced(triton.compile))
    if "emulator" not in request.path.parts:
        monkeypatch.setattr(module, "_lift", _untraced(module._lift))
