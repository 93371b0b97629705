"""prepare(): compile, link and load a kernel once; the `PreparedKernel` then launches with little host work.

A call of `kernel[grid](...)` binds arguments, derives what they specialise the kernel to and looks that up, every time.
A prepared kernel has settled all this: what is left is a range check of the numbers and Triton's own C launcher, which
takes addresses as plain ints without asking the GPU driver about each.
"""

from __future__ import annotations

import operator
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from mori_triton import bitcode
from mori_triton.device.launch import NO_NETWORK, linked_provider, load, refuse_interpreter
from mori_triton.errors import ArgumentError, StateError, require

# how `struct` checks an argument of a Triton type; pointers start with "*"
_FORMATS = {
    **{"i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"},
    **{"u1": "?", "i1": "?", "fp16": "d", "bf16": "d", "fp32": "d", "f32": "d", "fp64": "d"},
}
# specialised by nothing but their type, whatever the kernel says
_NEVER_SPECIALISED = (bool, float)
_PLAIN = frozenset({int, float, bool, type(None)})


class PreparedKernel:
    """A kernel loaded on one device: the one that was current when `prepare` made it."""

    def __init__(
        self, compiled: Any, driver: Any, names: Sequence[str], constants: dict[str, Any], provider: str | None = None
    ) -> None:
        """
        Args:
            compiled: Triton's compiled kernel, loaded.
            driver: Triton's driver that loaded it.
            names: every parameter of the kernel, in order.
            constants: the constexpr ones and their values.
            provider: for which one the device library in it is made; None: it calls none of its functions.
        """
        import triton

        types = dict(zip(names, compiled.src.signature.values(), strict=True))
        self.name: str = compiled.name
        self.device: int = driver.get_current_device()
        self.compiled = compiled
        self.arguments = tuple(name for name in names if name not in constants)
        """What a call takes, in order."""
        self._types = [types[name] for name in self.arguments]
        for name, kind in zip(self.arguments, self._types, strict=True):
            known = isinstance(kind, str) and (kind[0] == "*" or kind in _FORMATS or kind == "constexpr")
            require(known, name, "a tensor, an address, a number or None", kind)
        self._absent = [i for i, kind in enumerate(self._types) if kind == "constexpr"]
        # "?" takes anything; what is absent is looked at apart
        formats = ["Q" if kind[0] == "*" else _FORMATS.get(kind, "?") for kind in self._types]
        self._pack = struct.Struct("=" + "".join(formats)).pack
        # Triton's launcher wants a value for each parameter
        self._constants = tuple(constants.values())
        order = [*self.arguments, *constants]
        moved = order != list(names)
        self._reorder = operator.itemgetter(*(order.index(name) for name in names)) if moved else None
        # the emulated device allows the memory of the tensors it is given, so there they stay tensors
        self._keeps_tensors = driver.get_active_torch_device().type == "cpu"
        self._provider, self._serves_all = provider, provider in (None, "any")
        self._current_device, self._current_stream = driver.get_current_device, driver.get_current_stream
        self._runtime = triton.knobs.runtime
        self._run, self._function, self._packed = compiled.run, compiled.function, compiled.packed_metadata

    def __call__(self, grid: tuple[int, ...], *args: Any, stream: int | None = None) -> None:
        """Launch. Asynchronous, except on the emulated device. Never compiles, loads or allocates.

        Args:
            grid: programs in x, y and z; those left out are 1. With a 0 nothing is launched.
            args: every argument that is not constexpr, in order: a number; for a pointer its address or a tensor; None
                where the example was None. On the emulated device an address alone opens no memory: pass a tensor for
                what is not on the symmetric heap.
            stream: the device's handle of a stream; None: the current one.

        Raises:
            StateError: another device is current than when the kernel was prepared, or the calling PE reaches its
                peers through another provider.
            ArgumentError: an argument does not fit the kernel; nothing is launched.
        """
        if self._current_device() != self.device:
            raise StateError(
                f"{self.name} was prepared on device {self.device}, and device {self._current_device()} is current: "
                "prepare it there too"
            )
        if not self._serves_all and (bitcode.provider_here() or NO_NETWORK) != self._provider:
            raise StateError(
                f"{self.name} was prepared for transport {self._provider}, and this PE's is "
                f"{bitcode.provider_here() or NO_NETWORK}: prepare it in this world"
            )
        plain: Sequence[Any] = args if _PLAIN.issuperset(map(type, args)) else self._addresses(args)
        try:
            self._pack(*plain)
        except struct.error:
            self._refuse(plain)
        for i in self._absent:
            if plain[i] is not None:
                self._refuse(plain)
        values = (*(args if self._keeps_tensors else plain), *self._constants)
        if self._reorder is not None:
            values = self._reorder(values)
        if stream is None:
            stream = self._current_stream(self.device)
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        runtime = self._runtime
        enter, leave = _hook(runtime.launch_enter_hook), _hook(runtime.launch_exit_hook)
        about = None if enter is None and leave is None else self.compiled.launch_metadata(grid, stream, *values)
        self._run(x, y, z, stream, self._function, self._packed, about, enter, leave, *values)

    def _addresses(self, args: Sequence[Any]) -> list[Any]:
        """`args` with an address for each tensor."""
        plain = []
        for i, value in enumerate(args):
            if type(value) in _PLAIN:
                plain.append(value)
            elif hasattr(value, "data_ptr"):
                if not self._keeps_tensors and getattr(value, "is_cpu", False) and not value.is_pinned():
                    require(False, self._named(i), "a tensor on the GPU", "one on the CPU")
                plain.append(value.data_ptr())
            else:
                # of numpy, for example
                plain.append(operator.index(value) if hasattr(value, "__index__") else value)
        return plain

    def _named(self, index: int) -> str:
        name = self.arguments[index] if index < len(self.arguments) else f"argument {index}"
        return f"{self.name}: {name}"

    def _refuse(self, plain: Sequence[Any]) -> NoReturn:
        """Raise `ArgumentError` for the argument that does not fit."""
        require(len(plain) == len(self.arguments), f"{self.name}: arguments", ", ".join(self.arguments), len(plain))
        for i, (kind, value) in enumerate(zip(self._types, plain, strict=True)):
            if kind == "constexpr":
                require(value is None, self._named(i), "None, as it was prepared", value)
                continue
            try:
                struct.pack("=" + ("Q" if kind[0] == "*" else _FORMATS[kind]), value)
            except struct.error as error:
                want = "a tensor or an address" if kind[0] == "*" else f"a number that fits {kind}"
                raise ArgumentError(f"{self._named(i)}: want {want}, got {value!r}") from error
        raise AssertionError("every argument fits by itself")


def _hook(chain: Any) -> Any:
    """A launch hook of Triton, None for a chain that calls nobody."""
    return None if chain is None or getattr(chain, "calls", chain) == [] else chain


@dataclass(frozen=True)
class Asked:
    """What `prepare` was asked for under `recording`. Called as a `PreparedKernel` is, it launches nothing."""

    kernel: Any
    values: dict[str, Any]  # parameter name -> example or constant, in the kernel's order
    options: dict[str, Any]  # `num_warps`, ...

    def __call__(self, grid: tuple[int, ...], *args: Any, stream: int | None = None) -> None:
        pass


_thread = threading.local()


@contextmanager
def recording() -> Iterator[list[Asked]]:
    """Let `prepare` compile and load nothing on this thread, and collect what it is asked for, in order.

    For who looks at the code of an op's kernels for a GPU that is not here. Outputs of the op hold whatever they held.
    """
    before, _thread.asked = getattr(_thread, "asked", None), []
    try:
        yield _thread.asked
    finally:
        _thread.asked = before


def prepare(kernel: Any, *example_args: Any, **named: Any) -> PreparedKernel:
    """Compile `kernel` for the current device, device library linked in, and load it. May wait for running kernels.

    Args:
        kernel: a `@triton.jit` function. Its arguments that are not constexpr are all in `do_not_specialize`, except
            those that are None, bools and floats: one prepared kernel is right for every value.
        example_args: as for a launch. Only their types count, and which are None.
        named: constexpr arguments and options (`num_warps`, ...); `launch_pdl` as of `device.launch.launch`.

    Raises:
        ArgumentError: the arguments are not the kernel's, or what is compiled would depend on their values.
        BitcodeError: no bitcode for the target, or the kernel calls a function that it does not have.
        StateError: under `TRITON_INTERPRET=1`.
    """
    refuse_interpreter(kernel)
    require(hasattr(kernel, "params"), "kernel", "a @triton.jit function", type(kernel).__name__)
    parameters = {param.name: param for param in kernel.params}
    try:
        bound = kernel.signature.bind(*example_args, **{k: v for k, v in named.items() if k in parameters})
    except TypeError as error:
        raise ArgumentError(f"{kernel.__name__}: arguments: {error}") from error
    bound.apply_defaults()
    values = bound.arguments
    for name, param in parameters.items():
        fixed = param.is_constexpr or param.do_not_specialize or values[name] is None
        if not fixed and not isinstance(values[name], _NEVER_SPECIALISED):
            raise ArgumentError(
                f"{kernel.__name__}: {name}: want it in do_not_specialize of @triton.jit, for a prepared kernel serves "
                f"every value; it would be specialised to {values[name]!r:.60}"
            )
    asked = getattr(_thread, "asked", None)
    if asked is not None:
        options = {name: value for name, value in named.items() if name not in parameters}
        asked.append(Asked(kernel, dict(values), options))
        return cast(PreparedKernel, asked[-1])
    compiled, driver = load(kernel, *example_args, **named)
    constants = {name: values[name] for name, param in parameters.items() if param.is_constexpr}
    return PreparedKernel(compiled, driver, list(parameters), constants, linked_provider(compiled))
