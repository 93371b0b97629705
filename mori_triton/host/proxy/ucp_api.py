"""libucp as a ctypes table: the functions and structs that the proxy uses, and how the library is found.

Structs are those of UCX 1.22, the longest so far: an older library reads a part of them, and `field_mask` says which
fields hold something. `ucs_status_t` is one byte; functions that return a pointer return a negative status in it.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

from mori_triton.errors import DriverError
from mori_triton.host.drivers.library import Function, Library, loaded

SONAME = "libucp.so.0"
# the first with a one-sided API that is complete: ucp_ep_close_nbx, ucp_ep_flush_nbx, ucp_am_send_nbx
API_VERSION = (1, 12)
PACKAGES = "Debian, Ubuntu: apt-get install libucx0; from PyPI: pip install mori_triton[rdma]"

FEATURE_RMA, FEATURE_AM = 1 << 1, 1 << 6
PARAM_FIELD_FEATURES = 1 << 0
ATTR_FIELD_MEMORY_TYPES = 1 << 2
MEMORY_TYPE_HOST = 0
WORKER_PARAM_FIELD_THREAD_MODE = 1 << 0
THREAD_MODE_SERIALIZED = 1
EP_PARAM_FIELD_REMOTE_ADDRESS, EP_PARAM_FIELD_ERR_HANDLING_MODE, EP_PARAM_FIELD_ERR_HANDLER = 1 << 0, 1 << 1, 1 << 2
ERR_HANDLING_MODE_NONE, ERR_HANDLING_MODE_PEER = 0, 1
MEM_MAP_PARAM_FIELD_ADDRESS, MEM_MAP_PARAM_FIELD_LENGTH = 1 << 0, 1 << 1
AM_HANDLER_PARAM_FIELD_ID, AM_HANDLER_PARAM_FIELD_CB, AM_HANDLER_PARAM_FIELD_ARG = 1 << 0, 1 << 2, 1 << 3
INPROGRESS, ERR_LAST = 1, -100

_P, _SIZE, _U64, _U32, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
STATUS = ctypes.c_int8
# what the call started: 0: it is complete; from `ERR_LAST` on, seen as a signed number, a status; else a request
STATUS_PTR = ctypes.c_void_p


class Params(ctypes.Structure):
    """ucp_params_t"""

    _fields_ = (
        ("field_mask", _U64),
        ("features", _U64),
        ("request_size", _SIZE),
        ("request_init", _P),
        ("request_cleanup", _P),
        ("tag_sender_mask", _U64),
        ("mt_workers_shared", _INT),
        ("estimated_num_eps", _SIZE),
        ("estimated_num_ppn", _SIZE),
        ("name", ctypes.c_char_p),
        ("node_local_id", _SIZE),
    )


class ContextAttr(ctypes.Structure):
    """ucp_context_attr_t"""

    _fields_ = (
        ("field_mask", _U64),
        ("request_size", _SIZE),
        ("thread_mode", _U32),
        ("memory_types", _U64),
        ("name", ctypes.c_char * 32),
        ("device_counter_size", _SIZE),
    )


class WorkerParams(ctypes.Structure):
    """ucp_worker_params_t"""

    _fields_ = (
        ("field_mask", _U64),
        ("thread_mode", _U32),
        ("cpu_mask", _U64 * 16),
        ("events", _U32),
        ("user_data", _P),
        ("event_fd", _INT),
        ("flags", _U64),
        ("name", ctypes.c_char_p),
        ("am_alignment", _SIZE),
        ("client_id", _U64),
    )


class ErrHandler(ctypes.Structure):
    """ucp_err_handler_t"""

    _fields_ = (("cb", _P), ("arg", _P))


class SockAddr(ctypes.Structure):
    """ucs_sock_addr_t"""

    _fields_ = (("addr", _P), ("addrlen", _U32))


class EpParams(ctypes.Structure):
    """ucp_ep_params_t"""

    _fields_ = (
        ("field_mask", _U64),
        ("address", _P),
        ("err_mode", _U32),
        ("err_handler", ErrHandler),
        ("user_data", _P),
        ("flags", _U32),
        ("sockaddr", SockAddr),
        ("conn_request", _P),
        ("name", ctypes.c_char_p),
        ("local_sockaddr", SockAddr),
    )


class MemMapParams(ctypes.Structure):
    """ucp_mem_map_params_t"""

    _fields_ = (
        ("field_mask", _U64),
        ("address", _P),
        ("length", _SIZE),
        ("flags", _U32),
        ("prot", _U32),
        ("memory_type", _U32),
        ("exported_memh_buffer", _P),
    )


class AmHandlerParam(ctypes.Structure):
    """ucp_am_handler_param_t"""

    _fields_ = (("field_mask", _U64), ("id", _U32), ("flags", _U32), ("cb", _P), ("arg", _P))


class RequestParam(ctypes.Structure):
    """ucp_request_param_t. `hip_src/proxy.cpp` has the same, for the operations of the loop."""

    _fields_ = (
        ("op_attr_mask", _U32),
        ("flags", _U32),
        ("request", _P),
        ("cb", _P),
        ("datatype", _U64),
        ("user_data", _P),
        ("reply_buffer", _P),
        ("memory_type", _U32),
        ("recv_info", _P),
        ("memh", _P),
        ("remote_datatype", _U64),
        ("remote", _P),
        ("remote_count", _SIZE),
    )


def _to(kind: Any) -> Any:
    return ctypes.POINTER(kind)


FUNCTIONS = {
    "get_version": Function("ucp_get_version", (_to(_U32), _to(_U32), _to(_U32)), None),
    "config_read": Function("ucp_config_read", (ctypes.c_char_p, ctypes.c_char_p, _to(_P)), STATUS),
    "config_modify": Function("ucp_config_modify", (_P, ctypes.c_char_p, ctypes.c_char_p), STATUS),
    "config_release": Function("ucp_config_release", (_P,), None),
    # ucp_init is an inline function around it
    "init": Function("ucp_init_version", (_U32, _U32, _to(Params), _P, _to(_P)), STATUS),
    "context_query": Function("ucp_context_query", (_P, _to(ContextAttr)), STATUS),
    "cleanup": Function("ucp_cleanup", (_P,), None),
    "worker_create": Function("ucp_worker_create", (_P, _to(WorkerParams), _to(_P)), STATUS),
    "worker_destroy": Function("ucp_worker_destroy", (_P,), None),
    "worker_get_address": Function("ucp_worker_get_address", (_P, _to(_P), _to(_SIZE)), STATUS),
    "worker_release_address": Function("ucp_worker_release_address", (_P, _P), None),
    "worker_progress": Function("ucp_worker_progress", (_P,), _U32),
    "worker_flush": Function("ucp_worker_flush_nbx", (_P, _to(RequestParam)), STATUS_PTR),
    "ep_create": Function("ucp_ep_create", (_P, _to(EpParams), _to(_P)), STATUS),
    "ep_close": Function("ucp_ep_close_nbx", (_P, _to(RequestParam)), STATUS_PTR),
    "ep_flush": Function("ucp_ep_flush_nbx", (_P, _to(RequestParam)), STATUS_PTR),
    "mem_map": Function("ucp_mem_map", (_P, _to(MemMapParams), _to(_P)), STATUS),
    "mem_unmap": Function("ucp_mem_unmap", (_P, _P), STATUS),
    "rkey_pack": Function("ucp_rkey_pack", (_P, _P, _to(_P), _to(_SIZE)), STATUS),
    "rkey_release": Function("ucp_rkey_buffer_release", (_P,), None),
    "rkey_unpack": Function("ucp_ep_rkey_unpack", (_P, _P, _to(_P)), STATUS),
    "rkey_destroy": Function("ucp_rkey_destroy", (_P,), None),
    "put": Function("ucp_put_nbx", (_P, _P, _SIZE, _U64, _P, _to(RequestParam)), STATUS_PTR),
    "get": Function("ucp_get_nbx", (_P, _P, _SIZE, _U64, _P, _to(RequestParam)), STATUS_PTR),
    "set_am_handler": Function("ucp_worker_set_am_recv_handler", (_P, _to(AmHandlerParam)), STATUS),
    "am_send": Function("ucp_am_send_nbx", (_P, _U32, _P, _SIZE, _P, _SIZE, _to(RequestParam)), STATUS_PTR),
    "request_status": Function("ucp_request_check_status", (_P,), STATUS),
    "request_free": Function("ucp_request_free", (_P,), None),
}


class Ucp(Library):
    """libucp's functions, and their addresses for the progress loop.

    Raises:
        DriverError: no library (paths tried, packages that have it), one that is too old, or a function is missing.
    """

    def __init__(self) -> None:
        self.path, handle = _open()
        super().__init__(f"UCX ({self.path})", handle, FUNCTIONS, lambda _, status: self.describe(status))
        self._handle = handle
        # in libucs, which libucp brings along
        self._status_string = getattr(handle, "ucs_status_string", None)
        if self._status_string is not None:
            self._status_string.argtypes, self._status_string.restype = [STATUS], ctypes.c_char_p
        parts = [_U32() for _ in range(3)]
        self.status("get_version", *map(ctypes.byref, parts))
        self.version = tuple(part.value for part in parts)
        if self.version[:2] < API_VERSION:
            raise DriverError(f"{self.path}: want UCX {'.'.join(map(str, API_VERSION))} or newer, got {self.version}")

    def describe(self, status: int) -> str:
        """UCX's text for a status."""
        text = self._status_string(status).decode() if self._status_string is not None else "UCX status"
        return f"{text} ({status})"

    def address(self, key: str) -> int:
        """Where a function of the table lies."""
        value = ctypes.cast(self._functions[key], ctypes.c_void_p).value
        assert value is not None
        return value


def candidates() -> list[str]:
    """What is tried, in order: a copy that this process has loaded already (two would not know of each other), the
    system's, that of the wheel.
    """
    wheel = importlib.util.find_spec("libucx")
    places = [str(Path(place) / "lib" / SONAME) for place in (wheel.submodule_search_locations or [])] if wheel else []
    return [*loaded("libucp.so"), SONAME, *places]


def _open() -> tuple[str, Any]:
    failures = []
    for name in candidates():
        try:
            return name, ctypes.CDLL(name)
        except OSError as error:
            failures.append(f"{name}: {error}")
    if importlib.util.find_spec("libucx") is None:
        failures.append("no wheel libucx-cu12 or libucx-cu13 in this Python")
    raise DriverError(f"UCX cannot be loaded: {'; '.join(failures)}. {PACKAGES}")
