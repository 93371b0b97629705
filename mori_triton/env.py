"""The only reader of `os.environ`. docs/env.md lists the same variables; a test compares the two.

`snapshot()` reads every setting once, at init; what changes in the environment afterwards has no effect on a world that
is up. A text that cannot be read is an `EnvError` naming the variable, the text and the accepted forms.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from mori_triton.errors import ArgumentError, EnvError

SIZE_FORMS = (
    "a positive number of bytes such as 4096, 512M, 1.5G, 2GiB, 64KB or 1e9 (K, M, G, T are powers of two), below 2^63"
)
MAX_TIMEOUT_S = 86400.0

_SIZE = re.compile(
    r"(?:(\d+(?:\.\d*)?|\.\d+)[ \t]*(?:([kmgt])(?:i?b)?|b)?|(\d+(?:\.\d*)?e\d{1,3}))", re.ASCII | re.IGNORECASE
)
_SECONDS = re.compile(r"\d+(?:\.\d*)?(?:e\d{1,3})?|\.\d+", re.ASCII | re.IGNORECASE)
_SHIFT = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_FALSE = ("", "0", "false", "off", "no")


def parse_size(value: str | int, name: str = "heap_size", *, error: type[ArgumentError] = ArgumentError) -> int:
    """A number of bytes from a text (`SIZE_FORMS`, blanks around it and any case are fine) or a positive int.

    A fraction of a byte is rounded up, as in OpenSHMEM: `3.1M` is 3250586. Raises `error` for everything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    else:
        match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise error(f"{name}: want {SIZE_FORMS}, got {value!r}")
        number, suffix, scientific = match.groups()
        exact = Fraction(scientific or number) * 2 ** _SHIFT[(suffix or "").lower()]
        if exact.denominator != 1 and not suffix:
            raise error(f"{name}: want {SIZE_FORMS}, got {value!r}, which is not a whole number of bytes")
        num_bytes = math.ceil(exact)
    if not 0 < num_bytes < 2**63:
        raise error(f"{name}: want {SIZE_FORMS}, got {value!r}")
    return num_bytes


def parse_seconds(value: str | float, name: str, *, error: type[ArgumentError] = ArgumentError) -> float:
    """A time limit in seconds, above 0; more than a day counts as a day."""
    forms = "a number of seconds above 0, such as 5, 0.5 or 1e3"
    if isinstance(value, str):
        if _SECONDS.fullmatch(value.strip()) is None:
            raise error(f"{name}: want {forms}, got {value!r}")
        seconds = float(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise error(f"{name}: want {forms}, got {value!r}")
    # not (a > 0) also refuses NaN
    if not seconds > 0:
        raise error(f"{name}: want {forms}, got {value!r}")
    return min(seconds, MAX_TIMEOUT_S)


def _size(text: str, name: str) -> int:
    return parse_size(text, name, error=EnvError)


def _seconds(text: str, name: str) -> float:
    return parse_seconds(text, name, error=EnvError)


def _count(text: str, name: str) -> int:
    if re.fullmatch(r"\d{1,9}", text.strip(), re.ASCII) is None or int(text) < 1:
        raise EnvError(f"{name}: want a whole number from 1 on, got {text!r}")
    return int(text)


def _flag(text: str, name: str) -> bool:
    return text.strip().lower() not in _FALSE


def _choice(*choices: str) -> Callable[[str, str], str]:
    def parse(text: str, name: str) -> str:
        if text.strip().lower() not in choices:
            raise EnvError(f"{name}: want {' or '.join(choices)}, got {text!r}")
        return text.strip().lower()

    return parse


def _heap_mode(text: str, name: str) -> str:
    # MORI calls it vmm_heap; its third mode, isolation, cannot translate addresses on the device
    mode = _choice("static_heap", "vmm", "vmm_heap")(text, name)
    return "vmm" if mode == "vmm_heap" else mode


def _word(text: str, name: str) -> str:
    if not text.strip():
        raise EnvError(f"{name}: want a name, got {text!r}")
    return text.strip()


def _names(text: str, name: str) -> tuple[str, ...]:
    names = tuple(word.strip() for word in text.split(",") if word.strip())
    if not names:
        raise EnvError(f"{name}: want interface names separated by commas, got {text!r}")
    return names


@dataclass(frozen=True)
class DeviceFilter:
    """Which devices to use: those of `names`, in that order, or all but them (`exclude`). Names are whole names."""

    names: tuple[str, ...]
    exclude: bool


DEVICE_FILTER_FORMS = "device names such as mlx5_0,mlx5_1, or ^mlx5_2 for all others"


def _device_filter(text: str, name: str) -> DeviceFilter | None:
    """None: all devices, which nothing and ^ alone stand for too."""
    stripped = text.strip()
    exclude = stripped.startswith("^")
    items = stripped.removeprefix("^")
    names = tuple(dict.fromkeys(word.strip() for word in items.split(",") if word.strip()))
    if not all(re.fullmatch(r"[^\s^/]+", word) for word in names) or (items.strip() and not names):
        raise EnvError(f"{name}: want {DEVICE_FILTER_FORMS}, got {text!r}")
    return DeviceFilter(names, exclude) if names else None


def _between(low: int, high: int) -> Callable[[str, str], int]:
    def parse(text: str, name: str) -> int:
        if re.fullmatch(r"-?\d{1,9}", text.strip(), re.ASCII) is None or not low <= int(text) <= high:
            raise EnvError(f"{name}: want a whole number from {low} to {high}, got {text!r}")
        return int(text)

    return parse


@dataclass(frozen=True)
class Variable:
    """One environment variable: `default` is what stands for it when unset (a text of the variable, or None)."""

    name: str
    default: str | None
    parse: Callable[[str, str], Any]
    meaning: str
    field: str | None = None  # of Settings; None: read when it is needed, by a function below


# how kernels reach PEs whose memory is not mapped; auto: whatever there is
TRANSPORTS = ("auto", "p2p", "mlx5", "bnxt_re", "ionic", "proxy")

VARIABLES = (
    Variable("MORI_SHMEM_HEAP_SIZE", "4G", _size, "symmetric heap of each PE, in bytes", "heap_bytes"),
    Variable("MORI_SHMEM_HEAP_TYPE", "uncached", _choice("uncached", "normal"), "memory kind of the heap", "heap_type"),
    Variable("MORI_SHMEM_MODE", "static_heap", _heap_mode, "how peers map the heap", "heap_mode"),
    Variable(
        "MORI_BOOTSTRAP_TIMEOUT", "300", _seconds, "limit of every host collective, in seconds", "bootstrap_timeout_s"
    ),
    Variable(
        "MORI_TRITON_WAIT_TIMEOUT", "30", _seconds, "limit of every wait in a kernel, in seconds", "wait_timeout_s"
    ),
    Variable("MORI_TRITON_DEVICE", "auto", _choice("auto", "cpu", "cuda", "hip"), "device of a process", "device"),
    Variable("MORI_TRITON_ARCH", "gfx1201", _word, "GPU that the CPU emulates", "arch"),
    Variable("MORI_TRITON_GPUS_PER_NODE", None, _count, "PEs that reach each other by load/store", "gpus_per_node"),
    Variable("MORI_NODE_ID", None, _word, "identity of this node, instead of the boot id", "node_id"),
    Variable("MORI_DISABLE_P2P", "0", _flag, "no PE reaches another by load/store", "disable_p2p"),
    Variable("MORI_TRITON_TRANSPORT", "auto", _choice(*TRANSPORTS), "way to PEs that are not mapped", "transport"),
    Variable("MORI_SOCKET_IFNAME", None, _names, "network interfaces for the bootstrap, in order", "socket_ifnames"),
    Variable("MORI_NUM_QP_PER_PE", "4", _count, "queue pairs to each PE", "num_qp_per_pe"),
    Variable("MORI_RDMA_DEVICES", None, _device_filter, "network cards to use", "rdma_devices"),
    Variable("MORI_IB_GID_INDEX", "-1", _between(-1, 255), "entry of a port's table of addresses", "ib_gid_index"),
    Variable("MORI_RDMA_SL", None, _between(0, 15), "service level of network traffic", "rdma_sl"),
    Variable("MORI_RDMA_TC", None, _between(0, 255), "traffic class of network traffic", "rdma_tc"),
    Variable("MORI_IBVERBS_LIB", None, _word, "libibverbs to load", "ibverbs_lib"),
    Variable(
        "MORI_EP_LAUNCH_CONFIG_MODE", "MANUAL", _choice("manual", "auto"), "source of launch shapes", "ep_launch_mode"
    ),
    Variable("MORI_EP_TUNING_CONFIG", None, _word, "tuning table, or directory of them, for AUTO", "ep_tuning_config"),
    Variable("MORI_RDNA4_EP", "0", _flag, "dispatch and combine made for RDNA4, on gfx1201", "rdna4_ep"),
    Variable("MORI_SHMEM_BC", None, _word, "device bitcode file to use instead of the packaged one"),
    Variable("MORI_TRITON_CACHE_DIR", None, _word, "directory of compiled objects"),
    Variable("XDG_CACHE_HOME", None, lambda text, name: text, "user's cache directory, holds `mori_triton/`"),
    Variable("TRITON_INTERPRET", "0", _flag, "Triton's interpreter, which this package refuses"),
    Variable(
        "PYTORCH_HIP_ALLOC_CONF", None, lambda text, name: text, "torch's allocator on AMD GPUs; one text is warned of"
    ),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES}


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """The value of one of `VARIABLES`, its default when unset. Raises `EnvError`; `KeyError` for an unlisted name."""
    variable = _BY_NAME[name]
    text = (os.environ if environ is None else environ).get(name, variable.default)
    return None if text is None else variable.parse(text, name)


@dataclass(frozen=True)
class Settings:
    """What a world needs to know, read once. Field meanings are those of `VARIABLES`."""

    heap_bytes: int
    heap_type: str
    heap_mode: str
    bootstrap_timeout_s: float
    wait_timeout_s: float
    device: str
    arch: str
    gpus_per_node: int | None
    node_id: str | None
    disable_p2p: bool
    transport: str
    socket_ifnames: tuple[str, ...] | None
    num_qp_per_pe: int
    rdma_devices: DeviceFilter | None
    ib_gid_index: int
    rdma_sl: int | None
    rdma_tc: int | None
    ibverbs_lib: str | None
    ep_launch_mode: str
    ep_tuning_config: str | None
    rdna4_ep: bool


def snapshot(environ: Mapping[str, str] | None = None) -> Settings:
    """Read every setting now. Raises `EnvError` for the first text that cannot be read."""
    return Settings(**{v.field: get(v.name, environ) for v in VARIABLES if v.field is not None})


def cache_dir() -> Path:
    """Where compiled objects go: `MORI_TRITON_CACHE_DIR`, else `mori_triton` in the user's cache. Not created."""
    own = get("MORI_TRITON_CACHE_DIR")
    if own is not None:
        return Path(own).expanduser()
    # the XDG text says that a relative path is to be ignored
    base = get("XDG_CACHE_HOME") or ""
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "mori_triton"


def arch() -> str:
    """GPU that the CPU emulates when nothing else says so."""
    return get("MORI_TRITON_ARCH")


def bitcode_override() -> str | None:
    """Path of the device bitcode given by the user, None when unset. The caller checks that it exists."""
    return get("MORI_SHMEM_BC")


def triton_interpret() -> bool:
    """Whether Triton's interpreter is asked for; it cannot call externs, and a wait in it would never end."""
    return get("TRITON_INTERPRET")


def torch_hip_allocator() -> dict[str, str]:
    """Options of torch's allocator on AMD GPUs, by name."""
    options = (item.partition(":") for item in (get("PYTORCH_HIP_ALLOC_CONF") or "").split(","))
    return {name.strip(): value.strip() for name, _, value in options}
