"""How far a card is, from completions' bytes as the vendors lay them out."""

from __future__ import annotations

import struct

import pytest

from mori_triton.host.nic.completions import Progress, progress

pytestmark = pytest.mark.cpu

BASE = 0x10000


def asked(provider: str, memory: bytes, **queue: int) -> Progress:
    def read(address: int, num_bytes: int) -> bytes:
        assert BASE <= address <= BASE + len(memory) - num_bytes
        return memory[address - BASE :][:num_bytes]

    return progress(provider, {"cq": BASE, "done": 0, "consumed": 0, "num_wqes": 16, **queue}, read)


def mlx5(counter: int, opcode: int = 0, syndrome: int = 0) -> bytes:
    cqe = bytearray(64)
    struct.pack_into(">H", cqe, 60, counter)
    cqe[63], cqe[55] = opcode << 4, syndrome
    return bytes(cqe)


def test_mlx5() -> None:
    assert asked("mlx5", b"\xff" * 64, posted=0) == (True, 0)
    assert asked("mlx5", b"\xff" * 64, posted=1) == (False, 0)
    assert asked("mlx5", mlx5(4), posted=5) == (True, 0)
    assert asked("mlx5", mlx5(3), posted=5) == (False, 0)
    # the counter has 16 bits
    assert asked("mlx5", mlx5(4), posted=(3 << 16) + 5) == (True, 0)
    for opcode in (13, 14):
        assert asked("mlx5", mlx5(4, opcode, 0x15), posted=5) == (False, 0x15)


def bnxt_re(count: int, status: int = 0) -> bytes:
    cqe = bytearray(32)
    struct.pack_into("<I", cqe, 8, count)
    struct.pack_into("<I", cqe, 24, status << 8)
    return bytes(cqe)


def test_bnxt_re() -> None:
    assert asked("bnxt_re", bytes(32), posted=0) == (True, 0)
    assert asked("bnxt_re", bytes(32), posted=3) == (False, 0)
    # modulo the ring
    assert asked("bnxt_re", bnxt_re(3), posted=35) == (True, 0)
    assert asked("bnxt_re", bnxt_re(2), posted=35) == (False, 0)
    assert asked("bnxt_re", bnxt_re(2, 10), posted=35).failed == 10


def ionic(count: int, color: int, status: int = 0) -> bytes:
    cqe = bytearray(32)
    struct.pack_into(">I", cqe, 4, count % 2**24)
    struct.pack_into(">II", cqe, 24, status, color | (2 if status else 0))
    return bytes(cqe)


def test_ionic() -> None:
    nothing = bytes(32)
    assert asked("ionic", nothing * 4, posted=0, num_cqes=4) == (True, 0)
    assert asked("ionic", nothing * 4, posted=2, num_cqes=4) == (False, 0)
    # two completions in the first round, whose color is 1
    ring = ionic(1, 1) + ionic(3, 1) + nothing * 2
    assert asked("ionic", ring, posted=3, num_cqes=4) == (True, 0)
    assert asked("ionic", ring, posted=4, num_cqes=4) == (False, 0)
    # kernels have taken both
    assert asked("ionic", ring, posted=3, num_cqes=4, consumed=2, done=3) == (True, 0)
    assert asked("ionic", ring, posted=4, num_cqes=4, consumed=2, done=3) == (False, 0)
    # in the second round it is 0, which the first two have, and the others not yet
    again = ionic(9, 0) + ionic(11, 0) + ionic(6, 1) + ionic(8, 1)
    assert asked("ionic", again, posted=11, num_cqes=4, consumed=3, done=6) == (True, 0)
    assert asked("ionic", again, posted=12, num_cqes=4, consumed=3, done=6) == (False, 0)
    # 24 bits
    assert asked("ionic", ionic(2**24 + 5, 1), posted=2**24 + 5, num_cqes=1) == (True, 0)
    assert asked("ionic", ring[:64] + ionic(4, 1, 9) + nothing, posted=4, num_cqes=4) == (False, 9)
