"""libcuda's C interface, as far as `CudaDriver` uses it. Pure data; tests compare it with cuda.h."""

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

LIBRARY_NAMES = ("libcuda.so.1", "libcuda.so")

ERROR_PEER_ACCESS_ALREADY_ENABLED = 704

MEMHOSTREGISTER_PORTABLE, MEMHOSTREGISTER_DEVICEMAP, MEMHOSTREGISTER_IOMEMORY = 1, 2, 4
# the names that HIP has for them
HOST_REGISTER_PORTABLE, HOST_REGISTER_MAPPED = MEMHOSTREGISTER_PORTABLE, MEMHOSTREGISTER_DEVICEMAP
HOST_REGISTER_IO = MEMHOSTREGISTER_IOMEMORY
MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1
MEMHOSTALLOC_PORTABLE, MEMHOSTALLOC_DEVICEMAP = 1, 2
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
STREAM_CAPTURE_STATUS_ACTIVE = 1
IPC_HANDLE_SIZE = 64
IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
MEM_ALLOCATION_TYPE_PINNED = 1
MEM_LOCATION_TYPE_DEVICE = 1
MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
MEM_ACCESS_FLAGS_PROT_READWRITE = 3
GRANULARITY_MINIMUM = 0

# handles are opaque pointers; device addresses and mapping handles are 64-bit numbers
DevicePointer = c_ulonglong
Handle = c_void_p
MapHandle = c_ulonglong


class IpcMemHandle(Structure):
    _fields_ = (("reserved", c_char * IPC_HANDLE_SIZE),)


class MemLocation(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocFlags(Structure):
    _fields_ = (
        ("compressionType", c_ubyte),
        ("gpuDirectRDMACapable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


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
    "init": _row("cuInit", c_uint),
    "error_name": _row("cuGetErrorName", c_int, POINTER(c_char_p)),
    "error_string": _row("cuGetErrorString", c_int, POINTER(c_char_p)),
    # devices and contexts
    "device_count": _row("cuDeviceGetCount", POINTER(c_int)),
    "device": _row("cuDeviceGet", POINTER(c_int), c_int),
    "pci_bus_id": _row("cuDeviceGetPCIBusId", POINTER(c_char), c_int, c_int),
    "context_retain": _row("cuDevicePrimaryCtxRetain", POINTER(Handle), c_int),
    "context_release": _row("cuDevicePrimaryCtxRelease_v2", c_int),
    "context_push": _row("cuCtxPushCurrent_v2", Handle),
    "context_pop": _row("cuCtxPopCurrent_v2", POINTER(Handle)),
    "context_set": _row("cuCtxSetCurrent", Handle),
    "synchronize": _row("cuCtxSynchronize"),
    "can_access_peer": _row("cuDeviceCanAccessPeer", POINTER(c_int), c_int, c_int),
    "enable_peer_access": _row("cuCtxEnablePeerAccess", Handle, c_uint),
    # memory
    "mem_alloc": _row("cuMemAlloc_v2", POINTER(DevicePointer), c_size_t),
    "mem_free": _row("cuMemFree_v2", DevicePointer),
    "host_alloc": _row("cuMemHostAlloc", POINTER(c_void_p), c_size_t, c_uint),
    "host_free": _row("cuMemFreeHost", c_void_p),
    "host_device_pointer": _row("cuMemHostGetDevicePointer_v2", POINTER(DevicePointer), c_void_p, c_uint),
    "host_register": _row("cuMemHostRegister_v2", c_void_p, c_size_t, c_uint),
    "host_unregister": _row("cuMemHostUnregister", c_void_p),
    "dma_buf": _row("cuMemGetHandleForAddressRange", c_void_p, DevicePointer, c_size_t, c_int, c_ulonglong),
    "memcpy": _row("cuMemcpyAsync", DevicePointer, DevicePointer, c_size_t, Handle),
    "memset": _row("cuMemsetD8Async", DevicePointer, c_ubyte, c_size_t, Handle),
    # memory of other processes
    "ipc_get": _row("cuIpcGetMemHandle", POINTER(IpcMemHandle), DevicePointer),
    "ipc_open": _row("cuIpcOpenMemHandle_v2", POINTER(DevicePointer), IpcMemHandle, c_uint),
    "ipc_close": _row("cuIpcCloseMemHandle", DevicePointer),
    # mappings
    "map_granularity": _row("cuMemGetAllocationGranularity", POINTER(c_size_t), POINTER(MemAllocationProp), c_int),
    "map_create": _row("cuMemCreate", POINTER(MapHandle), c_size_t, POINTER(MemAllocationProp), c_ulonglong),
    "map_release": _row("cuMemRelease", MapHandle),
    "map_reserve": _row("cuMemAddressReserve", POINTER(DevicePointer), c_size_t, c_size_t, DevicePointer, c_ulonglong),
    "map_unreserve": _row("cuMemAddressFree", DevicePointer, c_size_t),
    "map": _row("cuMemMap", DevicePointer, c_size_t, c_size_t, MapHandle, c_ulonglong),
    "unmap": _row("cuMemUnmap", DevicePointer, c_size_t),
    "map_access": _row("cuMemSetAccess", DevicePointer, c_size_t, POINTER(MemAccessDesc), c_size_t),
    "map_export": _row("cuMemExportToShareableHandle", c_void_p, MapHandle, c_int, c_ulonglong),
    "map_import": _row("cuMemImportFromShareableHandle", POINTER(MapHandle), c_void_p, c_int),
    # streams, events, graphs
    "stream_create": _row("cuStreamCreate", POINTER(Handle), c_uint),
    "stream_destroy": _row("cuStreamDestroy_v2", Handle),
    "stream_synchronize": _row("cuStreamSynchronize", Handle),
    "stream_wait_event": _row("cuStreamWaitEvent", Handle, Handle, c_uint),
    "event_create": _row("cuEventCreate", POINTER(Handle), c_uint),
    "event_destroy": _row("cuEventDestroy_v2", Handle),
    "event_record": _row("cuEventRecord", Handle, Handle),
    "capture_begin": _row("cuStreamBeginCapture_v2", Handle, c_int),
    "capture_end": _row("cuStreamEndCapture", Handle, POINTER(Handle)),
    # the first version, which every libcuda has; headers give the name to later ones
    "capture_info": _row("cuStreamGetCaptureInfo", Handle, POINTER(c_int), POINTER(c_ulonglong)),
    "graph_instantiate": _row("cuGraphInstantiateWithFlags", POINTER(Handle), Handle, c_ulonglong),
    "graph_launch": _row("cuGraphLaunch", Handle, Handle),
    "graph_destroy": _row("cuGraphDestroy", Handle),
    "graph_exec_destroy": _row("cuGraphExecDestroy", Handle),
    # modules
    "module_global": _row("cuModuleGetGlobal_v2", POINTER(DevicePointer), POINTER(c_size_t), Handle, c_char_p),
}
# since CUDA 11.7
OPTIONAL = {"dma_buf"}
