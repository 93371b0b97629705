"""local_expert_count against numpy: hand cases, random ids, launch shapes, MORI's name and errors; emulated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton

from mori_triton import emulator, ops
from mori_triton.device.launch import TARGETS, cross_compile
from mori_triton.errors import ArgumentError, LaunchShapeError
from mori_triton.ops.kernels.local_expert_count import clear_counts_kernel, local_expert_count_kernel
from tests.ops.cases import Case, config_of

pytestmark = pytest.mark.cpu

GUARD = -77


@pytest.fixture(params=["gfx1201", "gfx942"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    active = emulator.activate(request.param)
    yield request.param
    active.deactivate()


@pytest.fixture
def one_device() -> Iterator[None]:
    active = emulator.activate("gfx1201")
    yield
    active.deactivate()


def config(experts: int, k: int, pe: int = 1) -> ops.EpDispatchCombineConfig:
    return config_of(Case(num_pes=2, top_k=k, experts_per_pe=experts), pe)


def by_hand(ids: torch.Tensor, rows: int, first: int, experts: int) -> list[int]:
    flat = ids[:rows].numpy().ravel().astype(np.int64)
    return [int((flat == first + e).sum()) for e in range(experts)]


def counted(cfg: ops.EpDispatchCombineConfig, ids: torch.Tensor, rows: int, *shape: int) -> list[int]:
    """What the kernels give; `shape` goes to MORI's name. Around the counts lies memory that must stay."""
    experts = cfg.num_experts_per_rank
    memory = torch.full((experts + 128,), GUARD, dtype=torch.int32)
    out, total = memory[64 : 64 + experts], torch.tensor([rows], dtype=torch.int32)
    if shape:
        ops.launch_local_expert_count(cfg, ids, total, out, *shape)
    else:
        ops.local_expert_count(cfg, ids, total, out)
    assert bool((memory[:64] == GUARD).all())
    assert bool((memory[64 + experts :] == GUARD).all())
    return out.tolist()


@pytest.mark.parametrize(
    ("rows", "ids", "want"),
    [
        (3, [[4, 7], [0, 5], [9, 4]], [2, 1, 0, 1]),  # mixed
        (2, [[4, 5], [6, 7], [4, 4]], [1, 1, 1, 1]),  # the third row does not count
        (2, [[0, 3], [8, 100]], [0, 0, 0, 0]),  # all remote
        (2, [[5, 5], [5, 5]], [0, 4, 0, 0]),  # duplicates count
        (3, [[-1, -1], [-(2**31), 2**31 - 1], [-4, 6]], [0, 0, 1, 0]),  # what is no id
        (0, [[4, 5]], [0, 0, 0, 0]),  # nothing received
    ],
)
def test_hand_cases(rows: int, ids: list[list[int]], want: list[int], device: str) -> None:
    cfg, tensor = config(4, 2), torch.tensor(ids, dtype=torch.int32)
    assert counted(cfg, tensor, rows) == want
    assert counted(cfg, tensor, rows, 3, 2) == want
    assert ops.local_expert_count_torch(cfg, tensor, rows).tolist() == want


# experts and k; rows: one program, and several, some of which have nothing to do
@pytest.mark.parametrize(("experts", "k", "num_rows"), [(1, 1, 2100), (3, 2, 50), (32, 8, 1024), (32, 8, 4097)])
def test_random_ids(experts: int, k: int, num_rows: int, device: str) -> None:
    cfg = config(experts, k)
    ids = torch.randint(-2, 2 * experts + 3, (num_rows, k), dtype=torch.int32)
    for rows in (0, 1, num_rows // 3, num_rows):
        want = by_hand(ids, rows, experts, experts)
        assert counted(cfg, ids, rows) == want
        # again: what was there before is overwritten, not added to
        assert counted(cfg, ids, rows) == want


def test_more_experts_than_threads(one_device: None) -> None:
    cfg = config(600, 3, 0)
    ids = torch.randint(-5, 1300, (3000, 3), dtype=torch.int32)
    assert counted(cfg, ids, 2999) == by_hand(ids, 2999, 0, 600)


@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (2, 8), (7, 3), (80, 5), (500, 31), (-1, -1)])
def test_a_launch_shape_changes_no_result(shape: tuple[int, int], one_device: None) -> None:
    cfg = config(5, 4)
    ids = torch.randint(0, 10, (2500, 4), dtype=torch.int32)
    assert counted(cfg, ids, 2400, *shape) == by_hand(ids, 2400, 5, 5)


@pytest.mark.parametrize(("shape", "name"), [((0, 4), "block_num"), ((-2, 4), "block_num"), ((3, 0), "warp_per_block")])
def test_a_shape_that_is_not_positive_is_moris_runtime_error(shape: tuple[int, int], name: str) -> None:
    ids, word = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for error in (RuntimeError, ArgumentError, LaunchShapeError):
        with pytest.raises(error, match=f"{name}: want -1 or a positive number, got {min(shape)}"):
            ops.launch_local_expert_count(config(4, 2), ids, word[:1], word, *shape)


def test_it_is_launched_without_compiling_or_loading_again(one_device: None) -> None:
    cfg, ids = config(4, 2), torch.zeros(6000, 2, dtype=torch.int32)
    counted(cfg, ids, 5)
    loads: list[str] = []
    hook = lambda module, function, name, group, key: loads.append(name)  # noqa: E731
    triton.knobs.runtime.kernel_load_end_hook.add(hook)
    try:
        for rows in (1, 16, 4096):
            assert counted(cfg, ids[1:], rows) == [0, 0, 0, 0]
    finally:
        triton.knobs.runtime.kernel_load_end_hook.remove(hook)
    assert loads == []


def test_tensors_that_do_not_fit_are_refused() -> None:
    cfg = config(4, 2)
    ids, total, out = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(4).int()
    for bad, match in (
        ((ids.long(), total, out), "indices.dtype"),
        ((ids[:, :1], total, out), "indices.shape"),
        ((ids, torch.zeros(2).int(), out), "total_recv.shape"),
        ((ids, total, out[:3]), "out_counts.shape"),
        ((ids, total, out.float()), "out_counts.dtype"),
    ):
        with pytest.raises(ArgumentError, match=match):
            ops.local_expert_count(cfg, *bad)


@pytest.mark.compile
@pytest.mark.parametrize("arch", sorted(TARGETS))
def test_both_kernels_compile_for_every_target(arch: str) -> None:
    words = {"indices_ptr": "*i32", "total_ptr": "*i32", "counts_ptr": "*i32"}
    numbers = dict.fromkeys(("top_k", "first_expert", "num_experts"), "i32")
    for alone in (False, True):
        constants = {"ALONE": alone, "BLOCK": 2048, "BINS": 64}
        cross_compile(local_expert_count_kernel, {**words, **numbers}, constants, arch=arch, num_warps=8)
    cross_compile(clear_counts_kernel, {"counts_ptr": "*i32", "num_experts": "i32"}, {"BINS": 64}, arch=arch)
