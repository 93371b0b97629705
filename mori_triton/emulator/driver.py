"""A Triton driver without a GPU: `kernel[grid](cpu_tensors)` compiles for an AMD target and runs on an emulated device.

Triton hands `load_binary` only the linked binary. The assembly text is a file of the same compilation's metadata group,
which Triton passes to `knobs.runtime.kernel_load_start_hook` right before, on the same thread.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from mori_triton import env
from mori_triton.emulator import device as devices
from mori_triton.emulator import scheduler
from mori_triton.emulator.descriptors import DescriptorType, descriptor_type
from mori_triton.emulator.device import Device
from mori_triton.emulator.launch import Launch
from mori_triton.emulator.module import Code, Module, load_code
from mori_triton.errors import ArgumentError, StateError

_thread = threading.local()
# code by the path of its text and the file's time and size: with TRITON_ALWAYS_COMPILE, or after a cache was cleared,
# one path may hold another text
_texts: dict[tuple[str, int, int], Code] = {}


def set_device(number: int | None) -> None:
    """Make a device the calling thread's current one; None: back to the process' default. Raises `ArgumentError`."""
    _thread.device = None if number is None else devices.device(number)


def current_device() -> Device:
    """The calling thread's device, else the one of the last `activate`. Raises `StateError` when there is neither."""
    found = getattr(_thread, "device", None) or (_driver.defaults[-1] if _driver and _driver.defaults else None)
    if found is None:
        raise StateError(
            "this thread has no emulated device: call mori_triton.emulator.activate(arch), "
            "or run the code in local_world(device='cpu')"
        )
    return found


class _Utils:
    """What Triton calls `driver.utils`."""

    @staticmethod
    def get_device_properties(number: int) -> dict[str, Any]:
        device = devices.device(number)
        return {
            "max_shared_mem": device.max_shared,
            "multiprocessor_count": 4,
            "warpSize": device.warp_size,
            "arch": device.arch,
            "max_num_regs": 65536,
            "sm_clock_rate": 0,
            "mem_clock_rate": 0,
            "mem_bus_width": 0,
            "cooperativeLaunch": True,
        }

    @staticmethod
    def on_load(module: Any, function: Any, name: str, metadata_group: dict[str, str], hash: str) -> None:
        """Hook: remember where the text of the kernel that is about to be loaded is."""
        _thread.text_path = next((p for n, p in metadata_group.items() if n.endswith(".amdgcn")), None)

    @staticmethod
    def load_binary(name: str, binary: bytes, shared: int, number: int) -> tuple[Module, Module, int, int, int]:
        path, _thread.text_path = getattr(_thread, "text_path", None), None
        if path is None:
            raise StateError(
                f"the assembly text of {name} was not stored, and it is what the emulated device runs: "
                "unset TRITON_STORE_BINARY_ONLY (and clear Triton's cache)"
            )
        device = devices.device(number)
        info = Path(path).stat()
        key = path, info.st_mtime_ns, info.st_size
        code = _texts.get(key)
        if code is None:
            code = _texts[key] = load_code(Path(path).read_text())
        module = Module(code, number)
        device.add(module)
        return module, module, module.code.num_vregs, 0, 1024

    @staticmethod
    def unload_module(module: Module) -> None:
        devices.device(module.device).remove(module)


def _flatten(signature: Sequence[Any], values: Sequence[Any], names: Sequence[str]) -> list[tuple[str, Any, str]]:
    """(type, value, name) of every runtime argument; tuples are taken apart."""
    flat: list[tuple[str, Any, str]] = []
    for kind, value, name in zip(signature, values, names, strict=True):
        if isinstance(kind, tuple):
            flat += _flatten(kind, value, [f"{name}[{i}]" for i in range(len(kind))])
        elif kind != "constexpr":
            flat.append((kind, value, name))
    return flat


class _Launcher:
    """What Triton makes once per compiled kernel and calls for every launch."""

    def __init__(self, src: Any, metadata: Any):
        self.signature, self.metadata = tuple(src.signature.values()), metadata
        arg_names = list(getattr(src.fn, "arg_names", ()))
        keys = list(src.signature)
        self.names = [arg_names[k] if isinstance(k, int) else str(k) for k in keys]
        if getattr(metadata, "num_ctas", 1) != 1:
            raise ArgumentError(f"num_ctas: want 1 on the emulated device, got {metadata.num_ctas}")
        nested = any(isinstance(kind, tuple) for kind in self.signature)
        # of the tensor descriptors among the arguments, None for the others
        self.descriptors: list[DescriptorType | None] = []
        meta = iter(getattr(metadata, "tensordesc_meta", None) or [])
        parts: list[tuple[str, str]] = []
        for kind, _, name in _flatten(self.signature, self.signature, self.names):
            described = kind.startswith(("tensordesc", "nvTmaDesc"))
            descriptor = descriptor_type(kind, name, next(meta, None), metadata.num_warps) if described else None
            self.descriptors.append(descriptor)
            parts += descriptor.parts() if descriptor else [(kind, name)]
        self.described = any(self.descriptors)
        self.types = tuple(kind for kind, _ in parts)
        self.flat_names = [name for _, name in parts]
        self.kept = None if nested else [i for i, kind in enumerate(self.signature) if kind != "constexpr"]
        self.scratch = (
            getattr(metadata, "global_scratch_size", 0) or 0,
            getattr(metadata, "profile_scratch_size", 0) or 0,
        )

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        module: Module,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Callable | None,
        exit_hook: Callable | None,
        *args: Any,
    ) -> None:
        if self.kept is not None:
            values = [args[i] for i in self.kept]
        else:
            values = [value for _, value, _ in _flatten(self.signature, args, self.names)]
        if self.described:
            pairs = zip(self.descriptors, values, strict=True)
            values = [part for kind, value in pairs for part in (kind.values(value) if kind else [value])]
        launch = Launch(
            module,
            (grid_x, grid_y, grid_z),
            values,
            num_warps=self.metadata.num_warps,
            shared=self.metadata.shared,
            types=self.types,
            names=self.flat_names,
            device=devices.device(module.device),
            scratch=self.scratch,
        )
        if enter_hook is not None:
            enter_hook(launch_metadata)
        scheduler.current().execute(launch)
        if exit_hook is not None:
            exit_hook(launch_metadata)


class _OneAtATime:
    """Stands before `triton.compiler.compile`: threads compile one after another.

    All but the first of those that want the same kernel then find it in Triton's cache, and CPython's `ast.parse` (of
    3.11) is not safe in several threads. The lock is held while compiling only, never while a kernel runs.
    """

    _lock = threading.RLock()
    # everything compiled so, ever: a JITFunction keeps the object that stood here when it was first used
    kernels: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self, compile: Callable):
        self.compile = compile

    def __call__(self, src: Any, target: Any = None, options: Any = None, **kwargs: Any) -> Any:
        with self._lock:
            kernel = self.compile(src, target=target, options=options, **kwargs)
        self.kernels.add(kernel)
        return kernel


class EmulatedDriver(DriverBase):
    """The one driver object of the process; which device it means depends on the calling thread."""

    def __init__(self) -> None:
        super().__init__()
        self.utils, self.launcher_cls = _Utils(), _Launcher
        self.defaults: list[Device] = []
        self._users = 0
        # worlds on GPUs of this process, whose kernels need the driver that Triton has
        self._gpu_worlds = 0
        self._lock = threading.Lock()
        self._before: Any = None
        self._compile: _OneAtATime | None = None

    def hold(self) -> None:
        """Make this Triton's active driver, if it is not yet. Each `hold` needs a `deactivate` or `release`."""
        if env.triton_interpret() or triton.knobs.runtime.interpret:
            raise StateError(
                "TRITON_INTERPRET=1: Triton's interpreter cannot call extern functions and runs programs one after "
                "another. Unset it: local_world(device='cpu') runs kernels without a GPU"
            )
        with self._lock:
            if self._gpu_worlds:
                raise StateError(
                    "a world on GPUs runs in this process, and Triton serves one kind of device at a time: let it end"
                )
            self._users += 1
            if self._users > 1:
                return
            self._before = triton.runtime.driver._active
            _chain(self.utils.on_load)
            self._compile = triton.compiler.compile = _OneAtATime(triton.compiler.compile)
            triton.runtime.driver.set_active(self)

    def keep_out(self) -> None:
        """Refuse every `hold` until `let_in`: a world on GPUs runs. Raises `StateError` when this driver is active."""
        with self._lock:
            if triton.runtime.driver.active is self:
                raise StateError(
                    "Triton runs on the emulated device now: end the world on the CPU, or call deactivate() of what "
                    "mori_triton.emulator.activate() returned, before a world on GPUs runs"
                )
            self._gpu_worlds += 1

    def let_in(self) -> None:
        """Undo one `keep_out`."""
        with self._lock:
            self._gpu_worlds -= 1

    def release(self) -> None:
        """Undo one `hold`; the last one puts back the driver and the hooks that were there before."""
        with self._lock:
            if self._users == 0:
                return
            self._users -= 1
            if self._users:
                return
            _unchain(self.utils.on_load)
            assert self._compile is not None
            if triton.compiler.compile is self._compile:
                triton.compiler.compile = self._compile.compile
            # a kernel that dies later would ask whatever driver is active then to unload what we loaded
            for kernel in list(_OneAtATime.kernels):
                if isinstance(kernel.module, Module):
                    self.utils.unload_module(kernel.module)
                    kernel.module = kernel.function = kernel._run = None
            # somebody else's driver stays
            if triton.runtime.driver._active is self:
                triton.runtime.driver._active = self._before
            self._before = None

    def deactivate(self) -> None:
        """Undo the last `activate`."""
        if not self.defaults:
            raise StateError("deactivate: no activate to undo")
        self.defaults.pop()
        self.release()

    @staticmethod
    def is_active() -> bool:
        # Triton asks its own backends, never this one
        return False

    def get_current_target(self) -> GPUTarget:
        device = current_device()
        return GPUTarget("hip", device.arch, device.warp_size)

    def get_current_device(self) -> int:
        return current_device().number

    def set_current_device(self, number: int) -> None:
        set_device(number)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable:
        """Times one call: emulated time says nothing about a GPU, but lets `triton.autotune` choose something."""

        def bench(kernel_call: Callable, *, quantiles: Sequence[float] = (0.5,), **kwargs: Any) -> list[float]:
            start = time.perf_counter()
            kernel_call()
            return [1e3 * (time.perf_counter() - start)] * len(quantiles)

        return bench


def _chain(hook: Callable) -> None:
    runtime = triton.knobs.runtime
    present = runtime.kernel_load_start_hook
    if not hasattr(present, "add"):
        # somebody has set a plain function, or None
        chain = triton.knobs.HookChain()
        if present is not None:
            chain.add(present)
        runtime.kernel_load_start_hook = present = chain
    present.add(hook)


def _unchain(hook: Callable) -> None:
    present = triton.knobs.runtime.kernel_load_start_hook
    if hasattr(present, "remove"):
        present.remove(hook)


_driver: EmulatedDriver | None = None
_driver_lock = threading.Lock()


def driver() -> EmulatedDriver:
    """The process' driver object; not active until `activate` or `hold`."""
    global _driver
    with _driver_lock:
        if _driver is None:
            _driver = EmulatedDriver()
        return _driver


def activate(arch: str = "gfx1201") -> EmulatedDriver:
    """Let `kernel[grid](cpu_tensors)` run on an emulated GPU, in every thread that has no device of its own.

    A launch returns when the kernel has ended. `deactivate()` of the result puts back what was there before.

    Raises: `ArgumentError` for an architecture that is not emulated, `StateError` under `TRITON_INTERPRET=1`.
    """
    found, active = devices.default_device(arch), driver()
    active.hold()
    active.defaults.append(found)
    return active
