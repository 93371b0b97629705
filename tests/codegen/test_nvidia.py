"""Reading what ptxas and cuobjdump say, of texts that are written by hand."""

from __future__ import annotations

import pytest

from mori_triton.inspect import nvidia
from mori_triton.inspect.code import Resources, Source

pytestmark = pytest.mark.cpu

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function some_kernel:
  REG:63 STACK:{stack} SHARED:2048 LOCAL:{local} CONSTANT[0]:696 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_resources() -> None:
    assert nvidia.read_usage(USAGE.format(stack=0, local=0), 256) == Resources(63, 0, None, 2304, 0, 0, None)
    for stack, local in ((16, 0), (0, 16)):
        spilled = nvidia.read_usage(USAGE.format(stack=stack, local=local), 0)
        # how many registers lie there is not written
        assert spilled == Resources(63, 0, None, 2048, 16, None, None)
        assert spilled.spills


def test_what_cannot_be_read_is_unknown() -> None:
    assert nvidia.read_usage("cuobjdump info    : File does not contain device code", 0) is None


PTX = """
\t.loc\t1 5 3
\tld.param.b64 %rd1, [kernel_param_0];
\tld.global.b64 { %rd39 }, [ %rd40 + 0 ];
\t.loc\t1 9 3
\t// begin inline asm
\t.loc\t1 9 3
\tmov.u32 %r1, 0x0;
\t.loc\t1 10 3
\t@%p3 ld.global.nc.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd44 + 0 ];
\t// end inline asm
\t@!%p1 st.global.cs.v2.b64 [ %rd1 + 0 ], { %rd2, %rd3 };
\tst.shared.b64 [mori_shmem_broadcast], %rd287;
\tst.relaxed.sys.global.u64 [%rd1], %rd2;
\tld.acquire.gpu.global.u32 %r1, [%rd1];
\tatom.acq_rel.gpu.global.add.u32 %r1, [%rd1], %r2;
\t{ red.relaxed.sys.global.add.u64 [%rd1], %rd2; }
\tatom.global.add.f16x2 %r1, [%rd1], %r2;
\tfence.acq_rel.sys;
\t// ld.global.b32 %r1, [%rd1];
\t.loc\t2 3 4, function_name $L__info_string0, inlined_at 1 9 3
\tld.global.b32 %r1, [%rd1];
\t.loc\t2 7 8, function_name $L__info_string1, inlined_at 2 3 4
\tld.global.b16 %r1, [%rd1];
\t.file\t2 "/some/where/rows.py"
\t.file\t1 "/some/where" "kernels.py"
"""


def test_accesses() -> None:
    """PTX names its files at the end, and counts on in inline assembly."""
    found = nvidia.accesses(PTX)
    assert [(a.kind, a.num_bytes, a.scope, a.hint) for a in found] == [
        ("load", 8, "", ""),
        ("load", 16, "", "nc"),
        ("store", 16, "", "cs"),
        ("store", 8, "system", ""),
        ("load", 4, "device", ""),
        ("atomic", 4, "device", ""),
        ("atomic", 8, "system", ""),
        ("atomic", 4, "device", ""),
        ("fence", 0, "system", ""),
        ("load", 4, "", ""),
        ("load", 2, "", ""),
    ]
    assert found[-2].source == Source("/some/where/rows.py", 3, 4, ("kernels.py:9:3",))
    assert found[-1].source == Source("/some/where/rows.py", 7, 8, ("rows.py:3:4", "kernels.py:9:3"))
    assert [a.source.line for a in found[:3]] == [5, 9, 9]
    assert found[0].source == Source("/some/where/kernels.py", 5, 3)
