"""Worlds on fake GPUs."""

import threading

import pytest

import mori_triton as mori
from mori_triton.world import gpu, gpus
from tests.fake_gpus import FakeGpus


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """Every world on "cuda" of a test is on fake GPUs; the list of them."""
    made = []
    monkeypatch.setattr(FakeGpus, "made", made, raising=False)
    monkeypatch.setattr(FakeGpus, "count", 1)
    monkeypatch.setattr(gpu, "Gpus", FakeGpus)
    monkeypatch.setattr(gpus, "check_available", lambda device: None)
    before = threading.active_count()
    yield made
    # every stream was given back, and its thread has ended
    assert threading.active_count() <= before
    assert all(one.given == len(one.streams) for one in made)


def world(n, **settings):
    return mori.local_world(n, device="cuda", heap_size="1M", **{"timeout_s": 20.0, **settings})
