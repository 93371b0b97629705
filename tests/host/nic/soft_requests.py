"""Right requests for the soft HCA, and the model of what they do."""

from tests.host.nic.soft_cards import Request

MASK = (1 << 64) - 1


def carried_out(heaps: list[bytearray], pe: int, peer: int, r: Request) -> None:
    """The model: what a request does to copies of the heaps."""
    mine, other = heaps[pe], heaps[peer]
    if r.op == "write":
        other[r.remote : r.remote + r.num_bytes] = mine[r.local : r.local + r.num_bytes]
    elif r.op == "read":
        mine[r.local : r.local + r.num_bytes] = other[r.remote : r.remote + r.num_bytes]
    elif r.op == "inline":
        other[r.remote : r.remote + len(r.data)] = r.data
    else:
        old = int.from_bytes(other[r.remote : r.remote + 8], "little")
        new = (old + r.value) & MASK if r.op == "add" else r.value if old == r.compare else old
        other[r.remote : r.remote + 8] = new.to_bytes(8, "little")
        mine[r.local : r.local + 8] = old.to_bytes(8, "little")


def request_of(op: str, signaled: bool = True) -> Request:
    return Request(
        op, local=264, remote=1024, num_bytes=77, value=0x1122334455667788, compare=5,
        data=b"123456789012"[: 12 if op == "inline" else 0], signaled=signaled,
    )  # fmt: skip
