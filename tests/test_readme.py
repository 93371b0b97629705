"""The code in README.md runs and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

README = Path(__file__).parent.parent / "README.md"


def test_first_example(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.S)
    assert code
    script = tmp_path / "example.py"
    script.write_text(code[1])
    promised = re.search(r"print\(.*\)  # (.*)", code[1])
    assert promised
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == promised[1]
