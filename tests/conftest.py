"""Settings every test shares."""

import pytest


@pytest.fixture(autouse=True)
def cpu_tests_need_no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that `cpu` tests start would take a GPU where there is one."""
    if request.node.get_closest_marker("cpu"):
        monkeypatch.setenv("MORI_TRITON_DEVICE", "cpu")
