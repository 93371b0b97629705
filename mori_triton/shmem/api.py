"""MORI's host API, by its names and argument order. Every call acts for the PE that the calling code runs as."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mori_triton import abi, env
from mori_triton.errors import ArgumentError, EnvError, StateError, require
from mori_triton.host import drivers, state
from mori_triton.host.bootstrap import tcp
from mori_triton.host.tables import Region

if TYPE_CHECKING:
    import torch

MORI_SHMEM_INIT_WITH_MPI_COMM = 0
MORI_SHMEM_INIT_WITH_UNIQUEID = 1


def shmem_torch_process_group_init(group_name: Any) -> int:
    """Initialise with the PEs of a torch process group: a PE is a rank in that group. Collective over the group.

    `group_name`: the name it was registered under, "default" for the default group, or the group itself. Any backend.
    Returns 0, also when shmem is up already. Raises `StateError` without torch.distributed, `PeerTimeout` naming the
    PEs that are missing.
    """
    if _is_up():
        return 0
    from mori_triton.host.bootstrap.process_group import bootstrap_of_group

    settings = env.snapshot()
    _open(bootstrap_of_group(group_name, settings.bootstrap_timeout_s, settings.socket_ifnames), settings)
    return 0


def shmem_mpi_init() -> int:
    """Not available: this package has no MPI bootstrap."""
    raise StateError("no MPI bootstrap: use shmem_torch_process_group_init, or shmem_get_unique_id and shmem_init_attr")


def shmem_get_unique_id() -> bytes:
    """128 bytes by which the PEs of one world find each other; pass them on by any means.

    The calling process serves the world's host collectives from now on, and has to live as long as the world; it is
    usually that of PE 0. Needs no torch.distributed.
    """
    settings = env.snapshot()
    return tcp.new_unique_id(settings.socket_ifnames)


def shmem_init_attr(flags: int, rank: int, nranks: int, unique_id: bytes) -> int:
    """Initialise as PE `rank` of `nranks`. Collective.

    Returns 0, also when shmem is up already (the arguments are then ignored, as in MORI). Raises `ArgumentError` for a
    rank, count or id that cannot be, `PeerTimeout` naming the PEs that are missing within MORI_BOOTSTRAP_TIMEOUT.
    """
    if _is_up():
        return 0
    if flags == MORI_SHMEM_INIT_WITH_MPI_COMM:
        return shmem_mpi_init()
    require(flags == MORI_SHMEM_INIT_WITH_UNIQUEID, "flags", "MORI_SHMEM_INIT_WITH_UNIQUEID", flags)
    require(isinstance(unique_id, (bytes, bytearray, memoryview)), "unique_id", "bytes", type(unique_id).__name__)
    settings = env.snapshot()
    _open(tcp.TcpBootstrap(bytes(unique_id), rank, nranks, timeout_s=settings.bootstrap_timeout_s), settings)
    return 0


def shmem_finalize() -> int:
    """End shmem for this PE; returns 0. Collective: PEs wait for each other before memory is unmapped.

    Raises `StateError` before init and when called twice, and, when all is done, what kernels of this PE have recorded
    and nobody has asked for. Tensors that are still held become stale, not dangling.
    """
    state.current().close()
    return 0


def shmem_module_init(hip_module: Any) -> int:
    """Give a loaded module this PE's context, for kernels that use MORI's names without a `ctx` argument; returns 0.

    Raises `DriverError` if the module has no `mori_shmem_context`: it was not linked with the device bitcode.
    """
    here = state.current()
    address, num_bytes = here.driver.module_global(hip_module, abi.CONTEXT_SYMBOL)
    require(num_bytes == 8, f"size of {abi.CONTEXT_SYMBOL}", "8 bytes", num_bytes)
    here.driver.write(address, struct.pack("<Q", here.heap.ctx_address))
    return 0


def shmem_mype() -> int:
    """This PE's index."""
    return state.current().pe


def shmem_npes() -> int:
    """Number of PEs."""
    return state.current().n_pes


def shmem_barrier_all() -> None:
    """Wait for this PE's device, then for all PEs. Collective.

    Raises `PeerTimeout` or `KernelFault` if a kernel of this PE has recorded an error, after all PEs have come.
    """
    here = state.current()
    here.driver.synchronize()
    here.bootstrap.barrier("shmem_barrier_all")
    here.check_errors()


def shmem_barrier_on_stream(stream: Any = None) -> None:
    """What is put on `stream` after this starts when what all PEs have put on theirs before it is done. Collective.

    `stream`: a torch stream or its handle; None: the current one. Asynchronous: a PE that does not come is found by the
    kernel's limit, and raised by the next call that looks for errors, such as `shmem_barrier_all`. The barriers of a PE
    come one after the other: use one stream, or order them by events. On the CPU launches are done when they return,
    so this is `shmem_barrier_all`.
    """
    here = state.current()
    if here.driver.name == "cpu":
        shmem_barrier_all()
        return
    from mori_triton.shmem.stream_barrier import enqueue_barrier

    enqueue_barrier(here, stream)


def shmem_malloc(size: int) -> int:
    """Address of `size` symmetric bytes, 256-byte aligned, uninitialised; 0 for size 0. Collective.

    Raises `HeapError` on every PE when PEs differ or the heap has no room.
    """
    return state.current().heap.malloc(_integer("size", size))


def shmem_malloc_align(alignment: int, size: int) -> int:
    """As `shmem_malloc`, with the address a multiple of `alignment`, a power of two (`ArgumentError` otherwise)."""
    return state.current().heap.malloc(_integer("size", size), _integer("alignment", alignment))


def shmem_ext_malloc_with_flags(size: int, flags: int) -> int:
    """As `shmem_malloc`. `flags` would pick a memory kind, which the heap has as a whole (MORI_SHMEM_HEAP_TYPE)."""
    _integer("flags", flags)
    return shmem_malloc(size)


def shmem_free(ptr: int | None) -> None:
    """Free what a malloc returned, on every PE before the next malloc. 0 and None are ignored; else `HeapError`."""
    state.current().heap.free(None if ptr is None else _integer("ptr", ptr))


def shmem_buffer_register(ptr: int, size: int) -> int:
    """Register memory outside the heap with the network card; not available: kernels send from the heap."""
    state.current()
    raise StateError(_NO_RDMA.format(f"register {size} bytes at {ptr:#x}"))


def shmem_buffer_deregister(ptr: int, size: int) -> int:
    """Undo `shmem_buffer_register`; not available."""
    state.current()
    raise StateError(_NO_RDMA.format(f"deregister {size} bytes at {ptr:#x}"))


def shmem_ptr_p2p(dest_ptr: int, my_pe: int, dest_pe: int) -> int:
    """Where this PE can load and store what is at symmetric address `dest_ptr` on `dest_pe`.

    0: that PE is not mapped here, or the address is outside this PE's heap. Raises `ArgumentError` for a PE that does
    not exist, and for a `my_pe` that is not this PE.
    """
    here = state.current()
    require(my_pe == here.pe, "my_pe", f"{here.pe}, the calling PE", my_pe)
    return here.heap.peer_address(_integer("dest_ptr", dest_ptr), dest_pe)


def shmem_num_qp_per_pe() -> int:
    """Queue pairs to each PE that is reached through a network card (MORI_NUM_QP_PER_PE at init)."""
    return state.current().settings.num_qp_per_pe


def context() -> torch.Tensor:
    """This PE's device context, the `ctx` argument of kernels: an int64 tensor that is valid until finalize."""
    return state.current().heap.ctx


_NO_RDMA = "cannot {}: over a network kernels send from the symmetric heap only; put the buffer there (shmem_malloc)"


# a wait of the device library ends first, with a record that says more
_GRACE_S = 1.0


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise ArgumentError(f"{name}: want an integer, got {value!r}") from error


def _is_up() -> bool:
    """Whether this PE is initialised; one that finalized in a local world is opened again, as part of it."""
    if state.find() is not None:
        return True
    old = state.bound()
    if old is None or old.owns_bootstrap:
        return False
    state.bind(
        state.open_state(
            old.bootstrap, old.driver, old.settings, attach=old.attach, fabric=old.fabric, owns_bootstrap=False
        )
    )
    return True


def _open(bootstrap: Any, settings: env.Settings) -> None:
    driver = None
    try:
        driver = drivers.open_driver(settings.device, heap_mode=settings.heap_mode)
        attach = _attach_emulator if driver.name == "cpu" else None
        state.set_process_state(state.open_state(bootstrap, driver, settings, attach=attach))
    except BaseException:
        bootstrap.close()
        if driver is not None:
            driver.close()
        raise


def _attach_emulator(here: state.PeState) -> Callable[[], None]:
    """Make this process's kernels run on the emulated device and let them touch the heaps."""
    from mori_triton import emulator
    from mori_triton.emulator import scheduler
    from mori_triton.emulator.device import device as device_of

    try:
        driver = emulator.activate(here.settings.arch)
    except ArgumentError as error:
        raise EnvError(f"MORI_TRITON_ARCH: {error}") from error
    device = emulator.current_device()
    device_of(device).set_global(abi.CONTEXT_SYMBOL, struct.pack("<Q", here.heap.ctx_address))

    def expose(regions: Sequence[Region]) -> Callable[[], None]:
        for region in regions:
            emulator.allow(device, region.address, region.num_bytes, region.name)

        def hide() -> None:
            for region in regions:
                emulator.disallow(device, region.address)

        return hide

    here.expose = expose
    hide = expose(here.regions())

    # a kernel that spins on its own, not in a wait of the device library, ends as well
    scheduler.bind(scheduler.Parallel(here.timeout_s + _GRACE_S))

    def detach() -> None:
        scheduler.bind(None)
        device_of(device).set_global(abi.CONTEXT_SYMBOL, bytes(8))
        hide()
        driver.deactivate()

    return detach
