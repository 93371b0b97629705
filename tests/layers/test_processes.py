"""A model with its experts in two processes, which find each other by a unique id."""

import multiprocessing
import os

import pytest
import torch

from mori_triton import layers, shmem
from tests.layers.small_models import qwen, tokens

pytestmark = pytest.mark.cpu

PARTS = [tokens(1, 6), tokens(2, 4)]


def pe_main(pe, unique_id, results):
    """A PE's process: it makes the model from the seed, as the others do, and keeps its own experts."""
    os.environ["MORI_SHMEM_HEAP_SIZE"] = "16M"
    torch.set_num_threads(1)
    shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, pe, len(PARTS), unique_id)
    model = qwen()
    model.set_experts_implementation("mori_ep")
    with torch.no_grad(), layers.shared_ops():
        logits = model(PARTS[pe]).logits
    num_experts = {len(module.down_proj) for _, module in layers.shards.experts_modules(model)}
    shmem.shmem_finalize()
    results.send((logits.numpy(), num_experts))


def test_logits_equal_the_unmodified_model():
    # importing transformers takes seconds: one server does it, and both PEs are copies of that
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipes = [context.Pipe(duplex=False) for _ in PARTS]
    unique_id = shmem.shmem_get_unique_id()
    processes = [
        context.Process(target=pe_main, args=(pe, unique_id, pipes[pe][1]), daemon=True) for pe in range(len(PARTS))
    ]
    for process in processes:
        process.start()
    try:
        model = qwen()
        for pe, (reader, _) in enumerate(pipes):
            assert reader.poll(100), f"PE {pe} says nothing"
            logits, num_experts = reader.recv()
            with torch.no_grad():
                torch.testing.assert_close(torch.from_numpy(logits), model(PARTS[pe]).logits, rtol=0, atol=1e-5)
            assert num_experts == {4}, "each PE keeps half of the 8 experts"
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
