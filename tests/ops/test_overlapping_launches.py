"""Launches of an op may overlap on sm_90: each waits for those before it, and lets the next one in behind its own waits
for peers. Read from the code that is made for such a GPU.
"""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl

from mori_triton.device.launch import TARGETS, cross_compile
from mori_triton.device.launches import gdc_launch_dependents, gdc_wait
from mori_triton.device.prepared import recording
from mori_triton.inspect.kernels import Launch, package_launches
from mori_triton.ops import plans

pytestmark = pytest.mark.compile

WAIT, LET_IN = r"^\s*griddepcontrol\.wait;", r"^\s*griddepcontrol\.launch_dependents;"
# a kernel waits for peers in a loop around one of these
POLL = r"\bld\.(relaxed|acquire)\.sys\.global\.u64"
# prepared by themselves
NOT_OF_AN_OP = {"barrier_kernel", "ring_kernel", "local_expert_count_kernel", "clear_counts_kernel"}


@pytest.fixture(scope="module")
def launches() -> dict[str, Launch]:
    return package_launches()


def early(text: str) -> list[str]:
    """What a kernel does before it waits that it must not: all but arithmetic and loads of what no launch writes."""
    lines = text[text.index("{") :].splitlines()
    at = [i for i, line in enumerate(lines) if re.search(WAIT, line)]
    assert len(at) == 1, f"{len(at)} waits for the launches before it"
    # addresses in the context, the first argument, which only the host writes
    fixed, wrong = set(), []
    for line in lines[: at[0]]:
        code = line.split("//")[0]
        made = re.search(r"(ld\.param|add|mov|cvta\S*)\S*\s+(%rd\d+), \[?(\S+?)[\],;+]", code)
        if made and (made[3] in fixed or "param_0" in made[3]):
            fixed.add(made[2])
        load = re.search(r"\bld\.global\.\S+\s[^\[]*\[\s*(%rd\d+)", code)
        if (load and load[1] not in fixed) or re.search(
            r"(^|\s)(st|atom|red|bra|ret|bar|call)\b(?!\.param)", code.replace("bar.warp", "")
        ):
            wrong.append(code.strip())
    return wrong


def let_in(text: str) -> str | None:
    """What is wrong with where a kernel lets the next launch in."""
    lines = text.splitlines()
    at, wait, polls = ([i for i, line in enumerate(lines) if re.search(w, line)] for w in (LET_IN, WAIT, POLL))
    if at and min(at) < wait[0]:
        return "before it has waited itself"
    return "before it waits for peers" if at and polls and min(at) < min(polls) else None


def test_every_launch_of_an_op_may_overlap(launches: dict[str, Launch]) -> None:
    overlapping = {name for name, launch in launches.items() if dict(launch.options).get("launch_pdl")}
    assert overlapping == set(launches) - NOT_OF_AN_OP
    # of several variants all but the first have brackets
    assert len(overlapping) > len({name.partition("[")[0] for name in overlapping}) >= 16


def test_each_waits_first_and_lets_the_next_in_when_no_peer_is_waited_for(launches: dict[str, Launch]) -> None:
    texts = {name: launch.build("sm_90").asm["ptx"] for name, launch in launches.items()}
    ours = set(launches) - NOT_OF_AN_OP
    assert {name: early(texts[name]) for name in ours if early(texts[name])} == {}
    assert {name: let_in(texts[name]) for name in ours if let_in(texts[name])} == {}
    # who has neither is launched when all before it is done
    assert [name for name in NOT_OF_AN_OP & set(texts) if "griddepcontrol" in texts[name]] == []
    # the hint pays where a peer's signal has just been waited for, and where nothing is
    assert {name for name in ours if re.search(LET_IN, texts[name], re.MULTILINE)} >= {
        "dispatch_route_kernel", "dispatch_copy_kernel", "combine_copy_kernel", "combine_reduce_kernel", "sync_kernel",
        "rdna4_dispatch_kernel", "rdna4_pull_kernel", "rdna4_push_kernel", "rdna4_sum_kernel", "dispatch_ll_kernel",
    }  # fmt: skip


@triton.jit(do_not_specialize=["ctx", "x_ptr"])
def late_kernel(ctx, x_ptr, EARLY: tl.constexpr):
    if EARLY == "load":
        tl.store(x_ptr, tl.load(x_ptr + 1))
    if EARLY == "let in":
        gdc_launch_dependents()
    gdc_wait()
    tl.store(x_ptr + 2, 3)


@pytest.mark.parametrize(
    ("how", "wrong"),
    [("load", ["ld.global", "st.global"]), ("let in", ["before it has waited itself"]), ("", [])],
)
def test_what_comes_too_early_is_seen(how: str, wrong: list[str]) -> None:
    built = cross_compile(
        late_kernel, {"ctx": "*i64", "x_ptr": "*i32"}, {"EARLY": how}, arch="sm_90", num_warps=1, launch_pdl=True
    )
    found = [*early(built.asm["ptx"]), *filter(None, [let_in(built.asm["ptx"])])]
    assert len(found) == len(wrong)
    assert all(part in line for part, line in zip(wrong, found, strict=True))


@pytest.mark.parametrize("arch", sorted(TARGETS))
@pytest.mark.parametrize("overlap", [False, True])
def test_elsewhere_launches_do_not_overlap(arch: str, overlap: bool) -> None:
    built = cross_compile(
        late_kernel, {"ctx": "*i64", "x_ptr": "*i32"}, {"EARLY": ""}, arch=arch, num_warps=1, launch_pdl=overlap
    )
    asm = built.asm["ptx" if arch == "sm_90" else "amdgcn"]
    assert ("griddepcontrol" in asm) == (overlap and arch == "sm_90")
    assert getattr(built.metadata, "launch_pdl", False) == (overlap and arch == "sm_90")


def test_the_plans_ask_for_it() -> None:
    with recording() as asked:
        plans.StepMaker()(late_kernel, (1,), torch.zeros(1, dtype=torch.int64), torch.zeros(1), EARLY="", num_warps=1)
    assert asked[0].options == {"num_warps": 1, "launch_pdl": True}
