"""Every argument type, constant and struct of the drivers' ctypes tables, against the vendors' own headers.

The headers are those in Triton's wheel. MORI_TEST_CUDA_INCLUDE and MORI_TEST_HIP_INCLUDE name others: the directory
that holds cuda.h, and the one that holds hip/hip_runtime_api.h (such as what Debian's libamdhip64-dev installs).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from pathlib import Path

import pytest

from mori_triton.host.drivers import cuda_api
from tests.host import c_headers

pytestmark = pytest.mark.cpu

# what differs from the rule that a constant has the header's name without the vendor's prefix
RENAMED = {"GRANULARITY_MINIMUM": "MEM_ALLOC_GRANULARITY_MINIMUM"}


def include_directories(variable: str, vendor: str, *system: str) -> list[Path]:
    spec = importlib.util.find_spec("triton")
    bundled = [Path(spec.origin).parent / "backends" / vendor / "include"] if spec and spec.origin else []
    given = os.environ.get(variable)
    return [Path(given)] if given else [*bundled, *map(Path, system)]


@functools.cache
def cuda_header() -> c_headers.Header:
    places = include_directories("MORI_TEST_CUDA_INCLUDE", "nvidia", "/usr/local/cuda/include", "/usr/include")
    for place in places:
        if (place / "cuda.h").is_file():
            return c_headers.Header(place / "cuda.h")
    pytest.skip(f"no cuda.h in {', '.join(map(str, places))}; set MORI_TEST_CUDA_INCLUDE")


def numbers_of(module) -> dict[str, int]:
    return {name: value for name, value in vars(module).items() if name.isupper() and isinstance(value, int)}


@pytest.mark.parametrize("key", cuda_api.FUNCTIONS)
def test_k4_arguments_of_libcuda(key: str) -> None:
    row = cuda_api.FUNCTIONS[key]
    assert row.restype is ctypes.c_int
    assert tuple(map(c_headers.type_of, row.argtypes)) == cuda_header().arguments(row.symbol)


@pytest.mark.parametrize("name", numbers_of(cuda_api))
def test_constants_of_libcuda(name: str) -> None:
    header, plain = cuda_header(), RENAMED.get(name, name)
    known = [prefix + plain for prefix in ("CU_", "CUDA_") if prefix + plain in header.constants | header.defines]
    assert [header.constant(full) for full in known] == [getattr(cuda_api, name)], known


@pytest.mark.parametrize("struct", [cuda_api.IpcMemHandle, cuda_api.MemAllocationProp, cuda_api.MemAccessDesc])
def test_structs_of_libcuda(struct: type[ctypes.Structure]) -> None:
    declared = {"IpcMemHandle": "CUipcMemHandle", "MemAllocationProp": "CUmemAllocationProp"}
    header = cuda_header().type_of(declared.get(struct.__name__, "CUmemAccessDesc"))
    assert c_headers.type_of(struct) == header
