"""Every exception the package raises, and the checks at its public edge.

A message names the argument, what was wanted and what came. `MoriError` is the base, so one `except` catches all of
them; each also derives from the builtin a caller would expect (`ValueError`, `RuntimeError`, `TimeoutError`, ...).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class MoriError(Exception):
    """Base of every error of this package."""


class ArgumentError(MoriError, ValueError):
    """An argument is not what its docstring asks for. Nothing was launched, nothing was changed."""


class LaunchShapeError(ArgumentError, RuntimeError):
    """A number of programs or warps that no launch can have. Also a `RuntimeError`, which MORI raises for it."""


class StagingError(ArgumentError, RuntimeError):
    """A staging buffer that no dispatch can use: null, not aligned, or too short. Also a `RuntimeError`, as in MORI."""


class EnvError(ArgumentError):
    """An environment variable holds a text that cannot be read; the message shows it and the accepted forms."""


class StateError(MoriError, RuntimeError):
    """A call came at a time when it cannot be served: before init, after finalize or close, or out of order."""


class HeapError(MoriError, RuntimeError):
    """The symmetric heap refused: exhausted, double free, a foreign pointer, or PEs that do not agree."""


class BitcodeError(MoriError, RuntimeError):
    """A device bitcode file is missing or does not match `abi`: which symbol, what was expected, what was found."""


class DriverError(MoriError, RuntimeError):
    """A GPU driver or system call failed; carries the driver's own text."""


class UnsupportedInstruction(MoriError, NotImplementedError):
    """The emulated device does not know an instruction: mnemonic, operands and line."""


class KernelFault(MoriError, RuntimeError):
    """A kernel on the emulated device did what a device traps on: an access outside every allocation, a bad jump."""


class WeakMemoryError(KernelFault):
    """A load could see a stale value: names the load, the store, and the synchronisation missing between them."""


class Deadlock(MoriError, RuntimeError):
    """Nothing can change any more: lists who waits for which signal, the value expected and the value seen."""


class PeerTimeout(MoriError, TimeoutError):
    """A wait reached its limit: lists kernel, PE, peer, the value expected and the value seen."""


class NetworkError(MoriError, RuntimeError):
    """An operation over the network failed: transport, PE, peer, queue pair, request, the card's own word for it."""


class NotSupported(MoriError, NotImplementedError):
    """A combination that cannot work, found before any kernel runs; names the transport."""


class ReceiveOverflow(MoriError, RuntimeError):
    """More rows were sent to a PE than its receive buffers hold; those beyond were dropped, nothing else was hurt."""


def require(condition: bool, name: str, want: object, got: object) -> None:
    """Raise `ArgumentError` unless `condition`: "`name`: want `want`, got `got`"."""
    if not condition:
        raise ArgumentError(f"{name}: want {want}, got {got}")


def check_tensor(
    name: str,
    tensor: Any,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
) -> None:
    """Raise `ArgumentError` unless `tensor` is contiguous and has this dtype, shape (None: any size) and device."""
    import torch

    require(isinstance(tensor, torch.Tensor), name, "a torch.Tensor", type(tensor).__name__)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    require(tensor.dtype in dtypes, f"{name}.dtype", " or ".join(map(str, dtypes)), tensor.dtype)
    fits = tensor.dim() == len(shape) and all(w is None or w == g for w, g in zip(shape, tensor.shape, strict=True))
    wanted = "[" + ", ".join("any" if w is None else str(w) for w in shape) + "]"
    require(fits, f"{name}.shape", wanted, list(tensor.shape))
    require(tensor.is_contiguous(), name, "contiguous memory", f"strides {tensor.stride()}")
    if device is not None:
        require(tensor.device == device, f"{name}.device", device, tensor.device)
