"""MORI's host API: names and arguments, and what each does, PEs as threads."""

import inspect
import struct

import pytest
import torch

from mori_triton import shmem
from mori_triton.errors import ArgumentError, DriverError, HeapError, PeerTimeout, StateError
from mori_triton.shmem import tensor_utils
from tests.host.worlds import error_of, run_world

pytestmark = pytest.mark.cpu

# names and arguments of MORI's newest release, as a table of facts
MORI = {
    "shmem_torch_process_group_init": "(group_name)",
    "shmem_mpi_init": "()",
    "shmem_get_unique_id": "()",
    "shmem_init_attr": "(flags, rank, nranks, unique_id)",
    "shmem_finalize": "()",
    "shmem_module_init": "(hip_module)",
    "shmem_mype": "()",
    "shmem_npes": "()",
    "shmem_barrier_all": "()",
    "shmem_barrier_on_stream": "(stream=None)",
    "shmem_malloc": "(size)",
    "shmem_malloc_align": "(alignment, size)",
    "shmem_ext_malloc_with_flags": "(size, flags)",
    "shmem_free": "(ptr)",
    "shmem_buffer_register": "(ptr, size)",
    "shmem_buffer_deregister": "(ptr, size)",
    "shmem_ptr_p2p": "(dest_ptr, my_pe, dest_pe)",
    "shmem_num_qp_per_pe": "()",
    "MoriShmemBuffer": "(ptr, nbytes, dtype)",
    "mori_shmem_create_tensor": "(shape, dtype)",
    "symm_mori_shmem_tensor": "(tensor, peer)",
    "mori_shmem_free_tensor": "(tensor)",
    "mori_shmem_create_tensor_list_intra_node": "(shape, dtype, num_ranks)",
}
OURS = {"context"}


def test_names_and_arguments_are_moris():
    constants = {"MORI_SHMEM_INIT_WITH_MPI_COMM": 0, "MORI_SHMEM_INIT_WITH_UNIQUEID": 1}
    assert set(shmem.__all__) == MORI.keys() | constants.keys() | OURS
    for name, value in constants.items():
        assert getattr(shmem, name) == value
    for name, arguments in MORI.items():
        parameters = inspect.signature(getattr(shmem, name)).parameters.values()
        plain = [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]
        assert f"({', '.join(plain)})" == arguments, name
        assert inspect.getdoc(getattr(shmem, name)), name


def test_memory():
    def program(here):
        heap = here.heap
        first = shmem.shmem_malloc(100)
        assert first % 256 == 0
        second = shmem.shmem_malloc_align(4096, 100)
        assert second % 4096 == 0
        third = shmem.shmem_ext_malloc_with_flags(100, 0)
        assert shmem.shmem_malloc(0) == 0
        assert len({first, second, third}) == 3
        for bad in ({"alignment": 3, "size": 8}, {"alignment": 256, "size": -1}):
            with pytest.raises(ArgumentError):
                shmem.shmem_malloc_align(**bad)
        with pytest.raises(ArgumentError, match="size: want an integer, got '8'"):
            shmem.shmem_malloc("8")
        with pytest.raises(ArgumentError, match="flags: want an integer"):
            shmem.shmem_ext_malloc_with_flags(8, None)
        with pytest.raises(HeapError, match="MORI_SHMEM_HEAP_SIZE"):
            shmem.shmem_malloc(2 << 20)
        for pointer in (first, second, third, 0, None):
            shmem.shmem_free(pointer)
        with pytest.raises(HeapError, match="double free"):
            shmem.shmem_free(first)
        with pytest.raises(ArgumentError, match="ptr"):
            shmem.shmem_free("x")
        return heap.used_bytes

    assert run_world(2, program) == [512, 512]


def test_i19_ptr_p2p():
    def program(here):
        base, end = here.heap.base, here.heap.base + here.heap.num_bytes
        pe, peer = here.pe, here.pe ^ 1
        address = shmem.shmem_malloc(64)
        assert shmem.shmem_ptr_p2p(address, pe, pe) == address
        there = shmem.shmem_ptr_p2p(address, pe, peer)
        assert there == here.bootstrap.allgather(struct.pack("<Q", address))[peer][0:8] or there
        assert struct.pack("<Q", there) == here.bootstrap.allgather(struct.pack("<Q", address))[peer]
        # 0 and not a small offset, which MORI gives
        assert shmem.shmem_ptr_p2p(address, pe, (pe + 2) % 4) == 0
        for outside in (base - 1, end, 0):
            assert shmem.shmem_ptr_p2p(outside, pe, peer) == 0
        assert shmem.shmem_ptr_p2p(end - 1, pe, peer) != 0
        for bad in (-1, 4, 2**31 - 1):
            with pytest.raises(ArgumentError, match="pe: want 0 to 3"):
                shmem.shmem_ptr_p2p(address, pe, bad)
        with pytest.raises(ArgumentError, match="my_pe"):
            shmem.shmem_ptr_p2p(address, peer, pe)

    run_world(4, program, gpus_per_node=2, transport="p2p")


def test_barriers_order_pes():
    order = []

    def program(here):
        for barrier in (
            shmem.shmem_barrier_all,
            shmem.shmem_barrier_on_stream,
            lambda: shmem.shmem_barrier_on_stream(0),
        ):
            order.append(here.pe)
            barrier()
            barrier()

    run_world(3, program)
    assert [sorted(order[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3


def record_timeout(here):
    """What a kernel of this PE leaves in its error log when a wait reaches its limit."""
    log = int(here.heap.ctx[6])
    (slot,) = struct.unpack("<Q", here.driver.read(log, 8))
    record = struct.pack("<IiiiQQQII16x", 1, here.pe, 1, -1, here.heap.base, 5, 2, 4, slot + 1)
    here.driver.write(log + 16 + slot * len(record), record)
    here.driver.write(log, struct.pack("<Q", slot + 1))


def test_errors_of_kernels_come_out_at_the_next_barrier():
    """On the PE that has them, once, and only after all PEs have come: its peers are not left waiting."""
    text = r"barrier_all on PE 0 waiting for PE 1: barrier_all sync words of PE 0, expected >= 5, saw 2"

    def program(here):
        if here.pe == 0:
            record_timeout(here)
        first = error_of(shmem.shmem_barrier_all)
        second = error_of(shmem.shmem_barrier_all)
        if here.pe == 0:
            record_timeout(here)
        return first, second, error_of(shmem.shmem_finalize), here.heap.closed

    (first, second, last, closed), other = run_world(2, program)
    for error in (first, last):
        assert isinstance(error, PeerTimeout)
        assert text in str(error)
    assert second is None
    assert closed
    assert other == (None, None, None, True)


def test_module_init():
    class Module:
        def __init__(self, driver, symbols):
            self.symbols, self.address = symbols, driver.alloc(64)

        def symbol_address(self, name):
            return self.address + 8, self.symbols[name]

    def program(here):
        module = Module(here.driver, {"mori_shmem_context": 8})
        assert shmem.shmem_module_init(module) == 0
        assert here.driver.read(module.address, 24) == struct.pack("<QQQ", 0, here.heap.ctx.data_ptr(), 0)
        with pytest.raises(DriverError, match="no global variable 'mori_shmem_context'"):
            shmem.shmem_module_init(Module(here.driver, {}))
        with pytest.raises(ArgumentError, match="8 bytes, got 4"):
            shmem.shmem_module_init(Module(here.driver, {"mori_shmem_context": 4}))
        with pytest.raises(ArgumentError, match="module"):
            shmem.shmem_module_init(1234)

    run_world(2, program)


def test_what_is_missing_says_so():
    with pytest.raises(StateError, match="MPI"):
        shmem.shmem_mpi_init()
    with pytest.raises(StateError, match="MPI"):
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_MPI_COMM, 0, 1, bytes(128))

    def program(here):
        for call in (shmem.shmem_buffer_register, shmem.shmem_buffer_deregister):
            with pytest.raises(StateError, match=r"register 8 bytes at 0x1000.*symmetric heap only.*shmem_malloc"):
                call(0x1000, 8)
        assert shmem.shmem_num_qp_per_pe() == 4
        assert shmem.context() is here.heap.ctx

    run_world(1, program)


def test_tensors():
    def program(here):
        pe, n = here.pe, here.n_pes
        tensor = shmem.mori_shmem_create_tensor((3, 4), torch.bfloat16)
        assert (tensor.shape, tensor.dtype, tensor.device.type) == ((3, 4), torch.bfloat16, "cpu")
        tensor.fill_(pe)
        shmem.shmem_barrier_all()
        assert shmem.symm_mori_shmem_tensor(tensor, pe) is tensor
        for peer in range(n):
            assert shmem.symm_mori_shmem_tensor(tensor[1:, ::2], peer).eq(peer).all()
        with pytest.raises(ArgumentError, match="pe: want"):
            shmem.symm_mori_shmem_tensor(tensor, n)
        with pytest.raises(ArgumentError, match="symmetric heap"):
            shmem.symm_mori_shmem_tensor(torch.zeros(3), (pe + 1) % n)
        with pytest.raises(HeapError, match="points 8 bytes into"):
            shmem.mori_shmem_free_tensor(tensor[1:])
        shmem.shmem_barrier_all()
        shmem.mori_shmem_free_tensor(tensor)
        with pytest.raises(HeapError, match="double free"):
            shmem.mori_shmem_free_tensor(tensor)
        empty = shmem.mori_shmem_create_tensor([0, 4], torch.float32)
        assert empty.shape == (0, 4)
        shmem.mori_shmem_free_tensor(empty)
        for bad in (0, n + 1):
            with pytest.raises(ArgumentError, match="num_ranks"):
                shmem.mori_shmem_create_tensor_list_intra_node((2,), torch.int64, bad)
        tensors = shmem.mori_shmem_create_tensor_list_intra_node((2,), torch.int64, n)
        tensors[(pe + 1) % n][0] = pe
        shmem.shmem_barrier_all()
        assert tensors[pe][0] == (pe - 1) % n
        assert [int(one[0]) for one in tensors] == [(peer - 1) % n for peer in range(n)]

    run_world(3, program)


def test_buffer_shows_its_bytes():
    def program(here):
        address = shmem.shmem_malloc(16)
        here.driver.write(address, bytes(range(16)))
        buffer = tensor_utils.MoriShmemBuffer(address, 16, torch.int32)
        assert (buffer.ptr, buffer.nbytes, buffer.dtype) == (address, 16, torch.int32)
        assert not hasattr(buffer, "__cuda_array_interface__")
        import numpy as np

        array = np.asarray(buffer)
        assert array.tolist() == list(range(16))
        array[0] = 99
        return here.driver.read(address, 1)

    assert run_world(1, program) == [b"\x63"]
