"""What a PE is while shmem is initialised, and which one the calling code runs as.

In a local world every PE is a thread, and each thread is bound to its own state. In a process of its own a PE has one
state for the whole process. After `close` a state stays where it is, so that late calls get an error and not a crash.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mori_triton import bitcode
from mori_triton.env import Settings
from mori_triton.errors import StateError
from mori_triton.host.bootstrap.base import Bootstrap
from mori_triton.host.drivers.base import Driver, MemoryKind
from mori_triton.host.drivers.identity import process_identity
from mori_triton.host.heap import SymmetricHeap
from mori_triton.host.network import Fabric, Network, Site
from mori_triton.host.network.choose import open_network
from mori_triton.host.peers import undo_all
from mori_triton.host.shared_memory import SharedMemory
from mori_triton.host.tables import Region

# makes a PE's memory known to whatever runs its kernels; returns how to undo that
Attach = Callable[["PeState"], Callable[[], None]]


@dataclass(eq=False)
class PeState:
    """One PE of a world that is up. Made by `open_state`."""

    bootstrap: Bootstrap
    driver: Driver
    heap: SymmetricHeap
    settings: Settings
    attach: Attach | None
    owns_bootstrap: bool
    # what upper layers keep per PE
    extensions: dict[str, Any] = field(default_factory=dict)
    # called once, last first, by a finalize of a healthy world, before the heap closes
    on_close: list[Callable[[], None]] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)
    closed: bool = False
    # how the PEs of a world on GPUs in one process wait for each other; None: nobody has to
    rendezvous: Callable[[str], None] | None = None
    # what PEs that are not mapped are reached through; None: not at all
    network: Network | None = None
    # what `open_state` was given
    fabric: Fabric | None = None
    # lets this PE's kernels touch more memory, returns how to undo that. Set by `attach`; None: they may touch any
    expose: Callable[[Sequence[Region]], Callable[[], None]] | None = None
    _shared: list[SharedMemory] = field(default_factory=list)
    _detach: Callable[[], None] | None = None

    @property
    def pe(self) -> int:
        return self.bootstrap.pe

    @property
    def n_pes(self) -> int:
        return self.bootstrap.n_pes

    @property
    def timeout_s(self) -> float:
        """Limit of a wait in a kernel, in seconds."""
        return self.settings.wait_timeout_s

    @property
    def provider(self) -> str:
        """Whose requests kernels write for PEs that are not mapped, of `abi.PROVIDERS`; "p2p": nobody's."""
        return "p2p" if self.network is None else self.network.provider

    def regions(self) -> list[Region]:
        """Everything this PE's kernels may touch besides their own arguments."""
        shared = [region for memory in self._shared for region in memory.regions()]
        return self.heap.regions() + shared + (self.network.regions() if self.network is not None else [])

    def share(self, num_bytes: int, kind: MemoryKind, name: str) -> SharedMemory:
        """Symmetric memory of a kind of its own, beside the heap, mapped by the PEs that the heap reaches. Collective.

        `unshare` gives it back; what is left is given back when the state closes. Errors are those of `SharedMemory`.
        """
        reached = [self.heap.reaches(pe) for pe in range(self.n_pes)]
        memory = SharedMemory(self.driver, self.bootstrap, num_bytes, kind=kind, reached=reached, name=name)
        self._shared.append(memory)
        if self.expose is not None:
            memory.hide = self.expose(memory.regions())
        return memory

    def unshare(self, memory: SharedMemory) -> None:
        """Give back what `share` made. Local; this PE's kernels and its peers' must be done with it."""
        self._shared.remove(memory)
        memory.close()

    def check_errors(self) -> None:
        """Raise what kernels of this PE, or its network, have found wrong, if anything. Waits for nobody."""
        self.heap.check_errors()
        if self.network is not None:
            self.network.check()

    @property
    def gpus_per_node(self) -> int:
        """How many PEs make up a node."""
        return self.settings.gpus_per_node or self.n_pes

    @property
    def node(self) -> int:
        """Index of this PE's node, by `gpus_per_node`."""
        return self.pe // self.gpus_per_node

    def meet(self, what: str) -> None:
        """Collective: return when every PE of a world on GPUs in this process has come here. Elsewhere a no-op.

        Loading a kernel waits for those that run, so a PE that still has to load or launch something must not be
        waited for by a kernel: meet before the first launch that waits for peers, and again after it. Also a no-op
        with one PE, and while `world.graph` captures. Nothing is launched and no device is waited for.

        Raises `PeerTimeout` naming the PEs that are missing, `StateError` when a PE has failed or calls something else.
        """
        if self.rendezvous is not None:
            self.rendezvous(what)

    def close(self, *, failed: bool = False) -> None:
        """End this PE. Idempotent.

        Collective: nobody's memory is unmapped while a peer may use it. Raises, when all is done, what kernels have
        recorded. `failed`: local only, for a world that has lost a PE or a process that is exiting; it waits for
        nobody and skips `on_close`.
        """
        if self.closed:
            if failed and not self.heap.closed:
                self._give_back()
            return
        self.closed = True
        # peers that have not come here may still be using this PE's memory: a world that outlives it gives it back
        done = failed or self.owns_bootstrap
        try:
            if not failed:
                for callback in reversed(self.on_close):
                    callback()
                self.driver.synchronize()
                if self.network is not None:
                    self.network.quiet()
                # before anybody frees: what a mapping is afterwards, GPU libraries do not say
                self.heap.disconnect()
                for memory in self._shared:
                    memory.disconnect()
                self.bootstrap.barrier("shmem finalize")
                done = True
                # what a kernel has recorded and nobody has asked for must not go down with the heap
                self.check_errors()
        finally:
            self.on_close.clear()
            self.extensions.clear()
            if done:
                self._give_back()

    def _give_back(self) -> None:
        """Everything, also when a device that has failed does not take it."""
        try:
            self._abandon()
        finally:
            if self.owns_bootstrap:
                self.bootstrap.close()
                self.driver.close()

    def _abandon(self) -> None:
        """What `open_state` has made, last first."""
        undo: list[Callable[[], None]] = [memory.close for memory in reversed(self._shared)]
        undo += [self._detach] if self._detach is not None else []
        undo += [self.network.close] if self.network is not None else []
        self._shared.clear()
        self._detach = None
        undo_all([*undo, self.heap.close])


# called with every state that opens, on its PE's thread
on_open: list[Callable[[PeState], None]] = []


def open_state(
    bootstrap: Bootstrap,
    driver: Driver,
    settings: Settings,
    *,
    attach: Attach | None = None,
    fabric: Fabric | None = None,
    owns_bootstrap: bool = True,
) -> PeState:
    """Build this PE's heap, context and network. Collective; errors are those of `SymmetricHeap` and `open_network`.

    `fabric`: what connects PEs that are not mapped; None: what `settings.transport` says.
    `owns_bootstrap`: `close` also ends bootstrap and driver; a world that outlives its PEs' finalize keeps them.
    """
    node = node_identity(settings.node_id)
    kind = MemoryKind.CACHED if settings.heap_type == "normal" else MemoryKind.UNCACHED
    kind = kind if fabric is None else fabric.heap_kind or kind
    state = PeState(bootstrap, driver, _open_heap(bootstrap, driver, settings, kind), settings, attach, owns_bootstrap)
    state.fabric = fabric

    def site(kind: MemoryKind) -> Site:
        far = tuple(pe for pe in range(state.n_pes) if not state.heap.reaches(pe))
        return Site(bootstrap, driver, state.heap.base, settings.heap_bytes, kind, far, node, settings)

    def move(kind: MemoryKind) -> Site:
        state.heap.disconnect()
        bootstrap.barrier("heap given up for one of another kind")
        state.heap.close()
        state.heap = _open_heap(bootstrap, driver, settings, kind)
        return site(kind)

    try:
        state.network = open_network(site(kind), move, fabric)
        if state.network is not None:
            state.heap.set_network(state.network.address)
        if attach is not None:
            state._detach = attach(state)
        for tell in on_open:
            tell(state)
    except BaseException:
        state._abandon()
        raise
    return state


def _open_heap(bootstrap: Bootstrap, driver: Driver, settings: Settings, kind: MemoryKind) -> SymmetricHeap:
    node = node_identity(settings.node_id)
    if kind is MemoryKind.FINE_GRAINED and driver.name != "cpu":
        # no other process can map it
        node += f", process {process_identity()}"
    return SymmetricHeap(
        driver,
        bootstrap,
        settings.heap_bytes,
        kind=kind,
        timeout_s=settings.wait_timeout_s,
        node=node,
        gpus_per_node=settings.gpus_per_node,
        reach_peers=not settings.disable_p2p,
    )


def node_identity(node_id: str | None, boot_id: str | None = None, host_name: str | None = None) -> str:
    """What PEs of one node share: the given id, else the kernel's boot id, else the host name. None: ask the system."""
    if node_id:
        return f"id {node_id}"
    if boot_id is None:
        try:
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            boot_id = ""
    return f"boot {boot_id}" if boot_id else f"host {socket.gethostname() if host_name is None else host_name}"


_thread = threading.local()
_process: PeState | None = None
_process_lock = threading.Lock()


def bind(state: PeState) -> None:
    """The calling thread runs as this PE."""
    _thread.state = state


def unbind() -> None:
    """The calling thread runs as no PE of its own."""
    _thread.state = None


def bound() -> PeState | None:
    """The state of the calling thread, open or closed, if it was bound to one."""
    return getattr(_thread, "state", None)


def set_process_state(state: PeState) -> None:
    """The whole process runs as this PE, except threads bound to another. It is closed at exit, at the latest."""
    global _process
    with _process_lock:
        if _process is None:
            atexit.register(_close_at_exit)
        _process = state


def find() -> PeState | None:
    """The open state the calling code runs as, None if there is none."""
    state = bound() or _process
    return state if state is not None and not state.closed and state.pid == os.getpid() else None


def current() -> PeState:
    """The state the calling code runs as. Raises `StateError` before init, after finalize, and in a forked child."""
    state = bound() or _process
    if state is None:
        raise StateError(
            "shmem is not initialised here: call shmem_torch_process_group_init or shmem_init_attr, "
            "or run inside mori_triton.local_world"
        )
    if state.closed:
        raise StateError(f"shmem was finalized (it was PE {state.pe} of {state.n_pes}): initialise it again before use")
    if state.pid != os.getpid():
        raise StateError("shmem was initialised in the process this one was forked from; start processes with spawn")
    return state


def _provider_here() -> str | None:
    here = find()
    return None if here is None else here.provider


# kernels are linked by code that knows nothing of hosts
bitcode.answer_provider(_provider_here)


def _close_at_exit() -> None:
    # peers may be gone or still at work: nothing collective here
    if _process is not None and _process.pid == os.getpid():
        _process.close(failed=True)
