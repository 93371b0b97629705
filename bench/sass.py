"""Instructions of a put-with-signal for sm_90, beside inline PTX written by hand that does the same. Needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

from bench.report import Column
from mori_triton.device import shmem
from mori_triton.device.launch import cross_compile

ARCH = "sm_90"
COLUMNS = (
    Column("what"),
    Column("instructions"),
    Column("memory"),
    Column("branches"),
    Column("registers"),
    Column("shared_bytes", "shared memory, bytes"),
)
SIGNATURE = {
    **{"ctx": "*i64", "dst_ptr": "*i8", "src_ptr": "*i8", "num_bytes": "i64"},
    **{"signal_ptr": "*i64", "value": "i64", "pe": "i32"},
}
# a context's fields are those of mori_triton/abi.py. Addresses outside the heap and PEs out of reach are refused; 16
# bytes a thread, four at a time, where both sides allow it, else single ones; the program meets, one thread signals
BY_HAND = tl.constexpr("""{
.reg .pred p, q;
.reg .b32 n, tid, ntid, t;
.reg .b64 base, size, peers, there, off, soff, left, i, step, next, end, a, b;
.reg .b32 v<16>;
mov.b32 $0, -1;
ld.global.nc.b32 n, [$1+8];
ld.global.nc.v2.b64 {base, size}, [$1+16];
ld.global.nc.b64 peers, [$1+32];
sub.s64 off, $2, base;
sub.s64 soff, $5, base;
setp.ge.u32 p, $7, n;
setp.ge.or.u64 p, off, size, p;
setp.ge.or.u64 p, soff, size, p;
sub.s64 left, size, off;
setp.lt.or.u64 p, left, $4, p;
sub.s64 left, size, soff;
setp.lt.or.u64 p, left, 8, p;
@p bra DONE;
mad.wide.u32 peers, $7, 8, peers;
ld.global.nc.b64 there, [peers];
setp.eq.s64 p, there, 0;
@p bra DONE;
add.s64 off, off, there;
add.s64 soff, soff, there;
mov.u32 tid, %tid.x;
mov.u32 ntid, %ntid.x;
cvt.u64.u32 i, tid;
mov.b64 end, 0;
or.b64 a, off, $3;
and.b64 a, a, 15;
setp.ne.s64 p, a, 0;
@p bra BYTES;
shl.b64 i, i, 4;
mul.wide.u32 step, ntid, 16;
and.b64 end, $4, -16;
FOUR:
mad.lo.u64 next, step, 3, i;
setp.ge.u64 p, next, end;
@p bra ONE;
add.s64 a, $3, i;
add.s64 b, off, i;
ld.global.v4.b32 {v0, v1, v2, v3}, [a];
add.s64 a, a, step;
ld.global.v4.b32 {v4, v5, v6, v7}, [a];
add.s64 a, a, step;
ld.global.v4.b32 {v8, v9, v10, v11}, [a];
add.s64 a, a, step;
ld.global.v4.b32 {v12, v13, v14, v15}, [a];
st.global.v4.b32 [b], {v0, v1, v2, v3};
add.s64 b, b, step;
st.global.v4.b32 [b], {v4, v5, v6, v7};
add.s64 b, b, step;
st.global.v4.b32 [b], {v8, v9, v10, v11};
add.s64 b, b, step;
st.global.v4.b32 [b], {v12, v13, v14, v15};
add.s64 i, next, step;
bra FOUR;
ONE:
setp.ge.u64 p, i, end;
@p bra TAIL;
add.s64 a, $3, i;
add.s64 b, off, i;
ld.global.v4.b32 {v0, v1, v2, v3}, [a];
st.global.v4.b32 [b], {v0, v1, v2, v3};
add.s64 i, i, step;
bra ONE;
TAIL:
cvt.u64.u32 i, tid;
add.s64 i, i, end;
BYTES:
cvt.u64.u32 step, ntid;
MORE:
setp.ge.u64 p, i, $4;
@p bra MET;
add.s64 a, $3, i;
add.s64 b, off, i;
ld.global.u8 t, [a];
st.global.u8 [b], t;
add.s64 i, i, step;
bra MORE;
MET:
bar.sync 0;
mov.b32 $0, 0;
setp.ne.s32 q, tid, 0;
@q bra DONE;
fence.acq_rel.sys;
red.relaxed.sys.global.add.u64 [soff], $6;
DONE:
}""")


@triton.jit
def library_kernel(ctx, dst_ptr, src_ptr, num_bytes, signal_ptr, value, pe):
    """`num_bytes` from src, local, to dst of `pe`; then signal += value there."""
    shmem.put_signal(ctx, dst_ptr, src_ptr, num_bytes, signal_ptr, value, shmem.SIGNAL_ADD, pe)


@triton.jit
def by_hand_kernel(ctx, dst_ptr, src_ptr, num_bytes, signal_ptr, value, pe):
    """The same. Addresses are integers: Triton 3.6 brings operands together as those of an addition, not pointers."""
    context, dst, src, signal = ctx.to(tl.int64), dst_ptr.to(tl.int64), src_ptr.to(tl.int64), signal_ptr.to(tl.int64)
    tl.inline_asm_elementwise(
        BY_HAND, "=r,l,l,l,l,l,l,r", [context, dst, src, num_bytes, signal, value, pe], tl.int32, False, 1
    )


@triton.jit
def empty_kernel(ctx, dst_ptr, src_ptr, num_bytes, signal_ptr, value, pe):
    pass


KERNELS = {"mori_triton": library_kernel, "by hand": by_hand_kernel, "an empty kernel": empty_kernel}


def instructions(cubin: bytes) -> list[str]:
    """Mnemonics of a cubin's code, without the padding behind its end."""
    from triton.tools.disasm import extract

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = extract(file.name, None)
    # control codes, then the instruction, perhaps behind a predicate
    found = [
        re.match(r"\S+:\S+:\S+:\S+:\S+\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", line.strip()) for line in text.splitlines()
    ]
    names = [match[1] for match in found if match]
    while names and names[-1].startswith("NOP"):
        names.pop()
    return names


def registers(cubin: bytes) -> int:
    """Of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"\bREG:(\d+)", text)[-1])


def count(kernel: Any, num_warps: int = 4) -> dict[str, int]:
    """What a kernel is made of."""
    compiled = cross_compile(kernel, SIGNATURE, arch=ARCH, num_warps=num_warps)
    names = instructions(compiled.asm["cubin"])
    kinds = Counter(name.split(".")[0] for name in names)
    memory = sum(kinds[kind] for kind in ("LDG", "STG", "LD", "ST", "ATOMG", "ATOM", "RED", "REDG", "LDS", "STS"))
    return {
        "instructions": len(names),
        "memory": memory,
        "branches": kinds["BRA"],
        "registers": registers(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
    }


def rows() -> list[dict[str, Any]]:
    """One for each way."""
    return [{"what": what, **count(kernel)} for what, kernel in KERNELS.items()]
