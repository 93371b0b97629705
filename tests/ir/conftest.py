"""Hooks that a test has installed go with it: other tests of the process count what drivers are asked."""

import pytest
import triton

from mori_triton.host import state


@pytest.fixture(autouse=True)
def hooks_go_with_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = triton.knobs.runtime
    chain = triton.knobs.HookChain(reversed=True)
    for hook in getattr(runtime.kernel_load_end_hook, "calls", []):
        chain.add(hook)
    monkeypatch.setattr(runtime, "kernel_load_end_hook", chain)
    monkeypatch.setattr(state, "on_open", list(state.on_open))
