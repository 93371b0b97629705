"""libamdhip64's C interface, as far as `HipDriver` uses it. Pure data; tests compare it with hip_runtime_api.h.

Keys and names are those of `cuda_api` wherever the function is the same.
"""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_ulonglong,
    c_ushort,
    c_void_p,
)

from mori_triton.host.drivers.library import Function

LIBRARY_STEM = "libamdhip64.so"
LIBRARY_NAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")

# versions are major * 10^7 + minor * 10^5 + patch; HIP 5 lays out structs in another way
VERSION_MINIMUM = 6 * 10_000_000
# from here on a descriptor to import is given by its number, before it by its address
VERSION_DESCRIPTOR_BY_VALUE = 7 * 10_000_000 + 1 * 100_000

ERROR_PEER_ACCESS_ALREADY_ENABLED = 704

HOST_MALLOC_PORTABLE, HOST_MALLOC_MAPPED, HOST_MALLOC_COHERENT = 1, 2, 0x40000000
HOST_REGISTER_PORTABLE, HOST_REGISTER_MAPPED = 1, 2
# HIP has a flag for registers too, which does nothing
HOST_REGISTER_IO = 0
MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1
DEVICE_MALLOC_UNCACHED = 3
MEMCPY_DEFAULT = 4
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
STREAM_CAPTURE_STATUS_ACTIVE = 1
IPC_HANDLE_SIZE = 64
IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
MEM_ALLOCATION_TYPE_PINNED = 1
MEM_ALLOCATION_TYPE_UNCACHED = 0x40000000
MEM_LOCATION_TYPE_DEVICE = 1
MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
MEM_ACCESS_FLAGS_PROT_READWRITE = 3
GRANULARITY_MINIMUM = 0

DevicePointer = c_void_p
Handle = c_void_p
MapHandle = c_void_p


class IpcMemHandle(Structure):
    _fields_ = (("reserved", c_char * IPC_HANDLE_SIZE),)


class MemLocation(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocFlags(Structure):
    _fields_ = (("compressionType", c_ubyte), ("gpuDirectRDMACapable", c_ubyte), ("usage", c_ushort))


class MemAllocationProp(Structure):
    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", MemLocation),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", _AllocFlags),
    )


class MemAccessDesc(Structure):
    _fields_ = (("location", MemLocation), ("flags", c_int))


def _row(symbol: str, *argtypes: object) -> Function:
    return Function(symbol, argtypes)


FUNCTIONS = {
    "init": _row("hipInit", c_uint),
    "error_name": Function("hipGetErrorName", (c_int,), c_char_p),
    "error_string": Function("hipGetErrorString", (c_int,), c_char_p),
    "last_error": _row("hipGetLastError"),
    "version": _row("hipRuntimeGetVersion", POINTER(c_int)),
    # devices
    "device_count": _row("hipGetDeviceCount", POINTER(c_int)),
    "device_get": _row("hipGetDevice", POINTER(c_int)),
    "device_set": _row("hipSetDevice", c_int),
    "pci_bus_id": _row("hipDeviceGetPCIBusId", POINTER(c_char), c_int, c_int),
    "synchronize": _row("hipDeviceSynchronize"),
    "can_access_peer": _row("hipDeviceCanAccessPeer", POINTER(c_int), c_int, c_int),
    "enable_peer_access": _row("hipDeviceEnablePeerAccess", c_int, c_uint),
    # memory
    "mem_alloc": _row("hipMalloc", POINTER(DevicePointer), c_size_t),
    "mem_alloc_flags": _row("hipExtMallocWithFlags", POINTER(DevicePointer), c_size_t, c_uint),
    "mem_free": _row("hipFree", DevicePointer),
    "host_alloc": _row("hipHostMalloc", POINTER(c_void_p), c_size_t, c_uint),
    "host_free": _row("hipHostFree", c_void_p),
    "host_device_pointer": _row("hipHostGetDevicePointer", POINTER(DevicePointer), c_void_p, c_uint),
    "host_register": _row("hipHostRegister", c_void_p, c_size_t, c_uint),
    "host_unregister": _row("hipHostUnregister", c_void_p),
    "dma_buf": _row("hipMemGetHandleForAddressRange", c_void_p, DevicePointer, c_size_t, c_int, c_ulonglong),
    "memcpy": _row("hipMemcpyAsync", DevicePointer, DevicePointer, c_size_t, c_int, Handle),
    "memset": _row("hipMemsetAsync", DevicePointer, c_int, c_size_t, Handle),
    # memory of other processes
    "ipc_get": _row("hipIpcGetMemHandle", POINTER(IpcMemHandle), DevicePointer),
    "ipc_open": _row("hipIpcOpenMemHandle", POINTER(DevicePointer), IpcMemHandle, c_uint),
    "ipc_close": _row("hipIpcCloseMemHandle", DevicePointer),
    # mappings
    "map_granularity": _row("hipMemGetAllocationGranularity", POINTER(c_size_t), POINTER(MemAllocationProp), c_int),
    "map_create": _row("hipMemCreate", POINTER(MapHandle), c_size_t, POINTER(MemAllocationProp), c_ulonglong),
    "map_release": _row("hipMemRelease", MapHandle),
    "map_reserve": _row("hipMemAddressReserve", POINTER(DevicePointer), c_size_t, c_size_t, DevicePointer, c_ulonglong),
    "map_unreserve": _row("hipMemAddressFree", DevicePointer, c_size_t),
    "map": _row("hipMemMap", DevicePointer, c_size_t, c_size_t, MapHandle, c_ulonglong),
    "unmap": _row("hipMemUnmap", DevicePointer, c_size_t),
    "map_access": _row("hipMemSetAccess", DevicePointer, c_size_t, POINTER(MemAccessDesc), c_size_t),
    "map_export": _row("hipMemExportToShareableHandle", c_void_p, MapHandle, c_int, c_ulonglong),
    "map_import": _row("hipMemImportFromShareableHandle", POINTER(MapHandle), c_void_p, c_int),
    # streams, events, graphs
    "stream_create": _row("hipStreamCreateWithFlags", POINTER(Handle), c_uint),
    "stream_destroy": _row("hipStreamDestroy", Handle),
    "stream_synchronize": _row("hipStreamSynchronize", Handle),
    "stream_wait_event": _row("hipStreamWaitEvent", Handle, Handle, c_uint),
    "event_create": _row("hipEventCreateWithFlags", POINTER(Handle), c_uint),
    "event_destroy": _row("hipEventDestroy", Handle),
    "event_record": _row("hipEventRecord", Handle, Handle),
    "capture_begin": _row("hipStreamBeginCapture", Handle, c_int),
    "capture_end": _row("hipStreamEndCapture", Handle, POINTER(Handle)),
    "capture_info": _row("hipStreamGetCaptureInfo", Handle, POINTER(c_int), POINTER(c_ulonglong)),
    "graph_instantiate": _row("hipGraphInstantiateWithFlags", POINTER(Handle), Handle, c_ulonglong),
    "graph_launch": _row("hipGraphLaunch", Handle, Handle),
    "graph_destroy": _row("hipGraphDestroy", Handle),
    "graph_exec_destroy": _row("hipGraphExecDestroy", Handle),
    # modules
    "module_global": _row("hipModuleGetGlobal", POINTER(DevicePointer), POINTER(c_size_t), Handle, c_char_p),
}
# since ROCm 7
OPTIONAL = {"dma_buf"}
