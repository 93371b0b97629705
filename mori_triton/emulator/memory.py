"""Memory instructions: global, flat, raw-buffer and scratch accesses, atomics, scalar loads, fences.

Each becomes one call of a C++ function (hip_src/emulator/memory.cpp) that checks the addresses of all active lanes and
moves the data. What differs between instructions of one data type is packed into `how`:

    bits 0-2  addressing mode    bit 3  offsets count elements    bits 4-5  scope of the access
    bit 6     the old value is returned    bits 8-15  atomic operation    bits 32-63  instruction number, for reports
"""

from __future__ import annotations

import functools
import re
from typing import Any

from mori_triton.emulator.accesses import (
    ADDRESS,
    AGENT,
    BASE_AND_OFFSET,
    BUFFER,
    BUFFER_OFFSET,
    INVALIDATE_AGENT,
    INVALIDATE_SYSTEM,
    INVALIDATE_WORKGROUP,
    LOADS,
    LOCAL,
    RESPELT,
    SCRATCH,
    SCRATCH_OFFSET,
    STORES,
    SYSTEM,
    WAIT_STORES,
    WORKGROUP,
    WRITEBACK_AGENT,
    WRITEBACK_SYSTEM,
    operation,
)
from mori_triton.emulator.asm import Inst
from mori_triton.emulator.ir import Fn, Val
from mori_triton.emulator.lds import Lds
from mori_triton.emulator.lift_base import APERTURES
from mori_triton.emulator.state import Operand


class Memory(Lds):
    """Part of the lifter: emits the call of a memory function."""

    def extern(self, name: str, ret: str, *args: tuple[str, str]) -> Any:
        """Call a C++ function; args: (IR type, text)."""
        self.f.declare(f"declare {ret} @{name}({', '.join(t for t, _ in args)})")
        text = f"call {ret} @{name}({', '.join(f'{t} {v}' for t, v in args)})"
        if ret == "void":
            self.f.emit(text)
            return None
        return self.f.ins(text, int(ret[1:]))

    def guarded(self, ok: Val) -> None:
        """Leave the kernel with a fault unless `ok`."""
        n = self.f.n = self.f.n + 1
        self.f.emit(f"br i1 {ok.cmp('ne', 0).name}, label %ok{n}, label %faulted")
        self.f.label(f"ok{n}")

    def access(
        self,
        what: str,
        address: int,
        data: int,
        how: int,
        *,
        base: Val | None = None,
        offset: int | Val = 0,
        limit: int | Val = 0,
        out: int | None = None,
        lanes: Val | None = None,
    ) -> None:
        """One vector access. address, data, out: vector register numbers; what: `load_b32`, `atomic_64`, ..."""

        def text(x: int | Val | None) -> str:
            return x.name if isinstance(x, Val) else str(x or 0)

        args = [("ptr", "%w"), ("ptr", self.vptr(address)), ("ptr", self.vptr(data)), ("i64", text(base))]
        args += [("i64", str(how | self.pos << 32)), ("i32", text(offset)), ("i32", text(limit))]
        args += [(f"i{self.W}", (lanes or self.exec()).name)]
        if what.startswith("atomic"):
            args.append(("ptr", self.vptr(data if out is None else out)))
        self.guarded(self.extern(f"mori_emu_{what}_w{self.W}", "i32", *args))

    def returns(self, mods: dict) -> bool:
        """Does an atomic return the old value?"""
        return "RETURN" in str(mods.get("th", "")) or (("sc0" in mods or "glc" in mods) and not self.gfx12)

    def scope(self, mods: dict, atomic: bool) -> int:
        """How far an access reaches past the caches. gfx9 spells atomics of workgroup scope like agent scope."""
        if self.gfx12:
            found = {"SCOPE_DEV": AGENT, "SCOPE_SYS": SYSTEM}.get(str(mods.get("scope")), WORKGROUP)
        elif atomic:
            found = SYSTEM if "sc1" in mods else AGENT
        else:
            found = (SYSTEM if "sc0" in mods else AGENT) if "sc1" in mods else WORKGROUP
        return found

    def memory(self, ins: Inst, base: str) -> None:
        """global, flat, raw-buffer and scratch loads, stores and atomics."""
        match = re.match(r"(\w+?)_(load|store|atomic)_(.*)", base)
        assert match
        space, kind, ty = match.groups()
        ops, m = [self.op(o) for o in ins.ops], ins.mods
        ty = RESPELT.get(ty, ty)
        if "lds" in m or ty.startswith(("lds", "tr", "async")) or "async" in ins.mn:
            raise KeyError("no semantics")
        if any(o.half == "h" for o in ops):
            raise KeyError("high half as an operand")
        returns = kind == "load" or (kind == "atomic" and self.returns(m))
        scope = self.scope(m, kind == "atomic")
        if kind == "atomic" and space == "buffer":
            # Triton writes no scope into these; they act in the device's cache
            scope = max(scope, AGENT)
        how = scope << 4
        if kind == "atomic":
            code, bits = operation(ty)
            what, how = f"atomic_{bits}", how | code << 8 | (64 if returns else 0)
        else:
            known = LOADS if kind == "load" else STORES
            if ty not in known:
                raise KeyError(f"data type {ty}")
            what = f"{kind}_{ty}"
        offset = int(m.get("offset", "0"), 0)
        if space == "buffer":
            self.buffer_access(what, ops, m, how, offset)
            return
        out = ops.pop(0) if returns else None
        address = ops.pop(0)
        data = out if out and kind == "load" else ops.pop(0)
        scalar = ops.pop(0) if ops else self.op("off")
        if ops:
            raise KeyError("operand count")
        if "scale_offset" in m:
            how |= 8
        where: dict[str, Any]
        if space == "flat" and self.has_flat_addresses:
            lanes, rest = self.flat_lanes(address.idx)
            old = out.idx if out else None
            self.access(what, address.idx, data.idx, how | LOCAL, offset=offset, out=old, lanes=lanes[0])
            stack = self.stack(offset)
            self.access(what, address.idx, data.idx, how | SCRATCH_OFFSET, out=old, lanes=lanes[1], **stack)
            how, where = how | ADDRESS, {"offset": offset, "lanes": rest}
        elif space == "scratch":
            how |= SCRATCH_OFFSET if address.kind == "v" else SCRATCH
            where = self.stack(self.sread(scalar) + offset)
        elif scalar.kind == "null":
            how, where = how | ADDRESS, {"offset": offset}
        else:
            how, where = how | BASE_AND_OFFSET, {"base": self.sread(scalar, 64), "offset": offset}
        self.access(what, address.idx, data.idx, how, out=out.idx if out else None, **where)

    def stack(self, offset: int | Val) -> dict[str, Any]:
        """Where a lane's stack is, for `access`."""
        wave = self.f.ins("ptrtoint ptr %w to i64", 64)
        return {"base": wave + self.scratch, "offset": offset, "limit": self.private}

    @functools.cached_property
    def has_flat_addresses(self) -> bool:
        """Does the kernel make flat addresses of LDS or of stacks?"""
        return any(name in i.text for i in self.p.insts for name in APERTURES)

    def flat_lanes(self, register: int) -> tuple[list[Val], Val]:
        """Active lanes whose 64-bit address lies in LDS, on the stack; all others."""
        active, masks = self.exec(), []
        for start in APERTURES.values():

            def build(f: Fn, p: list, start: int = start) -> None:
                found = (f.load(p[0], 32, self.W) & 0xFFF00000).cmp("eq", start >> 32).lanes_to_bits()
                f.emit(f"ret i{self.W} {(found & p[1]).name}")

            args = [("ptr", self.vptr(register + 1)), (f"i{self.W}", active.name)]
            masks.append(self.call(f"flat_lanes_{start:x}", f"i{self.W}", args, build))
        return masks, active & ~(masks[0] | masks[1])

    def buffer_access(self, what: str, ops: list[Operand], mods: dict, how: int, offset: int) -> None:
        """data, offset register, resource, scalar offset. The old value of an atomic goes to the data registers."""
        data, address, resource, scalar = ops
        if "idxen" in mods:
            raise KeyError("idxen")
        base, limit = self.resource(resource.idx)
        self.access(
            what,
            address.idx,
            data.idx,
            how | (BUFFER_OFFSET if "offen" in mods else BUFFER),
            base=base + self.sread(scalar).zext(64),
            offset=offset,
            limit=limit,
        )

    def resource(self, register: int) -> tuple[Val, Val]:
        """(address, bytes as 32 bits) of a raw buffer's resource in four scalar registers."""
        low, high = self.f.load(self.sptr(register), 64), self.f.load(self.sptr(register + 2), 64)
        if self.p.arch != "gfx1250":
            return low & 0xFFFFFFFFFFFF, high.trunc(32)
        # 57 bits of address, then 45 bits of size; offsets have 32 bits, so a larger size has no end that they reach
        size = (low >> 57) | ((high & ((1 << 38) - 1)) << 7)
        return low & ((1 << 57) - 1), size.cmp("ugt", 0xFFFFFFFF).pick(0xFFFFFFFF, size).trunc(32)

    def scalar_load(self, register: int, address: Val, num_bytes: int) -> None:
        """Load num_bytes from an address into consecutive scalar registers."""
        how = self.pos << 32
        args = [("ptr", "%w"), ("i64", (address & ~3).name), ("ptr", self.sptr(register))]
        args += [("i32", str(num_bytes // 4)), ("i64", str(how))]
        self.guarded(self.extern("mori_emu_scalar_load", "i32", *args))

    def fence(self, ins: Inst, base: str) -> bool:
        """Write-backs, invalidates, waits for stores: they matter in weak-memory mode. False: none of them."""
        kinds = self.fence_kinds(ins, base)
        for kind in kinds or ():
            self.extern("mori_emu_fence", "void", ("ptr", "%w"), ("i32", str(kind)))
        return kinds is not None

    def fence_kinds(self, ins: Inst, base: str) -> list[int] | None:
        level = self.scope(ins.mods, atomic=False)
        if re.match(r"global_(wb|inv|wbinv)$", base) or base in ("buffer_wbl2", "buffer_inv"):
            kinds = []
            if "wb" in base and level:
                kinds.append(WRITEBACK_SYSTEM if level == SYSTEM else WRITEBACK_AGENT)
            if "inv" in base:
                kinds.append((INVALIDATE_WORKGROUP, INVALIDATE_AGENT, INVALIDATE_SYSTEM)[level])
            return kinds
        if base in ("s_wait_storecnt", "s_wait_storecnt_dscnt"):
            count = int(ins.ops[0], 0) >> (8 if base.endswith("dscnt") else 0)
            return [WAIT_STORES] if count == 0 else []
        if base == "s_wait_idle":
            return [WAIT_STORES]
        if base == "s_waitcnt":
            # frequent, as loads use the same counter; without a write-back in the kernel it releases nothing
            waited = "vmcnt(0)" in ins.text or bool(re.fullmatch(r"s_waitcnt 0(x0)?", ins.text))
            return [WAIT_STORES] if waited and self.writes_back else []
        return None

    @functools.cached_property
    def writes_back(self) -> bool:
        """Does the kernel write its device's cache back (gfx9)?"""
        return any(i.mn == "buffer_wbl2" for i in self.p.insts)

    def interrupt(self) -> None:
        """Call the host, which looks what is ready in the buffer of the event that m0 names (hostcalls.py)."""
        event = self.sread(self.op("m0"))
        arguments = [("ptr", "%w"), ("i32", event.name), ("i32", str(self.pos))]
        self.guarded(self.extern("mori_emu_interrupt", "i32", *arguments))

    def wave_end(self) -> None:
        """The end of a kernel is a release."""
        self.extern("mori_emu_wave_end", "void", ("ptr", "%w"))
