"""Predict the published RDNA4 times from bytes and a link: `python bench/model_rdna4.py --output DIR`.

First how far the model is from the measured dense baseline, which alone its parameters are fitted on; then what it
predicts for dispatch and combine, whose bytes and messages the emulated device counts. docs/link_model.md derives it
and says what it can and cannot tell.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import plot
from bench.rdna4 import link as links
from bench.rdna4.link import Demand, Link, RowCost, dense_demands, errors, irregular, pair_us, protocol_demands
from bench.rdna4.traffic import DENSE, CountedPair, count_pair, expected_rows, per_token
from bench.report import Column, Results, console, environment, show
from tests.ops.rdna4_checks import Point

PUBLISHED = Path(__file__).parent / "rdna4" / "published.json"
KIND, TOP_K, EXPERTS = "IntraNodeRDNA4", 8, 256
# parameters are fitted on these, the other half of the baseline is held out
FITTED_HIDDEN = (2048, 4096, 7168)
# ways of a signal, one after the other. Dispatch: a slot is asked for, there and back, then the signal; four PEs then
# pull ids, there and back. Combine: the signal
HOPS = {2: {"dispatch": 3, "combine": 1}, 4: {"dispatch": 5, "combine": 1}}
_COUNTED_TOKENS, _COUNTED_HIDDEN = 64, 2048


@dataclass(frozen=True)
class Entry:
    """One of the published points."""

    world_size: int
    hidden_size: int
    tokens: int
    mori_us: float
    rccl_us: float

    @property
    def row_bytes(self) -> int:
        return 2 * self.hidden_size

    @property
    def held_out(self) -> bool:
        """Whether the fit does not know it."""
        return self.hidden_size not in FITTED_HIDDEN

    def dense(self) -> tuple[Demand, Demand]:
        """What the baseline asks for."""
        return dense_demands(self.world_size, self.row_bytes, self.tokens)

    def protocol(self, costs: Mapping[str, RowCost]) -> tuple[Demand, ...]:
        """What dispatch and combine ask for, of tokens that are routed uniformly."""
        return protocol_demands(
            costs, expected_rows(self.world_size, TOP_K, EXPERTS), self.row_bytes, self.tokens
        )  # fmt: skip


def read_published(path: Path = PUBLISHED) -> list[Entry]:
    """The published points, EP2 first."""
    names = [field.name for field in dataclasses.fields(Entry)]
    found = [Entry(*(row[name] for name in names)) for row in json.loads(path.read_text())["entries"]]
    return sorted(found, key=lambda e: (e.world_size, e.hidden_size, e.tokens))


def fit_baseline(entries: Iterable[Entry], header_bytes: float) -> Link:
    """Parameters from the baseline's times of the hidden sizes that are not held out."""
    return links.fit([(e.dense(), e.rccl_us) for e in entries if not e.held_out], header_bytes)


def falls(entries: Sequence[Entry]) -> dict[Entry, bool]:
    """Baseline times that are above those of more bytes on as many PEs."""
    found: dict[Entry, bool] = {}
    for world_size in sorted({e.world_size for e in entries}):
        of = [e for e in entries if e.world_size == world_size]
        marks = irregular([e.tokens * e.row_bytes for e in of], [e.rccl_us for e in of])
        found.update(zip(of, marks, strict=True))
    return found


def predict(entries: Sequence[Entry], link: Link, costs: Mapping[int, Mapping[str, RowCost]]) -> list[dict[str, Any]]:
    """A row for each entry: times, and errors in percent; of the protocol with overlap ("low") and without ("high")."""
    marks, rows = falls(entries), []
    for e in entries:
        demands = e.protocol(costs[e.world_size])
        row = {**dataclasses.asdict(e), "held_out": e.held_out, "irregular": marks[e]}
        row["model_rccl_us"] = pair_us(link, e.dense())
        row["model_low_us"] = pair_us(link, demands, overlap=True)
        row["model_high_us"] = pair_us(link, demands)
        row["rccl_error"] = 100 * (row["model_rccl_us"] / e.rccl_us - 1)
        row["low_error"] = 100 * (row["model_low_us"] / e.mori_us - 1)
        row["high_error"] = 100 * (row["model_high_us"] / e.mori_us - 1)
        rows.append(row)
    return rows


def summaries(rows: Sequence[Mapping[str, Any]], model: str, measured: str, sets: Mapping[str, Callable]) -> list[dict]:
    """Errors of a model's column for each set of rows and each number of PEs."""
    found = []
    for name, chosen in sets.items():
        for world_size in sorted({row["world_size"] for row in rows}):
            of = [row for row in rows if row["world_size"] == world_size and chosen(row)]
            summary = errors([row[model] for row in of], [row[measured] for row in of])
            found.append({"set": name, "world_size": world_size, "model": model, **dataclasses.asdict(summary)})
    return found


def implied_gbs(e: Entry, us: float, remote_rows: float, link: Link, hops: int) -> float:
    """10^9 payload bytes/s that leave a PE in each direction, once the fixed time is taken off."""
    return 2 * remote_rows * e.tokens * e.row_bytes / (us - 2 * link.launch_us - hops * link.hop_us) / 1e3


def count(kinds: Sequence[str]) -> dict[tuple[str, int], CountedPair]:
    """Pairs on the emulated device, every element checked, by what and number of PEs."""
    # messages depend on which slots are neighbours; with a seed they repeat
    options = {"seed": 1}
    return {
        (kind, n): count_pair(Point(n, hidden=_COUNTED_HIDDEN, capacity=_COUNTED_TOKENS), kind, options=options)
        for n in sorted(HOPS)
        for kind in kinds
    }


# ------------------------------------------------------------------------------------------------------------- reports
_ERRORS = (
    Column("set"), Column("world_size", "PEs"), Column("number", "entries"), Column("median", "median, %", ".2f"),
    Column("p90", "p90, %", ".2f"), Column("worst", "worst, %", ".1f"), Column("mean", "mean, signed, %", "+.2f"),
)  # fmt: skip


def report_baseline(results: Results, entries: Sequence[Entry], rows: Sequence[Mapping[str, Any]], link: Link) -> None:
    """How far the model of the baseline is from what was measured."""
    out = console()
    num_fitted, hidden = sum(not e.held_out for e in entries), ", ".join(map(str, FITTED_HIDDEN))
    out.print(
        f"\n[bold]The baseline[/bold]: fitted on {num_fitted} of {len(entries)} RCCL times (hidden {hidden}): launch "
        f"{link.launch_us:.1f} µs, hop {link.hop_us:.1f} µs, link {link.gbs:.1f} GB/s each way, own memory "
        f"{link.own_gbs:.0f} GB/s; {link.header_bytes:g} bytes a message assumed"
    )
    sets = {
        "all": lambda row: True,
        "fitted": lambda row: not row["held_out"],
        "held out": lambda row: row["held_out"],
        "held out, regular": lambda row: row["held_out"] and not row["irregular"],
        "irregular": lambda row: row["irregular"],
    }
    found = summaries(rows, "model_rccl_us", "rccl_us", sets)
    for row in found:
        results.add("errors", **row)
    show("Model of the baseline beside RCCL's times", found, _ERRORS)
    names = ", ".join(f"EP{r['world_size']} {r['hidden_size']}×{r['tokens']}" for r in rows if r["irregular"])
    out.print(f"irregular (a time above that of more bytes, which no such model can have): {names or 'none'}")
    _heat("Error of the baseline's model, %", rows, "rccl_error")


def report_protocol(
    results: Results, entries: Sequence[Entry], rows: Sequence[Mapping[str, Any]], link: Link
) -> None:  # fmt: skip
    """What the model says of dispatch and combine beside MORI's times."""
    out = console()
    sets = {"all": lambda row: True, "256 tokens or fewer": lambda row: row["tokens"] <= 256,
            "more tokens": lambda row: row["tokens"] > 256}  # fmt: skip
    for model, words in (("model_low_us", "overlap"), ("model_high_us", "one after the other")):
        found = summaries(rows, model, "mori_us", sets)
        for row in found:
            results.add("errors", **row)
        show(f"{KIND}, own stores and link {words}, beside MORI's times", found, _ERRORS)
    _heat(f"Error of the prediction for {KIND} (overlap) beside MORI's times, %", rows, "low_error")
    gains = []
    for n in sorted({row["world_size"] for row in rows}):
        of = [row for row in rows if row["world_size"] == n]
        mean = statistics.geometric_mean
        gains.append(
            results.add(
                "speedup",
                world_size=n,
                measured=mean(row["rccl_us"] / row["mori_us"] for row in of),
                low=mean(row["rccl_us"] / row["model_high_us"] for row in of),
                high=mean(row["rccl_us"] / row["model_low_us"] for row in of),
                bytes_alone=(n - 1) / expected_rows(n, TOP_K, EXPERTS),
            )
        )
    show(
        "Geometric mean speed-up over RCCL's times",
        gains,
        [
            Column("world_size", "PEs"),
            Column("measured", "MORI, measured", ".3f"),
            Column("low", "model, one after the other", ".3f"),
            Column("high", "model, overlap", ".3f"),
            Column("bytes_alone", "of fewer rows alone", ".3f"),
        ],
    )
    rates = []
    for n in sorted({row["world_size"] for row in rows}):
        # the longest batches, where fixed times matter least
        for e in (e for e in entries if e.world_size == n and e.tokens == 16384):
            rates.append(
                results.add(
                    "rate", world_size=n, hidden_size=e.hidden_size,
                    rccl=implied_gbs(e, e.rccl_us, n - 1, link, 2 * (n - 1)),
                    mori=implied_gbs(e, e.mori_us, expected_rows(n, TOP_K, EXPERTS), link, sum(HOPS[n].values())),
                )
            )  # fmt: skip
    show(
        "Payload that left a PE, GB/s, 16384 tokens: measured times less the fixed ones",
        rates,
        [
            Column("world_size", "PEs"),
            Column("hidden_size", "hidden"),
            Column("rccl", "RCCL", ".1f"),
            Column("mori", "MORI", ".1f"),
        ],
    )
    out.print("Nothing here was measured on this project's kernels: their bytes are counted, the rates are RCCL's.")


def report_counts(results: Results, counted: Mapping[tuple[str, int], CountedPair]) -> None:
    """Bytes and messages of a token, and rows beside what uniform routing expects."""
    rows = []
    for (kind, n), pair in counted.items():
        expected = n - 1 if kind == DENSE else expected_rows(n, TOP_K, EXPERTS)
        rows.append(results.add("count", what=kind, world_size=n, expected_rows=expected, **per_token(pair)))
    names = [name for name in rows[0] if name not in ("bench", "kind", "what", "world_size")]
    columns = [Column("world_size", "PEs"), Column("what"), *(Column(name, None, ",.2f") for name in names)]
    show(
        f"Counted on the emulated gfx1201, of a token, hidden {_COUNTED_HIDDEN}, {_COUNTED_TOKENS} tokens",
        rows,
        columns,
    )


def _heat(title: str, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    """Hidden sizes down, tokens across."""
    tokens = sorted({row["tokens"] for row in rows})
    table: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        line = table.setdefault(
            (row["world_size"], row["hidden_size"]), {"PEs": row["world_size"], "hidden": row["hidden_size"]}
        )
        line[str(row["tokens"])] = row[key]
    show(title, table.values(), [Column("PEs"), Column("hidden"), *(Column(str(t), f"{t:,}", "+.1f") for t in tokens)])


def main(
    output: Annotated[Path | None, typer.Option(help="directory for the data and the picture")] = None,
    gbs: Annotated[float | None, typer.Option(help="link, GB/s each way; left out: fitted")] = None,
    launch_us: Annotated[float | None, typer.Option(help="fixed time of a phase; left out: fitted")] = None,
    hop_us: Annotated[float | None, typer.Option(help="one way of a signal; left out: fitted")] = None,
    own_gbs: Annotated[float | None, typer.Option(help="stores to own memory, GB/s; left out: fitted")] = None,
    header_bytes: Annotated[float, typer.Option(help="of a message on the link")] = links.HEADER_BYTES,
) -> None:
    """Report the model's errors on the baseline, then its predictions. Options change what follows the baseline."""
    results = Results("model-rdna4", output, environment(device="cpu"))
    entries = read_published()
    fitted = fit_baseline(entries, header_bytes)
    counted = count((KIND, DENSE))
    costs = {n: links.row_costs(counted[KIND, n], HOPS[n]) for n in HOPS}
    rows = predict(entries, fitted, costs)
    results.add("link", **dataclasses.asdict(fitted))
    report_baseline(results, entries, rows, fitted)
    report_counts(results, counted)
    given = {"gbs": gbs, "launch_us": launch_us, "hop_us": hop_us, "own_gbs": own_gbs}
    link = dataclasses.replace(fitted, **{name: value for name, value in given.items() if value is not None})
    if link != fitted:
        console().print(f"\nFrom here on with {link}")
        rows = predict(entries, link, costs)
    report_protocol(results, entries, rows, link)
    for row in rows:
        results.add("entry", **row)
    if results.path is not None:
        picture = plot.model(rows, results.path.with_suffix(".png"), results.environment)
        console().print(f"wrote {results.path}" + (f", {picture}" if picture else ""))


if __name__ == "__main__":
    typer.run(main)
