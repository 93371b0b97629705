"""All of MORI's functions in one kernel, and a library with which that stays small.

Each call of a function that may go through a network brings hundreds of instructions, since nothing of the library
stays a call in a kernel. Here what is a function in its source stays one, so a kernel of 98 calls has each of them
once.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

import triton
import triton.language as tl

from mori_triton import bitcode, env
from mori_triton.bitcode.files import DEVICE_LIBRARY, stored
from tests.device import mori_kernels as K
from tests.device.mori_kernels import (
    atomic_kernel,
    get_kernel,
    get_nbi_kernel,
    p_kernel,
    plain_kernel,
    put_kernel,
    put_signal_kernel,
    wait_kernel,
)

# at the index that `group` selects
GROUPS = (
    K.put_kernel,
    K.get_kernel,
    K.get_nbi_kernel,
    K.put_signal_kernel,
    K.p_kernel,
    K.atomic_kernel,
    K.wait_kernel,
    K.plain_kernel,
)


@triton.jit(do_not_specialize=["dst", "src", "sig", "addr", "count", "value", "compare", "op", "pe", "which", "group"])
def every_kernel(
    out,  # int64 [1], what the function returned
    dst: tl.int64,
    src: tl.int64,
    sig: tl.int64,
    addr: tl.int64,
    count: tl.int64,
    value: tl.int64,
    compare: tl.int64,
    real: tl.float32,
    op: tl.int32,
    pe: tl.int32,
    which: tl.int32,
    group: tl.int32,
):
    """The function that `which` selects in a group. Types are fixed, so that one compilation serves all arguments."""
    if group == 0:
        put_kernel(out, dst, src, count, pe, which)
    elif group == 1:
        get_kernel(out, dst, src, count, pe, which)
    elif group == 2:
        get_nbi_kernel(out, dst, src, count, pe, which)
    elif group == 3:
        put_signal_kernel(out, dst, src, count, sig, value, op, pe, which)
    elif group == 4:
        p_kernel(out, dst, value, real, pe, which)
    elif group == 5:
        atomic_kernel(out, dst, src, count, value, compare, op, pe, which)
    elif group == 6:
        wait_kernel(out, addr, value, which)
    elif group == 7:
        plain_kernel(out, addr, pe, which)


@cache
def library_of_calls(arch: str, provider: str) -> Path:
    """The library for a provider, in which functions of its source that are not exported are called and not inlined."""
    lines = bitcode.specialize(arch, provider=provider).read_text().splitlines()
    attributes = {m[1]: line for line in lines if (m := re.match(r"attributes #(\d+) = ", line))}
    kept, called = len(attributes), 0
    assert sorted(map(int, attributes)) == list(range(kept))
    for i, line in enumerate(lines):
        head = re.match(r"(define internal .*@_ZN4mori.*\).* )#(\d+)( .*)$", line)
        if head and " alwaysinline " in attributes[head[2]]:
            lines[i] = f"{head[1]}#{kept + int(head[2])}{head[3]}"
            called += 1
    # a source whose functions have other names would have nothing called
    assert called > 25
    for line in attributes.values():
        new = re.sub(r"#(\d+)", lambda m: f"#{kept + int(m[1])}", line, count=1)
        lines.append(new.replace(" alwaysinline ", " noinline "))
    data = ("\n".join(lines) + "\n").encode()
    return stored(env.cache_dir() / "bitcode" / hashlib.sha256(data).hexdigest()[:32] / DEVICE_LIBRARY, data)
