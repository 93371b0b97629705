"""Rings in memory of a GPU: by a dma-buf where driver, library and kernel have that, else by their address."""

from __future__ import annotations

import errno
import os
import re

import pytest

from mori_triton.errors import DriverError
from mori_triton.host.nic import bnxt_re, mlx5
from mori_triton.host.nic.rings import RingMemory
from mori_triton.host.nic.verbs import OpenDevice
from tests.host.fake_gpu import fake_driver
from tests.host.nic.fake_mlx5 import FakeMlx5
from tests.host.nic.fake_rdma import FakeVerbs
from tests.host.nic.test_bnxt_re import FakeBnxt

pytestmark = pytest.mark.cpu

MLX5_SIZES, BNXT_SIZES = [4096 * 64, 8, 2 << 20, 8], [32, 262144, 196608]


def in_pages(sizes: list[int]) -> list[tuple[int, int]]:
    """Where in a block each of these begins, and its bytes, if they are of whole pages and follow one another."""
    found, at = [], 0
    for size in sizes:
        pages = -(-size // 4096) * 4096
        found.append((at, pages))
        at += pages
    return found


class Bench:
    def __init__(self, maker: str, vendor: str = "cuda", **options) -> None:
        self.driver, self.gpus = fake_driver(vendor)
        self.verbs = FakeVerbs((f"{maker}_0",))
        self.fake = (FakeMlx5 if maker == "mlx5" else FakeBnxt)(**options)
        self.device = OpenDevice(self.verbs.library(), f"{maker}_0")
        cards = mlx5.Mlx5Device if maker == "mlx5" else bnxt_re.BnxtDevice
        self.card = cards(self.device, self.fake.library(), self.driver)
        self.num_open = descriptors()

    def create(self):
        made = self.card.create(1)
        assert descriptors() == self.num_open
        return made

    def close(self) -> None:
        self.device.close()
        assert (self.fake.held, self.verbs.held) == ({}, {})
        self.driver.close()
        assert descriptors() == self.num_open


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_mlx5_by_dma_buf(vendor: str) -> None:
    bench = Bench("mlx5", vendor)
    made, again = bench.create(), bench.create()
    assert list(bench.fake.umems.values()) == in_pages(MLX5_SIZES * 2)
    assert bench.fake.of("umem_reg") == []
    # where kernels post is where the card looks
    assert made.sq_address - made.cq_address == 4096 * 64 + 4096 + 65536
    assert made.record_address - made.cq_address == 4096 * 64 + 4096 + (2 << 20) + 4
    assert again.cq_address - made.cq_address == sum(pages for _, pages in in_pages(MLX5_SIZES))
    assert made.cq_address % 4096 == 0
    assert bench.driver.read(again.cq_address, 4096 * 64 + 4) == b"\xff" * 4096 * 64 + bytes(4)
    bench.close()


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_bnxt_re_by_dma_buf(vendor: str) -> None:
    bench = Bench("bnxt_re", vendor)
    made, again = bench.create(), bench.create()
    assert list(bench.fake.umems.values()) == in_pages(BNXT_SIZES * 2)
    assert len(bench.fake.descriptors) == 6
    assert made.sq_address - made.cq_address == 4096
    assert again.cq_address - made.cq_address == 4096 + 262144 + 196608
    bench.close()


def by_address(bench: Bench, sizes: list[int]) -> None:
    """A queue pair is made of addresses, and if that fails too the text says why."""
    made = bench.create()
    first = made.cq_address
    assert list(bench.fake.umems.values())[-len(sizes) :] == [
        (first + at, size) for (at, _), size in zip(in_pages(sizes), sizes, strict=True)
    ]


WHY = {
    "a driver without": ("dma_buf", "no dma-buf for it"),
    "an old library": ("lacks", "libmlx5 is too old for dma-bufs"),
    "one that refuses the mask": ("umem_reg_ex", r"mlx5dv_devx_umem_reg_ex .*a dma-buf\): E(OP)?NOTSUPP?: .*"),
}


@pytest.mark.parametrize("name", WHY)
def test_mlx5_by_address(name: str) -> None:
    what, why = WHY[name]
    bench = Bench("mlx5", lacks=("umem_reg_ex",) if what == "lacks" else ())
    if what == "dma_buf":
        bench.gpus.fail["dma_buf"] = 1
    elif what == "umem_reg_ex":
        bench.fake.fail["umem_reg_ex"] = errno.EOPNOTSUPP
    by_address(bench, MLX5_SIZES)
    bench.fake.fail["umem_reg"] = errno.EFAULT
    with pytest.raises(DriverError, match=rf"umem_reg \(262144 bytes at 0x.*EFAULT.*\({why}\).*nvidia-peermem"):
        bench.create()
    bench.close()


def test_bnxt_re_by_address() -> None:
    bench = Bench("bnxt_re")
    bench.gpus.fail["dma_buf"] = 1
    by_address(bench, BNXT_SIZES)
    assert bench.fake.descriptors == {}
    bench.fake.fail["umem_reg"] = errno.EFAULT
    with pytest.raises(DriverError, match=r"umem_reg \(32 bytes .*EFAULT.*\(no dma-buf for it\).*nvidia-peermem"):
        bench.create()
    bench.close()


def test_bnxt_re_finds_out_late_that_there_are_no_dma_bufs() -> None:
    bench = Bench("bnxt_re")
    bench.fake.no_dma_buf = True
    by_address(bench, BNXT_SIZES)
    # of the completions only: what is made later is not tried in a way that has failed
    assert len(bench.fake.descriptors) == 1
    bench.fake.fail["create_cq"] = errno.ENOMEM
    with pytest.raises(DriverError, match=r"create_cq .*ENOMEM.*\(bnxt_re_dv_create_cq .*ENOMEM.*\).*nvidia-peermem"):
        bench.create()
    bench.close()


def test_blocks_are_shared_and_given_back() -> None:
    driver, gpus = fake_driver("hip")
    verbs = FakeVerbs()
    device = OpenDevice(verbs.library(), "mlx5_0")
    memory = RingMemory(device, driver)
    seen = []
    for sizes in ([5000, 1], [15 << 20], [1 << 20], [(20 << 20) + 1], [4096]):
        with memory.take(sizes) as (rings, descriptor):
            assert descriptor is not None
            assert [ring.num_bytes for ring in rings] == sizes
            for ring in rings:
                # the dma-buf is of all of a block
                assert ring.address - ring.offset in gpus.memory["device"]
                assert ring.address % 4096 == 0
                assert driver.read(ring.address, ring.num_bytes) == bytes(ring.num_bytes)
            seen += [(ring.address, ring.address + ring.page_bytes) for ring in rings]
    for (_, end), (start, _) in zip(sorted(seen), sorted(seen)[1:], strict=False):
        assert end <= start, "they overlap"
    # 12 KiB and 15 MiB, 1 MiB, 20 MiB for itself, a page: each block is memory that may be exported
    assert seen[2][0] - seen[0][0] == 3 * 4096
    assert [size % (2 << 20) for size in gpus.memory["device"].values()] == [0] * 4
    with pytest.raises(ZeroDivisionError), memory.take([8]) as (_, descriptor):
        raise ZeroDivisionError
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.EBADF))):
        os.fstat(descriptor)
    device.close()
    assert not gpus.memory["device"]
