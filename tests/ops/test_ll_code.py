"""What the machine code of the one-launch dispatch and of deterministic routing has to look like, on every target."""

from __future__ import annotations

import re

import pytest

from mori_triton.device.launch import TARGETS
from mori_triton.ops import EpDispatchCombineKernelType as KernelType
from tests.ops.cases import Case
from tests.ops.test_compile import WORDS, launches

pytestmark = pytest.mark.compile

LL = {"kernel_type": KernelType.IntraNodeLL}
SMALL = Case(num_pes=8, hidden=7168, top_k=8, max_tokens=128, experts_per_pe=32)


@pytest.mark.parametrize("arch", sorted(TARGETS))
def test_rows_are_on_their_way_before_slots_are_asked_for(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And slots of all PEs are asked for by one instruction, so that one round trip brings them all."""
    lines = launches(SMALL, monkeypatch, **LL)["dispatch_ll_kernel"].compile(arch).splitlines()
    at = {what: [i for i, line in enumerate(lines) if re.search(word, line)] for what, word in WORDS[arch].items()}
    # a compiler may keep a masked copy of a block for lanes that are on and one for those that are off
    assert 1 <= len(at["add"]) <= 2
    assert min(at["load16"]) < min(at["add"]) < min(at["store16"])


def test_rows_are_written_past_the_cache_on_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer reads them, not this PE; and every 16-byte store of a row stands in one loop over the PEs."""
    text = launches(SMALL, monkeypatch, **LL)["dispatch_ll_kernel"].compile("sm_90")
    assert re.search(r"st\.global\.cs\.v4\.b32", text)
    assert not re.search(r"\.local\.", text), "registers spilled"


@pytest.mark.parametrize(
    ("hidden", "width", "too_wide"),
    [(2880, "b128", ""), (12, "b64", "b128"), (6, "b32", "b(64|128)"), (7, "b16", "b32")],
)
def test_rows_move_as_wide_as_they_allow(
    hidden: int, width: str, too_wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(hidden=hidden, dtype="bfloat16", weights=False)
    lines = launches(case, monkeypatch, **LL)["dispatch_ll_kernel"].compile("gfx1201").splitlines()
    # rows are the only stores with a hint that they are not needed again
    rows = [line for line in lines if re.search(r"(global|buffer)_store", line) and "TH_STORE_NT" in line]
    assert rows
    assert all(re.search(rf"_store_(d16_hi_)?{width}\b", line) for line in rows)
    assert not too_wide or not any(re.search(rf"_store_{too_wide}\b", line) for line in rows)


@pytest.mark.parametrize("scales", [(0, 0), (4, 4)], ids=["no scales", "scales"])
@pytest.mark.parametrize("weights", [False, True], ids=["no weights", "weights"])
def test_gfx1250_whatever_arguments_are_absent(
    weights: bool, scales: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.6 preloads arguments there, up to 29 words; see test_compile.py."""
    case = Case(hidden=24, weights=weights, scales=scales)
    made = launches(case, monkeypatch, **LL) | launches(case, monkeypatch, deterministic=True)
    for name in ("dispatch_ll_kernel", "dispatch_count_kernel", "dispatch_assign_kernel"):
        preloaded = re.search(r"\.amdhsa_user_sgpr_kernarg_preload_length (\d+)", made[name].compile("gfx1250"))
        assert preloaded is not None
        assert int(preloaded[1]) < 30
