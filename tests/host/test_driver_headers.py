"""Every argument type, constant and struct of the drivers' ctypes tables, against the vendors' own headers.

The headers are those in Triton's wheel. MORI_TEST_CUDA_INCLUDE and MORI_TEST_HIP_INCLUDE name others: the directory
that holds cuda.h, and the one that holds hip/hip_runtime_api.h (such as what Debian's libamdhip64-dev installs).
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import pytest

from mori_triton.host.drivers import cuda_api, hip_api
from tests.host import c_headers

pytestmark = pytest.mark.cpu

# what differs from the rule that a constant has the header's name without the vendor's prefix
RENAMED = {
    cuda_api: {"GRANULARITY_MINIMUM": "MEM_ALLOC_GRANULARITY_MINIMUM"},
    hip_api: {"GRANULARITY_MINIMUM": "MEM_ALLOCATION_GRANULARITY_MINIMUM"},
}
# ours alone
OWN = {"VERSION_MINIMUM", "VERSION_DESCRIPTOR_BY_VALUE"}
# what HIP 5, in Debian 12, has otherwise or not at all; the driver refuses it
CHANGED_IN_HIP_6 = {
    "map_granularity",
    "map_create",
    "MemAllocationProp",
    "IPC_MEM_LAZY_ENABLE_PEER_ACCESS",
    "DEVICE_MALLOC_UNCACHED",
    "MEM_ALLOCATION_TYPE_UNCACHED",
}


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


@functools.cache
def hip_header() -> c_headers.Header:
    places = include_directories("MORI_TEST_HIP_INCLUDE", "amd", "/opt/rocm/include", "/usr/include")
    for place in places:
        if (place / "hip/hip_runtime_api.h").is_file():
            return c_headers.Header(
                *(place / "hip" / name for name in ("hip_runtime_api.h", "driver_types.h", "hip_version.h"))
            )
    pytest.skip(f"no hip/hip_runtime_api.h in {', '.join(map(str, places))}; set MORI_TEST_HIP_INCLUDE")


def header_of(module) -> c_headers.Header:
    return cuda_header() if module is cuda_api else hip_header()


def skip_what_changed(header: c_headers.Header, name: str) -> None:
    version = int(header.defines.get("HIP_VERSION_MAJOR", "99"))
    if version < 6 and name in CHANGED_IN_HIP_6:
        pytest.skip(f"the header is of HIP {version}, where {name} is another or none")


def numbers_of(module) -> list[str]:
    return [name for name, value in vars(module).items() if name.isupper() and isinstance(value, int)]


BOTH = pytest.mark.parametrize(
    ("module", "key"),
    [(module, key) for module in (cuda_api, hip_api) for key in module.FUNCTIONS],
    ids=lambda value: value if isinstance(value, str) else value.__name__.rpartition(".")[2],
)


@BOTH
def test_k4_signatures(module, key: str) -> None:
    row, header = module.FUNCTIONS[key], header_of(module)
    skip_what_changed(header, key)
    assert tuple(map(c_headers.type_of, row.argtypes)) == header.arguments(row.symbol)
    assert c_headers.type_of(row.restype) == header.returned(row.symbol)


@pytest.mark.parametrize("name", numbers_of(cuda_api))
def test_constants_of_libcuda(name: str) -> None:
    header, plain = cuda_header(), RENAMED[cuda_api].get(name, name)
    known = [prefix + plain for prefix in ("CU_", "CUDA_") if prefix + plain in header.constants | header.defines]
    assert [header.constant(full) for full in known] == [getattr(cuda_api, name)], known


@pytest.mark.parametrize("name", [name for name in numbers_of(hip_api) if name not in OWN])
def test_constants_of_libamdhip64(name: str) -> None:
    header = hip_header()
    skip_what_changed(header, name)
    plain = "hip" + RENAMED[hip_api].get(name, name).replace("_", "").lower()
    known = [full for full in [*header.constants, *header.defines] if full.replace("_", "").lower() == plain]
    assert {header.constant(full) for full in known} == {getattr(hip_api, name)}, known


STRUCTS = {
    "IpcMemHandle": ("CUipcMemHandle", "hipIpcMemHandle_t"),
    "MemAllocationProp": ("CUmemAllocationProp", "hipMemAllocationProp"),
    "MemAccessDesc": ("CUmemAccessDesc", "hipMemAccessDesc"),
}


@pytest.mark.parametrize("struct", STRUCTS)
@pytest.mark.parametrize("module", [cuda_api, hip_api], ids=["cuda", "hip"])
def test_structs(module, struct: str) -> None:
    skip_what_changed(header_of(module), struct)
    assert c_headers.type_of(getattr(module, struct)) == header_of(module).type_of(STRUCTS[struct][module is hip_api])
