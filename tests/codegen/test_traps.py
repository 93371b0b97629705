"""What docs/amd_codegen.md says of Triton itself, by the versions that it was seen with."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton

from mori_triton.inspect.kernels import launch_from_file
from mori_triton.inspect.report import Report, report

pytestmark = pytest.mark.compile

OURS = Path(__file__).with_name("kernels.py")
VERSION = ".".join(triton.__version__.split(".")[:2])
SEEN = {"3.6": ("device", "load"), "3.9": ("system", "atomic")}

needs_seen = pytest.mark.skipif(VERSION not in SEEN, reason=f"nothing was written down about Triton {VERSION}")


def built(name: str, signature: str, arch: str) -> Report:
    return report(launch_from_file(f"{OURS}:{name}", signature, 4), arch)


@needs_seen
@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_scope_of_tritons_compare_and_swap(arch: str) -> None:
    found = built("compare_kernel", "*i32:16", arch)
    assert [access.scope for access in found.accesses if access.kind == "atomic"] == [SEEN[VERSION][0]]


@needs_seen
@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_how_triton_polls_and_acquires(arch: str) -> None:
    found = built("acquire_kernel", "*i32:16,*i64:16,*i64:16,False", arch)
    system = [access.kind for access in found.accesses if access.scope == "system"]
    assert system == [SEEN[VERSION][1], "invalidate"]
    # gfx1201: the other waves' own, behind the barrier
    own = [access.text for access in found.accesses if access.kind == "invalidate" and access.scope == "workgroup"]
    assert own == (["global_inv scope:SCOPE_SE"] * 2 if arch == "gfx1201" else [])
