"""The command `mori-triton`. Needs the extra `cli`; nothing else in the package imports this."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mori_triton.errors import MoriError

if TYPE_CHECKING:
    import typer
    from rich.console import Console

    from mori_triton.ops.tune import Outcome

# without a terminal rich folds tables to 80 columns
_WIDTH_WITHOUT_TERMINAL = 160


def main() -> None:
    """Entry point: says what to install where the extra is missing."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f"mori-triton: {error.name} is not installed; the command needs: pip install mori_triton[cli]")
    app()()


def token_counts(text: str) -> tuple[int, ...]:
    """Numbers of tokens from "1,64,4096", or "1..16384": powers of two from one to the other. Raises ValueError."""
    counts: set[int] = set()
    for part in text.split(","):
        low, dots, high = part.partition("..")
        first, last = int(low), int(high) if dots else int(low)
        if not 1 <= first <= last:
            raise ValueError(f"{part!r} is not a range of numbers from 1")
        while first <= last:
            counts.add(first)
            first *= 2
    return tuple(sorted(counts))


def names(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def app() -> typer.Typer:
    """The command line, made when it is needed."""
    import typer

    cli = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

    @cli.callback()
    def about() -> None:
        """Communication kernels for expert-parallel mixture-of-experts models."""

    @cli.command("tune")
    def tune_command(
        out: Path = typer.Option(Path("tuning_configs"), help="directory of the tables; better rules there stay"),
        device: str = typer.Option("auto", help="auto: the GPUs that are there, cuda, hip, or cpu: the emulated one"),
        ep: int = typer.Option(8, min=1, help="number of PEs; several may share a GPU"),
        hidden: int = typer.Option(7168, min=1, help="elements of a row"),
        topk: int = typer.Option(8, min=1, help="experts of a token"),
        experts: int = typer.Option(256, min=1, help="experts of all PEs"),
        tokens: str = typer.Option("1..16384", help='tokens of each PE: "64,4096", or "1..16384" for powers of two'),
        dtypes: str = typer.Option("bf16,fp8_e4m3", help="payloads: bf16, fp16, fp32, fp8_e4m3, fp8_e4m3_fnuz, fp4"),
        quant_types: str = typer.Option("none", help="combine codecs: none, fp8_direct_cast, fp8_blockwise, …"),
        kernel_type: str = typer.Option("IntraNode", help="IntraNode or IntraNodeLL"),
        phases: str = typer.Option("dispatch,combine", help="what to tune"),
        budget: float = typer.Option(150.0, min=0.0, help="about how many seconds measuring may take"),
        journal: Path | None = typer.Option(None, help="file to go on from; default: in --out, named after the run"),
        fresh: bool = typer.Option(False, "--fresh", help="forget an interrupted run"),
        arch: str | None = typer.Option(None, help="GPU to emulate, with --device cpu"),
    ) -> None:
        """Measure launch shapes on this machine and write the better ones into tuning tables.

        An op reads them with MORI_EP_LAUNCH_CONFIG_MODE=AUTO and MORI_EP_TUNING_CONFIG=<out>.
        """
        try:
            counts = token_counts(tokens)
        except ValueError as error:
            raise typer.BadParameter(f"{tokens!r}: {error}", param_hint="--tokens") from error
        from mori_triton.host.drivers import default_device
        from mori_triton.ops.config import EpDispatchCombineKernelType
        from mori_triton.ops.tune import Problem, tune

        known = [kind.name for kind in EpDispatchCombineKernelType]
        if kernel_type not in known:
            raise typer.BadParameter(f"{kernel_type!r} is none of {', '.join(known)}", param_hint="--kernel-type")
        problem = Problem(
            kernel_type, ep, hidden, topk, experts, counts, names(dtypes), names(quant_types), names(phases)
        )
        on = default_device() if device == "auto" else device
        if device == "auto" and on == "cpu":
            raise typer.BadParameter(
                "there is no GPU; --device cpu tunes on the emulated device, whose times say nothing about a GPU",
                param_hint="--device",
            )
        journal = journal or out / f".tune-{on}-{kernel_type}-ep{ep}-h{hidden}-k{topk}.jsonl"
        shown = _Shown()
        try:
            outcomes = tune(
                problem, device=on, out=out, journal=journal, fresh=fresh, budget_s=budget, arch=arch, report=shown.row
            )
        except MoriError as error:
            raise typer.Exit(shown.failed(error)) from error
        shown.end(outcomes, out)
        if any(outcome.decision.startswith("wrong") for outcome in outcomes):
            raise typer.Exit(1)

    @cli.command("inspect")
    def inspect_command(
        kernel: str = typer.Argument(help="a kernel of the package, with or without [variant]; all; or FILE.py:NAME"),
        arch: str = typer.Option("gfx1201", help="targets: gfx942, gfx950, gfx1201, gfx1250, sm_90, or all"),
        signature: str = typer.Option("", help='arguments of FILE.py:NAME, in order: "*bf16:16,i32,1024"'),
        num_warps: int = typer.Option(4, min=1, help="warps of a program of FILE.py:NAME"),
        asm: bool = typer.Option(False, "--asm", help="print the assembly, under the Python that it comes from"),
        as_json: bool = typer.Option(False, "--json", help="print JSON"),
    ) -> None:
        """Registers, spills, waves, widths of accesses and cache scopes of kernels. Compiles; needs no GPU.

        A type ending in :16 is a pointer or number that is divisible by 16, which Triton finds out by itself when it
        launches. FILE.py is run.
        """
        from mori_triton.inspect import shown
        from mori_triton.inspect.kernels import chosen_launches, chosen_targets
        from mori_triton.inspect.report import report

        console = _console()
        try:
            launches, targets = chosen_launches(kernel, signature, num_warps), chosen_targets(arch)
            reports = {target: [report(launch, target) for launch in launches] for target in targets}
        except MoriError as error:
            raise typer.Exit(_failed(console, "inspect", error)) from error
        if as_json:
            console.print_json(data=[one.as_json() for some in reports.values() for one in some])
            return
        for target, some in reports.items():
            if asm:
                for one in some:
                    console.print(shown.annotated(one), highlight=False, markup=False, soft_wrap=True)
            console.print(shown.summary(some, target))
            if len(some) == 1:
                console.print(shown.details(some[0]))

    return cli


class _Shown:
    """What the user sees: a line for each call as it is done, a table at the end."""

    def __init__(self) -> None:
        self.console = _console()

    def row(self, outcome: Outcome) -> None:
        """One call is done."""
        from mori_triton.ops.tuning_tables import describe

        what = describe(outcome.rule) if outcome.rule else f"{outcome.call.dtype}, {outcome.call.num_tokens} tokens"
        best_us = min(outcome.us, outcome.old_us)
        self.console.print(
            f"{outcome.call.phase} {what}: {outcome.decision}, {outcome.old_us:.1f} -> {best_us:.1f} µs",
            highlight=False, markup=False,
        )  # fmt: skip

    def end(self, outcomes: list[Outcome], out: Path) -> None:
        """Old and new shapes of every call."""
        from rich.table import Table

        table = Table(title=f"Tuning tables in {out}", title_justify="left")
        numbers = ("tokens", "µs", "floor µs")
        for header in ("phase", "dtype", "tokens", "in place", "codec", "old", "µs", "new", "µs", "floor µs", ""):
            table.add_column(header, justify="right" if header in numbers else "left")
        for done in outcomes:
            call = done.call
            table.add_row(
                call.phase, call.dtype, str(call.num_tokens), {None: "", True: "yes", False: "no"}[call.zero_copy],
                call.quant_type or "", _shape(done.old) or "built in", f"{done.old_us:.1f}",
                _shape(done.rule), f"{done.us:.1f}", f"{done.floor_us:.1f}", done.decision,
            )  # fmt: skip
        self.console.print(table)

    def failed(self, error: MoriError) -> int:
        """Say what went wrong; the exit status."""
        return _failed(self.console, "tune", error)


def _console() -> Console:
    from rich.console import Console

    there = Console()
    return there if there.is_terminal else Console(width=_WIDTH_WITHOUT_TERMINAL)


def _failed(console: Console, command: str, error: MoriError) -> int:
    """Say what went wrong; the exit status."""
    console.print(f"mori-triton {command}: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
    return 2


def _shape(rule: object) -> str:
    """A rule's numbers: programs x warps, and what else it sets."""
    from mori_triton.ops.tuning_tables import TuningRule

    if not isinstance(rule, TuningRule):
        return ""
    text = f"{rule.block_num}x{rule.warp_per_block}"
    if rule.piece_bytes:
        text += f", {rule.piece_bytes} B"
    if rule.route_tokens:
        text += f", route {rule.route_tokens}" + (f"x{rule.route_warps}" if rule.route_warps else "")
    if rule.stage_programs:
        text += f", stage {rule.stage_programs}x{rule.stage_warps}, {rule.stage_piece_bytes} B"
    return text


if __name__ == "__main__":
    main()
