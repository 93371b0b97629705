"""Linking kernels that use MORI's names, and telling each loaded one which PE it runs as.

MORI's functions take no context: they read its address from `mori_shmem_context`, a variable that every loaded module
has a copy of. `install_hook` lets Triton call us whenever it has loaded a kernel, and we write the address of the
calling PE's context there; again when shmem is initialised anew, and 0, which refuses every operation, at finalize.

PEs of a local world on GPUs are threads of one process, for which Triton would load a kernel once. So each of them
links a copy of the library that differs in a label: to Triton these are different kernels, and each PE gets modules of
its own. An emulated device has its own modules, with its PE's context, anyway.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import threading
import weakref
from pathlib import Path
from typing import Any

import triton

from mori_triton import abi, bitcode
from mori_triton.device import launch
from mori_triton.errors import StateError
from mori_triton.host import state
from mori_triton.host.state import PeState

# kind of driver, index of its device, slot
_Place = tuple[str, int, int | None]

_lock = threading.RLock()
# loaded modules that have the variable; the order of a dict, for a set that keeps it
_modules: dict[_Place, dict[Any, None]] = {}
# those that were loaded before shmem was initialised
_early: dict[Any, None] = {}
# who has which copy of the library
_slots: dict[int, weakref.ref[PeState]] = {}
# what is kept in `PeState.extensions`
_SLOT, _ADOPTED = "ir.slot", "ir.adopted"


def get_extern_libs(target: Any = None) -> dict[str, str]:
    """`extern_libs=` for a launch or a compilation of a kernel with MORI's names.

    In a program of a local world each PE asks for itself: on GPUs each has a copy of the library of its own, and so
    compiles its kernels for itself (Triton's cache keeps them all). The library is made for the provider that carries
    what goes to the PE's peers; where shmem is not initialised, a kernel looks that up when it runs.

    Args:
        target: Triton's `GPUTarget` or `"gfx942"`, `"sm_90"`, ..., so that anyone can cross-compile; None: that of the
            active device.

    Raises:
        StateError: under `TRITON_INTERPRET=1`.
        BitcodeError: no bitcode for the target.
    """
    launch.refuse_interpreter()
    libraries = launch.get_extern_libs(target, without_pe="any")
    slot = _slot(state.find())
    if slot is None:
        return libraries
    return {name: str(bitcode.labelled_copy(path, _label(slot))) for name, path in libraries.items()}


def install_hook() -> None:
    """Let every kernel with MORI's names that Triton loads from now on know its PE. Idempotent; other hooks stay.

    Call it before the first such kernel is loaded, before or after shmem is initialised; once is enough, also for later
    worlds. Whoever assigns `triton.knobs.runtime.kernel_load_end_hook` afterwards takes ours away: call it again then.
    """
    with _lock:
        _chain("kernel_load_end_hook", _on_load)
        # Triton 3.6 never unloads
        if hasattr(triton.knobs.runtime, "kernel_unload_hook"):
            _chain("kernel_unload_hook", _on_unload)
        if _adopt not in state.on_open:
            state.on_open.append(_adopt)
    here = state.find()
    if here is not None:
        _adopt(here)


def _chain(knob: str, hook: Any) -> None:
    present = getattr(triton.knobs.runtime, knob)
    if not hasattr(present, "add"):
        # somebody has set a plain function, or None
        chain = triton.knobs.HookChain()
        if present is not None:
            chain.add(present)
        setattr(triton.knobs.runtime, knob, chain)
        present = chain
    present.add(hook)


# --------------------------------------------------------------------------------------------------------------- hooks


def _on_load(module: Any, function: Any, name: str, metadata_group: dict[str, str], hash: str) -> None:
    """Triton has loaded a kernel, on the thread that is to launch it."""
    here = state.find()
    if here is not None:
        _check_provider(here, name, metadata_group)
    if here is not None and here.driver.name == "cpu":
        # the emulated device has told the module
        return
    if not _has_context(metadata_group):
        return
    with _lock:
        if here is None:
            # a handle of a GPU's driver; what the emulated device loads outside of worlds needs nothing
            if isinstance(module, int):
                _early[module] = None
            return
        _adopt(here)
        place, linked = _place(here), _linked_slot(metadata_group)
        if linked != place[2]:
            raise StateError(
                f"{name}: loaded by PE {here.pe}, linked with {_whose(linked)}, want {_whose(place[2])}: call "
                "get_extern_libs() for each launch, in the program that runs as the PE"
            )
        _modules.setdefault(place, {})[module] = None
    # not under the lock: it may wait for running kernels
    _write(here, module, here.heap.ctx_address)


def _on_unload(module: Any, function: Any, name: str, metadata_group: dict[str, str], hash: str) -> None:
    with _lock:
        _early.pop(module, None)
        for modules in _modules.values():
            modules.pop(module, None)


def _adopt(here: PeState) -> None:
    """Tell the modules that are loaded for a PE its context, until it is finalized. Idempotent."""
    if here.driver.name == "cpu" or _ADOPTED in here.extensions:
        return
    with _lock:
        here.extensions[_ADOPTED] = True
        place = _place(here)
        modules = _modules.setdefault(place, {})
        if place[2] is None:
            modules.update(_early)
            _early.clear()
        known = list(modules)
    for module in known:
        _write(here, module, here.heap.ctx_address)
    here.on_close.append(lambda: _forget(here, place))


def _forget(here: PeState, place: _Place) -> None:
    with _lock:
        known = list(_modules[place])
    if known:
        # kernels that run are to end as they began
        here.driver.synchronize()
    for module in known:
        _write(here, module, 0)


def _write(here: PeState, module: Any, context: int) -> None:
    address, _ = here.driver.module_global(module, abi.CONTEXT_SYMBOL)
    here.driver.write(address, struct.pack("<Q", context))


# --------------------------------------------------------------------------------------------------------- whose copy


def _place(here: PeState) -> _Place:
    return here.driver.name, here.driver.device_index, _slot(here)


def _slot(here: PeState | None) -> int | None:
    """Which copy of the library a PE links: no other PE of this process that is up has it. None: the file itself."""
    if here is None or here.owns_bootstrap or here.driver.name == "cpu":
        return None
    with _lock:
        slot = here.extensions.get(_SLOT)
        if slot is None:
            taken = {slot for slot, owner in _slots.items() if (up := owner()) is not None and not up.closed}
            # as a rule its own number, so that worlds after each other find their kernels
            slot = next(slot for slot in itertools.count(here.pe) if slot not in taken)
            _slots[slot] = weakref.ref(here)
            here.extensions[_SLOT] = slot
        return slot


def _label(slot: int) -> str:
    return f"pe{slot}"


def _whose(slot: int | None) -> str:
    return "the device library itself" if slot is None else f"copy {slot} of the device library"


def _has_context(metadata_group: dict[str, str]) -> bool:
    """Whether a kernel's assembly has the variable: it uses a function of MORI's that needs the context."""
    return any(
        abi.CONTEXT_SYMBOL in Path(path).read_text()
        for name, path in metadata_group.items()
        if name.endswith((".ptx", ".amdgcn"))
    )


def _linked_slot(metadata_group: dict[str, str]) -> int | None:
    """The slot of the copy that a kernel was linked with."""
    found = re.fullmatch(r"pe(\d+)", Path(_library(metadata_group) or "").parent.name)
    return int(found[1]) if found else None


def _library(metadata_group: dict[str, str]) -> str | None:
    """Path of the device library that a kernel was linked with."""
    (about,) = (path for name, path in metadata_group.items() if name.endswith(".json"))
    return dict(json.loads(Path(about).read_text()).get("extern_libs") or ()).get(abi.LIBRARY)


def _check_provider(here: PeState, name: str, metadata_group: dict[str, str]) -> None:
    library = _library(metadata_group)
    if library is None or not Path(library).is_file():
        return
    provider = bitcode.provider_of(library)
    if provider not in ("any", here.provider):
        raise StateError(
            f"{name}: loaded by PE {here.pe}, linked with the device library for transport {provider}, want "
            f"{here.provider}: call get_extern_libs() for each launch, in the program that runs as the PE"
        )
