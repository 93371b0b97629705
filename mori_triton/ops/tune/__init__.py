"""Find launch shapes by measuring: calibrate, then a quick sweep, and write what is better into tuning tables.

Every PE of a local world takes part; PE 0 decides what is measured next, writes the journal and the tables. A shape is
saved only after its results were compared with torch's, and replaces a rule only when it was faster than that rule's
shape in this very run, by more than the noise. docs/tuning.md describes it; `mori-triton tune` is this as a command.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from mori_triton.errors import ArgumentError, require
from mori_triton.host import state as host_state
from mori_triton.ops.buffers import ep_buffer_layout
from mori_triton.ops.tune.bench import DTYPES, SUMMED, PeBench, Problem, row_shape
from mori_triton.ops.tune.journal import Journal
from mori_triton.ops.tune.search import Call, axes_of, grids_of, search
from mori_triton.ops.tune.timing import COPY_BYTES, copy_rate_gbs
from mori_triton.ops.tuning import PHASES, EpLaunchConfig, device_names, launch_config, shape_of_rule
from mori_triton.ops.tuning_tables import SHARED, TuningRule, file_name, load_table, save_table
from mori_triton.world import local_world

__all__ = ["Outcome", "Problem", "calls_of", "tune"]

# a step of the search has to win by so much, a rule by the noise that was measured and at least by this
_MARGIN = 0.01
# a shape that takes so much longer than the best so far in its first two runs is not measured further
_HOPELESS = 1.25
# a chain of calls in one graph takes about so long, so that launching the graph does not count
_CHAIN_US = 400.0
_LONGEST_CHAIN = 8
_REPEATS = 7
# calls at these sizes are searched through the grid first; the others start from the nearest of them
_CALIBRATED = (128, 4096)
# a calibrated call gets as much time as so many others
_CALIBRATION_SHARE = 6
_HEAP_SLACK = 64 << 20


@dataclass(frozen=True)
class Outcome:
    """What became of one call."""

    call: Call
    decision: str  # "new", "better", "kept" (the old rule is as good) or "wrong: ..." (nothing was saved)
    rule: TuningRule | None  # what stands in the table now
    old: TuningRule | None  # what stood there before
    us: float  # of the best shape found
    old_us: float  # of the old rule's shape, or the built-in one, in the same run
    floor_us: float
    num_measured: int


def calls_of(problem: Problem) -> Iterator[Call]:
    """Every call to tune, those of one group together, a group's calibrated ones first."""
    for phase in problem.phases:
        for dtype in problem.dtypes:
            for zero_copy, quant in _variants(problem, phase, dtype):
                columns, row_bytes = row_shape(dtype, problem.hidden)
                for n in _in_order(problem.num_tokens):
                    yield Call(phase, dtype, n, columns, problem.topk, row_bytes, problem.kernel_type, zero_copy, quant)


def _variants(problem: Problem, phase: str, dtype: str) -> list[tuple[bool | None, str | None]]:
    """(zero copy, codec) of a phase."""
    if phase == "dispatch":
        return [(None, None)]
    if problem.kernel_type == "IntraNodeLL":
        # its combine is IntraNode's, and uses that one's table
        return []
    variants: list[tuple[bool | None, str | None]] = []
    for quant in problem.quant_types:
        if quant == "none" and dtype in SUMMED:
            variants += [(True, quant), (False, quant)]
        elif quant != "none" and dtype == "bf16":
            variants.append((False, quant))
    return variants


def _calibrated(num_tokens: tuple[int, ...]) -> list[int]:
    """The sizes nearest to those of `_CALIBRATED`."""
    return sorted({min(num_tokens, key=lambda n: (abs(n - wanted), n)) for wanted in _CALIBRATED})


def _in_order(num_tokens: tuple[int, ...]) -> list[int]:
    first = _calibrated(num_tokens)
    # outwards from them, so that a neighbour's best is there to start from
    return first + sorted(
        set(num_tokens) - set(first), key=lambda n: (min(abs(n.bit_length() - c.bit_length()) for c in first), n)
    )


def tune(
    problem: Problem,
    *,
    device: str,
    out: Path,
    journal: Path | None = None,
    fresh: bool = False,
    budget_s: float = 150.0,
    arch: str | None = None,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Tune all calls of a problem on this machine and write the tables to `out`.

    Args:
        problem: what to tune for.
        device: "cuda", "hip" or "cpu", as for `local_world`.
        out: directory of the tables, made if missing; a rule there is replaced only by a better one.
        journal: file that an interrupted run goes on from; None: no journal.
        fresh: start over even if the journal holds this run's beginning.
        budget_s: about how long measuring may take. When it is short, fewer shapes are tried.
        arch: of the emulated GPU, with device "cpu".
        report: called with each call's outcome, on a thread of the world.

    Returns:
        The outcome of every call, those from the journal included.

    Raises:
        ArgumentError: no such problem, an unreadable table or journal, the journal of another run, or a place that
            cannot be written.
    """
    _check(problem)
    layouts = [ep_buffer_layout(problem.config(0, quant)).num_bytes for quant in problem.quant_types]
    world = local_world(problem.ep_size, device, heap_size=sum(layouts) + _HEAP_SLACK, arch=arch, timeout_s=60.0)
    _check_out(out)
    board: dict[int, dict[str, Any]] = {}
    outcomes: list[Outcome] = []

    def program(pe: int) -> None:
        bench = PeBench(problem, board)
        if pe == 0:
            lead = _Lead(bench, out, journal, fresh, budget_s)
            for call in calls_of(problem):
                # a capture begins with a collection: spare it what was loaded long ago
                gc.collect()
                gc.freeze()
                outcomes.append(lead.outcome_of(call))
                report(outcomes[-1])
            lead.everyone("end")
            lead.journal.add("end")
        else:
            _follow(bench)
        bench.close()

    try:
        world.run(program)
    finally:
        gc.unfreeze()
    return outcomes


def _check(problem: Problem) -> None:
    require(
        len(problem.num_tokens) > 0 and min(problem.num_tokens) >= 1, "num_tokens", "numbers from 1", problem.num_tokens
    )
    odd = [phase for phase in problem.phases if phase not in PHASES]
    require(bool(problem.phases) and not odd, "phases", " or ".join(PHASES), ", ".join(problem.phases))
    unknown = [name for name in problem.dtypes if name not in DTYPES]
    require(bool(problem.dtypes) and not unknown, "dtypes", f"some of: {', '.join(DTYPES)}", ", ".join(problem.dtypes))
    whole = problem.num_experts % problem.ep_size == 0 and problem.num_experts >= problem.topk
    want = f"a multiple of ep_size = {problem.ep_size}, at least topk = {problem.topk}"
    require(whole, "num_experts", want, problem.num_experts)
    for quant in problem.quant_types:
        problem.config(0, quant)


def _check_out(out: Path) -> None:
    """Measuring takes minutes: a directory that takes no file is to be known before."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ArgumentError(f"out: want a directory that can be written, got {out}: {error.strerror}") from error


def _follow(bench: PeBench) -> None:
    """What every PE but 0 runs: what PE 0 says."""
    while True:
        said = json.loads(bench.state.bootstrap.allgather(b"", "tune: what next")[0])
        if said["do"] == "end":
            return
        _act(bench, said)


def _act(bench: PeBench, said: dict[str, Any]) -> Any:
    call = Call(**said["call"])
    if said["do"] == "start":
        return bench.start(call)
    shape = EpLaunchConfig(**said["shape"])
    if said["do"] == "verify":
        return bench.verify(call, shape)
    give_up_us = float("inf") if said["give_up_us"] is None else said["give_up_us"]
    return bench.measure(call, shape, said["rounds"], said["repeats"], give_up_us)


class _Lead:
    """PE 0: decides, writes the journal and the tables."""

    def __init__(self, bench: PeBench, out: Path, journal: Path | None, fresh: bool, budget_s: float) -> None:
        self.bench, self.problem, self.out = bench, bench.problem, out
        self.device = bench.device
        num_gpus = 1 if self.device.type == "cpu" else min(torch.cuda.device_count(), self.problem.ep_size)
        arch, model = device_names(self.device, host_state.current().settings.arch)
        shared = self.device.type != "cpu" and num_gpus < self.problem.ep_size
        self.names = (arch, model + SHARED if shared else model, self.problem.kernel_type, self.problem.ep_size)
        run = {"problem": asdict(self.problem), "gpu": self.names[:2], "num_gpus": num_gpus}
        run |= {"torch": torch.__version__, "triton": triton.__version__}
        self.journal = Journal(journal, run, fresh=fresh)
        calibrated = self.journal.find("calibration")
        if calibrated is None:
            num_bytes = COPY_BYTES if self.device.type != "cpu" else 1 << 22
            self.journal.add("calibration", copy_gbs=copy_rate_gbs(self.device, num_bytes))
            calibrated = self.journal.lines[-1]
        self.copy_gbs = calibrated["copy_gbs"] * num_gpus
        self.calls = list(calls_of(self.problem))
        self.best: dict[Call, EpLaunchConfig] = {}
        self.ends_s = time.monotonic() + budget_s

    def everyone(self, do: str, **what: Any) -> Any:
        """Have every PE do something; what it gave on this one."""
        said = {"do": do, **what}
        self.bench.state.bootstrap.allgather(json.dumps(said).encode(), "tune: what next")
        return None if do == "end" else _act(self.bench, said)

    # -- one call --------------------------------------------------------------------------------------------
    def outcome_of(self, call: Call) -> Outcome:
        """Tune one call, or take its outcome from the journal."""
        done = self.journal.find("outcome", call=asdict(call))
        if done is None:
            outcome, shape = self._tune(call)
            line = {k: v for k, v in asdict(outcome).items() if k != "call"}
            self.journal.add("outcome", call=asdict(call), shape=asdict(shape), **line)
            self.best[call] = shape
            return outcome
        self.best[call] = EpLaunchConfig(**done["shape"])
        rule, old = (done[key] and TuningRule(**done[key]) for key in ("rule", "old"))
        if rule is not None and rule.key not in self._rules(call.phase):
            # the table was taken away since
            self._save(call.phase, rule)
        figures = (done[key] for key in ("us", "old_us", "floor_us", "num_measured"))
        return Outcome(call, done["decision"], rule, old, *figures)

    def _tune(self, call: Call) -> tuple[Outcome, EpLaunchConfig]:
        started_s = time.monotonic()
        self.everyone("start", call=asdict(call))
        built_in = self._built_in(call)
        num_rows = self.bench.num_rows(call.num_tokens)
        floor_us = self._floor_us(call, num_rows)
        rounds = 1 if self.device.type == "cpu" else max(1, min(_LONGEST_CHAIN, int(_CHAIN_US / max(floor_us, 1.0))))

        def measure(shape: EpLaunchConfig, best_us: float) -> float:
            times = self.everyone(
                "measure", call=asdict(call), shape=asdict(shape), rounds=rounds, repeats=_REPEATS,
                give_up_us=None if best_us == float("inf") else best_us * _HOPELESS,
            )  # fmt: skip
            return statistics.median(times) if times else float("inf")

        # a combine in place is timed with a dispatch before it, whose own time is taken off in the end
        before_us = 0.0
        if call.zero_copy:
            before = replace(call, phase="dispatch", zero_copy=None, quant_type=None)
            times = self.everyone(
                "measure", call=asdict(before), shape=asdict(self._built_in(before)), rounds=rounds, repeats=_REPEATS,
                give_up_us=None,
            )  # fmt: skip
            before_us = statistics.median(times)
        old = self._rules(call.phase).get(self._rule(call, built_in, 0, 0, 0, 0).key)
        old_shape = shape_of_rule(built_in, old) if old else built_in
        starts = [old_shape, built_in, *self._neighbours(call)]
        calibrates = call.num_tokens in _calibrated(self.problem.num_tokens) and self.device.type != "cpu"
        limit_s = started_s + self._share_s(call)
        found = search(
            call, starts, measure, grids=grids_of(call) if calibrates else (), margin=_MARGIN,
            enough_us=before_us + floor_us * (1 + _MARGIN), go_on=lambda: time.monotonic() < limit_s,
        )  # fmt: skip
        # the best and what is there now once more, in turn: only this decides
        again: dict[EpLaunchConfig, list[float]] = {old_shape: [], found.shape: []}
        for _ in range(3 if len(again) > 1 else 2):
            for shape, times in again.items():
                times.append(measure(shape, float("inf")))
        us = {shape: statistics.median(times) for shape, times in again.items()}
        noise = max(((max(t) - min(t)) / min(t) for t in again.values() if max(t) < float("inf")), default=0.0)
        is_better = us[found.shape] < us[old_shape] * (1 - max(noise, _MARGIN))
        shape = found.shape if is_better else old_shape
        alone_us = {shape: max(0.0, pair_us - before_us) for shape, pair_us in us.items()}
        figures = alone_us[found.shape], alone_us[old_shape], floor_us, found.num_measured
        wrong = (
            self.everyone("verify", call=asdict(call), shape=asdict(shape)) if us[shape] < float("inf") else "no time"
        )
        if wrong:
            return Outcome(call, f"wrong: {wrong}", old, old, *figures), built_in
        if old and not is_better:
            return Outcome(call, "kept", old, old, *figures), shape
        gbs = num_rows / self.problem.ep_size * call.row_bytes / max(alone_us[shape], 0.01) / 1e3
        rule = self._rule(call, shape, alone_us[shape], gbs, floor_us, noise)
        self._save(call.phase, rule)
        return Outcome(call, "better" if old else "new", rule, old, *figures), shape

    def _path(self, phase: str) -> Path:
        return self.out / file_name(*self.names, phase)

    def _rules(self, phase: str) -> dict[Any, TuningRule]:
        """The table's rules by what they are for."""
        path = self._path(phase)
        return {rule.key: rule for rule in load_table(path, phase).rules} if path.is_file() else {}

    def _save(self, phase: str, rule: TuningRule) -> None:
        arch, model, kernel_type, ep_size = self.names
        header = {"gpu_arch": arch, "gpu_model": model, "kernel_type": kernel_type, "ep_size": ep_size, "phase": phase}
        save_table(self._path(phase), header, {**self._rules(phase), rule.key: rule}.values())

    def _built_in(self, call: Call) -> EpLaunchConfig:
        return launch_config(
            self.device.type, call.phase, call.num_tokens, call.row_bytes, dtype=DTYPES[call.dtype], top_k=call.topk,
            zero_copy=bool(call.zero_copy), quant_type=call.quant_type or "none", kernel_type=call.kernel_type,
        )  # fmt: skip

    def _neighbours(self, call: Call) -> list[EpLaunchConfig]:
        """The best shapes of the sizes of this group that are done and nearest to this one: one smaller, one larger."""
        done = [c for c in self.best if c.group == call.group]
        smaller = max((c for c in done if c.num_tokens < call.num_tokens), key=lambda c: c.num_tokens, default=None)
        larger = min((c for c in done if c.num_tokens > call.num_tokens), key=lambda c: c.num_tokens, default=None)
        return [self.best[c] for c in (smaller, larger) if c is not None]

    def _share_s(self, call: Call) -> float:
        """Seconds that this call may take: its part of what is left."""
        first = _calibrated(self.problem.num_tokens)
        left = [c for c in self.calls if c not in self.best]
        weights = {c: _CALIBRATION_SHARE if c.num_tokens in first else 1 for c in left}
        return max(0.0, self.ends_s - time.monotonic()) * weights[call] / sum(weights.values())

    def _floor_us(self, call: Call, num_rows: int) -> float:
        """Bytes of rows and tokens that must be read or written, over the copy rate."""
        each_row = 3 if call.phase == "combine" and not call.zero_copy else 1
        num_bytes = (each_row * num_rows + call.num_tokens * self.problem.ep_size) * call.row_bytes
        return num_bytes / self.copy_gbs / 1e3

    def _rule(
        self, call: Call, shape: EpLaunchConfig, us: float, gbs: float, floor_us: float, noise: float
    ) -> TuningRule:
        names = [name for name in axes_of(call) if name not in ("num_programs", "num_warps")]
        return TuningRule(
            dtype=call.dtype, num_tokens=call.num_tokens, hidden_dim=call.hidden_dim, topk=call.topk,
            zero_copy=call.zero_copy, quant_type=call.quant_type,
            block_num=shape.num_programs, warp_per_block=shape.num_warps,
            latency_us=round(us, 2), bandwidth_gbps=round(gbs, 2), floor_us=round(floor_us, 2), noise=round(noise, 4),
            **{name: getattr(shape, name) for name in names},
        )  # fmt: skip
