"""The device library's binary interface: structs, codes, symbols, signatures. Pure data.

`hip_src/context.h` and `hip_src/shmem_device.cpp` state the same in C++. The bitcode carries its own layout table and
its function types, and `bitcode.verify` compares both with this file, so neither side can drift.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import NamedTuple

ABI_VERSION = 2
LIBRARY = "mori_shmem"  # extern library key: Triton on HIP links it only if it is part of a called symbol's name
CONTEXT_SYMBOL = "mori_shmem_context"  # module global, u64: address of the Context that MORI's names use
LAYOUT_SYMBOL = "mori_shmem_abi_layout"  # module constant, u32 words in the order of LAYOUT
# module globals, u32, 0: what a build is for (hip_src/build_time.h); `bitcode` makes constants of them in a copy
PROVIDER_SYMBOL, DEBUG_SYMBOL, PROFILER_SYMBOL = SWITCHES = (
    "mori_shmem_provider",
    "mori_shmem_debug",
    "mori_shmem_profiler",
)

# -------------------------------------------------------------------------------------------------------------- structs


class Field(NamedTuple):
    """One field of a struct: byte offset and type (`u32`, `i32` or `u64`, little endian)."""

    offset: int
    type: str


# one per PE, in that PE's device memory; what each field means is in hip_src/context.h
CONTEXT_FIELDS = {
    "version": Field(0, "u32"),
    "pe": Field(4, "i32"),
    "n_pes": Field(8, "i32"),
    "flags": Field(12, "u32"),
    "heap_base": Field(16, "u64"),
    "heap_size": Field(24, "u64"),
    "peer_bases": Field(32, "u64"),
    "sync": Field(40, "u64"),
    "errors": Field(48, "u64"),
    "timeout_ticks": Field(56, "u64"),
    "network": Field(64, "u64"),
    "profile": Field(72, "u64"),
}
CONTEXT_SIZE = 80
CONTEXT_BYTES = 128  # what the host allocates

ERROR_RECORD_FIELDS = {
    "kind": Field(0, "u32"),
    "pe": Field(4, "i32"),
    "peer": Field(8, "i32"),
    "tag": Field(12, "i32"),
    "address": Field(16, "u64"),
    "expected": Field(24, "u64"),
    "seen": Field(32, "u64"),
    "compare": Field(40, "u32"),
    "sequence": Field(44, "u32"),
    "symbol": Field(48, "u32"),
}
ERROR_RECORD_SIZE = 64
ERROR_CAPACITY = 16
# a ring: kernels write `count` and the records, the host writes `limit`; see hip_src/context.h
ERROR_LOG_FIELDS = {"count": Field(0, "u64"), "limit": Field(8, "u64"), "records": Field(16, "u64")}
ERROR_LOG_SIZE = 16 + ERROR_CAPACITY * ERROR_RECORD_SIZE

# what a profiler build logs; see hip_src/profile.h. `capacity` records follow `records`
PROFILE_RECORD_FIELDS = {
    "start": Field(0, "u64"),
    "end": Field(8, "u64"),
    "num_bytes": Field(16, "u64"),
    "symbol": Field(24, "u32"),
    "peer": Field(28, "i32"),
    "program": Field(32, "u64"),
}
PROFILE_RECORD_SIZE = 40
PROFILE_LOG_FIELDS = {"count": Field(0, "u64"), "capacity": Field(8, "u64"), "records": Field(16, "u64")}

# one per PE that reaches others through a network; see hip_src/network.h
NETWORK_FIELDS = {
    "provider": Field(0, "u32"),
    "num_qp_per_pe": Field(4, "u32"),
    "queues": Field(8, "u64"),
    "ring": Field(16, "u64"),
}
NETWORK_SIZE = 64
QUEUE_FIELDS = {
    "sq": Field(0, "u64"),
    "cq": Field(8, "u64"),
    "record": Field(16, "u64"),
    "doorbell": Field(24, "u64"),
    "doorbell_value": Field(32, "u64"),
    "cq_doorbell": Field(40, "u64"),
    "cq_doorbell_value": Field(48, "u64"),
    "psn_table": Field(56, "u64"),
    "number": Field(64, "u32"),
    "num_wqes": Field(68, "u32"),
    "num_cqes": Field(72, "u32"),
    "num_psns": Field(76, "u32"),
    "lkey": Field(80, "u32"),
    "rkey": Field(84, "u32"),
    "results_lkey": Field(88, "u32"),
    "mtu": Field(92, "u32"),
    "remote_base": Field(96, "u64"),
    "remote_bytes": Field(104, "u64"),
    "results": Field(112, "u64"),
    "ready": Field(120, "u64"),
    "reserved": Field(128, "u64"),
    "psn": Field(136, "u64"),
    "posted": Field(192, "u64"),
    "ringing": Field(200, "u64"),
    "done": Field(256, "u64"),
    "consumed": Field(264, "u64"),
    "polling": Field(272, "u64"),
    "error": Field(280, "u64"),
    "free_results": Field(288, "u64"),
}
QUEUE_SIZE = 320
RESULT_WORDS = 64  # `results` has one word more

BARRIER_WORDS = 64  # u64 words of Context.sync

# the words of LAYOUT_SYMBOL, in order: (what, value)
LAYOUT: tuple[tuple[str, int], ...] = (
    ("version", ABI_VERSION),
    ("sizeof(Context)", CONTEXT_SIZE),
    *((f"Context.{name}", field.offset) for name, field in CONTEXT_FIELDS.items()),
    ("sizeof(ErrorRecord)", ERROR_RECORD_SIZE),
    *((f"ErrorRecord.{name}", field.offset) for name, field in ERROR_RECORD_FIELDS.items()),
    ("sizeof(ErrorLog)", ERROR_LOG_SIZE),
    *((f"ErrorLog.{name}", field.offset) for name, field in ERROR_LOG_FIELDS.items()),
    ("sizeof(ProfileRecord)", PROFILE_RECORD_SIZE),
    *((f"ProfileRecord.{name}", field.offset) for name, field in PROFILE_RECORD_FIELDS.items()),
    *((f"ProfileLog.{name}", field.offset) for name, field in PROFILE_LOG_FIELDS.items()),
    ("sizeof(Network)", NETWORK_SIZE),
    *((f"Network.{name}", field.offset) for name, field in NETWORK_FIELDS.items()),
    ("sizeof(Queue)", QUEUE_SIZE),
    *((f"Queue.{name}", field.offset) for name, field in QUEUE_FIELDS.items()),
    ("ErrorLog capacity", ERROR_CAPACITY),
    ("Context bytes", CONTEXT_BYTES),
    ("barrier words", BARRIER_WORDS),
    ("result words", RESULT_WORDS),
)

# ---------------------------------------------------------------------------------------------------------------- codes

ERROR_WAIT_TIMEOUT = 1
ERROR_REFUSED = 2  # a PE, address, alignment or operation that cannot be served; nothing was accessed
ERROR_OVERFLOW = 3  # more rows came (`seen`) than there is room for (`expected`)
# `address`: number of the queue pair, `expected`: index of the request, `compare`: one of PROVIDERS, `seen`: vendor's
# status, its syndrome << 8
ERROR_NETWORK_FAILED = 4

# how peers are reached that are not mapped; "any" in a build: as the context says, "p2p" in a build: not at all
PROVIDERS = {"any": 0, "mlx5": 1, "bnxt_re": 2, "ionic": 3, "proxy": 4, "p2p": 5}
PROVIDER_ANY, PROVIDER_MLX5, PROVIDER_BNXT_RE, PROVIDER_IONIC, PROVIDER_PROXY, PROVIDER_P2P = PROVIDERS.values()

COMPARE_EQ, COMPARE_NE, COMPARE_GT, COMPARE_GE, COMPARE_LT, COMPARE_LE = range(1, 7)
COMPARE_SIGNS = {1: "==", 2: "!=", 3: ">", 4: ">=", 5: "<", 6: "<="}

SIGNAL_SET = 9
SIGNAL_ADD = 10

ATOMIC_INC = 2
ATOMIC_SET = 3
ATOMIC_ADD = 4
ATOMIC_AND = 5
ATOMIC_OR = 6
ATOMIC_XOR = 7
ATOMIC_FETCH = 12
ATOMIC_FETCH_INC = 13
ATOMIC_FETCH_ADD = 14
ATOMIC_FETCH_AND = 15
ATOMIC_FETCH_OR = 16
ATOMIC_FETCH_XOR = 17
ATOMIC_SWAP = 18
ATOMIC_COMPARE_SWAP = 19

TAG_BARRIER_ALL = -1
TAG_WAIT_UNTIL = -2
TAG_NETWORK = -3  # for a queue pair: `address` is that of its Queue, `expected` and `seen` count requests

# ------------------------------------------------------------------------------------------------------------ functions


class Function(NamedTuple):
    """An exported function. Types are Triton's names: `int32`, `uint64`, `float32`, ..."""

    symbol: str
    args: tuple[str, ...]
    ret: str
    pure: bool = False


_SCOPES = ("thread", "warp", "block")


def _ctx_functions() -> dict[str, Function]:
    table: dict[str, Function] = {}

    def add(name: str, args: str, ret: str = "int32", pure: bool = False) -> None:
        table[f"ctx_{name}"] = Function(f"{LIBRARY}_ctx_{name}", ("uint64", *args.split()), ret, pure)

    add("my_pe", "", pure=True)
    add("n_pes", "", pure=True)
    add("ptr", "uint64 int32", "uint64", pure=True)
    for name in ("fence", "quiet"):
        add(name, "int32 int32")
    for name in ("acquire", "barrier_all"):
        add(name, "")
    for name in ("signal_set", "signal_add"):
        add(name, "uint64 uint64 int32 int32")
    add("signal_set_all", "uint64 uint64")
    for compare in ("eq", "ne", "gt", "ge", "lt", "le"):
        add(f"wait_{compare}", "uint64 int64 int32 int32", "int64")
    for t in ("int32", "uint32", "uint64"):
        add(f"wait_{t}", f"uint64 {t} int32 int32 int32", t)
    add("wait_all_ge", "uint64 int32 int64 int32", "int64")
    add("arrive_last", "uint64 int32")
    add("signal_set_all_last", "uint64 uint64 uint64 int32")
    add("prefetch", "")
    add("report", "int32 int32 int32 uint64 uint64 uint64")
    for scope in _SCOPES:
        for name in ("put", "put_nbi", "get", "get_nbi"):
            add(f"{name}_{scope}", "uint64 uint64 uint64 int32 int32")
        add(f"put_signal_{scope}", "uint64 uint64 uint64 uint64 uint64 int32 int32 int32")
    add("put_small", "uint64 uint64 uint64 int32 int32")
    for t in ("uint8", "uint16", "uint32", "uint64"):
        add(f"put_value_{t}", f"uint64 {t} int32 int32")
    add("atomic_from", "uint64 uint64 uint64 int32 int32 int32")
    for t in ("uint32", "uint64"):
        add(f"atomic_{t}", f"uint64 {t} {t} int32 int32 int32")
        add(f"atomic_fetch_{t}", f"uint64 {t} {t} int32 int32 int32", t)
    return table


def _mori_functions() -> dict[str, Function]:
    table: dict[str, Function] = {}

    def add(name: str, args: str, ret: str = "int32", pure: bool = False) -> None:
        table[name] = Function(f"{LIBRARY}_{name}", tuple(args.split()), ret, pure)

    add("my_pe", "")
    add("n_pes", "", pure=True)
    add("ptr_p2p", "uint64 int32 int32", "uint64")
    add("ptr", "uint64 int32", "uint64")
    for name in ("quiet", "fence"):
        add(f"{name}_thread", "")
        add(f"{name}_thread_pe", "int32")
        add(f"{name}_thread_pe_qp", "int32 int32")
    add("barrier_all_thread", "")
    add("barrier_all_block", "")
    for name in ("put{}_nbi_{}", "get{}_nbi_{}", "get{}_{}"):
        for scope in _SCOPES:
            for t in ("mem", "_uint32", "_uint64", "_float", "_double"):
                add(name.format(t, scope), "uint64 uint64 uint64 int32 int32")
    for scope in _SCOPES:
        add(f"putmem_nbi_signal_{scope}", "uint64 uint64 uint64 uint64 uint64 int32 int32 int32")
    add("put_size_imm_nbi_thread", "uint64 uint64 uint64 int32 int32")
    for name, t in (
        ("int32", "int32"),
        ("int64", "int64"),
        ("uint32", "uint32"),
        ("uint64", "uint64"),
        ("int", "int32"),
        ("float", "float32"),
        ("double", "float64"),
    ):
        add(f"{name}_p", f"uint64 {t} int32 int32")
    add("atomic_size_nonfetch_thread", "uint64 uint64 uint64 int32 int32 int32")
    for t in ("uint32", "uint64", "int64"):
        add(f"atomic_{t}_nonfetch_thread", f"uint64 {t} int32 int32 int32")
        add(f"atomic_{t}_fetch_thread", f"uint64 {t} {t} int32 int32 int32", t)
        add(f"{t}_atomic_add_thread", f"uint64 {t} int32 int32")
        add(f"{t}_atomic_fetch_add_thread", f"uint64 {t} int32 int32", t)
    for t in ("uint32", "uint64", "int32", "int64"):
        add(f"{t}_wait_until_greater_than", f"uint64 {t}", t)
        add(f"{t}_wait_until_equals", f"uint64 {t}")
    return table


CTX_FUNCTIONS = _ctx_functions()  # ours: the context is the first argument
MORI_FUNCTIONS = _mori_functions()  # MORI's table: the context is CONTEXT_SYMBOL

# exported by MORI's library too, though not in its table
EXTRA_FUNCTIONS = {
    f"{name}_p": Function(f"{LIBRARY}_{name}_p", ("uint64", t, "int32", "int32"), "int32")
    for name, t in (
        ("char", "int8"),
        ("uchar", "uint8"),
        ("short", "int16"),
        ("ushort", "uint16"),
        ("uint", "uint32"),
        ("long", "int64"),
        ("ulong", "uint64"),
        ("longlong", "int64"),
        ("ulonglong", "uint64"),
    )
}

FUNCTIONS: dict[str, Function] = {**CTX_FUNCTIONS, **MORI_FUNCTIONS, **EXTRA_FUNCTIONS}


_SYMBOLS = {zlib.crc32(f.symbol.encode()): f.symbol for f in FUNCTIONS.values()}


def symbol_name(code: int) -> str | None:
    """The function that a record's `symbol` is of, or None if it says none: the code is the CRC-32 of the name."""
    return _SYMBOLS.get(code)


def abi_hash() -> str:
    """16 hex digits over everything above that a bitcode file has to agree with."""
    table = [f"{f.symbol}({','.join(f.args)})->{f.ret}" for f in FUNCTIONS.values()]
    return hashlib.sha256(repr((LAYOUT, sorted(table))).encode()).hexdigest()[:16]
