"""Settings every test shares."""

import os
from pathlib import Path

import pytest

# Triton's cache knows a kernel by its source, not by its file, whose path is in the binary and in what faults say: two
# checkouts that share a cache get each other's paths
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "triton-cache"))


@pytest.fixture(autouse=True)
def cpu_tests_need_no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that `cpu` tests start would take a GPU where there is one."""
    if request.node.get_closest_marker("cpu"):
        monkeypatch.setenv("MORI_TRITON_DEVICE", "cpu")
