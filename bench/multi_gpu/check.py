"""Part (a): the IntraNode op between processes, every element checked: torchrun ... -m bench.multi_gpu.check

Run once for each way to map peers' memory (`MORI_SHMEM_MODE`). Ends with status 1 when an element is wrong.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.multi_gpu.group import Group, join, leave, peer_access
from bench.report import Results, console, environment
from mori_triton import ops
from tests.ops import hashed
from tests.ops.hashed import Problem

_LL = (("kernel_type", ops.EpDispatchCombineKernelType.IntraNodeLL),)
_DETERMINISTIC = (("deterministic", True),)
_FP4 = getattr(torch, "float4_e2m1fn_x2", torch.float8_e4m3fn)
# every routing, payload, size and kernel, each with some of the others
MATRIX = (
    Problem(2, 7168, 8, torch.bfloat16, 129, 32, "uneven", "random", scales=(56, 4), registered=True),
    Problem(2, 7168, 8, torch.bfloat16, 4096, 32, "full", "random", weights=False),
    Problem(2, 2880, 9, torch.float16, 33, 4, "zero", "none_to_last", scales=(3, 1)),
    Problem(2, 16384, 64, torch.bfloat16, 33, 32, "full", "spread"),
    Problem(2, 24, 3, torch.float32, 33, 4, "uneven", "nowhere"),
    Problem(2, 7168, 8, torch.float8_e4m3fn, 129, 32, "uneven", "padded", scales=(56, 4)),
    Problem(2, 1001, 5, torch.float8_e4m3fnuz, 33, 4, "one", "to_one"),
    Problem(2, 3584, 8, _FP4, 129, 32, "uneven", "duplicates", scales=(224, 1)),
    Problem(2, 7168, 8, torch.bfloat16, 128, 32, "uneven", "random", scales=(56, 4), registered=True, config=_LL),
    Problem(2, 2880, 10, torch.float16, 33, 4, "zero", "out_of_range", config=_LL),
    Problem(2, 7168, 8, torch.bfloat16, 129, 32, "uneven", "random", config=_DETERMINISTIC),
    Problem(2, 2880, 64, torch.float16, 33, 40, "zero", "padded", registered=True, config=_DETERMINISTIC),
)


def wrong_elements(group: Group, problem: Problem, rounds: int) -> int:
    """Of all PEs, over so many rounds of one op, from poisoned buffers."""
    op = ops.EpDispatchCombineOp(hashed.op_config(problem, group.rank))
    hashed.poison(op)
    wrong = 0
    for index in range(rounds):
        mine = hashed.Round(problem, group.rank, index, group.device)
        wrong += int(hashed.one_round(op, problem, mine, deterministic=op.config.deterministic))
    op.close()
    return sum(group.gather(wrong))


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu: the emulated device")] = "cuda",
    rounds: Annotated[int, typer.Option(help="of each problem")] = 3,
    tiny: Annotated[bool, typer.Option("--tiny", help="short rows, few tokens, few problems")] = False,
    out: Annotated[Path | None, typer.Option(help="directory for a JSONL file")] = None,
    commit: Annotated[str | None, typer.Option(help="of the sources, where they have no .git")] = None,
) -> None:
    """Check every problem of the matrix among the processes of this run."""
    group = join(device)
    mode = group.state.settings.heap_mode
    first = group.rank == 0
    results = Results(f"multi-gpu-check-{mode}", out if first else None, environment(commit, device))
    missing = [line for lines in group.gather(peer_access(group)) for line in lines]
    bad = len(missing)
    for number, general in enumerate(MATRIX):
        problem = dataclasses.replace(general, num_pes=group.size)
        if tiny:
            problem = dataclasses.replace(
                problem, hidden=min(problem.hidden, 72), max_tokens=min(problem.max_tokens, 6)
            )
            if number not in (0, 9, 10):
                continue
        wrong = wrong_elements(group, problem, rounds)
        bad += wrong > 0
        if first:
            results.add(
                "check",
                mode=mode,
                pes=group.size,
                gpus=group.num_gpus,
                problem=str(problem),
                rounds=rounds,
                wrong=wrong,
            )
    if first:
        say = console().print
        for line in missing:
            say(line, highlight=False)
        for row in results.of("check"):
            if row["wrong"]:
                say(f"{row['problem']}: {row['wrong']} wrong elements", highlight=False)
        where = f"{group.num_gpus} GPUs" if group.num_gpus else "emulated devices"
        say(f"{mode}: {len(results.rows)} problems among {group.size} PEs on {where}: {bad} failed", highlight=False)
    leave(group)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    typer.run(main)
