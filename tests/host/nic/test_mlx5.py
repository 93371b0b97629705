"""mlx5's commands bit by bit, from the manual's offsets; and what is left when one fails."""

from __future__ import annotations

import errno

import pytest

from mori_triton.errors import ArgumentError, DriverError
from mori_triton.host.drivers.cpu import CpuDriver
from mori_triton.host.nic import mlx5
from mori_triton.host.nic.connection import QueuePairEnd
from mori_triton.host.nic.verbs import OpenDevice
from tests.host.nic.fake_mlx5 import FakeMlx5
from tests.host.nic.fake_rdma import FakeVerbs
from tests.host.nic.test_connection import facts

pytestmark = pytest.mark.cpu


class Bench:
    def __init__(self) -> None:
        self.verbs, self.fake, self.driver = FakeVerbs(), FakeMlx5(), CpuDriver()
        self.device = OpenDevice(self.verbs.library(), "mlx5_0")

    def open(self) -> mlx5.Mlx5Device:
        return mlx5.Mlx5Device(self.device, self.fake.library(), self.driver)


def bits(command: bytes) -> dict[tuple[int, int], int]:
    """Every bit that is set, as (byte of its word, bit)."""
    words = {at: int.from_bytes(command[at : at + 4], "big") for at in range(0, len(command), 4)}
    return {(at, bit): 1 for at, word in words.items() for bit in range(32) if word >> bit & 1}


def wanted(*fields: tuple[int, int, int, int]) -> dict[tuple[int, int], int]:
    """The same of fields (word, high, low, value)."""
    for _, high, low, value in fields:
        assert value < 1 << (high - low + 1)
    return {(at, low + bit): 1 for at, high, low, value in fields for bit in range(high - low + 1) if value >> bit & 1}


def test_create() -> None:
    bench = Bench()
    made = bench.open().create(2)
    (cq, create), (qp, second), (modify, init) = bench.fake.commands
    assert (cq, qp, modify) == ("create", "create", "modify")
    assert [len(command) for _, command in bench.fake.commands] == [272, 272, 272]
    ring, cq_record, rings, record = bench.fake.umems
    assert bits(create) == wanted(
        (0x00, 31, 16, 0x400), (0x10, 25, 25, 1), (0x10, 20, 20, 1), (0x10, 17, 17, 1), (0x14, 31, 0, cq_record),
        (0x1C, 28, 24, 12), (0x1C, 23, 0, 0x123), (0x24, 7, 0, 0x1F), (0x58, 31, 0, ring), (0x5C, 31, 31, 1),
    )  # fmt: skip
    assert bits(second) == wanted(
        (0x00, 31, 16, 0x500), (0x18, 12, 11, 3), (0x1C, 23, 0, 0xC0DE), (0x20, 22, 19, 12), (0x20, 14, 11, 14),
        (0x20, 7, 6, 1), (0x24, 23, 0, 0x123), (0x94, 23, 0, 0xABC01), (0xB4, 23, 0, 0xABC01), (0xE8, 28, 28, 1),
        (0xFC, 31, 0, record), (0x108, 31, 0, rings), (0x10C, 31, 31, 1),
    )  # fmt: skip
    assert bits(init) == wanted(
        (0x00, 31, 16, 0x502), (0x08, 23, 0, 0xABC02), (0x18, 12, 11, 3), (0x54, 23, 16, 2), (0xA8, 19, 16, 3),
        (0xA8, 15, 13, 7),
    )  # fmt: skip
    # memory: one collapsed completion that is not there yet; receive ring of 64 KiB, then 1 MiB to send
    sizes = [num_bytes for _, num_bytes in bench.fake.umems.values()]
    assert sizes == [4096 * 64, 8, 2 << 20, 8]
    assert all(address % 4096 == 0 for address, _ in bench.fake.umems.values())
    assert bench.driver.read(made.cq_address, 4096 * 64) == b"\xff" * 4096 * 64
    assert made.number == 0xABC02
    assert made.sq_address == bench.fake.umems[rings][0] + 65536
    assert mlx5.SQ_WQES == 16384
    assert made.record_address == bench.fake.umems[record][0] + 4
    assert (made.cq_address, made.doorbell_address) == (bench.fake.umems[ring][0], 0x7E0000000800)
    bench.device.close()
    assert (bench.fake.held, bench.verbs.held) == ({}, {})
    assert bench.fake.keys()[-7:] == [
        "obj_destroy", "umem_dereg", "umem_dereg", "obj_destroy", "umem_dereg", "umem_dereg", "free_uar",
    ]  # fmt: skip


def connected(**options) -> list[bytes]:
    bench = Bench()
    device = bench.open()
    made = device.create(1)
    link = {key: options.pop(key) for key in list(options) if key in ("link_layer", "lid")}
    own = facts(0, mtu=4, gid_index=5, **link)
    peer = facts(1, gid=bytes(range(0x10, 0x20)), mac=bytes(range(0xA0, 0xA6)), mtu=3, **link)
    device.connect(made, own, peer, (QueuePairEnd(made.number, 0x111111), QueuePairEnd(0xFEDCBA, 0xFFFFFF)), **options)
    return [command for _, command in bench.fake.commands[3:]]


def test_connect_over_ethernet() -> None:
    receive, send = connected(service_level=5, traffic_class=0xA0)
    assert receive[0x40:0x50] == bytes(range(0x10, 0x20))
    assert receive[0x56:0x5C] == bytes(range(0xA0, 0xA6))
    rest = receive[:0x40] + bytes(16) + receive[0x50:0x56] + bytes(6) + receive[0x5C:]
    assert bits(rest) == wanted(
        (0x00, 31, 16, 0x503), (0x08, 23, 0, 0xABC02), (0x20, 31, 29, 3), (0x20, 28, 24, 30), (0x2C, 23, 0, 0xFEDCBA),
        (0x38, 23, 16, 5), (0x38, 7, 0, 64), (0x50, 21, 16, 0x28), (0x50, 15, 0, 0xFC02), (0x54, 30, 28, 5),
        (0xA8, 23, 21, 4), (0xAC, 28, 24, 12), (0xAC, 23, 0, 0xFFFFFF),
    )  # fmt: skip
    assert bits(send) == wanted(
        (0x00, 31, 16, 0x504), (0x08, 23, 0, 0xABC02), (0x38, 31, 27, 20), (0x88, 23, 21, 4), (0x88, 18, 16, 7),
        (0x88, 15, 13, 7), (0x90, 23, 0, 0x111111),
    )  # fmt: skip


def test_connect_over_infiniband() -> None:
    receive, _ = connected(link_layer="InfiniBand", lid=0xBFFF)
    assert bits(receive) == wanted(
        (0x00, 31, 16, 0x503), (0x08, 23, 0, 0xABC02), (0x20, 31, 29, 3), (0x20, 28, 24, 30), (0x2C, 23, 0, 0xFEDCBA),
        (0x34, 15, 0, 0xBFFF), (0xA8, 23, 21, 4), (0xAC, 28, 24, 12), (0xAC, 23, 0, 0xFFFFFF),
    )  # fmt: skip


def test_the_address_that_is_sent_from() -> None:
    bench = Bench()
    device = bench.open()
    bench.fake.answer = bytes(0x22) + b"\xee\x0d\x9a\x01\x02\x03" + bytes(8)
    assert device.mac(1, 3) == b"\xee\x0d\x9a\x01\x02\x03"
    ((_, command),) = bench.fake.commands
    assert bits(command) == wanted((0x00, 31, 16, 0x760), (0x08, 31, 16, 3), (0x08, 3, 0, 1))


def test_a_card_that_refuses_says_why() -> None:
    bench = Bench()
    device = bench.open()
    bench.fake.answer = b"\x03\0\0\0\x00\x5e\x1a\x2b"
    text = r"^mlx5dv_devx_obj_create \(CREATE_CQ on mlx5_0\): EREMOTEIO: .* \(status 0x3, syndrome 0x5e1a2b\)$"
    with pytest.raises(DriverError, match=text):
        device.create(1)
    bench.device.close()
    assert (bench.fake.held, bench.verbs.held) == ({}, {})


@pytest.mark.parametrize("key", ["alloc_uar", "query_eqn", "umem_reg", "obj_create", "obj_modify"])
def test_failures_leave_nothing(key: str) -> None:
    bench = Bench()
    device = bench.open()
    bench.fake.fail[key] = errno.ENOMEM
    with pytest.raises(DriverError, match=rf"mlx5dv_devx_{key} .*mlx5_0.*ENOMEM"):
        device.create(1)
    bench.device.close()
    assert (bench.fake.held, bench.verbs.held) == ({}, {})


def test_fields() -> None:
    block = bytearray(b"\xff" * 12)
    mlx5.put(block, mlx5.Field(4, 15, 8), 0)
    assert block.hex() == "ffffffff" + "ffff00ff" + "ffffffff"
    mlx5.put(block, mlx5.Field(4, 15, 8), 0xA5)
    assert mlx5.get(block, mlx5.Field(4, 15, 8)) == 0xA5
    for value in (-1, 256):
        with pytest.raises(ArgumentError, match=r"8 bits at byte 0x4: want below 2\^8"):
            mlx5.put(block, mlx5.Field(4, 15, 8), value)
