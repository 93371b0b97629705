"""UCX objects of one PE: context, worker, the registered heap, and an endpoint and a remote key for every PE."""

from __future__ import annotations

import base64
import ctypes
import json
from collections.abc import Mapping
from typing import Any

from mori_triton.errors import DriverError
from mori_triton.host.agreement import agree, all_fine
from mori_triton.host.bootstrap.base import Bootstrap
from mori_triton.host.proxy import layout, ucp_api
from mori_triton.host.proxy.ucp_api import Ucp

# the first whose shared memory can have UCX end all requests to a peer that is gone, if asked
_ENDS_REQUESTS = (1, 18)
_SETTINGS = {"POSIX_ERROR_HANDLING": "y", "SYSV_ERROR_HANDLING": "y"}


def ends_requests(ucp: Ucp) -> bool:
    """Whether UCX ends every request to a peer that is gone, on any transport; otherwise some only have our limit."""
    return ucp.version[:2] >= _ENDS_REQUESTS


class Endpoints:
    """Collective to create; fills `peers`. From then on only one thread at a time may use the worker.

    Args:
        address, num_bytes: this PE's heap.
        peers: `n_pes` records for the progress loop.
        entries: slots of the ring, the same on all PEs.
        on_failure: address of the function that UCX calls when a peer is gone, with the peer's record.
        options: UCX settings without the prefix `UCX_`; they win over the environment.

    Raises:
        HeapError: on every PE, when one of them has no UCX, cannot register its heap or cannot reach a peer.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        address: int,
        num_bytes: int,
        peers: ctypes.Array[layout.Peer],
        entries: int,
        on_failure: int,
        options: Mapping[str, str],
    ) -> None:
        self._peers, self._own = peers, bootstrap.pe
        self._context, self.worker, self._memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.ucp: Ucp | None = None
        # whether UCX knows no memory but the host's: it would load and store any other
        self.host_only = True
        mine: dict[str, Any] = {"problem": None}
        try:
            self.ucp = Ucp()
            self._open(self.ucp, options)
            mine |= self._register(self.ucp, address, num_bytes)
            mine["same"] = {"entries": entries, "UCX": ".".join(map(str, self.ucp.version))}
        except DriverError as error:
            mine["problem"] = str(error)
        try:
            others = [json.loads(text) for text in bootstrap.allgather(json.dumps(mine).encode(), "proxy set-up")]
            all_fine([facts["problem"] for facts in others])
            agree("proxy set-up", [facts["same"] for facts in others])
            problem = None
            assert self.ucp is not None
            try:
                for pe, facts in enumerate(others):
                    self._connect(self.ucp, pe, facts, on_failure)
            except DriverError as error:
                problem = str(error)
            answers = bootstrap.allgather(json.dumps(problem).encode(), "proxy set-up, endpoints made")
            all_fine([json.loads(text) for text in answers])
        except BaseException:
            self.close()
            raise

    def _open(self, ucp: Ucp, options: Mapping[str, str]) -> None:
        config = ctypes.c_void_p()
        ucp.call("config_read", None, None, ctypes.byref(config))
        try:
            for name, value in {**(_SETTINGS if ends_requests(ucp) else {}), **options}.items():
                ucp.call("config_modify", config, name.encode(), value.encode(), about=f"{name}={value}")
            params = ucp_api.Params(
                field_mask=ucp_api.PARAM_FIELD_FEATURES,
                features=ucp_api.FEATURE_RMA | ucp_api.FEATURE_AM,
            )
            ucp.call("init", *ucp_api.API_VERSION, ctypes.byref(params), config, ctypes.byref(self._context))
        finally:
            ucp.status("config_release", config)
        known = ucp_api.ContextAttr(field_mask=ucp_api.ATTR_FIELD_MEMORY_TYPES)
        ucp.call("context_query", self._context, ctypes.byref(known))
        self.host_only = known.memory_types == 1 << ucp_api.MEMORY_TYPE_HOST
        # made here, used by the loop's thread, closed here
        worker = ucp_api.WorkerParams(
            field_mask=ucp_api.WORKER_PARAM_FIELD_THREAD_MODE, thread_mode=ucp_api.THREAD_MODE_SERIALIZED
        )
        ucp.call("worker_create", self._context, ctypes.byref(worker), ctypes.byref(self.worker))

    def answer(self, messages: Mapping[int, int], state: int) -> None:
        """Have UCX call the function at an address, with `state`, for each message of an id. Before any progress."""
        assert self.ucp is not None
        for number, address in messages.items():
            handler = ucp_api.AmHandlerParam(
                field_mask=ucp_api.AM_HANDLER_PARAM_FIELD_ID
                | ucp_api.AM_HANDLER_PARAM_FIELD_CB
                | ucp_api.AM_HANDLER_PARAM_FIELD_ARG,
                id=number, cb=address, arg=state,
            )  # fmt: skip
            self.ucp.call("set_am_handler", self.worker, ctypes.byref(handler))

    def _register(self, ucp: Ucp, address: int, num_bytes: int) -> dict[str, Any]:
        """What peers need to know of this PE."""
        params = ucp_api.MemMapParams(
            field_mask=ucp_api.MEM_MAP_PARAM_FIELD_ADDRESS | ucp_api.MEM_MAP_PARAM_FIELD_LENGTH,
            address=address, length=num_bytes,
        )  # fmt: skip
        about = f"heap of {num_bytes} bytes at {address:#x}"
        ucp.call("mem_map", self._context, ctypes.byref(params), ctypes.byref(self._memory), about=about)
        place, size = ctypes.c_void_p(), ctypes.c_size_t()
        ucp.call("rkey_pack", self._context, self._memory, ctypes.byref(place), ctypes.byref(size))
        rkey = ctypes.string_at(place, size.value)
        ucp.status("rkey_release", place)
        ucp.call("worker_get_address", self.worker, ctypes.byref(place), ctypes.byref(size))
        worker = ctypes.string_at(place, size.value)
        ucp.status("worker_release_address", self.worker, place)
        facts = {"rkey": rkey, "worker": worker}
        return {"base": address, "bytes": num_bytes} | {k: base64.b64encode(v).decode() for k, v in facts.items()}

    def _connect(self, ucp: Ucp, pe: int, facts: dict[str, Any], on_failure: int) -> None:
        peer, name = self._peers[pe], f"PE {pe}"
        # this PE itself does not go, and the transport `self` does not know what that would be
        ends = ends_requests(ucp) and pe != self._own
        worker, rkey = (ctypes.create_string_buffer(base64.b64decode(facts[key])) for key in ("worker", "rkey"))
        params = ucp_api.EpParams(
            field_mask=ucp_api.EP_PARAM_FIELD_REMOTE_ADDRESS
            | ucp_api.EP_PARAM_FIELD_ERR_HANDLING_MODE
            | ucp_api.EP_PARAM_FIELD_ERR_HANDLER,
            address=ctypes.addressof(worker),
            err_mode=ucp_api.ERR_HANDLING_MODE_PEER if ends else ucp_api.ERR_HANDLING_MODE_NONE,
            err_handler=ucp_api.ErrHandler(on_failure, ctypes.addressof(peer)),
        )
        made = ctypes.c_void_p()
        ucp.call("ep_create", self.worker, ctypes.byref(params), ctypes.byref(made), about=name)
        peer.ep = made.value
        ucp.call("rkey_unpack", made, rkey, ctypes.byref(made), about=name)
        peer.rkey, peer.base, peer.bytes = made.value, facts["base"], facts["bytes"]

    def close(self, *, cut: bool = False) -> None:
        """Give everything back. Idempotent. `cut`: requests may be in flight, which UCX must not lose, so what they use
        stays until the process ends; only the heap is let go.
        """
        ucp, self.ucp = self.ucp, None
        if ucp is None:
            return
        for peer in self._peers if not cut else ():
            if peer.rkey:
                ucp.status("rkey_destroy", peer.rkey)
            # the endpoints go with the worker: closing one waits for a peer that may have left already
            peer.ep = peer.rkey = 0
        if self._memory:
            ucp.status("mem_unmap", self._context, self._memory)
        if cut:
            return
        if self.worker:
            ucp.status("worker_destroy", self.worker)
        if self._context:
            ucp.status("cleanup", self._context)
