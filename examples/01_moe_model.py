"""Mixture-of-experts models whose experts live on different PEs, compared with the same models on one PE.

Two Hugging Face models with random weights read English text that ships with Python. Every PE has its own part of the
text and its own slice of every layer's experts; tokens travel between PEs through the memory of the GPUs, where there
are any, or of the emulated AMD device. Exits with 1 when a logit differs from the unmodified model's by more than 1e-5.
"""

import copy
import random
import re
import time
import zlib
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import mori_triton as mori
from mori_triton import layers
from mori_triton.errors import ArgumentError

LIMIT = 1e-5  # logits are about 1
MOST_WORDS = 256
SHAPE = {"vocab_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
QWEN = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}
MIXTRAL = {"hidden_size": 128, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2}
MODELS = [
    (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SHAPE, **QWEN, initializer_range=0.05)),
    (MixtralForCausalLM, MixtralConfig(**SHAPE, **MIXTRAL, initializer_range=0.05)),
]

Traffic = list[list[layers.LayerTraffic]]  # [layer][PE]
console = Console()
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


def read_texts(pes: int, seed: int) -> list[torch.Tensor]:
    """One topic of Python's help for each PE, as `[1, words]` token ids: a word's id is a hash of its letters."""
    names = random.Random(seed).sample(sorted(topics), pes)
    words = [re.findall(r"\w+|[^\w\s]", topics[name].lower())[:MOST_WORDS] for name in names]
    return [torch.tensor([[zlib.crc32(word.encode()) % SHAPE["vocab_size"] for word in text]]) for text in words]


def torch_device(world: mori.LocalWorld) -> str:
    """Where a PE's tensors are: "cuda" is the calling PE's GPU, of any vendor."""
    return "cpu" if world.device == "cpu" else "cuda"


def expert_kib(model: PreTrainedModel) -> float:
    return sum(weights.numel() * 4 for name, weights in model.named_parameters() if ".experts." in name) / 1024


def run_spread(
    model: PreTrainedModel, texts: list[torch.Tensor], world: mori.LocalWorld
) -> tuple[list[tuple], Traffic]:
    """Each PE's (logits of its text, KiB of expert weights), with the experts spread over as many PEs as texts."""
    calls: list[layers.LayerTraffic] = []
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("layers of all PEs", total=SHAPE["num_hidden_layers"] * len(texts))

        def on_layer(call: layers.LayerTraffic) -> None:
            calls.append(call)
            progress.advance(task)

        def program(pe: int) -> tuple[torch.Tensor, float]:
            # to this PE's own GPU, if there are several
            mine = copy.deepcopy(model).to(torch_device(world))
            mine.set_experts_implementation("mori_ep")
            with torch.no_grad(), layers.shared_ops(), layers.watch_traffic(mine, on_layer):
                return mine(texts[pe].to(mine.device)).logits.cpu(), expert_kib(mine)

        results = world.run(program)
    calls.sort(key=lambda call: (call.layer, call.pe))
    return results, [calls[start : start + len(texts)] for start in range(0, len(calls), len(texts))]


def print_traffic(title: str, traffic: Traffic) -> None:
    console.print(f"[bold]{title}[/]")
    table = Table()
    table.add_column("layer")
    for call in traffic[0]:
        table.add_column(f"PE {call.pe}", justify="right")
    for layer, calls in enumerate(traffic):
        table.add_row(str(layer), *(f"{sum(call.sent)} / {sum(call.received)}" for call in calls))
    console.print(table)


def save_plot(path: Path, runs: dict[str, Traffic]) -> None:
    """A picture of the tokens from each PE to each PE: a line of squares per model, a square per layer."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise typer.BadParameter("needs matplotlib: pip install 'mori_triton[plot]'", param_hint="--plot") from None
    figure = Figure(figsize=(3.2 * SHAPE["num_hidden_layers"] + 0.8, 3.8 * len(runs)), layout="constrained")
    for part, (model, traffic) in zip(figure.subfigures(len(runs), 1, squeeze=False)[:, 0], runs.items(), strict=True):
        matrices = [[call.sent for call in calls] for calls in traffic]
        most = max(count for matrix in matrices for row in matrix for count in row)
        axes = part.subplots(1, len(traffic), squeeze=False)[0]
        for layer, (ax, matrix) in enumerate(zip(axes, matrices, strict=True)):
            image = ax.imshow(matrix, cmap="Blues", vmin=0, vmax=most)
            ax.set(xticks=range(len(matrix)), yticks=range(len(matrix)), xlabel="to PE", title=f"layer {layer}")
            for sender, row in enumerate(matrix):
                for receiver, count in enumerate(row):
                    shade = "white" if count > 0.6 * most else "black"
                    ax.text(receiver, sender, str(count), ha="center", va="center", color=shade)
        axes[0].set_ylabel("from PE")
        part.colorbar(image, ax=axes, label="tokens")
        part.suptitle(model, weight="bold")
    figure.savefig(path, dpi=150)


@app.command(help=__doc__)
def main(
    device: Annotated[
        str, typer.Option(help="Where PEs run: cpu (the emulated AMD device), cuda, hip or auto.")
    ] = "auto",
    pes: Annotated[int, typer.Option(help="How many PEs share the experts: 1, 2, 4 or 8.")] = 4,
    arch: Annotated[
        str | None, typer.Option(help="The AMD target to emulate, gfx1201 for example; not on a GPU.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes the weights and picks the texts.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Save a picture of the traffic here (extra: plot).")] = None,
) -> None:
    if pes not in (1, 2, 4, 8):
        raise typer.BadParameter(f"8 and 16 experts cannot be divided among {pes} PEs", param_hint="--pes")
    try:
        world = mori.local_world(pes, device=device, arch=arch, timeout_s=100.0)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from None
    texts = read_texts(pes, seed)
    words = ", ".join(str(text.numel()) for text in texts)
    place = f"the emulated {world.arch}" if world.device == "cpu" else torch.cuda.get_device_name()
    console.print(f"{pes} PEs on {place} read {words} words of English\n")
    runs: dict[str, Traffic] = {}
    worst = 0.0
    for model_class, config in MODELS:
        torch.manual_seed(seed)
        model = model_class(copy.deepcopy(config)).eval().to(torch_device(world))
        with torch.no_grad():
            wanted = [model(text.to(model.device)).logits.cpu() for text in texts]
        started = time.perf_counter()
        results, traffic = run_spread(model, texts, world)
        seconds = time.perf_counter() - started
        difference = max(float((a - b).abs().max()) for a, (b, _) in zip(wanted, results, strict=True))
        verdict = "[green]equal[/]" if difference <= LIMIT else "[bold red]DIFFERENT[/]"
        print_traffic(f"{model_class.__name__}: tokens sent / received", traffic)
        kept = max(kib for _, kib in results)
        console.print(f"expert weights: {expert_kib(model):.0f} KiB, each PE keeps {kept:.0f} KiB")
        console.print(f"largest logit difference {difference:.1e}, allowed {LIMIT:.0e}: {verdict} ({seconds:.1f} s)\n")
        runs[model_class.__name__] = traffic
        worst = max(worst, difference)
    if plot:
        save_plot(plot, runs)
        console.print(f"saved {plot}")
    raise typer.Exit(int(not worst <= LIMIT))


if __name__ == "__main__":
    app()
