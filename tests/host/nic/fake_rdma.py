"""libibverbs and the providers' libraries as doubles: C functions with the tables' own signatures.

They note every call and what has not been given back. `fail[key]` makes a function fail with that errno, in the way
that its kind of result has; `lacks` are keys whose functions are not there.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import traceback

from mori_triton.host.nic import verbs_api
from mori_triton.host.nic.libraries import SOURCES, RdmaLibrary


def is_pointer(kind) -> bool:
    return kind is not None and (issubclass(kind, (ctypes._Pointer, ctypes.c_void_p)))


class FakeLibrary:
    """One of `SOURCES`. A subclass's `do_<key>` makes what a function returns; without one it is 0, or a new handle."""

    source: str

    def __init__(self, *, lacks: tuple[str, ...] = ()) -> None:
        self.calls: list[tuple] = []
        self.fail: dict[str, int] = {}
        self.held: dict[int, str] = {}
        self._numbers = itertools.count(0x1000, 0x10)
        self._kept: list[object] = []
        for key, row in SOURCES[self.source].functions.items():
            if key in lacks:
                continue
            # a callback cannot return a pointer to a struct, nor be given a handle of ours as a number
            result = ctypes.c_void_p if is_pointer(row.restype) else row.restype
            plain = [ctypes.c_void_p if issubclass(a, ctypes.c_void_p) else a for a in row.argtypes]
            serve = functools.partial(self.serve, key, is_pointer(row.restype))
            if row.restype is ctypes.c_char_p:
                setattr(self, row.symbol, _Text(serve))
            else:
                setattr(self, row.symbol, ctypes.CFUNCTYPE(result, *plain, use_errno=True)(serve))

    def library(self) -> RdmaLibrary:
        return RdmaLibrary(self.source, self, f"fake {self.source}")

    def serve(self, key: str, pointer: bool, *args):
        plain = [arg if isinstance(arg, (int, bytes, type(None))) else "struct" for arg in args]
        self.calls.append((key, *plain))
        if key in self.fail:
            ctypes.set_errno(self.fail[key])
            return None if pointer else self.fail[key]
        make = getattr(self, "do_" + key, None)
        try:
            return make(*args) if make is not None else self.new(key) if pointer else 0
        except Exception:
            # what is raised in a callback gets lost: the caller sees a function that fails, the test this
            traceback.print_exc()
            ctypes.set_errno(errno.EINVAL)
            return None if pointer else errno.EINVAL

    def new(self, key: str, address: int = 0) -> int:
        handle = address or next(self._numbers)
        self.held[handle] = key
        return handle

    def drop(self, handle: int) -> int:
        assert handle in self.held, f"{handle:#x} is not there (any more)"
        del self.held[handle]
        return 0

    def struct(self, key: str, struct: ctypes.Structure) -> int:
        """A struct that the library has made."""
        self._kept.append(struct)
        return self.new(key, ctypes.addressof(struct))

    def of(self, key: str) -> list[tuple]:
        return [tuple(args) for name, *args in self.calls if name == key]

    def keys(self) -> list[str]:
        return [key for key, *_ in self.calls]


class _Text:
    """A function that returns a C string, which a callback cannot."""

    def __init__(self, function) -> None:
        self.function, self.argtypes, self.restype = function, None, None

    def __call__(self, handle):
        return self.function(handle.value if isinstance(handle, ctypes.c_void_p) else handle)


def address(pointer) -> int:
    return ctypes.addressof(pointer.contents)


class FakeVerbs(FakeLibrary):
    """Devices of these names; each handle is 0xD0 and its place."""

    source = "libibverbs"

    def __init__(self, names: tuple[str, ...] = ("mlx5_0", "mlx5_1"), **options) -> None:
        super().__init__(**options)
        self.names, self.port_state, self.atomic_cap = names, verbs_api.PORT_ACTIVE, 1
        self.attributes: list[tuple[verbs_api.QpAttr, int]] = []
        self._keys = itertools.count(1)

    def do_get_device_list(self, count):
        array = (ctypes.c_void_p * (len(self.names) + 1))(*(0xD0 + at for at in range(len(self.names))))
        self._kept.append(array)
        count[0] = len(self.names)
        return self.new("list", ctypes.addressof(array))

    def do_free_device_list(self, array):
        self.drop(ctypes.cast(array, ctypes.c_void_p).value)

    def do_get_device_name(self, device):
        return self.names[device - 0xD0].encode()

    def do_close_device(self, context):
        return self.drop(context)

    def do_dealloc_pd(self, pd):
        return self.drop(pd)

    def do_query_device(self, context, out):
        out[0].vendor_id, out[0].max_qp_rd_atom, out[0].phys_port_cnt = 0x02C9, 16, 1
        out[0].atomic_cap = self.atomic_cap
        return 0

    def do_query_port(self, context, number, out):
        out[0].state, out[0].active_mtu, out[0].link_layer = self.port_state, verbs_api.MTU_4096, 2
        return 0

    def _mr(self, pd, at, num_bytes):
        key = next(self._keys)
        return self.struct("mr", verbs_api.Mr(addr=at, length=num_bytes, lkey=0x1000 + key, rkey=0xFFFF0000 + key))

    def do_reg_mr(self, pd, at, num_bytes, access):
        return self._mr(pd, at, num_bytes)

    def do_reg_dmabuf_mr(self, pd, offset, num_bytes, iova, descriptor, access):
        return self._mr(pd, iova, num_bytes)

    def do_dereg_mr(self, mr):
        return self.drop(address(mr))

    def do_modify_qp(self, qp, attr, mask):
        self.attributes.append((verbs_api.QpAttr.from_buffer_copy(attr[0]), mask))
        return 0
