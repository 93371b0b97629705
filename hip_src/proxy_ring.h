// The proxy's descriptor ring: what producers write and the progress loop reads.
//
// The ring lies in host memory that producers of any kind can reach: threads of this process (proxy.cpp) and kernels (nic_proxy.h). A
// producer reserves an index (compare-and-swap on `tail`, only while there is room, so that who gives up leaves no hole), writes every
// byte of the slot but `done`, and stores `ready` last. The loop takes slots in order of their index and ends them in any order: `done`
// of a slot, then `head` past all slots that have ended. A slot below `head` may be written again.
//
// Who wants to know how an operation ended, however late it looks, gives it a ticket: a word that it has taken from `free_tickets`
// and keeps until it has read it.
//
// `mori_triton/host/proxy/layout.py` repeats the structs; the bitcode carries `mori_proxy_layout`, compared before it is used.
#pragma once

namespace mori {

using i8 = signed char;
using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

constexpr u32 kProxyVersion = 3;
constexpr u32 kProxyErrors = 16;             // records kept: the first ones
constexpr u32 kProxyTickets = 64;            // bits of `free_tickets`
constexpr u64 kProxyFailed = 1ull << 63;     // in `done`: the operation failed
constexpr i32 kProxyAllPes = -1;             // pe of a quiet

enum ProxyOp : u32 {
  kProxyPut = 1,           // local -> remote, `bytes`; done: the source may be reused
  kProxyGet = 2,           // remote -> local, `bytes`; done: the data is there
  kProxyPutSignalSet = 3,  // put, then `value` replaces the 64-bit word at `extra` once the data is at its place
  kProxyPutSignalAdd = 4,  // put, then `value` is added to it
  kProxyQuiet = 5,         // done: everything posted before has had its effect on every PE
  kProxyFlush = 6,         // the same for one PE
  // atomics on `bytes` (4 or 8) at `remote`; those from kProxyFetchAdd on write the old value to `local`, and to the ticket
  kProxyAdd = 16,
  kProxyAnd = 17,
  kProxyOr = 18,
  kProxyXor = 19,
  kProxySet = 20,  // of 1 and 2 bytes too
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
  u16 op;      // ProxyOp
  u16 ticket;  // 1 + number of the ticket that is told the end, 0: none is
  i32 pe;
  u64 local;   // address in this process; of a fetch with a ticket 0: nowhere else
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

// Why something failed, in one word: UCX's status in bits 0-7, ProxyErrorKind in bits 8-15. Never 0.
constexpr u32 proxy_reason(u32 kind, i32 status) { return kind << 8 | (static_cast<u32>(status) & 0xff); }
constexpr i32 kProxyStatusTimeout = -80;  // UCS_ERR_ENDPOINT_TIMEOUT

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

struct ProxyTicket {
  u64 done;    // as in the descriptor, stored last
  u64 value;   // what a fetch brought
  u32 reason;  // of a failure: proxy_reason()
  i32 pe;      // of a failure: whose it is
  u64 reserved;
};

struct ProxyRing {
  u32 version;
  u32 entries;  // a power of two
  u32 n_pes;
  u32 reserved0[13];
  alignas(64) u64 tail;    // indices given out
  u64 broken;              // 1: a kernel's wait has reached its limit, none posts any more; beside `tail`, which who posts reads too
  alignas(64) u64 head;    // every index below is finished
  u64 num_gone;            // how many PEs count as gone; beside `head`, since producers read both
  alignas(64) u64 errors;  // how many there were; the first kProxyErrors have a record
  alignas(64) u64 free_tickets;  // bit i: tickets[i] is nobody's
  alignas(64) ProxyError records[kProxyErrors];
  ProxyTicket tickets[kProxyTickets];
  // the slots follow, and behind them a ProxyRingPeer for each PE
};

struct ProxyRingPeer {
  u32 gone;      // proxy_reason(), 0: it counts as there
  u32 reported;  // 1: a kernel has recorded that it is gone
};

#define MORI_PROXY_FIELD(s, field, at) static_assert(__builtin_offsetof(s, field) == (at), #s "." #field)
MORI_PROXY_FIELD(ProxyDescriptor, ready, 0);
MORI_PROXY_FIELD(ProxyDescriptor, done, 8);
MORI_PROXY_FIELD(ProxyDescriptor, op, 16);
MORI_PROXY_FIELD(ProxyDescriptor, ticket, 18);
MORI_PROXY_FIELD(ProxyDescriptor, pe, 20);
MORI_PROXY_FIELD(ProxyDescriptor, local, 24);
MORI_PROXY_FIELD(ProxyDescriptor, remote, 32);
MORI_PROXY_FIELD(ProxyDescriptor, bytes, 40);
MORI_PROXY_FIELD(ProxyDescriptor, value, 48);
MORI_PROXY_FIELD(ProxyDescriptor, extra, 56);
static_assert(sizeof(ProxyDescriptor) == 64, "ProxyDescriptor");
MORI_PROXY_FIELD(ProxyRing, entries, 4);
MORI_PROXY_FIELD(ProxyRing, tail, 64);
MORI_PROXY_FIELD(ProxyRing, broken, 72);
MORI_PROXY_FIELD(ProxyRing, head, 128);
MORI_PROXY_FIELD(ProxyRing, num_gone, 136);
MORI_PROXY_FIELD(ProxyRing, errors, 192);
MORI_PROXY_FIELD(ProxyRing, free_tickets, 256);
MORI_PROXY_FIELD(ProxyRing, records, 320);
MORI_PROXY_FIELD(ProxyRing, tickets, 320 + 64 * kProxyErrors);
static_assert(sizeof(ProxyError) == 64 && sizeof(ProxyTicket) == 32 && sizeof(ProxyRingPeer) == 8, "words of the ring");
static_assert(sizeof(ProxyRing) == 320 + 64 * kProxyErrors + 32 * kProxyTickets, "ProxyRing");
#undef MORI_PROXY_FIELD

}  // namespace mori
