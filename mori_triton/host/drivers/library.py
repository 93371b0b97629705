"""A driver library loaded with dlopen, as a table of functions that all have their argument types."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mori_triton.errors import DriverError


class Function(NamedTuple):
    """One row of a table: the exported symbol and its C signature."""

    symbol: str
    argtypes: tuple[Any, ...]
    restype: Any = ctypes.c_int


class Library:
    """The functions of `table`, by the table's keys. Those that are `call`ed return a status (0: fine).

    Args:
        handle: a loaded library (`load`), or anything that has the symbols as attributes.
        describe: the library's own text for a status that is not 0.
        optional: keys that it may lack (`has`).

    Raises:
        DriverError: another symbol is missing, which means that the installed driver is too old.
    """

    def __init__(
        self,
        name: str,
        handle: Any,
        table: Mapping[str, Function],
        describe: Callable[[Library, int], str],
        *,
        optional: Collection[str] = (),
    ):
        self.name, self._describe, self._table = name, describe, table
        self._functions = {}
        for key, row in table.items():
            function = getattr(handle, row.symbol, None)
            if function is None and key in optional:
                continue
            if function is None:
                raise DriverError(f"{name} has no function {row.symbol}: the installed driver is too old")
            function.argtypes, function.restype = list(row.argtypes), row.restype
            self._functions[key] = function

    def has(self, key: str) -> bool:
        """Whether it has a function that is optional."""
        return key in self._functions

    def status(self, key: str, *args: Any) -> Any:
        """Call a function; what it returns."""
        return self._functions[key](*args)

    def call(self, key: str, *args: Any, about: str = "") -> None:
        """Call a function and `check` its status."""
        self.check(self._functions[key](*args), key, about)

    def check(self, status: int, key: str, about: str = "") -> None:
        """Raise `DriverError` with the function, `about` (what it was called for) and the library's text unless 0."""
        if status:
            what = f"{self._table[key].symbol} ({about})" if about else self._table[key].symbol
            raise DriverError(f"{what}: {self._describe(self, status)}")


def load(names: Sequence[str]) -> ctypes.CDLL:
    """The first of `names` that can be opened. Raises `DriverError` with what was tried and why it failed."""
    failures = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failures.append(f"{name}: {error}")
    raise DriverError(f"the GPU driver's library cannot be opened: {'; '.join(failures)}")


def loaded(stem: str) -> list[str]:
    """Paths of libraries that are in this process already and whose file name starts with `stem`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if f"/{stem}" in line}
    return sorted(path for path in paths if Path(path).name.startswith(stem))
