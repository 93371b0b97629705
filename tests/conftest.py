"""Settings every test shares."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Triton's cache knows a kernel by its source, not by its file, whose path is in the binary and in what faults say: two
# checkouts that share a cache get each other's paths
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "triton-cache"))
# before anything imports torch: each core has a worker, and worlds threads of their own; more only wait for one another
os.environ.setdefault("OMP_NUM_THREADS", "1")


# parameters that say what is compiled, for what and by what way it is called; all others are values that kernels meet
KINDS = {
    "arch", "changes", "config", "device", "dtype", "form", "kernel", "kernel_type", "more", "mutant", "name", "on",
    "provider", "quant", "registered", "scales", "sent", "style", "transport", "way", "weights", "word",
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    every = "run every N-th case only among those of a test that differ in values alone; all that only compile"
    parser.addoption("--every", type=int, default=1, metavar="N", help=every)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--every`: what an older compiler does to kernels, without all that the newest has shown of them already."""
    seen: Counter[tuple[str, ...]] = Counter()
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        kind = item.nodeid.partition("[")[0], *(f"{name} {params[name]}" for name in sorted(KINDS & set(params)))
        in_turn = seen[kind] % config.getoption("every") == 0
        (chosen if in_turn or item.get_closest_marker("compile") else left_out).append(item)
        seen[kind] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


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
def what_only_costs_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coverage makes Triton's compiler, which is not measured, half as slow again, and the lifter three times as slow.

    A kernel costs little else. Tests of instructions call the lifter itself, and reach 97 % of it.
    """
    if sys.gettrace() is None:
        return
    from triton.runtime import JITFunction

    from mori_triton.emulator import module

    monkeypatch.setattr(JITFunction, "_do_compile", _untraced(JITFunction._do_compile))
    monkeypatch.setattr(module, "_lift", _untraced(module._lift))
