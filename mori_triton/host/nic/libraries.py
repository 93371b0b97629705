"""libibverbs and the providers' libraries, opened when they are first asked for, as tables of typed functions."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mori_triton.errors import DriverError, StateError
from mori_triton.host.drivers.library import Function, loaded
from mori_triton.host.nic import bnxt_re_api, ionic_api, mlx5_api, verbs_api

_DISTRIBUTIONS = "Debian and Ubuntu: ibverbs-providers; RHEL: libibverbs"


@dataclass(frozen=True)
class Source:
    """A library: the names it is looked for by, who provides it, its functions, and those that it may lack."""

    files: tuple[str, ...]
    packages: str
    functions: Mapping[str, Function]
    optional: frozenset[str]


# the name with a version is what packages for running things have; that without is of those for building
SOURCES = {
    "libibverbs": Source(
        ("libibverbs.so.1", "libibverbs.so"),
        "Debian and Ubuntu: libibverbs1; RHEL: libibverbs",
        verbs_api.FUNCTIONS,
        frozenset(verbs_api.OPTIONAL),
    ),
    "libmlx5": Source(("libmlx5.so.1", "libmlx5.so"), _DISTRIBUTIONS, mlx5_api.FUNCTIONS, frozenset(mlx5_api.OPTIONAL)),
    "libbnxt_re": Source(
        ("libbnxt_re.so", "libbnxt_re-rdmav59.so", "libbnxt_re-rdmav34.so"),
        f"libbnxt_re of Broadcom's driver bundle; that of distributions ({_DISTRIBUTIONS}) has no queues in GPU memory",
        bnxt_re_api.FUNCTIONS,
        frozenset(bnxt_re_api.OPTIONAL),
    ),
    "libionic": Source(
        ("libionic.so.1", "libionic.so"),
        f"libionic of AMD Pensando's driver bundle; that of distributions ({_DISTRIBUTIONS}) has no queues for GPUs",
        ionic_api.FUNCTIONS,
        frozenset(ionic_api.OPTIONAL),
    ),
}


class RdmaLibrary:
    """The functions of a library by its table's keys.

    Args:
        name: of `SOURCES`.
        handle: a loaded library, or anything that has the symbols as attributes.
        path: what it was loaded by, for messages.

    Raises:
        StateError: a function that is not optional is missing; the message names it and the packages that have it.
    """

    def __init__(self, name: str, handle: Any, path: str) -> None:
        source = SOURCES[name]
        self.name, self.path, self._table = name, path, source.functions
        self._functions = {}
        for key, row in source.functions.items():
            function = getattr(handle, row.symbol, None)
            if function is not None:
                function.argtypes, function.restype = list(row.argtypes), row.restype
                self._functions[key] = function
            elif key not in source.optional:
                raise StateError(
                    f"{name}, opened as {path}, has no function {row.symbol}: too old, or of another maker. "
                    f"Wanted: {source.packages}"
                )

    def has(self, key: str) -> bool:
        """Whether it has a function that is optional."""
        return key in self._functions

    def call(self, key: str, *args: Any, about: str = "") -> Any:
        """Call a function; what it returns.

        Raises:
            DriverError: it returned a status that is not 0, or a null pointer: with `about` and the system's text.
            StateError: the library lacks it.
        """
        row = self._table[key]
        if key not in self._functions:
            raise StateError(f"{self.name}, opened as {self.path}, has no function {row.symbol}: it is too old")
        ctypes.set_errno(0)
        result = self._functions[key](*args)
        if row.restype is ctypes.c_int:
            # most return the number of the error, some -1 and set errno, some its negative
            number = ctypes.get_errno() if result == -1 else abs(result)
            failed = result != 0
        elif row.restype in (None, ctypes.c_char_p, ctypes.c_uint8):
            return result
        else:
            number, failed = ctypes.get_errno(), not result
        if failed:
            what = f"{row.symbol} ({about})" if about else row.symbol
            raise DriverError(f"{what}: {errno.errorcode.get(number, f'error {number}')}: {os.strerror(number)}")
        return result


def load(name: str, files: tuple[str, ...]) -> RdmaLibrary:
    """A library of `SOURCES` from the first of `files` that can be opened.

    Raises:
        StateError: none can; the message says which were tried, why each failed and which packages have it.
    """
    failures = []
    for file in files:
        try:
            handle = ctypes.CDLL(file, use_errno=True)
        except OSError as error:
            failures.append(f"{file}: {error}")
            continue
        # one that lacks functions is not passed over for another: devices belong to the one that is in use
        return RdmaLibrary(name, handle, file)
    raise StateError(f"{name} cannot be opened; tried {'; '.join(failures)}. It is in {SOURCES[name].packages}")


@functools.cache
def open_verbs(override: str | None = None) -> RdmaLibrary:
    """libibverbs; `override`: the only file to try (`env.Settings.ibverbs_lib`). Raises as `load`."""
    if override is None:
        return load("libibverbs", SOURCES["libibverbs"].files)
    try:
        return load("libibverbs", (override,))
    except StateError as error:
        raise StateError(f"MORI_IBVERBS_LIB={override}: {error}") from None


@functools.cache
def open_provider(name: str) -> RdmaLibrary:
    """A provider's library, after libibverbs: the one that libibverbs has loaded if it has. Raises as `load`."""
    return load(name, (*loaded(name), *SOURCES[name].files))
