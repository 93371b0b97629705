"""Planted faults are found: by the protocols of test_seeds.py, in worlds like its, within a few seeds."""

import functools

import pytest

from mori_triton import bitcode, local_world
from mori_triton.device.launch import launch
from mori_triton.errors import Deadlock, MoriError, NetworkError, WeakMemoryError
from tests.network import faults, protocols

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.slow,
    pytest.mark.skipif(faults.CLANG is None, reason="faults are planted in the sources: no clang here to build them"),
]

# how each shows: as the wrong value itself, or before that
FOUND_BY = {
    "a fence removed": (protocols.ring, WeakMemoryError, "missing: a release of agent scope"),
    "a signal before its data": (protocols.ring, AssertionError, "ring, round"),
    "a wrong doorbell index, mlx5": (protocols.ring, (Deadlock, NetworkError), "expected"),
    "a wrong doorbell index, bnxt_re": (protocols.ring, (Deadlock, NetworkError), "expected"),
    "a wrong doorbell index, ionic": (protocols.ring, (Deadlock, NetworkError), "expected"),
    "a reservation not waited for": (protocols.barrier, (Deadlock, NetworkError), "expected"),
    "an epoch compared with ==": (protocols.ring, Deadlock, "expected == "),
}
SEEDS = 24


def test_every_fault_is_tried():
    assert FOUND_BY.keys() == faults.FAULTS.keys()


@pytest.mark.parametrize("name", faults.FAULTS)
def test_is_found(name, tmp_path):
    protocol, wanted, text = FOUND_BY[name]
    fault = faults.FAULTS[name]
    library = bitcode.specialize(faults.planted(name, tmp_path), provider=fault.transport)
    faulty = functools.partial(launch, extern_libs={"mori_shmem": str(library)})
    for seed in range(SEEDS):
        world = local_world(
            3,
            arch=fault.arch,
            transport=fault.transport,
            seed=seed,
            weak_memory=True,
            network={"late": True, "seed": seed, "num_wqes": 4},
        )
        try:
            world.run(protocol, faulty)
        except (MoriError, AssertionError) as error:
            found = error
            break
    else:
        pytest.fail(f"not found within {SEEDS} seeds")
    assert isinstance(found, wanted), f"seed {seed}"
    assert text in str(found), f"seed {seed}"
