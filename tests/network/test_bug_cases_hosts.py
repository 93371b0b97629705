"""Reported faults of libraries, cards and peer access (docs/bug_cases.md, groups K and N)."""

from __future__ import annotations

import ctypes
import itertools
import json
import warnings
from pathlib import Path

import pytest

from mori_triton import bitcode
from mori_triton.errors import DriverError, HeapError, StateError
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CpuDriver, hip_api
from mori_triton.host.heap import SymmetricHeap
from mori_triton.host.network import cards as real_cards
from mori_triton.host.network.choose import open_network
from mori_triton.host.nic import agree, soft_hca
from mori_triton.host.proxy import engine, ucp_api
from tests.host.fake_gpu import INVALID, FakeGpus, fake_driver
from tests.host.nic.sysfs_trees import BROADCOM, Node
from tests.host.noted_network import NotedFabric, each, site_of
from tests.host.worlds import error_of, run_threads

pytestmark = pytest.mark.cpu


def test_k2_a_card_whose_library_is_of_another_version_is_dropped_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on; it is named where nothing is left, too."""
    node = Node(tmp_path)
    node.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    node.nic("bnxt_re0", "pci0000:00/0000:02:00.0", vendor=BROADCOM)
    text = "libibverbs.so.1: version `IBVERBS_PRIVATE_34' not found (required by libmlx5.so.1)"

    def provider(name: str) -> None:
        if name == "libmlx5":
            raise StateError(text)

    monkeypatch.setattr(agree, "open_verbs", lambda override: None)
    monkeypatch.setattr(agree, "open_provider", provider)
    monkeypatch.setattr(real_cards, "CardFabric", lambda name, root: NotedFabric(name))

    def opened(**settings):
        def on(pe, bootstrap):
            return open_network(site_of(pe, bootstrap, **settings), lambda kind: pytest.fail("no"), None, tmp_path)

        return each(2, on)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [network.name for network in opened()] == ["bnxt_re"] * 2
    (warning,) = said
    assert f"some network cards are not used (mlx5_0:1: {text})" in str(warning.message)
    monkeypatch.undo()
    monkeypatch.setattr(agree, "open_verbs", lambda override: None)
    monkeypatch.setattr(agree, "open_provider", provider)
    for error in opened(transport="mlx5"):
        assert text in str(error)
        assert "those that there are, are others: bnxt_re0:1" in str(error)


WIDTHS = {None: "void", ctypes.c_uint32: "i32", ctypes.c_int: "i32", ctypes.c_uint64: "i64", ctypes.c_void_p: "ptr"}


@pytest.mark.parametrize(
    ("file", "signatures"), [("soft_hca.bc", soft_hca._SIGNATURES), ("proxy.bc", engine._SIGNATURES)]
)
def test_k4_functions_of_our_own_code_have_the_types_that_they_are_called_with(file: str, signatures) -> None:
    compiled = bitcode.signatures(bitcode.host_file(file))
    for name, (result, *arguments) in signatures.items():
        assert compiled[name] == f"{WIDTHS[result]}({', '.join(WIDTHS[kind] for kind in arguments)})", name


def test_k4_ucx_functions_have_types() -> None:
    for row in ucp_api.FUNCTIONS.values():
        assert all(isinstance(kind, type) for kind in row.argtypes), row
        assert row.restype is None or isinstance(row.restype, type), row


N_PES = 3
PAIRS = tuple(itertools.permutations(range(N_PES), 2))


@pytest.mark.parametrize("matrix", range(2 ** len(PAIRS)))
def test_k10_peer_access_that_differs_by_direction_is_the_same_error_on_all(matrix: int) -> None:
    """Every matrix of three PEs: all map all, or all are told who cannot reach whom; never two views of one world."""
    denied = {pair for bit, pair in enumerate(PAIRS) if matrix >> bit & 1}
    bases: dict[int, int] = {}

    class Directed(CpuDriver):
        def __init__(self, pe: int) -> None:
            super().__init__()
            self.pe = pe

        def import_handle(self, handle: bytes) -> int:
            address = json.loads(handle)["address"]
            owner = next(pe for pe, base in bases.items() if base == address)
            if (self.pe, owner) in denied:
                raise DriverError(f"{self.pe} cannot load from {owner}: no peer access")
            return super().import_handle(handle)

        def alloc(self, num_bytes: int, **options) -> int:
            address = super().alloc(num_bytes, **options)
            if options.get("exportable"):
                bases[self.pe] = address
            return address

    group = ThreadGroup(N_PES, timeout_s=5)

    def program(pe: int) -> tuple[bool, ...] | str:
        made: list[SymmetricHeap] = []
        error = error_of(lambda: made.append(SymmetricHeap(Directed(pe), group.bootstrap(pe), 1 << 16)))
        if error is not None:
            assert isinstance(error, HeapError)
            return str(error)
        return tuple(made[0].reaches(peer) for peer in range(N_PES))

    results = run_threads(N_PES, program)
    assert len(set(results)) == 1
    if not denied:
        assert results[0] == (True,) * N_PES
        return
    for pe in range(N_PES):
        mine = [owner for me, owner in sorted(denied) if me == pe]
        # a PE stops at the first that it cannot reach
        assert (
            (f"PE {pe}: {pe} cannot load from {mine[0]}: no peer access" in results[0])
            if mine
            else (f"PE {pe}: " not in results[0])
        )


def test_k13_code_that_is_compiled_here_exports_nothing_to_the_process() -> None:
    soft_hca._native()
    engine.engine()
    everyone = ctypes.CDLL(None)
    names = [*soft_hca._SIGNATURES, *engine._SIGNATURES]
    assert len(names) > 10
    assert [name for name in names if hasattr(everyone, name)] == []
    # what any code may call from outside is named after us; the rest stays inside
    for file in ("soft_hca.bc", "proxy.bc", "emulator_memory.bc", "emulator_scheduler.bc"):
        for name in bitcode.signatures(bitcode.host_file(file)):
            assert name.startswith("mori_") or name in ("memcpy", "memset", "memmove", "memcmp"), (file, name)


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ("expandable_segments:True,max_split_size_mb:128", True),
        (" max_split_size_mb:128 , expandable_segments:true", True),
        ("expandable_segments:True", False),
        ("expandable_segments:False,max_split_size_mb:128", False),
        ("", False),
        (None, False),
    ],
)
def test_n9_settings_of_torchs_allocator_that_lose_data_are_warned_of(
    text: str | None, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_HIP_ALLOC_CONF", raising=False)
    if text is not None:
        monkeypatch.setenv("PYTORCH_HIP_ALLOC_CONF", text)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fake_driver("hip")
        fake_driver("cuda")
    assert [str(one.message)[:22] for one in said] == ["PYTORCH_HIP_ALLOC_CONF"] * warned


def test_n13_a_range_is_mapped_once() -> None:
    """The library that is imitated refuses a second mapping of a range."""
    gpus, group = FakeGpus(hip_api.FUNCTIONS), ThreadGroup(2, timeout_s=5)

    def program(pe: int) -> None:
        driver, _ = fake_driver("hip", pe, gpus=gpus, heap_mode="vmm")
        for _ in range(3):
            heap = SymmetricHeap(driver, group.bootstrap(pe), 1 << 20)
            assert heap.reaches(1 - pe)
            heap.disconnect()
            heap.bootstrap.barrier()
            heap.close()
        driver.close()

    run_threads(2, program)
    mapped = 0
    for key, *arguments in gpus.calls:
        mapped += {"map": 1, "unmap": -1}.get(key, 0)
        assert 0 <= mapped <= 2, (key, arguments)
    assert len(gpus.of("map")) == 6
    assert mapped == 0
    assert not gpus.memory["mapped"]
    # a second mapping would have been noticed
    gpus.memory["reserved"][4096], gpus.memory["handles"][1] = 8192, (8192, 0, 0, 0)
    assert [gpus.do_map(4096, 8192, 0, 1, 0) for _ in range(2)] == [None, INVALID]
