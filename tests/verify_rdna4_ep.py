"""Every element of the RDNA4 op over a matrix of shapes: `python tests/verify_rdna4_ep.py`; status 0: all is right.

It starts its own world of PEs for each point: on the GPUs that torch sees, or else on the emulated gfx1201. What a
point's PEs run and how it is checked is in `tests/ops/rdna4_checks.py`. Variables, lists separated by commas:

    VERIFY_WORLD_SIZE         2, 4                                  default: 2,4
    VERIFY_TOPKS              1 to 64, or "all"                     default: 1,2,7,8,9,31,32,33,63,64
    VERIFY_HIDDEN_SIZES       elements of a row                     default: 2048,3072,7168
    VERIFY_CAPACITIES         the most tokens of a PE in a call     default: 8,256,300
    VERIFY_DTYPES             bf16, fp16                            default: bf16,fp16
    VERIFY_WEIGHTS            on, off                               default: on,off
    VERIFY_HANDLE_INTERLEAVE  1: two handles at once, and a replay  default: 1
    VERIFY_DOUBLE_COMBINE     1: two combines after a dispatch      default: 1
    VERIFY_ROUNDS             dispatches of a point, 2 or more      default: 2
    VERIFY_SEEDS              orders of the emulated device: one number, or a range "0-9"; default: PEs run in parallel
    VERIFY_WEAK_MEMORY        1: as late as the memory model allows; needs VERIFY_SEEDS
    VERIFY_DEVICE             cuda, cpu                             default: cuda where torch has one
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # before anything else: folders here have names of modules, and the package need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import datetime
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mori_triton as mori
from mori_triton.errors import ArgumentError
from tests.ops import rdna4_checks as checks
from tests.ops.rdna4_checks import DTYPES, Point

# a first launch compiles on one PE while the others wait for it
_TIMEOUT_S = 120.0
_ARCH = "gfx1201"


@dataclass(frozen=True)
class Settings:
    """What the variables say."""

    world_sizes: list[int]
    topks: list[int]
    hidden_sizes: list[int]
    capacities: list[int]
    dtypes: list[str]
    weights: list[bool]
    interleave: bool
    double: bool
    rounds: int
    seeds: list[int | None]
    weak_memory: bool
    device: str

    def points(self) -> Iterator[tuple[Point, int | None]]:
        """Every point under every seed; None: PEs run in parallel."""
        every = itertools.product(
            self.world_sizes, self.dtypes, self.topks, self.hidden_sizes, self.capacities, self.weights
        )
        return itertools.product((Point(*values) for values in every), self.seeds)


def settings(given: Mapping[str, str]) -> Settings:
    """Read the variables. Raises: ArgumentError that names a malformed or unknown one."""
    known = {name.split()[0] for name in (__doc__ or "").splitlines() if name.startswith("    VERIFY_")}
    for name in given:
        if name.startswith("VERIFY_") and name not in known:
            raise ArgumentError(f"{name}: unknown; there are {', '.join(sorted(known))}")

    def values(name: str, default: str, convert: Callable[[str], Any], want: str) -> list[Any]:
        text, found = given.get(f"VERIFY_{name}", default), []
        for part in text.split(","):
            try:
                found.append(convert(part.strip()))
            except (ValueError, KeyError):
                raise ArgumentError(f"VERIFY_{name}: want {want}, got {text!r}") from None
        return found

    def between(low: int, high: int) -> Callable[[str], int]:
        def convert(text: str) -> int:
            number = int(text)
            if not low <= number <= high:
                raise ValueError
            return number

        return convert

    def one(name: str, default: str, convert: Callable[[str], Any], want: str) -> Any:
        found = values(name, default, convert, want)
        if len(found) != 1:
            raise ArgumentError(f"VERIFY_{name}: want {want}, got {given[f'VERIFY_{name}']!r}")
        return found[0]

    def flag(name: str, default: str) -> bool:
        return bool(one(name, default, {"0": False, "1": True}.__getitem__, "0 or 1"))

    def named(names: Mapping[str, Any]) -> Callable[[str], Any]:
        return lambda text: names[text]

    def rows(text: str) -> int:
        # a row is a whole number of 16-byte words
        number = int(text)
        if number < 8 or number % 8:
            raise ValueError
        return number

    all_topks = given.get("VERIFY_TOPKS", "").strip() == "all"
    topks = range(1, 65) if all_topks else None
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = one("DEVICE", here, {"cuda": "cuda", "cpu": "cpu"}.__getitem__, "cuda or cpu")
    seeds: list[int | None] = [None]
    if "VERIFY_SEEDS" in given:
        first, *last = given["VERIFY_SEEDS"].split("-")
        want = 'a number or a range such as "0-9"'
        if not all(part.strip().isdecimal() for part in (first, *last)) or len(last) > 1:
            raise ArgumentError(f"VERIFY_SEEDS: want {want}, got {given['VERIFY_SEEDS']!r}")
        seeds = list(range(int(first), int((last or [first])[0]) + 1))
        if not seeds:
            raise ArgumentError(f"VERIFY_SEEDS: want {want}, got {given['VERIFY_SEEDS']!r}")
        if device != "cpu":
            raise ArgumentError("VERIFY_SEEDS: only the emulated device has them: want VERIFY_DEVICE=cpu")
    weak = flag("WEAK_MEMORY", "0")
    if weak and seeds == [None]:
        raise ArgumentError("VERIFY_WEAK_MEMORY: needs VERIFY_SEEDS")
    numbers, some = between(1, 1 << 16), "whole numbers from 1, separated by commas"
    return Settings(
        world_sizes=values("WORLD_SIZE", "2,4", named({"2": 2, "4": 4}), "2, 4 or both"),
        topks=list(topks)
        if topks
        else values("TOPKS", "1,2,7,8,9,31,32,33,63,64", between(1, 64), '1 to 64, or "all"'),
        hidden_sizes=values("HIDDEN_SIZES", "2048,3072,7168", rows, "multiples of 8"),
        capacities=values("CAPACITIES", "8,256,300", numbers, some),
        dtypes=values("DTYPES", "bf16,fp16", named({name: name for name in DTYPES}), "bf16, fp16 or both"),
        weights=values("WEIGHTS", "on,off", named({"on": True, "off": False}), "on, off or both"),
        interleave=flag("HANDLE_INTERLEAVE", "1"),
        double=flag("DOUBLE_COMBINE", "1"),
        rounds=one("ROUNDS", "2", between(2, 1 << 16), "a number from 2"),
        seeds=seeds,
        weak_memory=weak,
        device=device,
    )


def wrong(point: Point, seed: int | None, this: Settings) -> str | None:
    """Run a point on a world of its own; what was wrong."""
    where: dict[str, Any] = {"arch": _ARCH, "seed": seed, "weak_memory": this.weak_memory}
    if this.device != "cpu":
        where = {}
    sent = checks.sent_of(point, seed or 0, this.rounds, this.device)
    if this.device != "cpu":
        torch.cuda.synchronize()
    world = mori.local_world(
        point.world_size, this.device, heap_size=checks.heap_bytes(point), timeout_s=_TIMEOUT_S, **where
    )
    try:
        world.run(checks.run_point, point, sent, this.interleave, this.double)
    # whatever it is, the point is wrong and the next one is run all the same
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    """The status of the command."""
    say = (console := Console(width=None if sys.stdout.isatty() else 140)).print
    try:
        this = settings(os.environ)
    except ArgumentError as error:
        say(str(error), style="red", highlight=False)
        return 2
    points, start = list(this.points()), time.monotonic()
    where = torch.cuda.get_device_name(0) if this.device != "cpu" else f"emulated {_ARCH}"
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}"
    given = " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("VERIFY_"))
    say(f"{given} python tests/verify_rdna4_ep.py".strip(), highlight=False)
    say(f"{date}; {where}; {versions}; {len(points)} points", highlight=False)
    found: dict[tuple[int, str, bool], list[str | None]] = {}
    for point, seed in track(points, "points", console=console, disable=not console.is_terminal):
        said = wrong(point, seed, this)
        found.setdefault((point.world_size, point.dtype, point.weights), []).append(said)
        if said is not None:
            say(f"wrong: {point}{'' if seed is None else f', seed {seed}'}: {said}", highlight=False)
    table = Table("world", "dtype", "weights", "points", "right", title="RDNA4 dispatch and combine")
    for (world, dtype, weights), results in found.items():
        right = sum(said is None for said in results)
        table.add_row(f"EP{world}", dtype, "on" if weights else "off", str(len(results)), str(right))
    say(table)
    num_wrong = sum(said is not None for results in found.values() for said in results)
    say(f"{len(points) - num_wrong} of {len(points)} right in {time.monotonic() - start:.0f} s", highlight=False)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
