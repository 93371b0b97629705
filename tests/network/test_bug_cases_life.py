"""Reported faults of initialising, finalising and process exit (docs/bug_cases.md, group I), over networks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import mori_triton as mori
from mori_triton import bitcode, env, shmem
from mori_triton.bitcode import files, specialisation
from mori_triton.device.launch import launch
from mori_triton.errors import StateError
from mori_triton.host import native, state
from mori_triton.host.drivers import cpu as cpu_driver
from mori_triton.host.nic import soft_hca
from mori_triton.host.proxy.ucp_api import Ucp
from tests.host.worlds import run_threads
from tests.network_programs import put_kernel, symmetric

pytestmark = pytest.mark.cpu

TRANSPORTS = ("mlx5", "bnxt_re", "ionic", "proxy")
ROOT = Path(__file__).parents[2]


def put_to_the_next(pe: int, n: int = 2) -> None:
    """Every PE puts 64 bytes of its number + 1 to the next, which finds them."""
    x, status = symmetric(128), symmetric(1, torch.int64)
    x[:64].fill_(pe + 1)
    x[64:].zero_()
    shmem.shmem_barrier_all()
    # the kernel puts to the address it takes from, so one sends at a time
    for sender in range(n):
        if sender == pe:
            launch(put_kernel, (1,), shmem.context(), x, status, 0, (pe + 1) % n)
            assert status.tolist() == [0]
        shmem.shmem_barrier_all()
        if (sender + 1) % n == pe:
            assert x.tolist() == [sender + 1] * 64 + [0] * 64
            x[:64].fill_(pe + 1)
        shmem.shmem_barrier_all()


def left() -> tuple[int, int, int]:
    """Mappings, descriptors and threads of this process."""
    gc.collect()
    return len(cpu_driver._live), len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_i1_i4_five_cycles_over_a_network_leave_nothing(transport: str) -> None:
    def program(pe: int) -> None:
        owned = set()
        for _ in range(5):
            assert shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, 9, 9, b"") == 0
            assert shmem.shmem_torch_process_group_init("default") == 0
            here = state.current()
            assert (here.pe, here.n_pes, here.provider, here.heap.used_bytes) == (pe, 2, transport, 512)
            assert shmem.shmem_malloc(1000) == here.heap.base + 512
            # the world's driver outlives the cycle
            owned.add(len(here.driver._owned))
            shmem.shmem_barrier_all()
            assert shmem.shmem_finalize() == 0
            with pytest.raises(StateError, match=f"finalized .it was PE {pe} of 2"):
                shmem.shmem_finalize()
        assert len(owned) == 1, owned

    # what a process makes once is made by the first world
    mori.local_world(2, transport=transport, heap_size="1M", timeout_s=20).run(lambda pe: None)
    before = left()
    mori.local_world(2, transport=transport, heap_size="1M", timeout_s=20).run(program)
    # fewer: what an earlier test left has ended meanwhile
    assert all(now <= then for now, then in zip(left(), before, strict=True))


EXIT = """
    import dataclasses, pathlib, sys, threading
    from mori_triton import env
    from mori_triton.host import native, state
    from mori_triton.host.bootstrap import tcp
    from mori_triton.host.drivers import CpuDriver

    what, finalizes = sys.argv[1], sys.argv[2] == "finalizes"
    settings = dataclasses.replace(
        env.snapshot({}), heap_bytes=1 << 20, transport="proxy" if what == "proxy" else "auto",
        gpus_per_node=None if what == "p2p" else 1,
    )
    unique_id, states, fabric = tcp.new_unique_id(), [None, None], None
    if what not in ("proxy", "p2p"):
        from mori_triton.host.network.soft import SoftFabric
        from mori_triton.host.nic.soft_hca import SoftHca
        hca = SoftHca()
        hca.start()
        fabric = SoftFabric(what, hca)

    def start(pe):
        boot = tcp.TcpBootstrap(unique_id, pe, 2, timeout_s=20)
        states[pe] = state.open_state(boot, CpuDriver(shared=True), settings, fabric=fabric)

    def on_both(call):
        threads = [threading.Thread(target=call, args=(pe,)) for pe in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]

    on_both(start)
    assert [here.provider for here in states] == [what] * 2
    state.set_process_state(states[0])
    if finalizes:
        on_both(lambda pe: states[pe].close())
    maps = pathlib.Path("/proc/self/maps").read_text()
    assert not any(name in maps for name in ("libibverbs", "libmlx5", "libbnxt_re", "libionic")), maps
    assert ("libucp" in maps) == (what == "proxy")
    print("ends")
"""


@pytest.mark.parametrize("ending", ["finalizes", "forgets"])
@pytest.mark.parametrize("what", ["p2p", "mlx5", "proxy"])
def test_i3_k1_exit_while_a_network_is_up(what: str, ending: str) -> None:
    """Its threads still poll; exit is clean all the same. No RDMA library is opened where no card is used."""
    if what == "proxy":
        # says which package has UCX
        Ucp()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXIT), what, ending],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_i10_what_changes_after_init_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable of a world's settings, texts that are good and texts that cannot be read."""
    fields = [variable for variable in env.VARIABLES if variable.field is not None]
    good = {
        "MORI_SHMEM_HEAP_SIZE": "64K", "MORI_SHMEM_HEAP_TYPE": "normal", "MORI_SHMEM_MODE": "vmm",
        "MORI_TRITON_WAIT_TIMEOUT": "0.01", "MORI_TRITON_GPUS_PER_NODE": "2", "MORI_DISABLE_P2P": "1",
        "MORI_TRITON_TRANSPORT": "p2p", "MORI_NUM_QP_PER_PE": "1", "MORI_NODE_ID": "elsewhere",
    }  # fmt: skip
    world = mori.local_world(2, transport="bnxt_re", heap_size="1M", timeout_s=20)

    def program(pe: int) -> tuple[str, int]:
        here = state.current()
        settings = here.settings
        for texts in (good, dict.fromkeys((variable.name for variable in fields), "no such thing")):
            for name, text in texts.items():
                # both PEs set the same
                monkeypatch.setenv(name, text)
            shmem.shmem_barrier_all()
            put_to_the_next(pe)
            # and a PE that comes back into the world finds it as it was
            shmem.shmem_finalize()
            shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, pe, 2, b"")
            assert state.current().settings == settings
            assert state.current().heap.num_bytes == 1 << 20
            put_to_the_next(pe)
        return state.current().provider, shmem.shmem_num_qp_per_pe()

    assert world.run(program) == [("bnxt_re", 4)] * 2


def test_i15_what_is_made_at_first_use_by_64_threads_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library for one provider, in an empty cache, and the soft HCA's code."""
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", str(tmp_path))
    for cached in (files._copy_of, specialisation._specialised):
        cached.cache_clear()
    monkeypatch.setattr(soft_hca, "_native", native.once(soft_hca._native.__wrapped__))
    gate = threading.Barrier(64)

    def program(pe: int) -> tuple[Path, bytes]:
        gate.wait()
        with soft_hca.SoftHca() as hca:
            assert not hca.pending()
        # making one takes a second, and 64 of them would
        path = bitcode.specialize("gfx1201", provider="p2p") if pe < 8 else bitcode.find_bitcode("gfx1201")
        return path, path.read_bytes()

    found = run_threads(64, program, timeout_s=120)
    assert len(set(found[:8])) == len(set(found[8:])) == 1
    kept = sorted(path.name for path in (tmp_path / "bitcode").rglob("*") if path.is_file())
    assert kept == [bitcode.DEVICE_LIBRARY] * 2


@pytest.mark.parametrize("transport", ["mlx5", "proxy"])
def test_i19_no_address_for_a_pe_that_is_reached_through_a_network(transport: str) -> None:
    def program(pe: int) -> None:
        here, address = state.current(), shmem.shmem_malloc(64)
        mate, far = pe ^ 1, (pe + 2) % 4
        assert shmem.shmem_ptr_p2p(address, pe, mate) not in (0, address)
        assert shmem.shmem_ptr_p2p(address, pe, far) == 0
        assert shmem.shmem_ptr_p2p(here.heap.base - 1, pe, mate) == 0
        tensor = symmetric(64)
        with pytest.raises(StateError, match=f"PE {pe} cannot load from or store to PE {far}"):
            shmem.symm_mori_shmem_tensor(tensor, far)
        shmem.shmem_barrier_all()

    mori.local_world(4, gpus_per_node=2, transport=transport, heap_size="1M", timeout_s=20).run(program)
