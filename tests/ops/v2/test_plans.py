"""Plans: what they refuse, whose staging buffer they use, and what they report."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mori_triton import local_world
from mori_triton.errors import ArgumentError, StateError
from mori_triton.host import state as host_state
from mori_triton.ops import op_base
from mori_triton.ops.dispatch_combine_v2 import (
    EpArena,
    EpCombinePlan,
    EpDispatchCombineConfig,
    EpDispatchPlan,
    ep_staging_bytes,
    plans,
)
from mori_triton.ops.dispatch_combine_v2.staging import allocate_staging

pytestmark = pytest.mark.cpu

# what every test here runs, so that kernels are compiled once: one token to both PEs
PES, HIDDEN, MOST, TOP_K = 2, 24, 5, 2


def config(pe: int, **changes: Any) -> EpDispatchCombineConfig:
    return EpDispatchCombineConfig(
        **{
            "rank": pe,
            "world_size": PES,
            "hidden_dim": HIDDEN,
            "max_num_inp_token_per_rank": MOST,
            "num_experts_per_rank": 1,
            "num_experts_per_token": TOP_K,
            **changes,
        }
    )


INPUT = torch.arange(HIDDEN, dtype=torch.bfloat16).view(1, HIDDEN)
INDICES = torch.tensor([[0, 1]], dtype=torch.int32)


def launch(plan: EpDispatchPlan, **args: Any) -> None:
    """A dispatch that has to come through, from this line."""
    out, _, _, ids, total = plan.launch(input=INPUT, indices=INDICES, **args)
    assert int(total[0]) == PES
    for row in range(PES):
        assert torch.equal(out[row], INPUT[0])
        assert ids[row].tolist() == [0, 1]


def on_each_pe(program: Callable[..., Any]) -> list[Any]:
    return local_world(PES, heap_size="2M").run(program)


def buffer_of(arena: EpArena) -> torch.Tensor:
    """A staging buffer of ones, so that it shows whether a dispatch wrote it."""
    return allocate_staging(arena.staging, arena.device).fill_(255)


def is_written(buffer: torch.Tensor) -> bool:
    return not bool((buffer == 255).all())


def test_info_has_the_size_and_the_layout() -> None:
    def program(pe: int) -> None:
        arena = EpArena(config(pe, scale_dim=56, scale_type_size=4))
        plan = EpDispatchPlan(arena, block_num=3)
        info = plan.info
        assert info["staging_bytes"] == ep_staging_bytes(PES, 0, 224, MOST) == ep_staging_bytes(PES, 10, 224, 0)
        assert list(info["staging_layout"]) == ["indices", "weights", "sources", "scales", "bases", "counts"]
        assert info["staging_layout"]["scales"] == (2 * 1280 + 128, PES * 10 * 256)
        assert info["staging_layout"]["counts"][1] == 512 * PES * 4
        assert (info["block_num"], info["max_recv"]) == (3, 10)
        assert EpCombinePlan(arena).info["staging_bytes"] == 0

    on_each_pe(program)


def test_a_base_that_cannot_be_is_refused_before_anything_is_launched() -> None:
    def program(pe: int) -> None:
        arena = EpArena(config(pe))
        plan, buffer = EpDispatchPlan(arena), buffer_of(arena)
        for base, why in ((0, "got 0"), (buffer.data_ptr() + 64, "aligned to 128"), (buffer[:-1], "bytes, got")):
            # nobody else launches: a launch would wait for its peers
            with pytest.raises(RuntimeError, match=f"^staging_base: .*{why}"):
                plan.launch(input=INPUT, indices=INDICES, staging_base=base)
            with pytest.raises(RuntimeError, match=f"^staging_base: .*{why}"):
                plan.bind(staging_base=base)
        size = plan.info["staging_bytes"]
        with pytest.raises(RuntimeError, match=f"^staging_base: want .* {size} bytes, got {size - 1}"):
            plan.launch(input=INPUT, indices=INDICES, staging_base=buffer.data_ptr(), staging_bytes=size - 1)
        assert not is_written(buffer)
        host_state.current().bootstrap.barrier("refused")
        assert not plan._bound
        launch(plan, staging_base=buffer)
        assert is_written(buffer)

    on_each_pe(program)


def test_a_launch_argument_wins_at_every_launch() -> None:
    def program(pe: int) -> None:
        arena = EpArena(config(pe))
        plan, bound, given = EpDispatchPlan(arena), buffer_of(arena), buffer_of(arena)
        plan.bind(staging_base=bound)
        for _ in range(2):
            launch(plan, staging_base=given)
            assert (is_written(given), is_written(bound)) == (True, False)
            given.fill_(255)
        # an address that is bound for good
        other = buffer_of(arena)
        plan.bind(staging_base=other.data_ptr(), staging_bytes=other.numel())
        launch(plan)
        assert (is_written(other), is_written(given), is_written(bound)) == (True, False, False)

    on_each_pe(program)


def test_an_unbound_plan_warns_at_the_callers_line_and_shares_its_buffer() -> None:
    def program(pe: int) -> None:
        arena, wide = EpArena(config(pe)), EpArena(config(pe, max_num_inp_token_per_rank=MOST + 1))
        first, second, third = EpDispatchPlan(arena, block_num=1), EpDispatchPlan(arena), EpDispatchPlan(wide)
        for plan in (first, first, second):
            launch(plan)
        third._staging(None, None)
        buffers = host_state.current().extensions[plans._SHARED]
        assert set(buffers) == {arena.staging, wide.staging}
        assert first._default is second._default is buffers[arena.staging] is not third._default
        assert first._default.numel() == first.info["staging_bytes"]
        # a base that is bound later takes its place
        bound = buffer_of(arena)
        second.bind(staging_base=bound)
        launch(second)
        assert is_written(bound)
        first.close()
        assert arena.staging in buffers
        second.close()
        second.close()
        assert set(buffers) == {wide.staging}
        third.close()
        assert not buffers

    line = launch.__code__.co_firstlineno + 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_each_pe(program)
    warned = [w for w in caught if w.category is FutureWarning]
    # once for each plan and PE; the third was not launched
    assert len(warned) == 3 * PES
    assert [(w.filename, w.lineno) for w in warned].count((__file__, line)) == 2 * PES
    assert all("staging_base" in str(warning.message) for warning in warned)


def test_no_buffer_is_allocated_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = False
    monkeypatch.setattr(op_base.EpOpBase, "_is_captured", lambda self: capturing)
    monkeypatch.setattr(op_base.EpOpBase, "_capture_id", lambda self: 5)

    def program(pe: int) -> None:
        nonlocal capturing
        arena, state = EpArena(config(pe)), host_state.current()
        first, second = EpDispatchPlan(arena), EpDispatchPlan(arena)
        state.bootstrap.barrier("made")
        capturing = True
        with pytest.raises(
            StateError, match="staging_base is bound, and none can be allocated while a graph is captured"
        ):
            first.launch(input=INPUT, indices=INDICES)
        state.bootstrap.barrier("refused")
        capturing = False
        state.bootstrap.barrier("not captured")
        launch(first)
        state.bootstrap.barrier("allocated")
        capturing = True
        # one that is first launched there has the buffer of its layout
        launch(second)
        assert second._default is first._default
        state.bootstrap.barrier("captured")
        capturing = False

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        on_each_pe(program)


def test_names_types_and_ends() -> None:
    def program(pe: int) -> None:
        arena = EpArena(config(pe))
        plan, back = EpDispatchPlan(arena), EpCombinePlan(arena)
        with pytest.raises(TypeError, match=r"EpDispatchPlan: stagingBase: want one of .*staging_base"):
            plan.bind(stagingBase=0)
        with pytest.raises(TypeError, match="EpDispatchPlan: tokens: want one of input"):
            plan.launch(tokens=INPUT)
        with pytest.raises(TypeError, match="EpCombinePlan: staging_base: want one of"):
            back.bind(staging_base=buffer_of(arena))
        with pytest.raises(TypeError, match="blocks"):
            EpDispatchPlan(arena, blocks=4)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="dtype: want rows of 48 bytes"):
            EpDispatchPlan(arena, dtype=torch.float32)
        # an entry of packed float4 is as long as one of float8, a row half as long
        bytewise = EpArena(config(pe, hidden_dim=32, data_type=torch.float8_e4m3fn))
        with pytest.raises(ValueError, match="dtype: want rows of 32 bytes"):
            EpDispatchPlan(bytewise, dtype=torch.float4_e2m1fn_x2)
        with pytest.raises(ValueError, match=r"dtype: want torch\.float32 or"):
            EpDispatchPlan(arena, dtype=torch.int16)
        with pytest.raises(ValueError, match=r"input\.dtype"):
            plan.launch(input=INPUT.half(), indices=INDICES, staging_base=buffer_of(arena))
        with pytest.raises(ValueError, match=r"input.shape: want \[any, 24\]"):
            plan.launch(input=INPUT[:, :8].contiguous(), indices=INDICES, staging_base=buffer_of(arena))
        with pytest.raises(ValueError, match="stream"):
            plan.launch(5, input=INPUT, indices=INDICES, staging_base=buffer_of(arena))
        inside = arena.recv_tokens()[:1]
        with pytest.raises(ValueError, match="input: want memory that peers do not write"):
            plan.launch(input=inside, indices=INDICES, staging_base=buffer_of(arena))
        with pytest.raises(ValueError, match="arena"):
            EpDispatchPlan(config(pe))  # type: ignore[arg-type]
        for closed, call in ((plan, {"input": INPUT, "indices": INDICES}), (back, {"input": INPUT})):
            closed.close()
            for refused in (closed.launch, closed.bind):
                with pytest.raises(RuntimeError, match=f"the {type(closed).__name__} is closed"):
                    refused(**call)
        arena.close()
        with pytest.raises(StateError, match="closed"):
            EpDispatchPlan(arena).launch(input=INPUT, indices=INDICES)

    on_each_pe(program)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts_per_token": 17}, "num_experts_per_token: want <= 16"),
        ({"dispatch_block_num": 513}, r"dispatch_block_num: want in \[1, 512\]"),
        ({"schedule": ((4, 513, 2),)}, r"schedule: blocks: want in \[1, 512\]"),
        ({"schedule": ((4, 2, 2), (4, 2, 2))}, "schedule: want .* rising"),
        ({"schedule": ((4, 2, 3),)}, "schedule: warps: want 1, 2"),
        ({"warp_num_per_block": 3}, "^warp_num_per_block: want 1, 2"),
        ({"combine_warp_num_per_block": 32}, "combine_warp_num_per_block: want 1, 2"),
        ({"combine_block_num": 0}, "combine_block_num: want >= 1"),
        ({"combine_mode": "scatter"}, "combine_mode: want one of: gather"),
        ({"quant_type": "fp8_direct_cast"}, "quant_type: want one of: none"),
        ({"kernel_backend": "flydsl"}, "kernel_backend: want None or one of: triton"),
        ({"enable_std_moe": True}, "enable_std_moe: want False"),
        ({"world_size": 65}, "world_size: want <= 64"),
        ({"hidden_dim": 20}, "hidden_dim: want a multiple of 16 bytes"),
        ({"dispatch_data_type": torch.float32}, "want both or neither"),
        ({"data_type": torch.int8}, "data_type: want torch.float32 or"),
        (
            {"dispatch_data_type": torch.bfloat16, "combine_data_type": torch.float8_e4m3fn},
            "combine_data_type: want torch.float32 or",
        ),
        ({"max_num_inp_token_per_rank": 0}, "max_num_inp_token_per_rank: want an int >= 1"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as error:
        config(0, **changes)
    assert isinstance(error.value, ArgumentError)


@pytest.mark.parametrize("field", ["hidden_dim", "scale_dim", "combine_data_type"])
def test_problems_that_differ_among_pes_are_refused_on_every_pe(field: str) -> None:
    changes = {"hidden_dim": HIDDEN + 8, "scale_dim": 3, "combine_data_type": torch.float16}

    def program(pe: int) -> None:
        types = {"dispatch_data_type": torch.bfloat16, "combine_data_type": torch.bfloat16, "scale_type_size": 4}
        with pytest.raises(ArgumentError, match=f"config.{field}: want one value on every PE"):
            EpArena(config(pe, **types | ({field: changes[field]} if pe == 1 else {})))

    on_each_pe(program)


def test_block_counts_beyond_the_staging_extent_are_refused_by_plans_too() -> None:
    def program(pe: int) -> None:
        arena = EpArena(config(pe))
        for block_num in (0, 513):
            with pytest.raises(ValueError, match=r"block_num: want in \[1, 512\]"):
                EpDispatchPlan(arena, block_num=block_num)
        EpDispatchPlan(arena, block_num=512)
        for kind in (EpDispatchPlan, EpCombinePlan):
            with pytest.raises(ValueError, match="warp_per_block: want 1, 2"):
                kind(arena, warp_per_block=3)

    on_each_pe(program)


def test_tuned_settles_what_is_left_open() -> None:
    fields = {"world_size": 4, "rank": 0, "hidden_dim": 7168, "max_num_inp_token_per_rank": 4096}
    fields |= {"num_experts_per_rank": 32, "num_experts_per_token": 8}
    tuned = EpDispatchCombineConfig.tuned(**fields, warp_num_per_block=16)
    assert tuned.warp_num_per_block == 16
    assert tuned.dispatch_block_num == 256
    assert tuned.combine_block_num is not None
    assert tuned.combine_warp_num_per_block is not None


def test_the_example_of_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "ep_v2.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "docs/ep_v2.md", "exec"), {})
