"""Which launch shapes are worth measuring: a coarse grid once, then steps from the best along one axis at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mori_triton.ops.tuning import NO_LIMIT, EpLaunchConfig

# an axis's name and its values in order; the axes with the most to gain come first
Axes = dict[str, tuple[int, ...]]

_MOVING: Axes = {
    "num_programs": (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384, 65536, NO_LIMIT),
    "piece_bytes": (1024, 2048, 4096, 8192, 16384),
    "num_warps": (1, 2, 4, 8, 16),
}
_STAGING: Axes = {f"stage_{name.removeprefix('num_')}": values for name, values in _MOVING.items()}
_ROUTING: Axes = {"route_tokens": (1, 2, 4, 8, 16, 32), "route_warps": (1, 2, 4)}
# where a grid looks
_COARSE: Axes = {
    "num_programs": (1024, 8192, NO_LIMIT),
    "piece_bytes": (2048, 4096, 8192),
    "num_warps": (2, 4, 8),
}
_COARSE_STAGING: Axes = {
    "stage_programs": (264, 528, 1056, 2112),
    "stage_piece_bytes": (4096, 8192, 16384),
    "stage_warps": (4, 8, 16),
}


@dataclass(frozen=True)
class Call:
    """What a rule is for: one phase of one op at one number of tokens."""

    phase: str
    dtype: str  # as tuning tables name it
    num_tokens: int  # of each PE
    hidden_dim: int
    topk: int
    row_bytes: int
    kernel_type: str = "IntraNode"
    zero_copy: bool | None = None  # of combine, as is quant_type
    quant_type: str | None = None

    @property
    def is_ll(self) -> bool:
        """Whether one kernel both routes and moves."""
        return self.phase == "dispatch" and self.kernel_type == "IntraNodeLL"

    @property
    def group(self) -> tuple[str, str, bool, str]:
        """Calls of one group differ in their number of tokens only."""
        return self.phase, self.dtype, bool(self.zero_copy), self.quant_type or ""


def axes_of(call: Call) -> Axes:
    """The numbers that this call's kernels look at."""
    if call.is_ll:
        return {**_MOVING, "route_tokens": (1, 2, 4)}
    if call.phase == "dispatch":
        return {**_MOVING, **_ROUTING}
    return _MOVING if call.zero_copy else {**_MOVING, **_STAGING}


def effective(call: Call, shape: EpLaunchConfig) -> EpLaunchConfig:
    """What a shape comes to for this call: of two with one effective shape, one need be measured."""
    longest = 1 << (call.row_bytes - 1).bit_length()
    shape = replace(
        shape,
        piece_bytes=min(shape.piece_bytes, longest),
        stage_piece_bytes=min(shape.stage_piece_bytes, longest),
        route_tokens=min(shape.route_tokens, 1 << max(0, call.num_tokens - 1).bit_length()),
    )
    if call.is_ll:
        most = -(-call.num_tokens // shape.route_tokens)
    else:
        most = call.num_tokens * -(-call.row_bytes // shape.piece_bytes)
    shape = replace(shape, num_programs=max(1, min(shape.num_programs, most)))
    unused = {name: 1 for name in (*_MOVING, *_STAGING, *_ROUTING) if name not in axes_of(call)}
    return replace(shape, **unused)


def grids_of(call: Call) -> list[Axes]:
    """What to try exhaustively, one grid after the other, each around the best shape so far: one for each kernel."""
    return [_COARSE] if call.phase == "dispatch" or call.zero_copy else [_COARSE, _COARSE_STAGING]


@dataclass(frozen=True)
class Found:
    """The best shape of a search; `us` of it, and how many shapes were measured."""

    shape: EpLaunchConfig
    us: float
    num_measured: int


def search(
    call: Call,
    starts: Iterable[EpLaunchConfig],
    measure: Callable[[EpLaunchConfig, float], float],
    *,
    grids: Iterable[Axes] = (),
    margin: float,
    enough_us: float = 0.0,
    go_on: Callable[[], bool] = lambda: True,
) -> Found:
    """Measure `starts`, then every point of `grids`, then walk from the best along each axis while it gets better.

    Args:
        call: what the shapes are for.
        starts: at least one shape; the first is measured whatever happens.
        measure: (shape, best so far in µs, or infinity) to µs, or infinity for a shape that does not work. May give up
            early, with any figure above the best, when a shape is hopeless.
        grids: values to combine, the rest as in the best shape so far.
        margin: a shape is better when it is faster by more than this part.
        enough_us: nothing can be gained below it; the search ends.
        go_on: False: no time is left; the search ends.

    Deterministic, but for what `measure` says.
    """
    known: dict[EpLaunchConfig, float] = {}
    best_shape, best_us = None, float("inf")

    def better(shape: EpLaunchConfig) -> bool:
        nonlocal best_shape, best_us
        key = effective(call, shape)
        if key in known or (known and not (best_us > enough_us and go_on())):
            return False
        known[key] = measure(shape, best_us)
        if best_shape is None or known[key] < best_us * (1 - margin):
            best_shape, best_us = shape, known[key]
            return True
        return False

    for shape in starts:
        better(shape)
    assert best_shape is not None, "no shape to start from"
    for values_of in grids:
        around = best_shape
        for values in itertools.product(*values_of.values()):
            better(replace(around, **dict(zip(values_of, values, strict=True))))
    improved = True
    while improved:
        improved = False
        for name, values in axes_of(call).items():
            for step in (1, -1):
                while (neighbour := _neighbour(call, best_shape, name, values[::step])) is not None and better(
                    neighbour
                ):
                    improved = True
    return Found(best_shape, best_us, len(known))


def _neighbour(call: Call, shape: EpLaunchConfig, name: str, values: tuple[int, ...]) -> EpLaunchConfig | None:
    """The next shape along an axis, in the order of `values`, that comes to something else; None at the axis's end."""
    now, rising = getattr(shape, name), values[-1] > values[0]
    others = (replace(shape, **{name: v}) for v in values if (v > now if rising else v < now))
    return next((other for other in others if effective(call, other) != effective(call, shape)), None)
