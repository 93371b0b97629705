"""Importing `mori_triton.layers` is what registers `mori_ep`, and needs a transformers that has room for it."""

import subprocess
import sys
import textwrap

import pytest

from mori_triton import layers

pytestmark = pytest.mark.cpu


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_registered_on_import_and_not_before():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    assert ALL_EXPERTS_FUNCTIONS["mori_ep"] is layers.mori_ep_experts_forward
    assert run("import mori_triton, sys; print('transformers' in sys.modules)") == "False"


def test_transformers_missing_or_too_old():
    missing, old = run(
        """
        import sys, types
        for fake in (None, types.SimpleNamespace(__version__="5.6.2")):
            sys.modules["transformers"] = fake
            try:
                import mori_triton.layers
            except ImportError as error:
                print(error)
        """
    ).splitlines()
    for message in (missing, old):
        assert "transformers >= 5.7" in message
        assert "mori_triton[demo]" in message
    assert "cannot be imported" in missing
    assert "found 5.6.2" in old
