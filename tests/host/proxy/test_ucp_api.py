"""The ctypes table of libucp against UCX's own headers, by a C compiler; and how the library is found.

Headers: the wheel's, and those below the directory that MORI_TEST_UCX_INCLUDE names, such as that of Debian's
libucx-dev. Structs may be longer here than in an older header, never different.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mori_triton.errors import DriverError
from mori_triton.host.proxy import ucp_api

pytestmark = pytest.mark.cpu

STRUCTS = {
    ucp_api.Params: "ucp_params_t",
    ucp_api.ContextAttr: "ucp_context_attr_t",
    ucp_api.WorkerParams: "ucp_worker_params_t",
    ucp_api.ErrHandler: "ucp_err_handler_t",
    ucp_api.SockAddr: "ucs_sock_addr_t",
    ucp_api.EpParams: "ucp_ep_params_t",
    ucp_api.MemMapParams: "ucp_mem_map_params_t",
    ucp_api.AmHandlerParam: "ucp_am_handler_param_t",
    ucp_api.RequestParam: "ucp_request_param_t",
}
# fields that UCX has appended since 1.13
APPENDED = {"node_local_id", "exported_memh_buffer", "remote_datatype", "remote", "remote_count", "device_counter_size"}
# the rest has the prefix UCP_
UCS = ("THREAD_MODE", "MEMORY_TYPE", "INPROGRESS", "ERR_LAST")


def include_dirs() -> dict[str, Path]:
    found = {}
    wheel = importlib.util.find_spec("libucx")
    if wheel is not None and wheel.submodule_search_locations:
        found["wheel"] = Path(wheel.submodule_search_locations[0]) / "include"
    if "MORI_TEST_UCX_INCLUDE" in os.environ:
        found["given"] = Path(os.environ["MORI_TEST_UCX_INCLUDE"])
    return found


def compiler() -> str:
    for name in ("clang-19", "cc", "gcc", "clang"):
        if shutil.which(name):
            return name
    pytest.skip("no C compiler (clang-19, cc, gcc or clang) to read UCX's headers with")


def constants() -> dict[str, int]:
    return {
        ("UCS_" if name.startswith(UCS) else "UCP_") + name: value
        for name, value in vars(ucp_api).items()
        if name.isupper() and isinstance(value, int) and not name.startswith("_")
    }


def size_of(kind: object) -> int:
    return 0 if kind is None else ctypes.sizeof(kind)


def assertions(old: bool) -> str:
    lines = ["#include <stddef.h>", "#include <ucp/api/ucp.h>"]
    for struct, name in STRUCTS.items():
        lines += [
            f"_Static_assert(offsetof({name}, {field}) == {getattr(struct, field).offset}"
            f' && sizeof((({name}*)0)->{field}) == {getattr(struct, field).size}, "{name}.{field}");'
            for field, _ in struct._fields_
            if not (old and field in APPENDED)
        ]
        lines.append(f'_Static_assert(sizeof({name}) {"<=" if old else "=="} {ctypes.sizeof(struct)}, "{name}");')
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in constants().items()]
    lines.append('_Static_assert(sizeof(ucs_status_t) == 1, "ucs_status_t");')
    return "\n".join(lines)


def test_every_number_is_compared() -> None:
    assert {"UCP_FEATURE_RMA", "UCS_INPROGRESS", "UCS_ERR_LAST", "UCS_THREAD_MODE_SERIALIZED"} <= set(constants())
    assert len(constants()) >= 14


@pytest.mark.parametrize("source", ["wheel", "given"])
def test_structs_and_numbers(source: str, tmp_path: Path) -> None:
    include = include_dirs().get(source)
    if include is None:
        pytest.skip(f"no UCX headers ({'pip install libucx-cu12' if source == 'wheel' else 'MORI_TEST_UCX_INCLUDE'})")
    old = not re.search(r"node_local_id", (include / "ucp/api/ucp.h").read_text())
    check = tmp_path / "check.c"
    check.write_text(assertions(old) + "\n")
    done = subprocess.run(
        [compiler(), "-std=c11", "-I", str(include), "-fsyntax-only", str(check)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check.write_text(assertions(old).replace("== 1,", "== 3,") + "\n")
    done = subprocess.run(
        [compiler(), "-I", str(include), "-fsyntax-only", str(check)], capture_output=True, check=False
    )
    assert done.returncode != 0, "a wrong number is not seen"


def signature(text: str, symbol: str) -> tuple[str, list[str]]:
    """What a function returns and its arguments, as written."""
    match = re.search(rf"([\w \t\n*]+?)\b{symbol}\s*\(([^;{{}}]*?)\)\s*;", text)
    assert match, symbol
    returned = match[1].split("\n\n")[-1].strip()
    arguments = [" ".join(part.split()) for part in match[2].split(",")]
    return " ".join(returned.split()), [] if arguments == ["void"] else arguments


def kind_of(written: str, named: bool) -> tuple[str, int]:
    """Pointer or number, and its size."""
    text = re.sub(r"\bconst\b", "", written)
    if "*" in text:
        return "pointer", 8
    word = re.sub(r"\s+\w+\s*$", "", text.strip()) if named else text.strip()
    if word.endswith("_h") or word == "ucs_status_ptr_t":
        return "pointer", 8
    sizes = {"void": 0, "ucs_status_t": 1, "unsigned": 4, "size_t": 8, "uint64_t": 8, "ucp_atomic_op_t": 4}
    return "number", sizes[word]


def declared(kind: object) -> tuple[str, int]:
    pointer = kind in (ctypes.c_void_p, ctypes.c_char_p) or (
        isinstance(kind, type) and issubclass(kind, ctypes._Pointer)
    )
    return "pointer" if pointer else "number", size_of(kind)


@pytest.mark.parametrize("source", ["wheel", "given"])
def test_signatures(source: str) -> None:
    include = include_dirs().get(source)
    if include is None:
        pytest.skip(f"no UCX headers ({'pip install libucx-cu12' if source == 'wheel' else 'MORI_TEST_UCX_INCLUDE'})")
    text = "".join((include / "ucp/api" / name).read_text() for name in ("ucp.h", "ucp_compat.h"))
    text = re.sub(r"/\*.*?\*/", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#[^\n]*\n|\bUCS_F_DEPRECATED\b", "", text, flags=re.MULTILINE)
    for row in ucp_api.FUNCTIONS.values():
        returned, arguments = signature(text, row.symbol)
        assert [kind_of(argument, True) for argument in arguments] == [declared(a) for a in row.argtypes], row.symbol
        assert kind_of(returned, False) == declared(row.restype), row.symbol


def test_a_missing_library_says_what_was_tried_and_what_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucp_api, "candidates", lambda: ["libucp-not-here.so.0", "/nowhere/libucp.so.0"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DriverError) as caught:
        ucp_api.Ucp()
    for part in ("libucp-not-here.so.0: ", "/nowhere/libucp.so.0: ", "libucx0", "mori_triton[rdma]", "no wheel libucx"):
        assert part in str(caught.value)


def test_a_copy_that_is_loaded_already_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucp_api, "loaded", lambda stem: [f"/opt/{stem}.0"])
    assert ucp_api.candidates()[:2] == ["/opt/libucp.so.0", ucp_api.SONAME]


def test_an_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def __getattr__(self, name: str):
            def call(*args) -> int:
                for arg, value in zip(args, (1, 8, 0), strict=False):
                    ctypes.cast(arg, ctypes.POINTER(ctypes.c_uint32))[0] = value
                return 0

            return call

    monkeypatch.setattr(ucp_api, "_open", lambda: ("/opt/libucp.so.0", Old()))
    with pytest.raises(DriverError, match=r"/opt/libucp.so.0: want UCX 1.12 or newer, got \(1, 8, 0\)"):
        ucp_api.Ucp()
