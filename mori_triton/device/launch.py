"""Launch and cross-compile kernels that call the device library: the one place that adds `extern_libs`."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mori_triton import abi, bitcode, env
from mori_triton.errors import ArgumentError, BitcodeError, StateError

# wave size of every target that the package's tests compile for
TARGETS = {"gfx942": 64, "gfx950": 64, "gfx1201": 32, "gfx1250": 32, "sm_90": 32}
# a product and a sum are rounded one by one, so results are the same on every GPU and with every Triton
FP_FUSION = False
# the first NVIDIA GPUs whose launches of one stream can overlap
_OVERLAPPING_SM = 90


# where code runs as no PE: the package's own kernels then have no network to go through
NO_NETWORK = "p2p"


def get_extern_libs(target: Any = None, *, without_pe: str = NO_NETWORK) -> dict[str, str]:
    """`extern_libs=` for a launch or a compilation: the library made for the provider that the calling code's PE has.

    Args:
        target: Triton's `GPUTarget` or `"gfx942"`, `"sm_90"`, ...; None: the active device's.
        without_pe: the provider where the calling code runs as no PE.
    """
    if target is None:
        from triton.runtime import driver

        target = driver.active.get_current_target()
    return {abi.LIBRARY: str(bitcode.specialize(target, provider=bitcode.provider_here() or without_pe))}


def linked_provider(compiled: Any) -> str | None:
    """For which provider a compiled kernel's device library is; None: the kernel calls none of its functions."""
    if f'"{abi.LIBRARY}' not in compiled.asm.get("ttir", ""):
        return None
    return bitcode.provider_of(dict(compiled.metadata.extern_libs)[abi.LIBRARY])


def refuse_interpreter(kernel: Any = None) -> None:
    """Raise `StateError` under Triton's interpreter: it calls no extern, and runs programs one after another, so waits
    never end.
    """
    if env.triton_interpret() or type(kernel).__name__ == "InterpretedFunction":
        raise StateError(
            "TRITON_INTERPRET=1: Triton's interpreter cannot call the device library; unset it and run on the emulated "
            'device instead: mori_triton.local_world(n, device="cpu")'
        )


def launch(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> Any:
    """`kernel[grid](*args, **kwargs)` with the device library of the active target linked in. Asynchronous.

    `device.prepared` launches again and again with less host work. A library that `extern_libs=` names wins, such as
    one that `bitcode.specialize` has made for debugging.

    `launch_pdl=True` brings the kernel in before the launch that it follows is done, on NVIDIA GPUs from sm_90 on:
    every program of it then begins with `device.launches.gdc_wait`. Elsewhere launches do not overlap, and it is left
    out.

    Returns:
        The compiled kernel.

    Raises:
        StateError: under `TRITON_INTERPRET=1`.
        BitcodeError: no bitcode for the target, or the kernel calls a function that it does not have.
    """
    refuse_interpreter(kernel)
    options = _options(kwargs)
    if hasattr(kernel, "params"):
        # so that threads which launch the same kernel for the first time do not load it at once
        load(kernel, *args, **kwargs)
    compiled = kernel[grid](*args, **options)
    check_linked(compiled)
    return compiled


_compiling = threading.RLock()


def load(kernel: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Compile a `@triton.jit` function for these arguments, link it, check that, and load it on the current device.

    Threads that want the same kernel take turns, for Triton lets two of them meet it half compiled or half loaded. Who
    loads may have to wait until running kernels end, so nobody else waits for that: not those who want another kernel,
    nor those whose kernel is loaded.

    Returns:
        The compiled kernel and Triton's driver. Errors as of `launch`.
    """
    from triton.runtime import driver

    active = driver.active
    # touches no GPU
    with _compiling:
        compiled = kernel.warmup(*args, grid=(1,), **_options(kwargs))
    if compiled is None:
        raise StateError(f"{kernel.__name__}: a jit_cache_hook of Triton took the compilation over")
    check_linked(compiled)
    own = vars(compiled)
    # Triton sets `module` in the middle of loading; the emulated device takes it away again
    if compiled.module is None or _LOADED not in own:
        with own.setdefault(_LOCK, threading.RLock()):
            compiled._init_handles()
            own[_LOADED] = True
    return compiled, active


# attributes of a compiled kernel that are ours
_LOADED, _LOCK = "_mori_triton_loaded", "_mori_triton_lock"


def _options(given: Mapping[str, Any], target: Any = None) -> dict[str, Any]:
    """Arguments and options `given`, and options of every kernel of the package, for the target or the active one.

    `launch_pdl` is for GPUs whose launches can overlap.
    """
    if target is None:
        from triton.runtime import driver

        target = driver.active.get_current_target()
    libraries = given.get("extern_libs", {})
    if abi.LIBRARY not in libraries:
        libraries = {**libraries, **get_extern_libs(target)}
    options = {"enable_fp_fusion": FP_FUSION, **given, "extern_libs": libraries}
    if not (target.backend == "cuda" and target.arch >= _OVERLAPPING_SM):
        options.pop("launch_pdl", None)
    return options


_linked: set[str] = set()


def check_linked(compiled: Any) -> None:
    """Raise `BitcodeError` if a compiled kernel still calls a function of the device library: on HIP Triton links
    silently nothing.
    """
    key = getattr(compiled, "hash", None)
    if compiled is None or key in _linked:
        return
    left = unresolved(compiled.asm)
    if left:
        raise BitcodeError(
            f"{getattr(compiled, 'name', 'kernel')}: unresolved {', '.join(left)}: want every symbol inlined from the "
            f'device library; launch with extern_libs={{"{abi.LIBRARY}": ...}} (get_extern_libs())'
        )
    if key is not None:
        _linked.add(key)


def unresolved(asm: Mapping[str, Any]) -> list[str]:
    """Functions of the device library that the generated code still calls or declares."""
    llir = asm.get("llir", "")
    names = set(re.findall(rf'^declare .*@"?({abi.LIBRARY}_\w+)"?\(', llir, re.MULTILINE))
    names |= set(re.findall(rf'call [^\n]*@"?({abi.LIBRARY}_\w+)"?\(', llir))
    return sorted(names)


def gpu_target(arch: str) -> Any:
    """Triton's `GPUTarget` for one of `TARGETS`."""
    from triton.backends.compiler import GPUTarget

    if arch not in TARGETS:
        raise ArgumentError(f"arch: want one of {', '.join(TARGETS)}, got {arch!r}")
    return GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, TARGETS[arch])


def cross_compile(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any] | None = None,
    *,
    arch: str,
    library: Path | str | None = None,
    divisible_by_16: Collection[str] = (),
    **options: Any,
) -> Any:
    """Compile a `@triton.jit` kernel for a GPU that need not be here, device library linked in, and check that it is.

    Args:
        kernel: the jit function.
        signature: argument name -> Triton type (`"*fp32"`, `"i64"`), constants left out.
        constants: argument name -> value of the constexpr arguments.
        arch: one of `TARGETS`.
        library: another bitcode file; None: the verified one.
        divisible_by_16: arguments that are known to be so, as Triton finds out of most pointers when it launches.
        options: `num_warps`, ...

    Raises:
        BitcodeError: a symbol is left unresolved.
    """
    import triton
    from triton.compiler import ASTSource

    refuse_interpreter(kernel)
    target = gpu_target(arch)
    constants = dict(constants or {})
    source = ASTSource(
        fn=kernel,
        signature={**dict(signature), **dict.fromkeys(constants, "constexpr")},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible_by_16},
    )
    if library is not None:
        options["extern_libs"] = {abi.LIBRARY: str(library)}
    compiled = triton.compile(source, target=target, options=_options(options, target))
    check_linked(compiled)
    return compiled


def compile_probe(arch: str, library: Path | str) -> Any:
    """Compile a kernel that signals and waits through `library`, for `bitcode/build.py --check`."""
    from mori_triton.device import probe

    return cross_compile(probe.ring_kernel, probe.RING_SIGNATURE, arch=arch, library=library)
