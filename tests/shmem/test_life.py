"""Init and finalize by MORI's host API: before, again, after, refused, in one process and inside a world."""

import pytest
import torch

from mori_triton import shmem
from mori_triton.errors import ArgumentError, EnvError, HeapError, PeerTimeout, StateError
from mori_triton.host import state
from mori_triton.host.bootstrap import process_group
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CpuDriver
from tests.host.worlds import SETTINGS, error_of, run_threads

pytestmark = pytest.mark.cpu


def every_call():
    """(name, call) of everything that needs an initialised PE."""
    tensor = torch.zeros(4)
    return [
        ("shmem_finalize", shmem.shmem_finalize),
        ("shmem_module_init", lambda: shmem.shmem_module_init(object())),
        ("shmem_mype", shmem.shmem_mype),
        ("shmem_npes", shmem.shmem_npes),
        ("shmem_barrier_all", shmem.shmem_barrier_all),
        ("shmem_barrier_on_stream", shmem.shmem_barrier_on_stream),
        ("shmem_malloc", lambda: shmem.shmem_malloc(8)),
        ("shmem_malloc_align", lambda: shmem.shmem_malloc_align(256, 8)),
        ("shmem_ext_malloc_with_flags", lambda: shmem.shmem_ext_malloc_with_flags(8, 0)),
        ("shmem_free", lambda: shmem.shmem_free(4096)),
        ("shmem_buffer_register", lambda: shmem.shmem_buffer_register(4096, 8)),
        ("shmem_buffer_deregister", lambda: shmem.shmem_buffer_deregister(4096, 8)),
        ("shmem_ptr_p2p", lambda: shmem.shmem_ptr_p2p(4096, 0, 0)),
        ("shmem_num_qp_per_pe", shmem.shmem_num_qp_per_pe),
        ("context", shmem.context),
        ("MoriShmemBuffer", lambda: shmem.MoriShmemBuffer(4096, 8, torch.uint8)),
        ("mori_shmem_create_tensor", lambda: shmem.mori_shmem_create_tensor((4,), torch.int32)),
        ("symm_mori_shmem_tensor", lambda: shmem.symm_mori_shmem_tensor(tensor, 0)),
        ("mori_shmem_free_tensor", lambda: shmem.mori_shmem_free_tensor(tensor)),
        ("list", lambda: shmem.mori_shmem_create_tensor_list_intra_node((4,), torch.int32, 1)),
    ]


@pytest.mark.parametrize(("name", "call"), every_call())
def test_i1_before_init(name, call, monkeypatch):
    monkeypatch.setattr(state, "_process", None)
    with pytest.raises(StateError, match="not initialised here: call shmem_torch_process_group_init"):
        call()


def test_i1_life_cycle_in_a_world():
    """Init twice, finalize twice, use after finalize, five times over, in the PEs of one world."""
    attached = []

    def attach(here):
        attached.append(("attach", here.pe))
        return lambda: attached.append(("detach", here.pe))

    group = ThreadGroup(2, timeout_s=5)

    def program(pe):
        here = state.open_state(group.bootstrap(pe), CpuDriver(), SETTINGS, attach=attach, owns_bootstrap=False)
        state.bind(here)
        for cycle in range(5):
            # ignored where shmem is up, whatever they say
            assert shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, 7, 9, b"") == 0
            assert shmem.shmem_torch_process_group_init("default") == 0
            assert (shmem.shmem_mype(), shmem.shmem_npes()) == (pe, 2)
            assert state.current().heap.used_bytes == 512
            address = shmem.shmem_malloc(1000 + cycle)
            assert address - state.current().heap.base == 512
            shmem.shmem_barrier_all()
            assert shmem.shmem_finalize() == 0
            for name, call in every_call():
                error = error_of(call)
                assert isinstance(error, StateError), name
                assert f"finalized (it was PE {pe} of 2)" in str(error), name
        return True

    assert run_threads(2, program) == [True, True]
    assert len(attached) == 20
    assert attached.count(("attach", 0)) == attached.count(("detach", 0)) == 5


def test_i2_up_is_what_the_state_says():
    """Ended from outside, not through `shmem_finalize`: no flag of shmem's own says that it is still up."""
    group = ThreadGroup(2, timeout_s=5)

    def program(pe):
        state.bind(state.open_state(group.bootstrap(pe), CpuDriver(), SETTINGS, owns_bootstrap=False))
        for _ in range(2):
            shmem.shmem_malloc(64)
            state.current().close()
            with pytest.raises(StateError, match=f"finalized .it was PE {pe} of 2"):
                shmem.shmem_malloc(64)
            assert shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, pe, 2, b"") == 0
        address = shmem.shmem_malloc(64)
        shmem.shmem_finalize()
        return address > 0

    assert run_threads(2, program) == [True, True]


def test_bad_init_leaves_nothing(monkeypatch):
    monkeypatch.setattr(state, "_process", None)
    unique_id = shmem.shmem_get_unique_id()
    assert len(unique_id) == 128
    with_id = shmem.MORI_SHMEM_INIT_WITH_UNIQUEID
    for arguments in (
        (5, 0, 1, unique_id),
        (with_id, 1, 1, unique_id),
        (with_id, 0, 0, unique_id),
        (with_id, 0, 1, "0" * 128),
        (with_id, 0, 1, None),
        (with_id, 0, 1, b"x"),
    ):
        with pytest.raises(ArgumentError):
            shmem.shmem_init_attr(*arguments)
    monkeypatch.setenv("MORI_TRITON_ARCH", "gfx12")
    with pytest.raises(EnvError, match=r"MORI_TRITON_ARCH: .*gfx1201.*, got 'gfx12'"):
        shmem.shmem_init_attr(with_id, 0, 1, shmem.shmem_get_unique_id())
    monkeypatch.delenv("MORI_TRITON_ARCH")
    with pytest.raises(StateError, match=r"torch.distributed is not initialised"):
        shmem.shmem_torch_process_group_init("default")
    monkeypatch.setenv("MORI_BOOTSTRAP_TIMEOUT", "0.1")
    with pytest.raises(PeerTimeout, match=r"PE 1 of 2 did not join within 0.1 s"):
        shmem.shmem_init_attr(with_id, 0, 2, unique_id)
    assert state.find() is None
    # a heap that cannot be
    monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", "100")
    with pytest.raises(HeapError, match="too small"):
        shmem.shmem_init_attr(with_id, 0, 1, shmem.shmem_get_unique_id())
    monkeypatch.setenv("MORI_TRITON_DEVICE", "hip" if torch.version.cuda else "cuda")
    with pytest.raises(StateError, match=r"this torch .* was built without support for it"):
        shmem.shmem_init_attr(with_id, 0, 1, shmem.shmem_get_unique_id())
    assert state.find() is None


def test_one_process_world_on_the_emulated_device(monkeypatch, tmp_path):
    """Init with an id and with a process group, here; kernels may touch the heap until finalize only."""
    import torch.distributed as dist
    import triton

    from mori_triton import emulator

    monkeypatch.setattr(state, "_process", None)
    monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", "1M")
    before = triton.runtime.driver._active
    with_id = shmem.MORI_SHMEM_INIT_WITH_UNIQUEID
    assert shmem.shmem_init_attr(with_id, 0, 1, shmem.shmem_get_unique_id()) == 0
    assert shmem.shmem_init_attr(with_id, 0, 1, shmem.shmem_get_unique_id()) == 0
    assert (shmem.shmem_mype(), shmem.shmem_npes()) == (0, 1)
    regions = {(r.address, r.address + r.num_bytes, r.name) for r in state.current().heap.regions()}
    allowed = emulator.device.device(emulator.current_device())
    assert regions <= set(allowed.ranges)
    assert shmem.shmem_finalize() == 0
    assert not regions & set(allowed.ranges)
    assert triton.runtime.driver._active is before
    # the interpreter is refused, and that leaves nothing either
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(StateError, match="TRITON_INTERPRET"):
        shmem.shmem_init_attr(with_id, 0, 1, shmem.shmem_get_unique_id())
    monkeypatch.delenv("TRITON_INTERPRET")
    assert state.find() is None
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for group in ("default", dist.group.WORLD.group_name, dist.group.WORLD):
            assert shmem.shmem_torch_process_group_init(group) == 0
            assert shmem.shmem_npes() == 1
            shmem.shmem_finalize()
        for bad in ("no such group", None, dist.GroupMember.NON_GROUP_MEMBER):
            with pytest.raises(ArgumentError, match="group"):
                shmem.shmem_torch_process_group_init(bad)
        monkeypatch.setattr(dist, "get_rank", lambda group=None: -1)
        with pytest.raises(ArgumentError, match="belongs to"):
            shmem.shmem_torch_process_group_init("default")
        monkeypatch.undo()

        class Work:
            def wait(self, timeout):
                raise RuntimeError(f"nobody came in {timeout}")

        monkeypatch.setattr(dist, "broadcast", lambda *args, **kwargs: Work())
        monkeypatch.setenv("MORI_BOOTSTRAP_TIMEOUT", "3")
        with pytest.raises(PeerTimeout, match=r"did not hear from its rank 0 within 3 s.*nobody came in 0:00:03"):
            shmem.shmem_torch_process_group_init("default")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), ("undefined", "cpu"), ("nccl", "cuda:3"), ("cpu:gloo,cuda:nccl", "cpu")]
)
def test_the_id_travels_in_memory_that_the_backend_takes(monkeypatch, backend, device):
    """Of two backends that of the CPU: ranks that share a GPU can't use NCCL, and need no GPU for this."""
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert process_group._device_of(None) == torch.device(device)


def world_program(pe):
    """Init and finalize as code written for MORI does it, in a world where all is set up already."""
    seen = []
    for _ in range(3):
        assert shmem.shmem_torch_process_group_init("default") == 0
        tensor = shmem.mori_shmem_create_tensor((8,), torch.int32)
        tensor.fill_(pe)
        shmem.shmem_barrier_all()
        seen.append([int(shmem.symm_mori_shmem_tensor(tensor, peer)[3]) for peer in range(shmem.shmem_npes())])
        shmem.shmem_barrier_all()
        assert shmem.shmem_finalize() == 0
    return seen


@pytest.mark.parametrize("seed", [None, 5])
def test_inside_local_world(seed):
    from mori_triton.world import local_world

    assert local_world(3, heap_size="1M", seed=seed).run(world_program) == [[[0, 1, 2]] * 3] * 3
    # finalize or not, and a heap that the program asks too much of
    with pytest.raises(HeapError, match='heap_size="3M"'):
        local_world(2, heap_size="1M", seed=seed).run(lambda pe: shmem.shmem_malloc(2 << 20))
