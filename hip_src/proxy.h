// The proxy's descriptor ring: what producers write and the progress loop reads, and the loop's own state.
//
// The ring lies in host memory that producers of any kind can reach: threads of this process now, kernels later. A producer reserves
// an index (compare-and-swap on `tail`, only while there is room, so that who gives up leaves no hole), writes every byte of the
// slot but `done`, and stores `ready` last. The loop takes slots in order of their index and ends them in any order: `done` of a
// slot, then `head` past all slots that have ended. A slot below `head` may be written again.
//
// `mori_triton/host/proxy/layout.py` repeats the structs; the bitcode carries `mori_proxy_layout`, compared before it is used.
#pragma once

namespace mori {

using i8 = signed char;
using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u32 = unsigned;
using u64 = unsigned long long;

constexpr u32 kProxyVersion = 1;
constexpr u32 kProxyErrors = 16;             // records kept: the first ones
constexpr u64 kProxyFailed = 1ull << 63;     // in `done`: the operation failed
constexpr i32 kProxyAllPes = -1;             // pe of a quiet

enum ProxyOp : u32 {
  kProxyPut = 1,           // local -> remote, `bytes`; done: the source may be reused
  kProxyGet = 2,           // remote -> local, `bytes`; done: the data is there
  kProxyPutSignalSet = 3,  // put, then `value` replaces the 64-bit word at `extra` once the data is at its place
  kProxyPutSignalAdd = 4,  // put, then `value` is added to it
  kProxyQuiet = 5,         // done: everything posted before has had its effect on every PE
  kProxyFlush = 6,         // the same for one PE
  // atomics on `bytes` (4 or 8) at `remote`; those from kProxyFetchAdd on write the old value to `local`
  kProxyAdd = 16,
  kProxyAnd = 17,
  kProxyOr = 18,
  kProxyXor = 19,
  kProxySet = 20,
  kProxyFetchAdd = 32,
  kProxyFetchAnd = 33,
  kProxyFetchOr = 34,
  kProxyFetchXor = 35,
  kProxySwap = 36,
  kProxyCompareSwap = 37,  // `value` is stored where the old value is `extra`
};

struct alignas(64) ProxyDescriptor {
  u64 ready;   // index + 1, stored last by the producer
  u64 done;    // index + 1 (| kProxyFailed), stored by the loop
  u32 op;      // ProxyOp
  i32 pe;
  u64 local;   // address in this process
  u64 remote;  // offset in the heap of `pe`
  u64 bytes;
  u64 value;
  u64 extra;   // offset of the signal, or the value compared with
};

enum ProxyErrorKind : u32 {
  kProxyRefused = 1,     // the descriptor names no operation, PE or place of a heap; nothing was sent
  kProxyPeerFailed = 2,  // UCX gave up: `status` is its reason
  kProxyTimeout = 3,     // not finished within the limit
};

struct ProxyError {
  u32 kind;
  i32 status;  // ucs_status_t, 0 if none
  u32 op;
  i32 pe;
  u64 index;
  u64 remote;
  u64 bytes;
  u64 elapsed_ns;
  u64 reserved[2];
};

struct ProxyRing {
  u32 version;
  u32 entries;  // a power of two
  u64 reserved0[7];
  alignas(64) u64 tail;    // indices given out
  alignas(64) u64 head;    // every index below is finished
  alignas(64) u64 errors;  // how many there were; the first kProxyErrors have a record
  alignas(64) ProxyError records[kProxyErrors];
  // the slots follow
};

// libucp's functions, and the loop's own words. Only the loop's thread reads or writes `ProxyState`, but for `stop`.
struct ProxyFunctions {
  u64 put, get, am_send, flush, close, progress, request_free;
};

struct ProxyPeer {
  u64 ep, rkey;
  u64 base, bytes;  // the peer's heap as it knows it
  i32 status;       // why it counts as gone, 0: it does not
  u32 dirty;        // something was sent since the last flush
  u32 flushing;     // 1: a flush is in flight, 2: UCX has finished it
  u32 closed;       // 1: and the loop has seen to what was waiting for it
  u64 state;        // ProxyState
  u64 replies;      // ProxyReply[entries]: what is on its way to this PE
};

// An atomic goes to the loop of the PE whose memory it is about, which carries it out and answers. (UCX has atomics of its own: over
// TCP and shared memory it does the same, but without any way to end one whose peer is gone.)
struct ProxyRequest {
  u64 index;  // of the sender's ring
  u64 address, value, compare;
  u32 op, bytes;
  i32 from;
  u32 reserved;
};

struct ProxyReply {
  u64 index, old;
};

struct ProxyPending {
  u64 index;
  u64 started_ns;
  u64 state;  // ProxyState
  u64 next;   // list of those that UCX has finished
  u64 reply;
  ProxyRequest message;
  u32 stage;
  i32 status;
  u32 reported;
  u32 reserved;
  u64 spare[3];
};

struct ProxyState {
  ProxyFunctions ucp;
  u64 worker;
  u64 ring, peers, pending;  // ProxyRing, ProxyPeer[n_pes], ProxyPending[entries]
  i32 pe, n_pes;
  u64 timeout_ns;  // of one operation, 0: none
  u64 stop;        // not 0: serve what has been posted, at most for so many nanoseconds, and return
  u64 next;        // index that is taken next
  u64 oldest;      // every index below has ended; `head` stays behind at the first that UCX still holds
  u64 finished;    // ProxyPending that UCX has finished
  u64 force;       // endpoints of peers that are gone can be closed by force
  u64 sleeps;      // how often the loop slept
};

#define MORI_PROXY_FIELD(s, field, at) static_assert(__builtin_offsetof(s, field) == (at), #s "." #field)
MORI_PROXY_FIELD(ProxyDescriptor, ready, 0);
MORI_PROXY_FIELD(ProxyDescriptor, done, 8);
MORI_PROXY_FIELD(ProxyDescriptor, op, 16);
MORI_PROXY_FIELD(ProxyDescriptor, pe, 20);
MORI_PROXY_FIELD(ProxyDescriptor, local, 24);
MORI_PROXY_FIELD(ProxyDescriptor, remote, 32);
MORI_PROXY_FIELD(ProxyDescriptor, bytes, 40);
MORI_PROXY_FIELD(ProxyDescriptor, value, 48);
MORI_PROXY_FIELD(ProxyDescriptor, extra, 56);
static_assert(sizeof(ProxyDescriptor) == 64, "ProxyDescriptor");
MORI_PROXY_FIELD(ProxyRing, entries, 4);
MORI_PROXY_FIELD(ProxyRing, tail, 64);
MORI_PROXY_FIELD(ProxyRing, head, 128);
MORI_PROXY_FIELD(ProxyRing, errors, 192);
MORI_PROXY_FIELD(ProxyRing, records, 256);
static_assert(sizeof(ProxyPending) == 128 && sizeof(ProxyRequest) == 48 && sizeof(ProxyReply) == 16, "messages");
static_assert(sizeof(ProxyError) == 64 && sizeof(ProxyRing) == 256 + 64 * kProxyErrors, "ProxyRing");
#undef MORI_PROXY_FIELD

}  // namespace mori
