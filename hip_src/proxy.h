// What the proxy's loop keeps for itself, and the functions of libucp that it calls. x86_64 only.
//
// Only the loop's thread reads or writes any of it while it runs, but for `ProxyState::stop`. layout.py repeats the structs that
// the host fills in.
#pragma once

#include "proxy_ring.h"

namespace mori {

struct ProxyFunctions {
  u64 put, get, am_send, flush, close, progress, request_free;
};

struct ProxyPeer {
  u64 ep, rkey;
  u64 base, bytes;  // the peer's heap as it knows it
  i32 status;       // why it counts as gone, 0: it does not
  u32 closed;       // 1: and the loop has seen to what was waiting for it
  u64 state;        // ProxyState
  // order (proxy_order.h)
  u64 puts;         // given to UCX so far
  u64 flushed;      // of these, known to be at their places
  u64 covers;       // of these, those that the flush in flight will have seen to
  u64 wanted;       // `puts` when the quiet began that is under way
  u64 late;         // `puts` behind the last put that had to wait: those behind it were posted when it did not count yet
  u64 held, last;   // ProxyPending: first and last of those that wait for their turn
  u32 flushing;     // 1: a flush is in flight, 2: UCX has finished it
  u32 copies;       // puts and gets among those that wait
  u32 messages;     // posted and not answered
  u32 lost;         // 1: it is gone, and with it something that was posted
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
  u64 state;   // ProxyState
  u64 next;    // list of those that UCX has finished
  u64 behind;  // list of those that wait for their turn
  u64 need;    // it may go on when so many puts to its PE are at their places
  u64 reply;
  u32 stage;
  i32 status;
  u8 reported, in_ucx, copy_waits, is_message;
};

// A message, until UCX is done with it: that may be long after its limit was over and its slot has come to serve another operation.
struct ProxyHeader {
  u64 request_free;
  u64 words[6];
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
  u64 host_only;   // UCX knows no memory but the host's
};

// of an operation that is refused: its local side is no memory that this thread can touch (UCS_ERR_INVALID_ADDR)
constexpr i32 kProxyStatusLocal = -7;

static_assert(sizeof(ProxyPending) == 72 && sizeof(ProxyRequest) == 48 && sizeof(ProxyReply) == 16, "messages");

// ucs_status_t is one byte
using Status = i8;

struct RequestParam {  // ucp_request_param_t
  u32 mask, flags;
  void* request;
  void (*callback)(void*, Status, void*);
  u64 datatype;
  void* user_data;
  void* reply;
  u32 memory_type;
  void* receive_info;
  void* memory;
  u64 remote_datatype;
  const void* remote;
  u64 remote_count;
};
enum : u32 { HAS_CALLBACK = 2, HAS_USER_DATA = 4, HAS_FLAGS = 16, FORCE_CLOSE = 1, EAGER = 2 };
enum MessageId : u32 { REQUEST = 1, REPLY = 2 };
constexpr u64 UCS_ERR_NO_MEMORY = static_cast<u64>(-4ll);
constexpr u64 UCS_ERR_LAST = static_cast<u64>(-100ll);

using PutFn = u64 (*)(u64 ep, const void*, u64, u64 remote, u64 rkey, const RequestParam*);
using GetFn = u64 (*)(u64 ep, void*, u64, u64 remote, u64 rkey, const RequestParam*);
using SendFn = u64 (*)(u64 ep, u32 id, const void* header, u64, const void*, u64, const RequestParam*);
using FlushFn = u64 (*)(u64 ep, const RequestParam*);
using ProgressFn = u32 (*)(u64 worker);
using FreeFn = void (*)(u64 request);

template <class T>
T acquire(const T* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

template <class T>
void release(T* word, T value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

inline ProxyDescriptor* slots(ProxyRing* r) { return reinterpret_cast<ProxyDescriptor*>(r + 1); }
inline ProxyDescriptor* slot(ProxyRing* r, u64 index) { return slots(r) + (index & (r->entries - 1)); }
inline ProxyRingPeer* ring_peer(ProxyRing* r, i32 pe) { return reinterpret_cast<ProxyRingPeer*>(slots(r) + r->entries) + pe; }
inline ProxyRing* ring(ProxyState* s) { return reinterpret_cast<ProxyRing*>(s->ring); }
inline ProxyPeer* peer(ProxyState* s, i32 pe) { return reinterpret_cast<ProxyPeer*>(s->peers) + pe; }
inline ProxyPending* pending(ProxyState* s, u64 index) {
  return reinterpret_cast<ProxyPending*>(s->pending) + (index & (ring(s)->entries - 1));
}

inline bool is_flush(u32 op) { return op == kProxyQuiet || op == kProxyFlush; }
inline bool has_signal(u32 op) { return op == kProxyPutSignalSet || op == kProxyPutSignalAdd; }
inline bool is_atomic(u32 op) {
  return (op >= kProxyAdd && op <= kProxySet) || (op >= kProxyFetchAdd && op <= kProxyCompareSwap);
}
inline bool fetches(u32 op) { return op >= kProxyFetchAdd; }
inline bool failed(u64 handle) { return handle >= UCS_ERR_LAST; }
inline i32 status_of(u64 handle) { return static_cast<i32>(static_cast<i64>(handle)); }

}  // namespace mori
