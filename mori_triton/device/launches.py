"""How launches of a stream follow each other: on NVIDIA GPUs from sm_90 on the next one may be brought in early (CUDA:
programmatic dependent launches), so its start is not on the way of a call of several launches.

Every kernel of an op is launched so (`ops.plans`), and so begins with `gdc_wait`. Elsewhere both functions are nothing:
launches do not overlap there.
"""

import triton
import triton.language as tl
from triton.language import core


@core.builtin
def _may_overlap(_semantic=None):
    """Whether what is being compiled is launched with `launch_pdl=True`, an option of CUDA's backend alone."""
    return core.constexpr(bool(getattr(_semantic.builder.options, "launch_pdl", False)))


@triton.jit
def gdc_wait():
    """All launches before this one on its stream are done, and what they wrote is seen.

    Every program comes by, before it reads what any launch writes and before it writes: else a launch could be done
    before the one that it follows.
    """
    if _may_overlap():
        # a result that nobody uses: an inline assembly has one
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def gdc_launch_dependents():
    """A hint: when all programs have come by or ended, the next launch may be brought in, to wait in its `gdc_wait`.

    Only behind every wait for peers: programs that sit there early could keep a peer's out of a GPU that PEs share.
    """
    if _may_overlap():
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
