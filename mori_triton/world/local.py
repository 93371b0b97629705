"""`local_world`: all PEs of a world as threads of this process, on the emulated device or on this machine's GPUs.

On the CPU each PE has an emulated GPU of its own. By default the PEs run in parallel; with a seed exactly one of {the
PEs' host threads, the device} runs at a time and the seed alone decides every switch, so a run repeats exactly.

On GPUs each PE has a stream of its own, which is current in its thread, on GPU `pe % number of GPUs`: several PEs may
share one. Loading a kernel there waits for the kernels that run, so nobody may load anything while a kernel waits for
him. The ops of this package see to it; for kernels of your own, `LocalWorld.preload` loads them beforehand.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mori_triton import env
from mori_triton.emulator import device as devices
from mori_triton.errors import ArgumentError, StateError, require
from mori_triton.host import drivers
from mori_triton.world import network as world_network
from mori_triton.world.graph import WorldGraph
from mori_triton.world.ledger import byte_ledger
from mori_triton.world.run import Run, running

if TYPE_CHECKING:
    from mori_triton.emulator.ledger import ByteLedger

DEFAULT_ARCH = "gfx1201"
GPU_DEVICES = ("cuda", "hip")


def local_world(
    n: int,
    device: str = "cpu",
    *,
    heap_size: str | int = "64M",
    gpus_per_node: int | None = None,
    arch: str | None = None,
    seed: int | None = None,
    weak_memory: bool = False,
    timeout_s: float = 30.0,
    transport: str = "auto",
    network: Mapping[str, Any] | None = None,
) -> LocalWorld:
    """A world of `n` PEs in this process; `.run(program, *args)` runs `program(pe, *args)` once per PE.

    Args:
        n: number of PEs, from 1.
        device: "cpu", the emulated GPU; "cuda" or "hip", the GPUs that torch sees; "auto": GPUs if there are any and
            none of `arch`, `seed` and `weak_memory` is given, else "cpu".
        heap_size: symmetric heap of each PE: bytes, or a text such as "64M".
        gpus_per_node: PEs `k*g` to `k*g+g-1` reach each other by load/store, others do not; None: all do.
        arch: "cpu" only: GPU to emulate, "gfx942", "gfx950", "gfx1201" (None means that) or "gfx1250".
        seed: "cpu" only. None: PEs run in parallel. A number: one thing runs at a time, in an order that depends on the
            seed alone.
        weak_memory: "cpu" only: stores and loads may be seen as late as the memory model allows; needs a seed.
        timeout_s: limit of every wait in a kernel and of every host collective, in seconds; virtual time with a seed.
        transport: how kernels reach PEs that are not mapped: "mlx5", "bnxt_re" or "ionic", queue pairs of such a card,
            which a thread of this process stands in for; "proxy", UCX on a thread for each PE; "p2p", not at all;
            "auto": "mlx5" if there are such PEs. With one of the first four and no `gpus_per_node` each PE is a node.
        network: options of the transport (docs/worlds.md): `late`, `seed`, `num_wqes`, `faults`; of "proxy": `entries`,
            `options`.

    Raises: `ArgumentError` for a value that cannot be, and for a GPU that is not there.
    """
    if device == "auto":
        emulated = arch is not None or seed is not None or weak_memory
        device = "cpu" if emulated else drivers.default_device()
    return LocalWorld(n, device, heap_size, gpus_per_node, arch, seed, weak_memory, timeout_s, transport, network)


def current_world() -> LocalWorld:
    """The world whose program the calling thread runs. Raises `StateError` outside of `LocalWorld.run`."""
    run = running()
    if run is None:
        raise StateError("current_world: this thread runs no program of a local_world(...).run(program)")
    return run.world


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclasses.dataclass(frozen=True)
class LocalWorld:
    """See `local_world`. Holds no resources: each `run` builds the world anew and takes it down."""

    n: int
    device: str
    heap_size: str | int
    gpus_per_node: int | None
    arch: str | None
    seed: int | None
    weak_memory: bool
    timeout_s: float
    transport: str
    network: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        require(_is_count(self.n), "n", "a number of PEs from 1", repr(self.n))
        require(self.device in ("cpu", *GPU_DEVICES), "device", '"cpu", "cuda", "hip" or "auto"', repr(self.device))
        env.parse_size(self.heap_size)
        ok = self.gpus_per_node is None or _is_count(self.gpus_per_node)
        require(ok, "gpus_per_node", "None or a number from 1", repr(self.gpus_per_node))
        if self.device == "cpu":
            self._check_emulated()
        else:
            self._check_gpu()
        env.parse_seconds(self.timeout_s, "timeout_s")
        require(self.transport in env.TRANSPORTS, "transport", " or ".join(env.TRANSPORTS), repr(self.transport))
        if self.transport == "proxy":
            ok = self.seed is None
            require(ok, "transport", '"mlx5", "bnxt_re" or "ionic" with a seed: UCX runs in real time', '"proxy"')
        if self.transport not in ("auto", "p2p") and self.gpus_per_node is None:
            object.__setattr__(self, "gpus_per_node", 1)
        world_network.check_options(self.way, self.network, self.n)

    @property
    def way(self) -> str:
        """What `transport` stands for here: "p2p", "proxy" or one of the cards."""
        if self.transport != "auto":
            return self.transport
        mapped = (self.gpus_per_node or self.n) >= self.n and not env.get("MORI_DISABLE_P2P")
        return "p2p" if mapped else world_network.DEFAULT

    def _check_emulated(self) -> None:
        arch = DEFAULT_ARCH if self.arch is None else self.arch
        devices.check_arch(arch)
        object.__setattr__(self, "arch", arch)
        ok = self.seed is None or (isinstance(self.seed, int) and not isinstance(self.seed, bool))
        require(ok, "seed", "None or an integer", repr(self.seed))
        require(isinstance(self.weak_memory, bool), "weak_memory", "True or False", repr(self.weak_memory))
        if self.weak_memory and self.seed is None:
            raise ArgumentError("weak_memory: want a seed too (it draws the stale value that a load sees), got None")

    def _check_gpu(self) -> None:
        for name, given, default in (
            ("arch", self.arch, None),
            ("seed", self.seed, None),
            ("weak_memory", self.weak_memory, False),
        ):
            want = f'{default} on "{self.device}": it is for the emulated device (device="cpu")'
            require(given is default, name, want, repr(given))
        from mori_triton.world.gpus import check_available

        check_available(self.device)

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """`program(pe, *args)` on every PE, with `mori_triton.shmem` initialised for it; the results, indexed by PE.

        On GPUs everything that the program has launched is done when this returns.

        Raises: the first error of a PE, with the PE named; the other PEs are ended. `PeerTimeout` for a wait in a
            kernel that reached its limit, `Deadlock` when nothing can change any more; both list who waits for what.
        """
        require(callable(program), "program", "a function of the PE's number", type(program).__name__)
        return self._new_run(program, args).results()

    def _new_run(self, program: Callable[..., Any], args: tuple) -> Run:
        if self.device == "cpu":
            from mori_triton.world.emulated import EmulatedRun

            return EmulatedRun(self, program, args)
        from mori_triton.world.gpu import GpuRun

        return GpuRun(self, program, args)

    def byte_ledger(self) -> contextlib.AbstractContextManager[ByteLedger]:
        """Count what kernels access: `with world.byte_ledger() as ledger: world.run(program)`.

        "cpu" only. The ledger counts loads, stores and atomics of every run in the block, by the PE whose kernel it is
        and the PE that has allocated the memory; it may be read during and after it. See `emulator.ledger.ByteLedger`.

        Raises: `ArgumentError` for a world on GPUs, `StateError` in a program.
        """
        return byte_ledger(self)

    # inside the program

    def preload(self, load: Callable[[], Any]) -> Any:
        """Load kernels before anything waits: `load()` on one PE after the other; what it returned here.

        Collective, inside the program. Give it everything that a PE will launch while a peer's kernel may wait for it
        (Triton kernels, torch operations that have not run yet): `device.prepared.prepare(kernel, ...)` loads a kernel
        without launching it, a torch operation is loaded by running it once. On GPUs the PE's device is idle before and
        after, and `load` must neither wait for another PE nor make collective calls. On the CPU nothing has to be
        loaded: the PEs run `load` at the same time.

        Raises: `StateError` outside of this world's `run`; what `load` raises.
        """
        require(callable(load), "load", "a function without arguments", type(load).__name__)
        return self._run("preload").preload(load)

    def graph(self, step: Callable[[], Any]) -> WorldGraph:
        """The steps of all PEs as one graph, to be replayed together.

        Collective, inside the program; every PE gives its own step. On GPUs the steps are captured, not executed, into
        one CUDA graph by PE 0's thread, one after the other, each as its PE and on that PE's stream. So a step
        must have run once before, makes no collective host calls, does not wait for the device, and finds its
        inputs at replay in the tensors that it read at capture. Modes of a thread (`torch.no_grad`) are PE 0's.
        On the CPU a replay calls the step.

        Raises: `StateError` outside of this world's `run`; what a step raises, which ends the run.
        """
        require(callable(step), "step", "a function without arguments", type(step).__name__)
        return self._run("graph").graph(step)

    def _run(self, what: str) -> Run:
        run = running()
        if run is None or run.world is not self:
            raise StateError(f"{what}: call it in the program that this world's run(program) runs, on the PE's thread")
        return run
