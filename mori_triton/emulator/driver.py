"""A Triton driver without a GPU: `kernel[grid](cpu_tensors...)` compiles for an AMD target and runs in machine.Machine.

Triton hands load_binary() only the linked binary; the assembly text is a file of the same compilation's metadata group, which
Triton passes to `knobs.runtime.kernel_load_start_hook` right before.  (A launcher could also find it: get_cache_manager(metadata.hash).)"""
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from mori_triton.emulator.machine import Kernel, Machine


class Utils:
    def __init__(self, driver):
        self.driver, self.pending = driver, None

    def get_device_properties(self, device):
        return {"max_shared_mem": 163840 if self.driver.arch == "gfx950" else 65536, "multiprocessor_count": 4, "warpSize": self.driver.warp, "arch": self.driver.arch}

    def on_load(self, module, function, name, metadata_group, hash):
        path = next((p for n, p in metadata_group.items() if n.endswith(".amdgcn")), None)
        if path is None:
            raise RuntimeError("no assembly text was stored: unset TRITON_STORE_BINARY_ONLY")
        self.pending = name, Path(path).read_text()

    def load_binary(self, name, binary, shared, device):
        expected, text = self.pending
        assert name == expected
        k = Kernel(text, self.driver.cache)
        self.driver.loaded.append(k)
        return k, k, k.lifter.num_vregs, 0, 1024

    def unload_module(self, module):
        pass


class Launcher:
    def __init__(self, src, metadata):
        self.constexpr, self.metadata = [t == "constexpr" for t in src.signature.values()], metadata

    def __call__(self, gx, gy, gz, stream, kernel, packed, launch_metadata, enter, exit, *args):
        d = triton.runtime.driver.active
        args = [float(a) if isinstance(a, float) else a for a, c in zip(args, self.constexpr) if not c]
        d.machine.launch(kernel, (gx, gy, gz), args, self.metadata.num_warps, self.metadata.shared, stream=(d.device, stream))
        if not d.deferred:
            d.synchronize()


class LiftDriver(DriverBase):
    """deferred=True: launches only queue up until synchronize(), so kernels of several PEs run interleaved.
    One device number per PE: Triton loads a kernel once a device, so every PE has its own module-level variables."""

    def __init__(self, arch, cache=None, seed=1, deferred=False, **machine):
        self.arch, self.warp, self.cache, self.deferred = arch, 32 if arch.startswith("gfx1") else 64, cache, deferred
        self.utils, self.launcher_cls, self.machine, self.device, self.loaded = Utils(self), Launcher, Machine(seed, **machine), 0, []

    def activate(self):
        triton.knobs.runtime.kernel_load_start_hook.add(self.utils.on_load)
        triton.runtime.driver.set_active(self)
        return self

    def deactivate(self):
        """drop the hook; without a GPU Triton has no default driver to go back to, the next activate() replaces this one"""
        triton.knobs.runtime.kernel_load_start_hook.remove(self.utils.on_load)

    def synchronize(self, seconds=60.0):
        self.machine.run(seconds=seconds)

    @staticmethod
    def is_active(): return False
    def get_current_target(self): return GPUTarget("hip", self.arch, self.warp)
    def get_active_torch_device(self): return torch.device("cpu")
    def get_current_device(self): return self.device
    def get_current_stream(self, device=None): return 0
    def set_current_device(self, device): self.device = device
    def map_python_to_cpp_type(self, ty): return ty
    def get_benchmarker(self): raise NotImplementedError
    def get_device_interface(self): return torch.cpu
