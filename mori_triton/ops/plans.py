"""Plans: the launches of a call, prepared once for all calls that look like it.

What a call has to check and choose follows from its tensors' shapes, types and alignment. So the first call of a kind
makes a `Plan`: kernels compiled and loaded, grids and all arguments fixed but for the memory that the caller brings.
Later calls fill in addresses and launch: no compilation, no allocation, no synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mori_triton.device.prepared import PreparedKernel, prepare
from mori_triton.host.state import PeState


class Given(NamedTuple):
    """A kernel argument that every call brings: its name, and a tensor of its type."""

    name: str
    example: torch.Tensor


@dataclass(frozen=True)
class Step:
    """One launch of a plan."""

    prepared: PreparedKernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # None where `holes` says so
    holes: tuple[tuple[int, str], ...]  # (index, name of the `Given`)
    waits: bool  # whether one of its programs waits for peers

    def launch(self, given: Mapping[str, Any]) -> None:
        """Launch with these tensors or addresses. Asynchronous."""
        args = list(self.args)
        for index, name in self.holes:
            args[index] = given[name]
        self.prepared(self.grid, *args)


@dataclass(frozen=True)
class Plan:
    """The launches of one call and what it returns."""

    steps: Sequence[Step]
    result: Any = None
    rest: Plan | None = None  # of a call that only sends: the launches that receive
    waits: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "waits", any(step.waits for step in self.steps))

    def run(self, what: str, state: PeState, given: Mapping[str, Any], first: Step | None = None) -> None:
        """Launch `first`, if any, and the steps. Collective where one waits; `what` tells a peer in another call.

        Everything is loaded by now, so a PE that has met the others launches all that they wait for; and nobody goes
        on to what might load a kernel before all have launched. `Given` arguments are addresses, on the emulated device
        tensors.
        """
        steps = self.steps if first is None else (first, *self.steps)
        if first is not None or self.waits:
            state.meet(f"{what}: all kernels are loaded")
        for step in steps:
            step.launch(given)
            if step.waits:
                state.meet(f"{what}: a waiting kernel is launched")


class StepMaker:
    """Makes steps for one op; a kernel is prepared once for all steps that can share it."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[Any, ...], PreparedKernel] = {}

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, waits: bool = False, **named: Any) -> Step:
        """A launch of `kernel`. May wait for running kernels, as it loads.

        Args:
            args: of the kernel, in order: a tensor, an int, None, or a `Given`.
            waits: whether one of its programs waits for peers.
            named: constexpr arguments and options.
        """
        examples = [arg.example if isinstance(arg, Given) else arg for arg in args]
        kinds = tuple(e.dtype if isinstance(e, torch.Tensor) else type(e) for e in examples)
        key = (kernel, kinds, tuple(named.items()))
        prepared = self._prepared.get(key)
        if prepared is None:
            # each of an op's kernels begins with `gdc_wait`
            prepared = self._prepared[key] = prepare(kernel, *examples, **named, launch_pdl=True)
        holes = tuple((index, arg.name) for index, arg in enumerate(args) if isinstance(arg, Given))
        # the op's own memory, which kernels may touch by its address alone
        fixed = tuple(
            a.data_ptr() if isinstance(a, torch.Tensor) else None if isinstance(a, Given) else a for a in args
        )
        return Step(prepared, grid, fixed, holes, waits)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """An example of bytes for `tensor`, whose type a kernel need not know.

    Not a view of it: contiguous memory of one column may have any stride there, and then torch makes none.
    """
    return torch.empty(0, dtype=torch.uint8, device=tensor.device)


def plan_key(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What a plan may depend on of a tensor: all but its contents, and of its address the alignment."""
    if not isinstance(tensor, torch.Tensor):
        return None if tensor is None else (type(tensor),)
    return (tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous(), tensor.data_ptr() & 15)
