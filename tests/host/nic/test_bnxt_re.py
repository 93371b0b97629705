"""bnxt_re's queue pairs on a double of its library, and the states of connections that verbs change."""

from __future__ import annotations

import ctypes
import errno
import os

import pytest

from mori_triton.errors import ArgumentError, DriverError
from mori_triton.host.drivers.cpu import CpuDriver
from mori_triton.host.nic import bnxt_re, states, verbs_api
from mori_triton.host.nic.connection import QueuePairEnd
from mori_triton.host.nic.verbs import OpenDevice
from tests.host.nic.fake_rdma import FakeLibrary, FakeVerbs, address
from tests.host.nic.test_connection import facts

pytestmark = pytest.mark.cpu


def plain(struct: ctypes.Structure) -> dict[str, object]:
    """The fields that are not zero, structs within by dots."""
    found: dict[str, object] = {}
    for name, _ in struct._fields_:
        value = getattr(struct, name)
        if isinstance(value, ctypes.c_void_p):
            value = value.value
        if isinstance(value, ctypes.Structure):
            found |= {f"{name}.{inner}": v for inner, v in plain(value).items()}
        elif value:
            found[name] = value
    return found


class FakeBnxt(FakeLibrary):
    source = "libbnxt_re"

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.umems: dict[int, tuple[int, int]] = {}  # handle: address, bytes
        self.descriptors: dict[int, int] = {}  # of those that are dma-bufs
        # a kernel that makes no completion queue of one
        self.no_dma_buf = False
        self.made: list[dict[str, object]] = []
        self.states: list[tuple[dict[str, object], int]] = []
        self.page = (ctypes.c_uint64 * 1)()

    def do_get_default_db_region(self, context, out):
        out[0].dbr = ctypes.cast(self.page, ctypes.POINTER(ctypes.c_uint64))
        return 0

    def do_umem_reg(self, context, wanted):
        handle = self.new("umem")
        given = plain(wanted[0])
        self.umems[handle] = (given.pop("addr", 0), given.pop("size"))
        if "dmabuf_fd" in given:
            # noted, and used when a queue is made of it
            self.descriptors[handle] = given.pop("dmabuf_fd")
            assert (given.pop("comp_mask"), given.pop("pgsz_bitmap")) == (1, 2**64 - 4096)
        assert given == {"access_flags": 1}
        return handle

    def check_open(self, *umems):
        for umem in umems:
            if umem.value in self.descriptors:
                if self.no_dma_buf:
                    return False
                os.fstat(self.descriptors[umem.value])
        return True

    def do_umem_dereg(self, umem):
        return self.drop(umem)

    def do_create_cq(self, context, wanted):
        if not self.check_open(wanted[0].umem_handle):
            ctypes.set_errno(errno.EOPNOTSUPP)
            return None
        self.made.append(plain(wanted[0]))
        return self.new("cq")

    def do_destroy_cq(self, cq):
        return self.drop(cq)

    def do_init_obj(self, obj, kind):
        assert (kind, self.held[obj[0].cq.in_.value]) == (2, "cq")
        obj[0].cq.out[0].cqn = 0x77
        return 0

    def do_create_qp(self, pd, wanted):
        assert self.check_open(wanted[0].sq_umem_handle, wanted[0].rq_umem_handle)
        self.made.append(plain(wanted[0]))
        return self.struct("qp", verbs_api.Qp(qp_num=0x4321))

    def do_destroy_qp(self, qp):
        return self.drop(address(qp))

    def do_modify_qp(self, qp, attributes, mask, kind, value):
        assert (kind, value) == (0, 0)
        self.states.append((plain(attributes[0]), mask))
        return 0


class Bench:
    def __init__(self) -> None:
        self.verbs, self.fake, self.driver = FakeVerbs(("bnxt_re0",)), FakeBnxt(), CpuDriver()
        self.device = OpenDevice(self.verbs.library(), "bnxt_re0")

    def open(self) -> bnxt_re.BnxtDevice:
        return bnxt_re.BnxtDevice(self.device, self.fake.library(), self.driver)


def test_create() -> None:
    bench = Bench()
    made = bench.open().create(1)
    cq_umem, sq_umem, rq_umem = bench.fake.umems
    sizes = [num_bytes for _, num_bytes in bench.fake.umems.values()]
    # 12288 slots of 16 bytes, and behind those to send 8192 entries of 8 bytes
    assert sizes == [32, 262144, 196608]
    cq, qp = bench.fake.made
    assert cq == {"umem_handle": cq_umem, "ncqe": 1}
    handle = qp.pop("send_cq")
    assert handle == qp.pop("recv_cq")
    assert bench.fake.held[handle] == "cq"
    assert qp == {
        "qp_type": 2, "max_send_wr": 4096, "max_recv_wr": 4096, "max_send_sge": 1, "max_recv_sge": 1,
        "max_inline_data": 16, "sq_umem_handle": sq_umem, "sq_len": 262144, "sq_slots": 12288, "sq_wqe_sz": 48,
        "sq_psn_sz": 8, "sq_npsn": 8192, "rq_umem_handle": rq_umem, "rq_len": 196608, "rq_slots": 12288,
        "rq_wqe_sz": 48,
    }  # fmt: skip
    assert (made.number, made.cq_number) == (0x4321, 0x77)
    assert made.cq_address == bench.fake.umems[cq_umem][0]
    assert made.sq_address == bench.fake.umems[sq_umem][0]
    assert made.psn_table_address == made.sq_address + 196608
    assert made.doorbell_address == ctypes.addressof(bench.fake.page)
    assert bench.driver.read(made.cq_address, 32) == bytes(32)
    assert bench.fake.states == [({"qp_state": 1, "port_num": 1, "qp_access_flags": 15}, 0x39)]
    bench.device.close()
    assert (bench.fake.held, bench.verbs.held) == ({}, {})
    assert bench.fake.keys()[-5:] == ["destroy_qp", "umem_dereg", "umem_dereg", "destroy_cq", "umem_dereg"]


def test_connect() -> None:
    bench = Bench()
    device = bench.open()
    made = device.create(1)
    own, peer = facts(0, provider="bnxt_re", mtu=5, gid_index=3), facts(1, mtu=3, gid=bytes(range(16)))
    device.connect(made, own, peer, (QueuePairEnd(made.number, 0x10), QueuePairEnd(0x99, 0x20)), traffic_class=0x68)
    (receive, receive_mask), (send, send_mask) = bench.fake.states[1:]
    assert receive == {
        "qp_state": 2, "path_mtu": 3, "dest_qp_num": 0x99, "rq_psn": 0x20, "max_dest_rd_atomic": 16,
        "min_rnr_timer": 12, "ah_attr.grh.dgid.subnet_prefix": 0x0706050403020100,
        "ah_attr.grh.dgid.interface_id": 0x0F0E0D0C0B0A0908,
        "ah_attr.grh.sgid_index": 3, "ah_attr.grh.hop_limit": 255, "ah_attr.grh.traffic_class": 0x68, "ah_attr.sl": 1,
        "ah_attr.is_global": 1, "ah_attr.port_num": 1,
    }  # fmt: skip
    assert send == {
        "qp_state": 3, "sq_psn": 0x10, "max_rd_atomic": 7, "timeout": 20, "retry_cnt": 7, "rnr_retry": 7,
    }  # fmt: skip
    # state, way, mtu, number, psn, reads, timer; state, timeout, retries, retries, reads, psn
    assert (receive_mask, send_mask) == (0x1 | 0x80 | 0x100 | 0x100000 | 0x1000 | 0x20000 | 0x8000, 0x12E01)


def test_states_of_other_makers_and_networks() -> None:
    own = facts(0, provider="ionic", link_layer="InfiniBand", port=2)
    peer = facts(1, link_layer="InfiniBand", lid=0x1A)
    receive, _ = states.to_receive(own, peer, QueuePairEnd(5, 6), max_reads=300, service_level=4)
    assert plain(receive) == {
        "qp_state": 2, "path_mtu": 5, "dest_qp_num": 5, "rq_psn": 6, "max_dest_rd_atomic": 255, "min_rnr_timer": 12,
        "ah_attr.dlid": 0x1A, "ah_attr.sl": 4, "ah_attr.port_num": 2,
    }  # fmt: skip
    send, _ = states.to_send(own, QueuePairEnd(7, 0))
    assert plain(send) == {"qp_state": 3, "max_rd_atomic": 15, "timeout": 14, "retry_cnt": 7, "rnr_retry": 7}
    with pytest.raises(ArgumentError, match="port: want 1 to 255"):
        states.to_init(0)


@pytest.mark.parametrize("key", ["umem_reg", "create_cq", "init_obj", "create_qp", "modify_qp"])
def test_failures_leave_nothing(key: str) -> None:
    bench = Bench()
    device = bench.open()
    bench.fake.fail[key] = errno.EINVAL
    with pytest.raises(DriverError, match=rf"bnxt_re_dv_{key} .*bnxt_re0.*EINVAL: Invalid argument"):
        device.create(1)
    bench.device.close()
    assert (bench.fake.held, bench.verbs.held) == ({}, {})


def test_no_doorbells() -> None:
    bench = Bench()
    bench.fake.fail["get_default_db_region"] = errno.EOPNOTSUPP
    with pytest.raises(DriverError, match=r"bnxt_re_dv_get_default_db_region \(bnxt_re0\): E"):
        bench.open()
