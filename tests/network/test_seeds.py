"""Protocols over cards that deliver as late as they may, in weak memory, under many seeds: no wrong value.

`MORI_TEST_SEEDS=500 pytest tests/network/test_seeds.py` tries more of them than every run of the tests does.
"""

import os

import pytest

from mori_triton import local_world
from mori_triton.device.launch import launch
from tests.network import protocols

pytestmark = pytest.mark.cpu

CARDS = ("mlx5", "bnxt_re", "ionic")
SEEDS = int(os.environ.get("MORI_TEST_SEEDS", "48"))
GROUPS = 8


@pytest.mark.parametrize("group", range(GROUPS))
def test_no_wrong_value(group):
    for seed in range(group, SEEDS, GROUPS):
        # 3 PEs, or 2 + 2 of which some are mapped; rings that are full all the time, or never
        num_pes, mapped = ((3, 1), (4, 2))[seed // 3 % 2]
        world = local_world(
            num_pes,
            gpus_per_node=mapped,
            transport=CARDS[seed % 3],
            seed=seed,
            weak_memory=True,
            network={"late": True, "seed": seed, "num_wqes": (4, 64)[seed // 9 % 2]},
            # one writes through the first cache, the other does not
            arch=("gfx1201", "gfx942")[seed // 18 % 2],
        )
        try:
            world.run(protocols.all_protocols, launch)
        except Exception as error:
            raise AssertionError(f"seed {seed} over {CARDS[seed % 3]}") from error
