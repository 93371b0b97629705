"""`alias_mori()` in processes of their own, since it is for good: the same modules, no second copy, no shadowing."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def run(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


def test_both_names_are_the_same_modules() -> None:
    done = run(
        """
import mori_triton
before = len(sys.meta_path)
mori_triton.alias_mori()
mori_triton.alias_mori()
assert len(sys.meta_path) == before + 1
assert not {"torch", "triton"} & set(sys.modules)
import mori
assert mori is mori_triton
import mori.shmem
from mori.shmem import shmem_mype
import mori.shmem.tensor_utils
import mori.ir.triton.runtime
from mori.ir import triton as mori_device, MORI_DEVICE_FUNCTIONS
from mori.ir.triton import get_extern_libs, install_hook
from mori.ops import EpDispatchCombineOp
import mori_triton.ops, mori_triton.ir.triton.runtime
assert sys.modules["mori.ir.triton.runtime"] is mori_triton.ir.triton.runtime
assert mori_device is mori_triton.ir.triton
assert EpDispatchCombineOp is mori_triton.ops.EpDispatchCombineOp
assert mori.shmem.__spec__.name == mori.shmem.__name__ == "mori_triton.shmem"
# one module for both names, whichever was imported first
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "mori":
        assert module is sys.modules["mori_triton" + name[4:]], name
import importlib
importlib.reload(mori.ir.ops)
try:
    import mori.cco
except ModuleNotFoundError as error:
    assert "mori.cco" in str(error)
else:
    raise AssertionError
mori_triton.alias_mori()
"""
    )
    assert done.returncode == 0, done.stderr


def test_an_installed_mori_is_not_shadowed(tmp_path: Path) -> None:
    (tmp_path / "mori").mkdir()
    asks = f"""
sys.path.insert(0, {str(tmp_path)!r})
import mori_triton
try:
    mori_triton.alias_mori()
except mori_triton.errors.StateError as error:
    print(error)
import mori
print(mori is mori_triton)
"""
    code = "import mori_triton.errors\n" + asks
    # a directory without a package in it, such as a checkout
    assert run(code, tmp_path).stdout == "True\n"
    package = tmp_path / "mori" / "__init__.py"
    package.write_text("")
    for first in ("", f"sys.path.insert(0, {str(tmp_path)!r}); import mori\n"):
        said, same = run(first + code, tmp_path).stdout.splitlines()
        assert said.startswith(f"alias_mori: mori {'was imported from' if first else 'is installed at'} {package}")
        assert same == "False"
