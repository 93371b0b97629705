"""The kernels of the package as its ops launch them on a GPU, and kernels of other files; which is what is inspected.

No list is kept here: ops are called as a user calls them, in a small world on the CPU where `prepare` only notes which
kernel it is asked for (`device.prepared.recording`), with the launch shapes of a GPU.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from mori_triton.device import probe
from mori_triton.device.launch import TARGETS, cross_compile
from mori_triton.device.prepared import Asked, recording
from mori_triton.errors import ArgumentError, require
from mori_triton.host import state as host_state
from mori_triton.ops import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp
from mori_triton.ops import dispatch_combine_v2 as v2
from mori_triton.ops.formats import QUANT_TYPES
from mori_triton.ops.local_expert_count import prepare_kernels
from mori_triton.ops.op_base import EpOpBase
from mori_triton.ops.tuning import launch_config
from mori_triton.shmem.stream_barrier import enqueue_barrier
from mori_triton.world import local_world

# the model whose rows move: 8 PEs, top-8 of 256 experts, bfloat16, float32 scales of 128 elements each
NUM_PES, HIDDEN, TOP_K, EXPERTS, SCALES = 8, 7168, 8, 256, 56
# a launch shape is chosen for so many tokens; the buffers hold only a few
FEW_TOKENS, MANY_TOKENS, ROWS_THERE = 128, 4096, 8


@dataclass(frozen=True)
class Launch:
    """A kernel with the types and constants of one launch: all that its code depends on."""

    name: str  # of the kernel; of several variants, all but the first have the op's in brackets
    kernel: Any
    signature: tuple[tuple[str, str], ...]  # parameter -> Triton type; those that are constants left out
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]  # num_warps, ...
    divisible_by_16: tuple[str, ...] = ()  # parameters that Triton is told this of

    @property
    def num_warps(self) -> int:
        return int(dict(self.options).get("num_warps", 4))

    def build(self, arch: str) -> Any:
        """Triton's compiled kernel; `BitcodeError` where it calls what the device library does not have."""
        return cross_compile(
            self.kernel, dict(self.signature), dict(self.constants), arch=arch,
            divisible_by_16=self.divisible_by_16, **dict(self.options),
        )  # fmt: skip


def launch_of(asked: Asked, variant: str = "") -> Launch:
    """What `prepare` was asked for, as it would compile it: nothing is known of arguments but their types."""
    from triton.runtime.jit import mangle_type

    signature, constants = {}, {}
    is_constexpr = {param.name: param.is_constexpr for param in asked.kernel.params}
    for name, value in asked.values.items():
        if is_constexpr[name] or value is None:
            constants[name] = value
        else:
            signature[name] = mangle_type(value)
    name = asked.kernel.__name__
    return Launch(
        f"{name}[{variant}]" if variant else name, asked.kernel,
        tuple(signature.items()), tuple(constants.items()), tuple(sorted(asked.options.items())),
    )  # fmt: skip


def _round(
    pe: int,
    *,
    num_tokens: int = MANY_TOKENS,
    dtype: torch.dtype = torch.bfloat16,
    registered: bool = False,
    scales: int = SCALES,
    **fields: Any,
) -> None:
    """Two rounds, the second in split calls, with the launch shapes for `num_tokens` tokens on an AMD GPU."""
    num_pes = host_state.current().n_pes
    config = EpDispatchCombineConfig(
        data_type=torch.bfloat16, rank=pe, world_size=num_pes, hidden_dim=HIDDEN,
        scale_dim=scales, scale_type_size=4, max_token_type_size=2,
        max_num_inp_token_per_rank=ROWS_THERE, num_experts_per_rank=EXPERTS // num_pes, num_experts_per_token=TOP_K,
        **fields,
    )  # fmt: skip
    op = EpDispatchCombineOp(config)
    _as_on_a_gpu(op, num_tokens, dtype, registered)
    tokens = torch.zeros(ROWS_THERE, HIDDEN).to(dtype)
    weights = torch.zeros(ROWS_THERE, TOP_K)
    indices = torch.zeros(ROWS_THERE, TOP_K, dtype=torch.int32)
    scale_rows = torch.zeros(ROWS_THERE, scales) if scales else None
    rows = op.get_registered_combine_input_buffer(dtype, HIDDEN) if registered else tokens
    op.dispatch(tokens, weights, scale_rows, indices)
    op.combine(rows, weights, indices)
    # two in a row meet between them
    for _ in range(2):
        op.dispatch_send(tokens, weights, scale_rows, indices)
        op.dispatch_recv()
    op.combine_send(rows, weights, indices)
    op.combine_recv()
    op.close()


def _staged_round(pe: int) -> None:
    """A round of an EPv2 op, which stages what is small."""
    config = v2.EpDispatchCombineConfig(
        rank=pe, world_size=NUM_PES, hidden_dim=HIDDEN, max_num_inp_token_per_rank=ROWS_THERE,
        num_experts_per_rank=EXPERTS // NUM_PES, num_experts_per_token=TOP_K, scale_dim=SCALES, scale_type_size=4,
    )  # fmt: skip
    op = v2.EpDispatchCombineOp(config)
    _as_on_a_gpu(op.arena, MANY_TOKENS, torch.bfloat16, registered=False)
    tokens = torch.zeros(ROWS_THERE, HIDDEN, dtype=torch.bfloat16)
    indices = torch.zeros(ROWS_THERE, TOP_K, dtype=torch.int32)
    *_, handle = op.dispatch(
        tokens, torch.zeros(ROWS_THERE, TOP_K), torch.zeros(ROWS_THERE, SCALES), indices, return_routing=True
    )
    op.combine(tokens, True, routing=handle)
    op.close()


def _as_on_a_gpu(op: EpOpBase, num_tokens: int, dtype: torch.dtype, registered: bool) -> None:
    """Give an op's later calls the launch shapes for `num_tokens` tokens on an AMD GPU."""
    config = op.config
    for phase in ("dispatch", "combine"):
        shape = launch_config(
            "hip", phase, num_tokens, HIDDEN * dtype.itemsize, dtype=dtype, top_k=TOP_K, zero_copy=registered,
            quant_type=config.quant_type, kernel_type=config.kernel_type.name,
        )  # fmt: skip
        op._set_launch(phase, shape)


def _beside(pe: int) -> None:
    """What is launched beside rounds."""
    enqueue_barrier(host_state.current(), None)
    for alone in (True, False):
        prepare_kernels(EXPERTS // NUM_PES, alone)


_RDNA4: dict[str, Any] = {"kernel_type": EpDispatchCombineKernelType.IntraNodeRDNA4, "scales": 0}
# number of PEs -> what is called on every one, in this order: a kernel's first launch gets its name, others also the
# variant's
VARIANTS: dict[int, dict[str, Callable[[int], None]]] = {
    NUM_PES: {
        "": _round,
        "beside": _beside,
        "registered": partial(_round, registered=True),
        "few": partial(_round, num_tokens=FEW_TOKENS),
        "LL": partial(_round, num_tokens=FEW_TOKENS, kernel_type=EpDispatchCombineKernelType.IntraNodeLL),
        "deterministic": partial(_round, deterministic=True),
        "fp8": partial(_round, dtype=torch.float8_e4m3fn),
        "v2": _staged_round,
        **{codec: partial(_round, quant_type=codec) for codec in QUANT_TYPES if codec != "none"},
    },
    4: {
        "EP4": partial(_round, **_RDNA4),
        "EP4 few": partial(_round, **_RDNA4, num_tokens=FEW_TOKENS),
    },
    2: {
        "EP2": partial(_round, **_RDNA4),
        "EP2 few": partial(_round, **_RDNA4, num_tokens=FEW_TOKENS),
    },
}


@lru_cache(maxsize=1)
def package_launches() -> dict[str, Launch]:
    """Every kernel of the package, by name; a kernel that several variants launch differently has several entries.

    Runs the ops in local worlds on the CPU, in which no kernel is compiled or launched: not to be called in another.
    """
    ring = probe.ring_kernel
    launches = {ring.__name__: Launch(ring.__name__, ring, tuple(probe.RING_SIGNATURE.items()), (), ())}
    seen = set()
    for num_pes, variants in VARIANTS.items():
        for variant, asked in _asked(num_pes, variants):
            firsts: dict[str, Asked] = {}
            for one in asked:
                # a half of a round launches the whole one's kernels, made smaller
                firsts.setdefault(one.kernel.__name__, one)
            for one in firsts.values():
                plain = launch_of(one)
                if plain not in seen:
                    seen.add(plain)
                    named = launch_of(one, variant) if plain.name in launches else plain
                    launches[named.name] = named
    return launches


def _asked(num_pes: int, variants: Mapping[str, Callable[[int], None]]) -> list[tuple[str, list[Asked]]]:
    """What PE 0 of a world asks for, by variant."""

    def program(pe: int) -> list[tuple[str, list[Asked]]]:
        found = []
        for variant, call in variants.items():
            with recording() as asked:
                call(pe)
            found.append((variant, asked))
        return found

    return local_world(num_pes, device="cpu", heap_size="64M").run(program)[0]


def entry_kernels(folder: Path) -> set[str]:
    """Names of the `@triton.jit` functions below `folder` that are launched: by our naming, `*_kernel`."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                names.add(node.name)
    return {name for name in names if name.endswith("_kernel")}


def chosen_launches(kernel: str, signature: str, num_warps: int) -> list[Launch]:
    """What `all`, a kernel's name with or without a variant, or `FILE.py:NAME` means. Raises ArgumentError."""
    if ".py:" in kernel:
        return [launch_from_file(kernel, signature, num_warps)]
    require(not signature, "--signature", "none for a kernel of the package", signature)
    launches = package_launches()
    found = [one for name, one in launches.items() if kernel in ("all", name, name.partition("[")[0])]
    require(bool(found), "KERNEL", f"all, FILE.py:NAME, or one of {', '.join(launches)}", kernel)
    return found


def chosen_targets(text: str) -> list[str]:
    """Targets from `all` or names separated by commas. Raises ArgumentError."""
    names = list(TARGETS) if text == "all" else [word.strip() for word in text.split(",")]
    for name in names:
        require(name in TARGETS, "--arch", f"all, or some of {', '.join(TARGETS)}", name)
    return names


def launch_from_file(where: str, signature: str, num_warps: int) -> Launch:
    """The kernel `path.py:name`, whose arguments are as `signature` says, in order, separated by commas.

    A type (`*bf16`, `i32`) is an argument's, with `:16` of one that is divisible by 16, as torch's pointers are. A
    number, `True`, `False` or `None` is a constant, as every constexpr argument has to be. Runs the file.

    Raises:
        ArgumentError: there is no such file or kernel, or the signature is not the kernel's.
    """
    path, _, name = where.rpartition(":")
    require(Path(path).is_file(), "KERNEL", "the name of a kernel of the package, all, or FILE.py:NAME", where)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Triton looks a kernel's globals up through the module
    sys.modules.setdefault(spec.name, module)
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    kernel: Any = getattr(module, name, None)
    require(hasattr(kernel, "arg_names"), "KERNEL", f"a @triton.jit function of {path}", name)
    words = [word.strip() for word in signature.split(",") if word.strip()]
    params = kernel.params
    names = ", ".join(param.name for param in params)
    require(len(words) == len(params), "--signature", f"one entry for each of {names}", signature)
    types, constants, aligned = {}, {}, []
    for param, word in zip(params, words, strict=True):
        kind, colon, hint = word.partition(":")
        if _TYPE.fullmatch(kind) and not param.is_constexpr:
            require(hint == ("16" if colon else ""), "--signature", f"{param.name}: {kind} or {kind}:16", word)
            types[param.name] = kind
            aligned += [param.name] if hint else []
        else:
            constants[param.name] = _constant(param.name, word)
    options = (("num_warps", num_warps),)
    return Launch(name, kernel, tuple(types.items()), tuple(constants.items()), options, tuple(aligned))


_TYPE = re.compile(r"\*{0,2}(k?)(i1|u1|[iu](8|16|32|64)|fp(16|32|64)|bf16|fp8\w+)")


def _constant(name: str, word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError) as error:
        raise ArgumentError(f"--signature: {name}: want a type such as *bf16:16 or a constant, got {word!r}") from error
