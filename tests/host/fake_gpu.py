"""libcuda and libamdhip64 as doubles: C functions with the tables' own signatures, over memory of this process.

They note every call, keep account of what was not given back, and refuse what the real ones would: work without a
current device, memory that is not theirs. New memory is full of 0xA5. `fail[key]` makes a function fail.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
from collections import Counter, defaultdict

from mori_triton.host.drivers import cuda, cuda_api, hip, hip_api
from mori_triton.host.drivers.library import Library

INVALID, OUT_OF_MEMORY, NO_DEVICE, NO_CONTEXT, NOT_FOUND, ALREADY = 1, 2, 101, 201, 500, 704
TEXTS = {
    INVALID: (b"ERROR_INVALID_VALUE", b"invalid argument"),
    OUT_OF_MEMORY: (b"ERROR_OUT_OF_MEMORY", b"out of memory"),
    NO_DEVICE: (b"ERROR_INVALID_DEVICE", b"invalid device ordinal"),
    NO_CONTEXT: (b"ERROR_INVALID_CONTEXT", b"invalid device context"),
    NOT_FOUND: (b"ERROR_NOT_FOUND", b"named symbol not found"),
    ALREADY: (b"ERROR_PEER_ACCESS_ALREADY_ENABLED", b"peer access is already enabled"),
}
GRANULE = 1 << 21
WITHOUT_DEVICE = {"init", "device_count", "device", "version", "device_get", "device_set", "last_error"}


class _TextFunction:
    """A function that returns a C string, which a callback cannot."""

    def __init__(self, function):
        self.function, self.argtypes, self.restype = function, None, None

    def __call__(self, *args):
        return self.function(*args)


class FakeGpus:
    """`devices` GPUs that reach each other unless `peers` is False."""

    def __init__(self, table, *, devices: int = 2, peers: bool = True, version: int = 70_200_000) -> None:
        self.devices, self.peers, self.version = devices, peers, version
        self.calls: list[tuple] = []
        self.fail: dict[str, int] = {}
        self.last_error = 0
        # HIP starts every thread on device 0, CUDA on none
        self.first = [0] if "device_set" in table else []
        self.current: dict[int, list[int]] = defaultdict(self.first.copy)
        self.contexts: Counter[int] = Counter()
        kinds = ("device", "host", "reserved", "mapped", "handles", "registered")
        self.memory: dict[str, dict] = {kind: {} for kind in kinds}
        self.opened: Counter[int] = Counter()
        self.access: set[tuple] = set()
        # captures begun, and the stream of the one that goes on
        self.captures, self.captured = 0, ()
        self.others: dict[str, set[int]] = {kind: set() for kind in ("streams", "events", "graphs", "executables")}
        self.exports: dict[int, int] = {}
        self.globals: dict[bytes, int] = {}
        # where memory that was freed is to be handed out again
        self.next_address = 0
        self._numbers = itertools.count(0x1000)
        self._buffers: dict[int, object] = {}
        self._kept = []
        for key, row in table.items():
            if row.restype is ctypes.c_char_p:
                function = _TextFunction(functools.partial(self.text, key))
            else:
                function = ctypes.CFUNCTYPE(row.restype, *row.argtypes)(functools.partial(self.serve, key))
            self._kept.append(function)
            setattr(self, row.symbol, function)

    # what tests ask

    def left(self) -> dict[str, object]:
        """What has not been given back."""
        everything = {**self.memory, **self.others, "opened": +self.opened, "contexts": +self.contexts}
        everything["current"] = {thread: stack for thread, stack in self.current.items() if stack != self.first}
        return {kind: held for kind, held in everything.items() if held}

    def keys(self) -> list[str]:
        """Calls since the last `clear`, without those that only make a device current."""
        return [key for key, *_ in self.calls if not key.startswith(("context_p", "device_get", "device_set"))]

    def of(self, key: str) -> list[tuple]:
        return [tuple(arguments) for name, *arguments in self.calls if name == key]

    # the library

    def serve(self, key: str, *args) -> int:
        plain = [arg if isinstance(arg, (int, bytes, type(None), ctypes.Structure)) else "out" for arg in args]
        self.calls.append((key, *plain))
        if key in self.fail:
            status = self.fail[key]
        elif key not in WITHOUT_DEVICE and not key.startswith(("context", "error")) and self.device() is None:
            status = NO_CONTEXT
        else:
            status = getattr(self, "do_" + key)(*args) or 0
        if status and key != "last_error":
            self.last_error = status
        return status

    def text(self, key: str, status: int) -> bytes:
        return TEXTS[status][key == "error_string"]

    def device(self) -> int | None:
        stack = self.current[threading.get_ident()]
        return stack[-1] if stack else None

    def _new(self, kind: str, num_bytes: int, out) -> int:
        if num_bytes >= 1 << 50:
            return OUT_OF_MEMORY
        alignment = 4096 if num_bytes >= 4096 else 256
        buffer = (ctypes.c_ubyte * (num_bytes + alignment - 1))()
        address = -(-ctypes.addressof(buffer) // alignment) * alignment
        if self.next_address:
            address, self.next_address, buffer = self.next_address, 0, self._buffers[self.next_address]
        ctypes.memset(address, 0xA5, num_bytes)
        self._buffers[address] = buffer
        self.memory[kind][address] = num_bytes
        out[0] = address
        return 0

    def _drop(self, kind: str, address) -> int:
        if address not in self.memory[kind]:
            return INVALID
        del self.memory[kind][address]
        return 0

    def _number(self, kind: str, out) -> int:
        number = next(self._numbers)
        self.others[kind].add(number)
        out[0] = number
        return 0

    def _end(self, kind: str, number) -> int:
        if number not in self.others[kind]:
            return INVALID
        self.others[kind].remove(number)
        return 0

    def do_init(self, flags):
        pass

    def do_error_name(self, status, out):
        # the caller looks at it later: these bytes stay
        out[0] = TEXTS[status][0]

    def do_error_string(self, status, out):
        out[0] = TEXTS[status][1]

    def do_last_error(self):
        old, self.last_error = self.last_error, 0
        return old

    def do_version(self, out):
        out[0] = self.version

    def do_device_count(self, out):
        out[0] = self.devices

    def do_device(self, out, index):
        if not 0 <= index < self.devices:
            return NO_DEVICE
        out[0] = 10 + index

    def do_pci_bus_id(self, out, size, device):
        text = f"0000:{device % 10 + 0x1A:02X}:00.0".encode() + b"\0"
        if len(text) > size:
            return INVALID
        ctypes.memmove(out, text, len(text))

    def do_context_retain(self, out, device):
        self.contexts[device] += 1
        out[0] = 0xC0000 + device

    def do_context_release(self, device):
        self.contexts[device] -= 1

    def do_context_push(self, context):
        self.current[threading.get_ident()].append(context - 0xC0000 - 10)

    def do_context_pop(self, out):
        out[0] = 0xC0000 + 10 + self.current[threading.get_ident()].pop()

    def do_context_set(self, context):
        self.current[threading.get_ident()] = [context - 0xC0000 - 10]

    def do_device_get(self, out):
        out[0] = self.device() or 0

    def do_device_set(self, index):
        self.current[threading.get_ident()] = [index]

    def do_synchronize(self):
        pass

    def do_can_access_peer(self, out, device, peer):
        out[0] = self.peers and device != peer

    def do_enable_peer_access(self, peer, flags):
        pair = (self.device(), peer)
        if pair in self.access:
            return ALREADY
        self.access.add(pair)

    def do_mem_alloc(self, out, num_bytes):
        return self._new("device", num_bytes, out)

    def do_mem_alloc_flags(self, out, num_bytes, flags):
        return self._new("device", num_bytes, out)

    def do_mem_free(self, address):
        return self._drop("device", address)

    def do_host_alloc(self, out, num_bytes, flags):
        return self._new("host", num_bytes, out)

    def do_host_free(self, address):
        return self._drop("host", address)

    def do_host_register(self, address, num_bytes, flags):
        if address % 4096 or num_bytes % 4096 or address in self.memory["registered"]:
            return INVALID
        self.memory["registered"][address] = (num_bytes, flags)

    def do_host_unregister(self, address):
        return self._drop("registered", address)

    def do_host_device_pointer(self, out, address, flags):
        if address not in self.memory["registered"]:
            return INVALID
        # elsewhere than the process sees it, as with registers
        out[0] = address + 0x100000000000

    def do_dma_buf(self, out, address, num_bytes, kind, flags):
        # AMD's driver takes other addresses too, and gives a descriptor of the whole allocation all the same
        if address not in self.memory["device"] or num_bytes % 4096 or (kind, flags) != (1, 0):
            return INVALID
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = os.memfd_create("fake dma-buf")

    def do_memcpy(self, dst, src, num_bytes, *_):
        ctypes.memmove(dst, src, num_bytes)

    def do_memset(self, address, value, num_bytes, stream):
        ctypes.memset(address, value, num_bytes)

    def do_ipc_get(self, out, address):
        # a handle stands for the allocation, whatever address inside it is given
        base = next(base for base, size in self.memory["device"].items() if base <= address < base + size)
        ctypes.memmove(out, base.to_bytes(8, "little"), 8)

    def do_ipc_open(self, out, handle, flags):
        out[0] = int.from_bytes(bytes(handle)[:8], "little")
        self.opened[out[0]] += 1

    def do_ipc_close(self, address):
        self.opened[address] -= 1

    def do_map_granularity(self, out, prop, option):
        out[0] = GRANULE

    def do_map_create(self, out, num_bytes, prop, flags):
        if num_bytes % GRANULE or num_bytes >= 1 << 50:
            return INVALID if num_bytes % GRANULE else OUT_OF_MEMORY
        out[0] = handle = next(self._numbers)
        self.memory["handles"][handle] = (num_bytes, prop[0].type, prop[0].requestedHandleTypes, prop[0].location.id)

    def do_map_release(self, handle):
        return self._drop("handles", handle)

    def do_map_reserve(self, out, num_bytes, alignment, address, flags):
        return self._new("reserved", num_bytes, out)

    def do_map_unreserve(self, address, num_bytes):
        return self._drop("reserved", address)

    def do_map(self, address, num_bytes, offset, handle, flags):
        if self.memory["reserved"].get(address) != num_bytes or handle not in self.memory["handles"]:
            return INVALID
        if address in self.memory["mapped"]:
            # as real libraries do not
            return INVALID
        self.memory["mapped"][address] = handle

    def do_unmap(self, address, num_bytes):
        return self._drop("mapped", address)

    def do_map_access(self, address, num_bytes, descriptors, count):
        if address not in self.memory["mapped"]:
            return INVALID
        self.access.add((address, descriptors[0].location.id, descriptors[0].flags))

    def do_map_export(self, out, handle, kind, flags):
        descriptor = os.memfd_create("fake")
        self.exports[os.fstat(descriptor).st_ino] = handle
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = descriptor

    def do_map_import(self, out, argument, kind):
        # an address is never as small as a descriptor
        descriptor = argument if argument < 1 << 16 else ctypes.c_int.from_address(argument).value
        handle = self.exports[os.fstat(descriptor).st_ino]
        out[0] = imported = next(self._numbers)
        self.memory["handles"][imported] = self.memory["handles"][handle]

    def do_stream_create(self, out, flags):
        return self._number("streams", out)

    def do_stream_destroy(self, stream):
        return self._end("streams", stream)

    def do_stream_synchronize(self, stream):
        pass

    def do_stream_wait_event(self, stream, event, flags):
        pass

    def do_event_create(self, out, flags):
        return self._number("events", out)

    def do_event_destroy(self, event):
        return self._end("events", event)

    def do_event_record(self, event, stream):
        pass

    def do_capture_begin(self, stream, mode):
        self.captures += 1
        self.captured = stream

    def do_capture_info(self, stream, status, out):
        if self.captured == stream:
            status[0], out[0] = 1, self.captures
        else:
            # a capture that failed is none that goes on
            status[0], out[0] = 2, 77

    def do_capture_end(self, stream, out):
        self.captured = ()
        return self._number("graphs", out)

    def do_graph_instantiate(self, out, graph, flags):
        return self._number("executables", out)

    def do_graph_launch(self, graph, stream):
        pass

    def do_graph_destroy(self, graph):
        return self._end("graphs", graph)

    def do_graph_exec_destroy(self, graph):
        return self._end("executables", graph)

    def do_module_global(self, out, size, module, name):
        if name not in self.globals:
            return NOT_FOUND
        out[0], size[0] = self.globals[name], 8


def fake_driver(kind: str, index: int = 0, *, gpus: FakeGpus | None = None, **options):
    """A driver of `kind` "cuda" or "hip" on doubles, and the doubles."""
    module, api = (cuda, cuda_api) if kind == "cuda" else (hip, hip_api)
    gpus = gpus or FakeGpus(api.FUNCTIONS)
    library = Library(f"fake {kind}", gpus, api.FUNCTIONS, module._describe, optional=api.OPTIONAL)
    made = module.CudaDriver if kind == "cuda" else module.HipDriver
    return made(index, library=library, **options), gpus
