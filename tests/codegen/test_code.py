"""What the compilers made of every kernel of the package: no spills, and rows 16 bytes at a time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import triton

import mori_triton
from mori_triton.device.launch import TARGETS
from mori_triton.inspect.kernels import Launch, entry_kernels, launch_from_file, package_launches
from mori_triton.inspect.report import Report, report

pytestmark = pytest.mark.compile

AMD = sorted(arch for arch in TARGETS if arch.startswith("gfx"))
# waves of 32 and of 64; the other two targets are theirs too
DAILY = ("gfx1201", "gfx942")
# they move ids and weights of a token, which lie closely, at an address that may be aligned to one id only
IDS = ("local_expert_count_kernel", "dispatch_stage_kernel", "rdna4_pull_kernel")
IS_OLDEST = triton.__version__.startswith("3.6.")
# by our naming, the kernels that move rows
MOVES = r"(_(copy|ll|encode|decode|reduce|push|sum|send)|rdna4_dispatch)_kernel"
OURS = Path(__file__).with_name("kernels.py")


@pytest.fixture(scope="module")
def launches() -> dict[str, Launch]:
    return package_launches()


def faults(found: Report) -> list[str]:
    """What must not be."""
    resources = found.resources
    assert resources is not None
    # Triton 3.6 keeps a few SGPRs of dispatch_count_kernel in lanes of a VGPR on gfx942, which is no memory
    spills = resources.spills if not IS_OLDEST else resources.vgpr_spills or resources.scratch_bytes
    wrong = ["spills"] if spills else []
    for block in found.rows:
        if not block.widths:
            wrong.append(f"{block.kind} at {block.source}: no instruction found")
        elif block.narrow and found.launch.name not in IDS:
            wrong.append(f"{block.kind} at {block.source}: {block.widths} bytes at a time of {block.bytes_of_lane}")
    return wrong


def test_no_kernel_is_forgotten(launches: dict[str, Launch]) -> None:
    named = {name.partition("[")[0] for name in launches}
    assert named == entry_kernels(Path(mori_triton.__file__).parent)
    assert len(named) >= 16


def first_of_each(launches: dict[str, Launch]) -> list[str]:
    return [name for name in launches if "[" not in name]


@pytest.mark.parametrize("arch", DAILY)
def test_every_kernel(arch: str, launches: dict[str, Launch]) -> None:
    reports = [report(launches[name], arch) for name in first_of_each(launches)]
    assert {found.launch.name: faults(found) for found in reports if faults(found)} == {}
    for found in reports:
        # the compiler's own number, which knows registers and its part of LDS; an older one forgets the trap handler
        theirs = re.search(r"^; Occupancy: (\d+)", found.asm, re.MULTILINE)
        assert theirs is not None
        assert found.waves == int(theirs[1]) or IS_OLDEST, found.launch.name
        if found.launch.name not in IDS:
            moves = re.search(MOVES, found.launch.name) is not None
            assert (moves, moves) == (found.width("load") == 16, found.width("store") == 16), found.launch.name


@pytest.mark.slow
@pytest.mark.parametrize("arch", AMD)
def test_every_variant(arch: str, launches: dict[str, Launch]) -> None:
    reports = [report(launch, arch) for launch in launches.values()]
    assert {found.launch.name: faults(found) for found in reports if faults(found)} == {}


@pytest.mark.parametrize(
    ("signature", "width"),
    [("*bf16:16,*bf16:16,i32:16,4096", 16), ("*bf16,*bf16,i32,4096", 2), ("*i8,*i8,i32,4096", 1)],
)
def test_a_narrow_copy_is_seen(signature: str, width: int) -> None:
    found = report(launch_from_file(f"{OURS}:copy_kernel", signature, 4), "gfx1201")
    assert (found.width("load"), found.width("store")) == (width, width)
    assert len(faults(found)) == (2 if width < 16 else 0)


@pytest.mark.parametrize("arch", DAILY)
def test_spills_are_seen(arch: str) -> None:
    found = report(launch_from_file(f"{OURS}:spilling_kernel", "*i32:16,*i32:16,4096,10", 1), arch)
    assert found.resources is not None
    assert found.resources.vgpr_spills
    # some go to accumulation registers first
    assert found.resources.scratch_bytes >= 2 * found.resources.vgpr_spills
    assert faults(found) == ["spills"]


def test_scopes_of_a_wait_and_of_a_signal() -> None:
    """Under MORI's names, by an outside author: what a signal and a wait need past the device's caches."""
    for arch in DAILY:
        sends = report(launch_from_file(f"{OURS}:send_kernel", "*i8,*i8,*u64,i64,i32", 4), arch).scopes()["system"]
        assert {"writeback", "store"} <= set(sends)
        waits = report(launch_from_file(f"{OURS}:wait_kernel", "*u64,*u64", 4), arch).scopes()["system"]
        assert {"load", "invalidate"} <= set(waits)
