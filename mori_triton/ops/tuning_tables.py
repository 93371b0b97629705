"""Tuned launch shapes in files: MORI's JSON format and names, read, looked up and written.

A file holds the rules of one (GPU architecture, GPU model, kernel type, number of PEs, phase). docs/tuning.md describes
the format, how a file is found and how a rule is chosen.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from mori_triton.errors import ArgumentError

VERSION = "1.0"
# the model of the emulated device, whose times say nothing about a GPU
EMULATED = "emulated"
# behind the model where several PEs, threads of one process, share a GPU
SHARED = "-shared"
PACKAGED = Path(__file__).parent / "tuning_configs"
# MORI's names of payload dtypes, and ours for those that MORI has no tables for
DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e4m3fnuz: "fp8_e4m3_fnuz",
    **({torch.float4_e2m1fn_x2: "fp4"} if hasattr(torch, "float4_e2m1fn_x2") else {}),
}


@dataclass(frozen=True)
class TuningRule:
    """One entry of a file's `rules`, under MORI's keys; the last block is ours and absent in MORI's files."""

    dtype: str  # a value of DTYPE_NAMES
    num_tokens: int
    hidden_dim: int
    block_num: int
    warp_per_block: int  # any number from 1 in MORI's files
    rdma_block_num: int = 0
    topk: int | None = None
    zero_copy: bool | None = None  # of combine rules, as is quant_type
    quant_type: str | None = None
    bandwidth_gbps: float | None = None
    latency_us: float | None = None
    piece_bytes: int | None = None
    route_tokens: int | None = None
    route_warps: int | None = None
    stage_programs: int | None = None
    stage_piece_bytes: int | None = None
    stage_warps: int | None = None
    floor_us: float | None = None  # the bytes over the copy rate of the run that made the rule
    noise: float | None = None  # relative spread of the latency in that run

    @property
    def num_warps(self) -> int:
        """`warp_per_block` as Triton takes it: the largest power of two not above it, at most 16."""
        return min(16, 1 << (self.warp_per_block.bit_length() - 1))

    @property
    def key(self) -> tuple[Any, ...]:
        """What the rule is for: two rules of one file never share it."""
        return self.dtype, self.hidden_dim, self.topk or 0, bool(self.zero_copy), self.quant_type or "", self.num_tokens


@dataclass(frozen=True)
class TuningTable:
    """The rules of one file, sorted by `key`."""

    path: Path
    rules: tuple[TuningRule, ...]
    # what lookups have found; a table is asked again and again for the same few calls
    _found: dict[tuple[Any, ...], TuningRule | None] = field(default_factory=dict, repr=False, compare=False)

    def lookup(
        self,
        dtype: torch.dtype,
        num_tokens: int,
        hidden_dim: int,
        top_k: int,
        zero_copy: bool | None = None,
        quant_type: str | None = None,
    ) -> TuningRule | None:
        """The rule for a call, None if the file has none of its dtype (combine: and zero_copy and quant_type).

        Of those, the rules of its hidden size and top-k, else of its hidden size, else of its top-k, else all; of these
        the one with the fewest tokens >= `num_tokens`, else the one with the most. Between rules that are left, the
        hidden size nearest to the call's, then the nearest top-k, then the smaller ones: the choice never depends on
        the order in the file.
        """
        asked = (dtype, num_tokens, hidden_dim, top_k, zero_copy, quant_type)
        if asked not in self._found:
            self._found[asked] = self._choose(*asked)
        return self._found[asked]

    def _choose(
        self,
        dtype: torch.dtype,
        num_tokens: int,
        hidden_dim: int,
        top_k: int,
        zero_copy: bool | None,
        quant_type: str | None,
    ) -> TuningRule | None:
        fitting = [
            r
            for r in self.rules
            if r.dtype == DTYPE_NAMES.get(dtype)
            and (zero_copy is None or r.zero_copy == zero_copy)
            and (quant_type is None or r.quant_type == quant_type)
        ]
        if not fitting:
            return None
        same_hidden = [r for r in fitting if r.hidden_dim == hidden_dim]
        same_topk = [r for r in fitting if r.topk == top_k]
        both = [r for r in same_hidden if r.topk == top_k]
        chosen = both or same_hidden or same_topk or fitting
        enough = [r.num_tokens for r in chosen if r.num_tokens >= num_tokens]
        tokens = min(enough) if enough else max(r.num_tokens for r in chosen)
        return min(
            (r for r in chosen if r.num_tokens == tokens),
            key=lambda r: (abs(r.hidden_dim - hidden_dim), r.hidden_dim, abs((r.topk or 0) - top_k), r.topk or 0),
        )


@dataclass(frozen=True)
class EpTuningTables:
    """The tables of one op; None: no file for that phase."""

    dispatch: TuningTable | None
    combine: TuningTable | None


def file_name(gpu_arch: str, gpu_model: str, kernel_type: str, ep_size: int, phase: str) -> str:
    """MORI's name of the file with these rules, `gfx942_mi300x_IntraNode_ep8_dispatch.json`."""
    return f"{gpu_arch}_{gpu_model}_{kernel_type}_ep{ep_size}_{phase}.json"


def gpu_model(device_name: str) -> str:
    """The model in a device's name, as file names spell it: `mi300x` of "AMD Instinct MI300X", `h200` of "NVIDIA H200".

    The first word with a digit in it, up to a dash; without one, all words joined by dashes.
    """
    words = re.findall(r"[a-z0-9-]+", device_name.lower())
    numbered = next((word for word in words if any(c.isdigit() for c in word)), None)
    return numbered.split("-")[0] if numbered else "-".join(words) or "unknown"


# --------------------------------------------------------------------------------------------------------- reading
_REQUIRED = ("dtype", "num_tokens", "hidden_dim", "block_num", "warp_per_block")
_REQUIRED_COMBINE = (*_REQUIRED, "zero_copy", "quant_type")
_COUNTS = ("num_tokens", "hidden_dim", "block_num", "warp_per_block", "topk", "stage_programs")
_POWERS = ("piece_bytes", "route_tokens", "route_warps", "stage_piece_bytes", "stage_warps")
_NUMBERS = ("bandwidth_gbps", "latency_us", "floor_us", "noise")
_KNOWN = tuple(f.name for f in fields(TuningRule))


def load_table(path: Path, phase: str) -> TuningTable:
    """Read a file of `phase`. Keys that this package does not know are left alone, so MORI's own files load.

    Raises:
        ArgumentError: no JSON, another version or phase, a key that is missing or holds something else, or two rules
            for one call; names the file, the rule and the key.
    """
    return TuningTable(path, parse_rules(_read(path), phase, str(path)))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{path}: the tuning table cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArgumentError(f"{path}: the tuning table is not JSON: {error}") from error


def phase_of(path: Path) -> str:
    """The `phase` that a file says it is of; raises ArgumentError for none."""
    data = _read(path)
    phase = data.get("phase") if isinstance(data, dict) else None
    if phase not in ("dispatch", "combine"):
        raise ArgumentError(f'{path}: phase: want "dispatch" or "combine", got {phase!r}')
    return phase


def parse_rules(data: Any, phase: str, where: str) -> tuple[TuningRule, ...]:
    """The rules of a file's contents; `where` names it in errors."""
    if not isinstance(data, dict):
        raise ArgumentError(f"{where}: want an object with version, phase and rules, got {type(data).__name__}")
    for key, want in (("version", VERSION), ("phase", phase)):
        if data.get(key) != want:
            raise ArgumentError(f"{where}: {key}: want {want!r}, got {data.get(key)!r}")
    rules = data.get("rules")
    if not isinstance(rules, list):
        raise ArgumentError(f"{where}: rules: want a list, got {type(rules).__name__}")
    parsed: dict[tuple[Any, ...], TuningRule] = {}
    for index, raw in enumerate(rules):
        rule = _parse_rule(raw, phase, f"{where}: rules[{index}]")
        if rule.key in parsed:
            raise ArgumentError(f"{where}: rules[{index}]: want one rule for {describe(rule)}, got a second")
        parsed[rule.key] = rule
    return tuple(parsed[key] for key in sorted(parsed))


def _parse_rule(raw: Any, phase: str, where: str) -> TuningRule:
    if not isinstance(raw, dict):
        raise ArgumentError(f"{where}: want an object, got {type(raw).__name__}")
    for key in _REQUIRED_COMBINE if phase == "combine" else _REQUIRED:
        if key not in raw:
            raise ArgumentError(f"{where}: {key}: missing")
    for key in _KNOWN:
        if raw.get(key) is not None:
            want = _wanted(key, raw[key])
            if want:
                raise ArgumentError(f"{where}: {key}: want {want}, got {raw[key]!r}")
        elif key in raw and key in _REQUIRED_COMBINE:
            raise ArgumentError(f"{where}: {key}: want a value, got null")
    return TuningRule(**{key: raw[key] for key in _KNOWN if key in raw})


def _wanted(key: str, value: Any) -> str:
    """What a key's value should have been; empty: it is."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if key in _COUNTS:
        return "" if whole and value >= 1 else "a whole number from 1 on"
    if key == "rdma_block_num":
        return "" if whole and value >= 0 else "a whole number from 0 on"
    if key in _POWERS:
        return "" if whole and value >= 1 and value & (value - 1) == 0 else "a power of two"
    if key in _NUMBERS:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return "" if number and 0 <= value < float("inf") else "a number from 0 on"
    if key == "zero_copy":
        return "" if isinstance(value, bool) else "true or false"
    return "" if isinstance(value, str) and value else "a name"


def describe(rule: TuningRule) -> str:
    """What a rule is for, in words."""
    codec = f", zero_copy {str(rule.zero_copy).lower()}, {rule.quant_type}" if rule.quant_type is not None else ""
    topk = f", top-{rule.topk}" if rule.topk is not None else ""
    return f"{rule.dtype}, {rule.num_tokens} tokens, hidden {rule.hidden_dim}{topk}{codec}"


def open_tables(
    mode: str, override: str | None, *, gpu_arch: str, gpu_model: str, kernel_type: str, ep_size: int
) -> EpTuningTables | None:
    """The tables that an op uses: read once, when it is constructed.

    Args:
        mode: `MORI_EP_LAUNCH_CONFIG_MODE`: "manual" gives None, "auto" looks for files.
        override: `MORI_EP_TUNING_CONFIG`: a directory to look in instead of the package's, or one file, which then
            serves the phase that it names.
        gpu_arch, gpu_model: `gfx942`, `mi300x`; see `gpu_model()`.
        kernel_type: MORI's name, `IntraNode`.
        ep_size: number of PEs.

    Without a file of this model, another one of the same architecture is taken: of this model used in the other way (a
    GPU for each PE, or one for several), else of another model, first in the same way, by name. The emulated device
    takes only its own. `IntraNodeLL` without a table for combine takes that of `IntraNode`, whose combine it has.

    Raises:
        ArgumentError: the override does not exist, or a file is malformed.
    """
    if mode == "manual":
        return None
    directory = PACKAGED
    if override is not None:
        path = Path(override).expanduser()
        if path.is_file():
            table = load_table(path, phase_of(path))
            return EpTuningTables(*(table if phase == phase_of(path) else None for phase in ("dispatch", "combine")))
        if not path.is_dir():
            raise ArgumentError(f"MORI_EP_TUNING_CONFIG: want a tuning table or a directory of them, got {override!r}")
        directory = path
    found = []
    for phase in ("dispatch", "combine"):
        # one kernel for all of dispatch is all that is different there
        kind = "IntraNode" if phase == "combine" and kernel_type == "IntraNodeLL" else kernel_type
        own = _find(directory, gpu_arch, gpu_model, kernel_type, ep_size, phase)
        nearest = own or _find(directory, gpu_arch, gpu_model, kind, ep_size, phase)
        found.append(load_table(nearest, phase) if nearest else None)
    return EpTuningTables(*found)


def _find(directory: Path, arch: str, model: str, kernel_type: str, ep_size: int, phase: str) -> Path | None:
    own = directory / file_name(arch, model, kernel_type, ep_size, phase)
    if own.is_file() or model == EMULATED:
        return own if own.is_file() else None
    before, after = file_name(arch, "*", kernel_type, ep_size, phase).split("*")
    others = {p.name[len(before) : -len(after)]: p for p in directory.glob(f"{before}*{after}")}
    models = sorted(m for m in others if m != EMULATED and "_" not in m)
    is_shared, plain = model.endswith(SHARED), model.removesuffix(SHARED)
    # the same GPU used in the other way is nearer than another GPU
    models.sort(key=lambda m: (m.removesuffix(SHARED) != plain, m.endswith(SHARED) != is_shared))
    return others[models[0]] if models else None


# --------------------------------------------------------------------------------------------------------- writing
def save_table(path: Path, header: Mapping[str, Any], rules: Iterable[TuningRule]) -> None:
    """Write a file, whole or not at all; `header` holds gpu_arch, gpu_model, kernel_type, ep_size and phase."""
    data = {
        "version": VERSION,
        **header,
        "rules": [
            {f.name: getattr(rule, f.name) for f in fields(rule) if getattr(rule, f.name) is not None}
            for rule in sorted(rules, key=lambda r: r.key)
        ],
    }
    parse_rules(data, str(header["phase"]), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
