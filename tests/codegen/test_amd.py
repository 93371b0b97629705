"""Reading AMD assembly, of texts that are written by hand."""

from __future__ import annotations

import pytest

from mori_triton.errors import ArgumentError
from mori_triton.inspect import amd
from mori_triton.inspect.code import NOWHERE, Resources, Source

pytestmark = pytest.mark.cpu

METADATA = """
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     8
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
    .group_segment_fixed_size: 16
    .max_flat_workgroup_size: 256
    .name:           some_kernel
    .private_segment_fixed_size: 20
    .sgpr_count:     90
    .sgpr_spill_count: 2
    .vgpr_count:     136
    .vgpr_spill_count: 5
    .wavefront_size: 64
amdhsa.target:   amdgcn-amd-amdhsa--gfx942
...
\t.end_amdgpu_metadata
"""


def test_resources() -> None:
    found = amd.resources("\t.amdhsa_next_free_vgpr 1\n" + METADATA, 1024)
    assert found == Resources(136, 8, 90, 16 + 1024, 20, 5, 2)
    assert found.spills


@pytest.mark.parametrize("kept", ["vgpr_spill_count: 1", "sgpr_spill_count: 1", "private_segment_fixed_size: 4"])
def test_each_kind_of_spill_counts(kept: str) -> None:
    text = METADATA.replace("fixed_size: 20", "fixed_size: 0").replace("count: 2", "count: 0").replace(": 5", ": 0")
    assert not amd.resources(text).spills
    name = kept.partition(":")[0]
    assert amd.resources(text.replace(f"{name}: 0", kept)).spills


def test_no_numbers_are_made_up() -> None:
    with pytest.raises(ArgumentError, match=r"no \.amdgpu_metadata"):
        amd.resources("s_endpgm")
    with pytest.raises(ArgumentError, match=r"no \.vgpr_spill_count"):
        amd.resources(METADATA.replace(".vgpr_spill_count: 5", ""))


def found(text: str, arch: str = "gfx1201") -> list[tuple[str, int, str, str]]:
    return [(a.kind, a.num_bytes, a.scope, a.hint) for a in amd.accesses(text, arch)]


GFX12 = [
    ("global_load_b128 v[1:4], v[5:6], off", ("load", 16, "", "")),
    ("global_load_b64 v[1:2], v1, s[2:3] offset:8 scope:SCOPE_SYS", ("load", 8, "system", "")),
    ("global_store_b128 v[1:2], v[3:6], off th:TH_STORE_NT", ("store", 16, "", "TH_STORE_NT")),
    ("global_store_d16_hi_b16 v[1:2], v3, off", ("store", 2, "", "")),
    ("buffer_load_d16_u8 v6, v7, s[12:15], null offen", ("load", 1, "", "")),
    ("buffer_load_b96 v[6:8], v7, s[12:15], null offen scope:SCOPE_SE", ("load", 12, "workgroup", "")),
    ("global_atomic_add_u32 v2, v2, v3, s[0:1] th:TH_ATOMIC_RETURN scope:SCOPE_DEV",
     ("atomic", 4, "device", "TH_ATOMIC_RETURN")),
    ("global_atomic_cmpswap_b64 v1, v[2:5], s[0:1] scope:SCOPE_SYS", ("atomic", 8, "system", "")),
    ("global_atomic_add_u64 v1, v[2:3], s[0:1]", ("atomic", 8, "", "")),
    ("global_wb scope:SCOPE_SYS", ("writeback", 0, "system", "")),
    ("global_inv scope:SCOPE_DEV", ("invalidate", 0, "device", "")),
    ("global_atomic_pk_add_bf16 v1, v2, s[0:1]", ("atomic", 4, "", "")),
]  # fmt: skip
GFX9 = [
    ("global_load_dwordx4 v[1:4], v[5:6], off nt", ("load", 16, "", "nt")),
    ("global_load_dwordx2 v[1:2], v[5:6], off sc0 sc1", ("load", 8, "system", "")),
    ("global_load_dword v1, v[5:6], off sc1", ("load", 4, "device", "")),
    ("flat_load_ubyte v1, v[5:6] sc0", ("load", 1, "workgroup", "")),
    ("buffer_store_short_d16_hi v1, v2, s[0:3], 0 offen", ("store", 2, "", "")),
    ("global_atomic_add v4, v4, v5, s[22:23] offset:128 sc0", ("atomic", 4, "device", "")),
    ("global_atomic_add_x2 v[6:7], v7, v[6:7], s[0:1] sc0 sc1", ("atomic", 8, "system", "")),
    ("global_atomic_pk_add_bf16 v1, v2, s[0:1]", ("atomic", 4, "device", "")),
    ("buffer_wbl2 sc1", ("writeback", 0, "device", "")),
    ("buffer_wbl2 sc0 sc1", ("writeback", 0, "system", "")),
    ("buffer_inv sc0 sc1", ("invalidate", 0, "system", "")),
    ("buffer_inv sc1", ("invalidate", 0, "device", "")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "line", "wanted"), [*(("gfx1250", *case) for case in GFX12), *(("gfx950", *case) for case in GFX9)]
)
def test_accesses(arch: str, line: str, wanted: tuple[str, int, str, str]) -> None:
    assert found(f"\t{line}", arch) == [wanted]


def test_what_is_no_access_to_global_memory() -> None:
    text = """
\t.globl global_load_b128
global_load_b128:                       ; @global_load_b128
\t; global_load_b128 v[1:4], v[5:6], off
\tds_load_b128 v[1:4], v1
\tscratch_load_b128 v[1:4], off, s1
\ts_load_b128 s[4:7], s[0:1], 0x0
\tv_add_u32 v1, v2, v3                    ; buffer_inv sc1
\ts_wait_loadcnt 0x0
"""
    assert found(text) == []


def test_an_access_of_unknown_width_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"line 1.*global_load_b1024"):
        amd.accesses("global_load_b1024 v[1:32], v[1:2], off", "gfx1201")


CALLERS = ("kernels.py:40:9", "a.py:1:2")


def test_sources() -> None:
    """The innermost function's line, until the next; none outside the function."""
    text = """
\t.file\t1 "/some/where" "kernels.py"
\t.file\t7 "/else/where.py"
\tglobal_load_b32 v1, v[1:2], off
\t.loc\t1 12 5 prologue_end               ; kernels.py:12:5 @[ kernels.py:40:9 @[ a.py:1:2 ] ]
\tglobal_load_b64 v[1:2], v[1:2], off
.LBB0_1:                                ; %bb
\tglobal_store_b64 v[1:2], v[1:2], off
\t.loc\t7 3 1 is_stmt 0
\tglobal_store_b32 v[1:2], v1, off
.Lfunc_end0:
\tglobal_store_b32 v[1:2], v1, off
"""
    here, there = Source("/some/where/kernels.py", 12, 5, CALLERS), Source("/else/where.py", 3, 1)
    sources = [(a.num_bytes, a.line, a.source) for a in amd.accesses(text, "gfx942")]
    assert sources == [(4, 4, NOWHERE), (8, 6, here), (8, 8, here), (4, 10, there), (4, 12, NOWHERE)]
    assert str(here) == "kernels.py:12"
