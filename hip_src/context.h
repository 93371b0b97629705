// Structs shared with the host. `mori_triton/abi.py` holds the same table; the bitcode carries `mori_shmem_abi_layout`, from which
// the host compares every offset before it uses a file.
#pragma once

#include "build_time.h"
#include "network.h"

namespace mori {

constexpr u32 kAbiVersion = 2;
constexpr u32 kBarrierWords = 64;     // u64 words of `sync`; seven a round, each written by one PE; the last one is this PE's epoch
constexpr u32 kErrorCapacity = 16;    // records of an ErrorLog, a power of two
constexpr u32 kContextBytes = 128;    // what the host allocates for a Context

// One per PE, in that PE's device memory. The host writes it before any kernel that takes it starts.
struct Context {
  u32 version;        // kAbiVersion
  i32 pe;             // who I am
  i32 n_pes;          // how many we are
  u32 flags;          // 0
  u64 heap_base;      // my symmetric heap as my device sees it
  u64 heap_size;      // bytes
  u64 peer_bases;     // u64[n_pes]: where each PE's heap is mapped for me; 0: not reachable by load and store
  u64 sync;           // symmetric u64[kBarrierWords], for barrier_all
  u64 errors;         // ErrorLog, 0: nobody reads
  u64 timeout_ticks;  // limit of one wait on clock_ticks(), 0: none
  u64 network;        // Network, 0: PEs that are not mapped cannot be reached
  u64 profile;        // ProfileLog, 0: nobody reads
};

enum ErrorKind : u32 {
  kWaitTimeout = 1,  // expected and seen are values of the word at `address`
  kRefused = 2,      // PE, address or alignment that cannot be served; expected: bytes asked for, seen: 1 if `address` is the local side
                     // of a copy, else 0. Nothing was accessed
  kOverflow = 3,     // written through report(): more rows came than there is room for; expected: room, seen: rows that came
  kNetworkFailed = 4,  // address: queue pair's number, expected: index of the request, seen: vendor's status | its syndrome << 8,
                       // compare: Provider
};

struct ErrorRecord {
  u32 kind;
  i32 pe;       // who reports
  i32 peer;     // whom it waited for or wanted to reach, -1: not known
  i32 tag;      // which wait of which kernel, chosen by the caller; negative: one of the tags below
  u64 address;  // local symmetric address
  u64 expected;
  u64 seen;
  u32 compare;  // Compare
  u32 sequence; // stored last: slot + 1, low bits. Until then the record is not whole
  u32 symbol;   // debug build: Call::symbol of the function that was called; else 0
  u32 pad[3];
};

// A ring that the host reads while kernels run: kernels alone write `count` and records, the host alone `limit`. It may be host
// memory: the atomic is one among this device's threads, which is all that is asked.
struct ErrorLog {
  u64 count;  // slots given out so far
  u64 limit;  // slots from here on are not stored: what the host has taken + kErrorCapacity
  ErrorRecord records[kErrorCapacity];
};

enum Compare : u32 { kEq = 1, kNe = 2, kGt = 3, kGe = 4, kLt = 5, kLe = 6 };

// atomic operation codes, MORI's numbers
enum AtomicOp : i32 {
  kInc = 2,
  kSet = 3,
  kAdd = 4,
  kAnd = 5,
  kOr = 6,
  kXor = 7,
  kSignalSet = 9,
  kSignalAdd = 10,
  kFetch = 12,
  kFetchInc = 13,
  kFetchAdd = 14,
  kFetchAnd = 15,
  kFetchOr = 16,
  kFetchXor = 17,
  kSwap = 18,
  kCompareSwap = 19,
};

// tags of waits that no caller named
constexpr i32 kTagBarrierAll = -1;
constexpr i32 kTagWaitUntil = -2;
constexpr i32 kTagNetwork = -3;  // for a queue pair: room in it, a request's completion

#define MORI_FIELD(s, field, at) static_assert(__builtin_offsetof(s, field) == (at), #s "." #field)
MORI_FIELD(Context, version, 0);
MORI_FIELD(Context, pe, 4);
MORI_FIELD(Context, n_pes, 8);
MORI_FIELD(Context, flags, 12);
MORI_FIELD(Context, heap_base, 16);
MORI_FIELD(Context, heap_size, 24);
MORI_FIELD(Context, peer_bases, 32);
MORI_FIELD(Context, sync, 40);
MORI_FIELD(Context, errors, 48);
MORI_FIELD(Context, timeout_ticks, 56);
MORI_FIELD(Context, network, 64);
MORI_FIELD(Context, profile, 72);
static_assert(sizeof(Context) == 80 && sizeof(Context) <= kContextBytes, "Context");
MORI_FIELD(ErrorRecord, kind, 0);
MORI_FIELD(ErrorRecord, pe, 4);
MORI_FIELD(ErrorRecord, peer, 8);
MORI_FIELD(ErrorRecord, tag, 12);
MORI_FIELD(ErrorRecord, address, 16);
MORI_FIELD(ErrorRecord, expected, 24);
MORI_FIELD(ErrorRecord, seen, 32);
MORI_FIELD(ErrorRecord, compare, 40);
MORI_FIELD(ErrorRecord, sequence, 44);
MORI_FIELD(ErrorRecord, symbol, 48);
static_assert(sizeof(ErrorRecord) == 64, "ErrorRecord");
MORI_FIELD(ErrorLog, count, 0);
MORI_FIELD(ErrorLog, limit, 8);
MORI_FIELD(ErrorLog, records, 16);
static_assert(sizeof(ErrorLog) == 16 + 64 * kErrorCapacity, "ErrorLog");
#undef MORI_FIELD

// Never written while a kernel runs, so the code generator may use the constant cache and hoist the loads.
using Ctx = const MORI_CONSTANT Context *;

MORI_INLINE Ctx context_at(u64 address) { return reinterpret_cast<Ctx>(address); }

// Start to bring the context and the words behind it, where the host keeps the first peer_bases: a signal needs one to find the
// other.
MORI_INLINE void prefetch(Ctx ctx) {
  prefetch(reinterpret_cast<u64>(ctx));
  prefetch(reinterpret_cast<u64>(ctx) + kContextBytes);
}

// what release_*() want: the context is read by every operation
MORI_INLINE u64 warm(Ctx ctx) { return reinterpret_cast<u64>(ctx); }

// What every body takes: for whom, and which exported function was called. The name costs nothing unless the build is one that
// says it (debug, profiler).
struct Call {
  Ctx ctx;
  u32 symbol;  // symbol_of() its name
};

// CRC-32 as zlib has it: the host finds a name by it, and no table has to list the functions in any order.
constexpr u32 symbol_of(const char *name) {
  u32 crc = ~0u;
  for (; *name != 0; name++) {
    crc ^= (u8)*name;
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0u);
  }
  return ~crc;
}

// Whether PEs that are not mapped are reached through a network.
MORI_INLINE bool has_network(Ctx ctx) { return build_provider() != kP2p && fixed(&ctx->network) != 0; }

// Of a context that has_network().
MORI_INLINE Net network_of(Ctx ctx) { return reinterpret_cast<Net>(fixed(&ctx->network)); }
MORI_INLINE u32 provider_of(Ctx ctx) {
  return build_provider() != kAnyProvider ? build_provider() : fixed(&network_of(ctx)->provider);
}

// Append a record; dropped, but counted, when the host has not taken the earlier ones.
MORI_BODY void report_by_one(Call call, u32 kind, i32 peer, i32 tag, u64 address, u64 expected, u64 seen, u32 compare) {
  Ctx ctx = call.ctx;
  u64 log = fixed(&ctx->errors);
  if (log == 0) return;
  u64 slot = add_system<u64>(log + __builtin_offsetof(ErrorLog, count), 1);
  if (slot >= load_system<u64>(log + __builtin_offsetof(ErrorLog, limit))) return;
  u64 place = log + __builtin_offsetof(ErrorLog, records) + slot % kErrorCapacity * sizeof(ErrorRecord);
  Global<ErrorRecord> record = global<ErrorRecord>(place);
  record->kind = kind;
  record->pe = fixed(&ctx->pe);
  record->peer = peer;
  record->tag = tag;
  record->address = address;
  record->expected = expected;
  record->seen = seen;
  record->compare = compare;
  record->symbol = is_debug_build() ? call.symbol : 0;
  release_to_system(warm(ctx));
  store_system<u32>(place + __builtin_offsetof(ErrorRecord, sequence), (u32)slot + 1);
}

// One record of the program, whatever its threads are.
MORI_BODY void report(Call call, u32 kind, i32 peer, i32 tag, u64 address, u64 expected, u64 seen) {
  if (is_elected()) report_by_one(call, kind, peer, tag, address, expected, seen, 0);
}

}  // namespace mori
