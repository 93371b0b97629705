"""libmlx5 as a double: notes each command's bytes, gives numbers to what it makes."""

from __future__ import annotations

import ctypes
import itertools
import os

from mori_triton.host.nic import mlx5_api
from tests.host.nic.fake_rdma import FakeLibrary, address


class FakeMlx5(FakeLibrary):
    source = "libmlx5"

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.commands: list[tuple[str, bytes]] = []
        self.umems: dict[int, tuple[int, int]] = {}  # id: address, bytes
        self._ids = itertools.count(0x21)
        self._queues = itertools.count(0x000ABC01)
        # what a card that refuses answers
        self.answer = b""

    def do_init_obj(self, obj, kind):
        assert kind == 1 << 6
        obj[0].pd.out[0].pdn = 0x00C0DE
        return 0

    def do_alloc_uar(self, context, flags):
        return self.struct("uar", mlx5_api.DevxUar(reg_addr=0x7E0000000800, base_addr=0x7E0000000000, page_id=0x123))

    def do_free_uar(self, uar):
        self.drop(address(uar))

    def do_query_eqn(self, context, vector, out):
        out[0] = 0x1F
        return 0

    def do_umem_reg(self, context, at, num_bytes, access):
        made = mlx5_api.DevxUmem(umem_id=next(self._ids))
        self.umems[made.umem_id] = (at, num_bytes)
        return self.struct("umem", made)

    def do_umem_reg_ex(self, context, wanted):
        given = wanted[0]
        # every size of whole pages, and a dma-buf that is open
        assert (given.comp_mask, given.pgsz_bitmap, given.access) == (1, 2**64 - 4096, 1)
        assert given.size % 4096 == 0
        os.fstat(given.dmabuf_fd)
        made = mlx5_api.DevxUmem(umem_id=next(self._ids))
        self.umems[made.umem_id] = (given.addr or 0, given.size)
        return self.struct("umem", made)

    def do_umem_dereg(self, umem):
        return self.drop(address(umem))

    def _note(self, key, given, given_bytes, taken, taken_bytes):
        self.commands.append((key, ctypes.string_at(given, given_bytes)))
        ctypes.memmove(taken, self.answer, min(len(self.answer), taken_bytes))
        return 0

    def do_obj_create(self, context, given, given_bytes, taken, taken_bytes):
        self._note("create", given, given_bytes, taken, taken_bytes)
        if self.answer:
            ctypes.set_errno(121)
            return None
        ctypes.memmove(taken + 8, next(self._queues).to_bytes(4, "big"), 4)
        return self.new("object")

    def do_obj_modify(self, obj, given, given_bytes, taken, taken_bytes):
        assert obj in self.held
        self._note("modify", given, given_bytes, taken, taken_bytes)
        return 121 if self.answer else 0

    def do_obj_destroy(self, obj):
        return self.drop(obj)

    def do_general_cmd(self, context, given, given_bytes, taken, taken_bytes):
        return self._note("general", given, given_bytes, taken, taken_bytes)
