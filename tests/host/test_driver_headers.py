"""Every argument type, constant and struct of the drivers' ctypes tables, against the vendors' own headers.

The headers are those in Triton's wheel, and those that MORI_TEST_CUDA_INCLUDE and MORI_TEST_HIP_INCLUDE name: the
directory that holds cuda.h, and the one that holds hip/hip_runtime_api.h (such as that of Debian's libamdhip64-dev).
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
    cuda_api: {
        "GRANULARITY_MINIMUM": "MEM_ALLOC_GRANULARITY_MINIMUM",
        "HOST_REGISTER_PORTABLE": "MEMHOSTREGISTER_PORTABLE",
        "HOST_REGISTER_MAPPED": "MEMHOSTREGISTER_DEVICEMAP",
    },
    hip_api: {"GRANULARITY_MINIMUM": "MEM_ALLOCATION_GRANULARITY_MINIMUM"},
}
# ours alone
OWN = {"VERSION_MINIMUM", "VERSION_DESCRIPTOR_BY_VALUE", "HOST_REGISTER_IO"}
# what HIP 5, in Debian 12, has otherwise or not at all; the driver refuses it
CHANGED_IN_HIP_6 = {
    "map_granularity",
    "map_create",
    "MemAllocationProp",
    "IPC_MEM_LAZY_ENABLE_PEER_ACCESS",
    "DEVICE_MALLOC_UNCACHED",
    "MEM_ALLOCATION_TYPE_UNCACHED",
    "MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD",
    "dma_buf",
}


FILES = {
    cuda_api: ("MORI_TEST_CUDA_INCLUDE", "nvidia", ["cuda.h"]),
    hip_api: ("MORI_TEST_HIP_INCLUDE", "amd", ["hip/hip_runtime_api.h", "hip/driver_types.h", "hip/hip_version.h"]),
}


@functools.cache
def header_of(module, source: str) -> c_headers.Header:
    """`source`: "triton", the header in Triton's wheel, or "given", that of the environment variable."""
    variable, vendor, files = FILES[module]
    if source == "given":
        place = Path(os.environ[variable])
    else:
        spec = importlib.util.find_spec("triton")
        assert spec is not None
        assert spec.origin is not None
        place = Path(spec.origin).parent / "backends" / vendor / "include"
    return c_headers.Header(*(place / name for name in files))


def skip_what_changed(header: c_headers.Header, name: str) -> None:
    version = int(header.defines.get("HIP_VERSION_MAJOR", "99"))
    if version < 6 and name in CHANGED_IN_HIP_6:
        pytest.skip(f"the header is of HIP {version}, where {name} is another or none")


def numbers_of(module) -> list[str]:
    names = [name for name, value in vars(module).items() if name.isupper() and isinstance(value, int)]
    return [name for name in names if name not in OWN]


def each(make):
    """Every part that `make(module)` lists, with every header there is for that module."""
    return [
        pytest.param(module, part, source, id=f"{module.__name__.rpartition('.')[2]}-{part}-{source}")
        for module, (variable, _, _) in FILES.items()
        for source in (["triton", "given"] if variable in os.environ else ["triton"])
        for part in make(module)
    ]


@pytest.mark.parametrize(("module", "key", "source"), each(lambda module: module.FUNCTIONS))
def test_k4_signatures(module, key: str, source: str) -> None:
    row, header = module.FUNCTIONS[key], header_of(module, source)
    skip_what_changed(header, key)
    assert tuple(map(c_headers.type_of, row.argtypes)) == header.arguments(row.symbol)
    assert c_headers.type_of(row.restype) == header.returned(row.symbol)


@pytest.mark.parametrize(("module", "name", "source"), each(numbers_of))
def test_constants(module, name: str, source: str) -> None:
    """CU_SOME_NAME, CUDA_SOME_NAME and hipSomeName are what is SOME_NAME here."""
    header = header_of(module, source)
    skip_what_changed(header, name)
    plain = RENAMED[module].get(name, name).replace("_", "").lower()
    wanted = {prefix + plain for prefix in (("cu", "cuda") if module is cuda_api else ("hip",))}
    known = [full for full in [*header.constants, *header.defines] if full.replace("_", "").lower() in wanted]
    assert {header.constant(full) for full in known} == {getattr(module, name)}, known


STRUCTS = {
    "IpcMemHandle": {cuda_api: "CUipcMemHandle", hip_api: "hipIpcMemHandle_t"},
    "MemAllocationProp": {cuda_api: "CUmemAllocationProp", hip_api: "hipMemAllocationProp"},
    "MemAccessDesc": {cuda_api: "CUmemAccessDesc", hip_api: "hipMemAccessDesc"},
}


@pytest.mark.parametrize(("module", "struct", "source"), each(lambda module: STRUCTS))
def test_structs(module, struct: str, source: str) -> None:
    header = header_of(module, source)
    skip_what_changed(header, struct)
    assert c_headers.type_of(getattr(module, struct)) == header.type_of(STRUCTS[struct][module])


@pytest.mark.parametrize("module", list(FILES), ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_header_from_elsewhere_is_compared_too(module) -> None:
    """So that a run says whether it was; every part is then listed a second time."""
    variable = FILES[module][0]
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set: compared with the header in Triton's wheel only")
    given = [mark.values for mark in each(lambda module: module.FUNCTIONS) if mark.values[2] == "given"]
    assert {key for listed, key, _ in given if listed is module} == set(module.FUNCTIONS)
