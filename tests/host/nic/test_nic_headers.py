"""Every signature, struct and constant of the tables of RDMA libraries.

Against the headers in the directory that MORI_TEST_RDMA_INCLUDE names, which holds infiniband/verbs.h (such as that of
Debian's libibverbs-dev); where there are none, against sizes and offsets written down here, as for the libraries whose
headers no distribution has.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import pytest

from mori_triton.host.nic import bnxt_re_api, ionic_api, mlx5_api, verbs_api
from tests.host.nic.rdma_headers import Headers, kind_of

pytestmark = pytest.mark.cpu

VARIABLE = "MORI_TEST_RDMA_INCLUDE"
TABLES = [verbs_api, mlx5_api, bnxt_re_api, ionic_api]
NAMES = {
    verbs_api.Gid: "ibv_gid", verbs_api.DeviceAttr: "ibv_device_attr", verbs_api.PortAttr: "ibv_port_attr",
    verbs_api.Mr: "ibv_mr", verbs_api.Qp: "ibv_qp", verbs_api.QpCap: "ibv_qp_cap",
    verbs_api.QpInitAttr: "ibv_qp_init_attr", verbs_api.CqInitAttrEx: "ibv_cq_init_attr_ex",
    verbs_api.GlobalRoute: "ibv_global_route", verbs_api.AhAttr: "ibv_ah_attr", verbs_api.QpAttr: "ibv_qp_attr",
    mlx5_api.DevxUmem: "mlx5dv_devx_umem", mlx5_api.DevxUmemIn: "mlx5dv_devx_umem_in", mlx5_api.DvObj: "mlx5dv_obj",
    mlx5_api.DevxUar: "mlx5dv_devx_uar", mlx5_api.DvPd: "mlx5dv_pd",
}  # fmt: skip
IN_HEADERS = [verbs_api, mlx5_api]


@functools.cache
def headers() -> Headers:
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} is not set: no libibverbs headers to compare with")
    place = Path(os.environ[VARIABLE]) / "infiniband"
    files = ["verbs.h", "mlx5dv.h", "mlx5_api.h", "mlx5_user_ioctl_verbs.h"]
    return Headers(*(place / name for name in files))


def parts(make, modules=IN_HEADERS):
    return [
        pytest.param(module, part, id=f"{module.__name__.rpartition('.')[2]}-{part}")
        for module in modules
        for part in make(module)
    ]


@pytest.mark.parametrize(("module", "key"), parts(lambda module: module.FUNCTIONS))
def test_k4_signatures(module, key: str) -> None:
    row = module.FUNCTIONS[key]
    result, arguments = headers().signature(row.symbol)
    if key == "query_port":
        # the exported function is of the struct's first version
        assert arguments[2] == ("pointer", "_compat_ibv_port_attr")
        arguments = (*arguments[:2], ("pointer", "ibv_port_attr"))
    assert tuple(kind_of(argument, NAMES) for argument in row.argtypes) == arguments
    assert kind_of(row.restype, NAMES) == result


@pytest.mark.parametrize("struct", [s for s in NAMES if s is not verbs_api.Gid], ids=lambda struct: struct.__name__)
def test_structs(struct) -> None:
    ours = [(name, getattr(struct, name).offset, getattr(struct, name).size) for name, _ in struct._fields_]
    prefix = getattr(struct, "_prefix_", False)
    wanted = headers().fields(NAMES[struct], len(ours) if prefix else None)
    if not prefix:
        assert ctypes.sizeof(struct) == headers().size_of(NAMES[struct])
    assert ours == wanted


@pytest.mark.parametrize(
    ("module", "name"), parts(lambda m: [n for n, value in vars(m).items() if n.isupper() and isinstance(value, int)])
)
def test_constants(module, name: str) -> None:
    prefix = "IBV_" if module is verbs_api else "MLX5DV_"
    assert headers().constant(prefix + name) == getattr(module, name)


@pytest.mark.parametrize(("module", "key"), parts(lambda module: module.FUNCTIONS, TABLES))
def test_k4_every_argument_has_a_type(module, key: str) -> None:
    row = module.FUNCTIONS[key]
    assert row.argtypes
    assert all(isinstance(argument, type) for argument in row.argtypes)
    # a pointer that came back as a C int would be cut off
    assert row.restype is None or isinstance(row.restype, type)
    assert set(module.FUNCTIONS) >= module.OPTIONAL


def test_sizes_and_offsets() -> None:
    """Of x86-64 and aarch64, which are alike in this."""
    assert [ctypes.sizeof(s) for s in (verbs_api.DeviceAttr, verbs_api.PortAttr, verbs_api.QpAttr)] == [232, 52, 144]
    assert [ctypes.sizeof(s) for s in (verbs_api.AhAttr, verbs_api.QpInitAttr, verbs_api.Mr)] == [32, 64, 48]
    assert (verbs_api.Mr.lkey.offset, verbs_api.Mr.rkey.offset, verbs_api.Qp.qp_num.offset) == (36, 40, 52)
    assert (verbs_api.QpAttr.ah_attr.offset, verbs_api.QpAttr.timeout.offset) == (56, 130)
    assert [ctypes.sizeof(s) for s in (mlx5_api.DevxUar, mlx5_api.DvObj, mlx5_api.DevxUmemIn)] == [40, 112, 48]
    bnxt = bnxt_re_api
    assert [ctypes.sizeof(s) for s in (bnxt.QpInitAttr, bnxt.DbRegionAttr, bnxt.DvObj, bnxt.DvCq)] == [136, 24, 80, 16]
    assert (bnxt.QpInitAttr.send_cq.offset, bnxt.QpInitAttr.sq_umem_handle.offset) == (24, 64)
    assert (bnxt.QpInitAttr.sq_len.offset, bnxt.QpInitAttr.rq_umem_handle.offset, bnxt.QpInitAttr.sq_wqe_sz.offset) == (
        80,
        88,
        104,
    )
    # what the first release has of these ends here
    assert (bnxt.UmemRegAttr.pa_buf.offset, bnxt.CqInitAttr.comp_mask.offset) == (48, 32)
    assert [ctypes.sizeof(s) for s in (ionic_api.DvCtx, ionic_api.DvQueue, ionic_api.DvQp)] == [24, 32, 64]
    assert (ionic_api.DvQueue.mask.offset, ionic_api.DvCtx.sq_qtype.offset) == (24, 16)
