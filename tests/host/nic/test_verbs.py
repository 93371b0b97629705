"""Opening a device, registering memory and giving both back, on a double of libibverbs."""

from __future__ import annotations

import errno

import pytest

from mori_triton.errors import ArgumentError, DriverError, StateError
from mori_triton.host.nic import verbs_api
from mori_triton.host.nic.verbs import OpenDevice
from tests.host.nic.fake_rdma import FakeVerbs

pytestmark = pytest.mark.cpu


def test_a_device_by_its_name() -> None:
    fake = FakeVerbs(("mlx5_10", "mlx5_1"))
    device = OpenDevice(fake.library(), "mlx5_1")
    assert fake.of("open_device") == [(0xD1,)]
    # the list is given back, and not the device
    assert sorted(fake.held.values()) == ["alloc_pd", "open_device"]
    assert fake.of("alloc_pd") == [(device.context.value,)]
    assert (device.attributes().vendor_id, device.attributes().max_qp_rd_atom) == (0x02C9, 16)
    device.close()
    device.close()
    assert fake.held == {}
    assert fake.keys()[-2:] == ["dealloc_pd", "close_device"]


def test_no_such_device() -> None:
    fake = FakeVerbs(("mlx5_0", "mlx5_1"))
    with pytest.raises(StateError, match=r"fake libibverbs.* no device bnxt_re0, there are: mlx5_0, mlx5_1.*/dev/inf"):
        OpenDevice(fake.library(), "bnxt_re0")
    with pytest.raises(StateError, match="there are: none"):
        OpenDevice(FakeVerbs(()).library(), "mlx5_0")
    assert fake.held == {}


def test_a_kernel_without_rdma() -> None:
    fake = FakeVerbs()
    fake.fail["get_device_list"] = errno.ENOSYS
    with pytest.raises(StateError, match=r"no device mlx5_0: ibv_get_device_list: ENOSYS: Function not implemented"):
        OpenDevice(fake.library(), "mlx5_0")


@pytest.mark.parametrize("key", ["open_device", "alloc_pd"])
def test_failures_of_opening_leave_nothing(key: str) -> None:
    fake = FakeVerbs()
    fake.fail[key] = errno.EACCES
    with pytest.raises(DriverError, match=rf"ibv_{key}.*EACCES: Permission denied"):
        OpenDevice(fake.library(), "mlx5_0")
    assert fake.held == {}


def test_ports() -> None:
    fake = FakeVerbs()
    device = OpenDevice(fake.library(), "mlx5_0")
    assert device.port(1).active_mtu == verbs_api.MTU_4096
    fake.port_state = 1
    with pytest.raises(StateError, match="mlx5_0 port 2 is not up: its state is 1, want 4"):
        device.port(2)
    for number in (0, 256):
        with pytest.raises(ArgumentError, match="number"):
            device.port(number)


def test_memory() -> None:
    fake = FakeVerbs()
    device = OpenDevice(fake.library(), "mlx5_0")
    pd = device.pd.value
    heap = device.register(0x7F0000000000, 4 << 30)
    words = device.register_dma_buf(9, 4096, 0x7F2000000000, 8192)
    everything = 1 | 2 | 4 | 8
    assert fake.of("reg_mr") == [(pd, 0x7F0000000000, 4 << 30, everything)]
    assert fake.of("reg_dmabuf_mr") == [(pd, 4096, 8192, 0x7F2000000000, 9, everything)]
    assert (heap.lkey, heap.rkey, words.lkey, words.rkey) == (0x1001, 0xFFFF0001, 0x1002, 0xFFFF0002)
    assert (words.address, words.num_bytes) == (0x7F2000000000, 8192)
    device.deregister(heap)
    with pytest.raises(StateError, match="mlx5_0: 4294967296 bytes at 0x7f0000000000 are not registered"):
        device.deregister(heap)
    fake.fail["reg_mr"] = errno.ENOMEM
    with pytest.raises(DriverError, match=r"ibv_reg_mr \(64 bytes at 0x40 for mlx5_0\): ENOMEM"):
        device.register(0x40, 64)
    # made later, given back earlier; the device's memory after what may write to it
    device.owns(lambda: fake.calls.append(("queue pair",)))
    device.close()
    assert fake.keys()[-4:] == ["queue pair", "dereg_mr", "dealloc_pd", "close_device"]
    assert fake.held == {}


def test_no_dma_buf_in_an_old_library() -> None:
    device = OpenDevice(FakeVerbs(lacks=("reg_dmabuf_mr",)).library(), "mlx5_0")
    with pytest.raises(StateError, match="ibv_reg_dmabuf_mr: it is too old"):
        device.register_dma_buf(9, 0, 0x1000, 4096)


def test_all_is_given_back_when_something_fails() -> None:
    fake = FakeVerbs()
    device = OpenDevice(fake.library(), "mlx5_0")
    device.register(0x1000, 4096)
    fake.fail["dereg_mr"] = errno.EIO
    with pytest.raises(DriverError, match=r"ibv_dereg_mr .*EIO"):
        device.close()
    assert fake.keys()[-3:] == ["dereg_mr", "dealloc_pd", "close_device"]
    assert list(fake.held.values()) == ["mr"]
