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
# one writes through the first cache, the other does not
ARCHS = ("gfx1201", "gfx942")
SEEDS = int(os.environ.get("MORI_TEST_SEEDS", "48"))


# by card and GPU: workers that share the tests then do not compile the same kernels
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("card", CARDS)
def test_no_wrong_value(card, arch):
    seeds = [seed for seed in range(SEEDS) if (CARDS[seed % 3], ARCHS[seed // 18 % 2]) == (card, arch)]
    if not seeds:
        pytest.skip(f"MORI_TEST_SEEDS={SEEDS}: the first seed of this card and GPU is a later one")
    for seed in seeds:
        # 3 PEs, or 2 + 2 of which some are mapped; rings that are full all the time, or never
        num_pes, mapped = ((3, 1), (4, 2))[seed // 3 % 2]
        world = local_world(
            num_pes,
            gpus_per_node=mapped,
            transport=card,
            seed=seed,
            weak_memory=True,
            network={"late": True, "seed": seed, "num_wqes": (4, 64)[seed // 9 % 2]},
            arch=arch,
        )
        try:
            world.run(protocols.all_protocols, launch)
        except Exception as error:
            raise AssertionError(f"seed {seed} over {card}") from error
