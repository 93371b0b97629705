"""`alias_mori`: this package under the name `mori`, for code that says `import mori`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from mori_triton.errors import StateError

_PACKAGE, _ALIAS = "mori_triton", "mori"


def alias_mori() -> None:
    """Let `import mori`, `mori.shmem`, `mori.ir.triton`, `mori.ops` ... mean this package's modules. Idempotent.

    They are the same objects under both names; submodules still load on first use.

    Raises:
        StateError: there is a `mori` that can be imported, or has been: it is not shadowed.
    """
    known = sys.modules.get(_ALIAS)
    if known is sys.modules[_PACKAGE]:
        return
    if known is not None:
        raise StateError(f"alias_mori: {_ALIAS} was imported from {_where(known.__spec__)}: want none")
    found = importlib.util.find_spec(_ALIAS)
    # a mere directory of that name, such as a checkout of MORI, is no package
    if found is not None and found.loader is not None and found.origin is not None:
        raise StateError(f"alias_mori: {_ALIAS} is installed at {_where(found)}: uninstall it, or import it instead")
    # before those that search directories, which would load a second copy of each submodule
    sys.meta_path.insert(0, _Finder())
    sys.modules[_ALIAS] = sys.modules[_PACKAGE]


def _where(spec: ModuleSpec | None) -> str:
    return spec.origin or "somewhere" if spec is not None else "somewhere"


class _Finder(MetaPathFinder):
    """Finds `mori.x` where `mori_triton.x` is."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{_ALIAS}."):
            return None
        real = importlib.util.find_spec(_PACKAGE + name.removeprefix(_ALIAS))
        return None if real is None else ModuleSpec(name, _Loader(real.name), origin=real.origin)


class _Loader(Loader):
    """Loads a module of this package, and leaves it as it is."""

    def __init__(self, real_name: str) -> None:
        self.real_name = real_name
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real_name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system has written the alias' there
        module.__spec__ = self.spec
