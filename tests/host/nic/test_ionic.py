"""ionic's queue pairs on doubles of libibverbs and libionic."""

from __future__ import annotations

import ctypes
import errno

import pytest

from mori_triton.errors import ArgumentError, DriverError
from mori_triton.host.nic import ionic, verbs_api
from mori_triton.host.nic.connection import QueuePairEnd
from mori_triton.host.nic.ionic import IonicQueue
from mori_triton.host.nic.verbs import OpenDevice
from tests.host.nic.fake_rdma import FakeLibrary, FakeVerbs, address
from tests.host.nic.test_bnxt_re import plain
from tests.host.nic.test_connection import facts

pytestmark = pytest.mark.cpu

PAGE = 0x7E0000000000


class FakeIonicVerbs(FakeVerbs):
    def do_create_qp(self, pd, wanted):
        self.made = plain(wanted[0])
        return self.struct("qp", verbs_api.Qp(qp_num=0x55AA))

    def do_destroy_qp(self, qp):
        return self.drop(address(qp))

    def do_destroy_cq(self, cq):
        return self.drop(cq)


class FakeIonic(FakeLibrary):
    source = "libionic"

    def do_get_ctx(self, out, context):
        out[0].db_page = PAGE
        out[0].db_ptr = ctypes.cast(PAGE + 0x40, ctypes.POINTER(ctypes.c_uint64))
        out[0].sq_qtype, out[0].rq_qtype, out[0].cq_qtype = 1, 2, 3
        return 0

    def do_get_qp(self, out, qp):
        assert qp[0].qp_num == 0x55AA
        out[0].sq.ptr, out[0].sq.mask, out[0].sq.db_val = 0x7D0000000000, 4095, 0x55AA << 24
        out[0].rq.ptr = 1
        return 0

    def do_qp_get_udma_idx(self, qp):
        return 1

    def do_get_cq(self, out, cq, at):
        assert at == 1
        out[0].q.ptr, out[0].q.mask, out[0].q.db_val = 0x7C0000000000, 8191, 0x33 << 24
        return 0


class Bench:
    def __init__(self) -> None:
        self.verbs, self.fake = FakeIonicVerbs(("ionic_0",)), FakeIonic()
        self.device = OpenDevice(self.verbs.library(), "ionic_0")

    def open(self) -> ionic.IonicDevice:
        return ionic.IonicDevice(self.device, self.fake.library())


def test_create_and_connect() -> None:
    bench = Bench()
    device = bench.open()
    made = device.create(1, 1)
    pd = bench.device.pd.value
    assert bench.fake.of("pd_set_sqcmb") == bench.fake.of("pd_set_rqcmb") == [(pd, False, False, False)]
    assert bench.fake.of("pd_set_udma_mask") == [(pd, 2)]
    assert bench.verbs.of("create_cq") == [(bench.device.context.value, 8192, None, None, 0)]
    cq = bench.verbs.made.pop("send_cq")
    assert cq == bench.verbs.made.pop("recv_cq")
    assert bench.verbs.held[cq] == "create_cq"
    assert bench.verbs.made == {
        "cap.max_send_wr": 4096, "cap.max_send_sge": 1, "cap.max_inline_data": 32, "qp_type": 2,
    }  # fmt: skip
    assert made.number == 0x55AA
    assert made.send == IonicQueue(0x7D0000000000, 4096, PAGE + 0x48, 0x55AA << 24)
    assert made.completions == IonicQueue(0x7C0000000000, 8192, PAGE + 0x58, 0x33 << 24)

    own, peer = facts(0, provider="ionic"), facts(1, provider="ionic", mtu=4)
    device.connect(made, own, peer, (QueuePairEnd(made.number, 3), QueuePairEnd(0x66, 4)), service_level=2)
    states = [plain(attributes) for attributes, _ in bench.verbs.attributes]
    assert states[0] == {"qp_state": 1, "port_num": 1, "qp_access_flags": 15}
    assert (states[1]["dest_qp_num"], states[1]["rq_psn"], states[1]["path_mtu"]) == (0x66, 4, 4)
    assert (states[1]["ah_attr.sl"], states[1]["ah_attr.grh.hop_limit"]) == (2, 1)
    assert states[2] == {
        "qp_state": 3, "sq_psn": 3, "max_rd_atomic": 15, "timeout": 14, "retry_cnt": 7, "rnr_retry": 7,
    }  # fmt: skip
    bench.device.close()
    assert bench.verbs.held == {}
    assert bench.verbs.keys()[-4:] == ["destroy_qp", "destroy_cq", "dealloc_pd", "close_device"]


def test_pipelines() -> None:
    bench = Bench()
    device = bench.open()
    for pipeline in (-1, 2):
        with pytest.raises(ArgumentError, match="pipeline: want 0 to 1"):
            device.create(1, pipeline)
    device.create(1, 0)
    assert bench.fake.of("pd_set_udma_mask")[0][1] == 1


@pytest.mark.parametrize(
    ("library", "key"),
    [
        ("verbs", "create_cq"), ("verbs", "create_qp"), ("verbs", "modify_qp"), ("fake", "get_qp"), ("fake", "get_cq"),
        ("fake", "pd_set_udma_mask"),
    ],
)  # fmt: skip
def test_failures_leave_nothing(library: str, key: str) -> None:
    bench = Bench()
    device = bench.open()
    getattr(bench, library).fail[key] = errno.EPERM
    with pytest.raises(DriverError, match=rf"{key} .*ionic_0.*EPERM: Operation not permitted"):
        device.create(1, 0)
    bench.device.close()
    assert bench.verbs.held == {}
