"""Requests of each kind, and that the soft HCA refuses a wrong one: an error completion, and no memory changed."""

import re
from collections.abc import Callable

from tests.host.nic.soft_cards import HEAP_BYTES, STATUS, QueuePair, Request, World

REQUESTS = {
    "write": Request("write", local=64, remote=128, num_bytes=48),
    "read": Request("read", local=64, remote=128, num_bytes=48),
    "inline": Request("inline", remote=128, data=b"12345678"),
    "long inline": Request("inline", remote=128, data=b"1234567890123"),
    "add": Request("add", local=64, remote=128, value=3, compare=9),
    "cas": Request("cas", local=64, remote=128, value=3, compare=9),
}


def fails(
    provider: str, wrong: Callable[[QueuePair], None], fault: str, says: str, *, index: int = 1, late: bool = False
) -> None:
    """A right request, what `wrong` posts and rings, a right one: the first is done, the others fail in their order."""
    world = World(provider, late=late)
    mine, _ = world.connect(0, 1)
    mine.post(Request("inline", remote=8, data=b"before", signaled=False))
    mine.ring()
    world.drain()
    before = world.snapshot()
    assert before[HEAP_BYTES + 8 : HEAP_BYTES + 14] == b"before"
    wrong(mine)
    for word in range(10_000):
        if (done := mine.last_completion()).failed:
            break
        world.hca.step(word)
    assert (done.count, done.failed, done.status) == (index + 1, True, STATUS[fault][provider])
    (error,) = world.hca.errors
    assert (error.number, error.index, error.fault) == (mine.number, index, fault)
    assert re.fullmatch(f"{says}.*", error.what), error.what
    mine.post(Request("write", num_bytes=64))
    mine.ring()
    world.drain()
    assert (mine.last_completion().failed, mine.last_completion().status) == (True, STATUS["flush"][provider])
    assert world.snapshot() == before
    assert len(world.hca.errors) == 1
