// The proxy: serves the descriptor ring of one PE through UCX. x86_64 only, freestanding, run by one host thread.
//
// `mori_proxy_run` is the loop; `mori_proxy_post` and `mori_proxy_wait` are the producers' side for host threads. libucp's
// functions come as addresses. Everything UCX calls back runs inside `progress`, so in the loop's thread.
#include "proxy.h"

extern "C" {
void* memcpy(void*, const void*, __SIZE_TYPE__);
int sched_yield(void);
struct timespec {
  long seconds, nanoseconds;
};
int nanosleep(const timespec*, timespec*);
int clock_gettime(int, timespec*);
}

using namespace mori;

namespace {

constexpr u32 BATCH = 64;               // descriptors taken before UCX gets its turn
constexpr u64 SPINS = 256, YIELDS = 32;  // idle rounds before the thread yields, then sleeps
constexpr long SHORT_NAP_NS = 20'000, LONG_NAP_NS = 500'000;
constexpr u64 LOOK_NS = 5'000'000;  // between two looks at the limits
constexpr i32 UCS_ERR_ENDPOINT_TIMEOUT = -80;
constexpr u64 UCS_ERR_LAST = static_cast<u64>(-100ll);

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

using PutFn = u64 (*)(u64 ep, const void*, u64, u64 remote, u64 rkey, const RequestParam*);
using GetFn = u64 (*)(u64 ep, void*, u64, u64 remote, u64 rkey, const RequestParam*);
using SendFn = u64 (*)(u64 ep, u32 id, const void* header, u64, const void*, u64, const RequestParam*);
using FlushFn = u64 (*)(u64 ep, const RequestParam*);
using ProgressFn = u32 (*)(u64 worker);
using FreeFn = void (*)(u64 request);

// Where an operation is. DATA, REMOTE, LAST: UCX has it. SENT, ANSWERED: the peer's loop has it, its answer is here. LOST: its time
// was up, so it has failed, but UCX may still have it: neither its slot nor its words here may be used again.
enum Stage : u32 { IDLE = 0, DATA, REMOTE, LAST, SENT, ANSWERED, QUEUED, FLUSHING, LOST, DONE };

template <class T>
T acquire(const T* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

template <class T>
void release(T* word, T value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

u64 now_ns() {
  timespec t;
  clock_gettime(1, &t);
  return static_cast<u64>(t.seconds) * 1'000'000'000ull + static_cast<u64>(t.nanoseconds);
}

void nap(long ns) {
  timespec t{0, ns};
  nanosleep(&t, nullptr);
}

ProxyDescriptor* slots(ProxyRing* r) { return reinterpret_cast<ProxyDescriptor*>(r + 1); }
ProxyDescriptor* slot(ProxyRing* r, u64 index) { return slots(r) + (index & (r->entries - 1)); }
ProxyRing* ring(ProxyState* s) { return reinterpret_cast<ProxyRing*>(s->ring); }
ProxyPeer* peer(ProxyState* s, i32 pe) { return reinterpret_cast<ProxyPeer*>(s->peers) + pe; }
ProxyPending* pending(ProxyState* s, u64 index) {
  return reinterpret_cast<ProxyPending*>(s->pending) + (index & (ring(s)->entries - 1));
}

// one of a producer's waits: short at first
struct Patience {
  u64 rounds = 0, limit_ns, since = 0;
  explicit Patience(u64 limit) : limit_ns(limit) {}
  bool more() {
    if (++rounds < SPINS) {
      __builtin_ia32_pause();
      return true;
    }
    u64 now = now_ns();
    if (since == 0) since = now;
    if (now - since >= limit_ns) return false;
    if (rounds < SPINS + YIELDS)
      sched_yield();
    else
      nap(SHORT_NAP_NS);
    return true;
  }
};

bool is_flush(u32 op) { return op == kProxyQuiet || op == kProxyFlush; }
bool has_signal(u32 op) { return op == kProxyPutSignalSet || op == kProxyPutSignalAdd; }
bool is_atomic(u32 op) {
  return (op >= kProxyAdd && op <= kProxySet) || (op >= kProxyFetchAdd && op <= kProxyCompareSwap);
}
bool fetches(u32 op) { return op >= kProxyFetchAdd; }
bool failed(u64 handle) { return handle >= UCS_ERR_LAST; }
i32 status_of(u64 handle) { return static_cast<i32>(static_cast<i64>(handle)); }

void record(ProxyState* s, u64 index, ProxyErrorKind kind, i32 pe, i32 status) {
  ProxyRing* r = ring(s);
  ProxyPending* op = pending(s, index);
  if (op->reported) return;
  op->reported = 1;
  u64 count = r->errors;
  if (count < kProxyErrors) {
    const ProxyDescriptor* d = slot(r, index);
    r->records[count] = {kind, status, d->op, pe, index, d->remote, d->bytes, now_ns() - op->started_ns, {}};
  }
  release(&r->errors, count + 1);
}

void finish(ProxyState* s, u64 index, bool failed, Stage stage = DONE) {
  pending(s, index)->stage = stage;
  release(&slot(ring(s), index)->done, (index + 1) | (failed ? kProxyFailed : 0));
}

void fail(ProxyState* s, u64 index, ProxyErrorKind kind, i32 pe, i32 status) {
  record(s, index, kind, pe, status);
  finish(s, index, true);
}

// UCX finished an operation: on the list, the rest happens outside of its progress
void operation_finished(void* request, Status status, void* user) {
  auto* op = static_cast<ProxyPending*>(user);
  auto* s = reinterpret_cast<ProxyState*>(op->state);
  op->status = status;
  op->next = s->finished;
  s->finished = reinterpret_cast<u64>(op);
  reinterpret_cast<FreeFn>(s->ucp.request_free)(reinterpret_cast<u64>(request));
}

RequestParam param_of(ProxyState* s, ProxyPending* op) {
  RequestParam param{};
  param.mask = HAS_CALLBACK | HAS_USER_DATA;
  param.callback = operation_finished;
  param.user_data = op;
  op->state = reinterpret_cast<u64>(s);
  return param;
}

// A message whose bytes are those of an operation or of `replies`: they last longer than UCX needs them.
u64 send(ProxyState* s, ProxyPeer* to, MessageId id, const void* message, u64 bytes) {
  RequestParam param{};
  param.mask = HAS_FLAGS;
  param.flags = EAGER;
  u64 handle = reinterpret_cast<SendFn>(s->ucp.am_send)(to->ep, id, message, bytes, nullptr, 0, &param);
  if (handle == 0 || failed(handle)) return handle;
  // what tells of its arrival is the answer
  reinterpret_cast<FreeFn>(s->ucp.request_free)(handle);
  return 0;
}

// The answer may come before this returns: `self` delivers at once.
u64 start_atomic(ProxyState* s, ProxyPending* op, const ProxyDescriptor* d, u64 offset, u32 bytes) {
  ProxyPeer* to = peer(s, d->pe);
  op->stage = SENT;
  op->message = {op->index, to->base + offset, d->value, d->extra, d->op, bytes, s->pe, 0};
  return send(s, to, REQUEST, &op->message, sizeof(op->message));
}

template <class T>
u64 carry_out(const ProxyRequest& m) {
  T* word = reinterpret_cast<T*>(m.address);
  T value = static_cast<T>(m.value), compare = static_cast<T>(m.compare);
  switch (m.op) {
    case kProxyAnd:
    case kProxyFetchAnd:
      return __atomic_fetch_and(word, value, __ATOMIC_SEQ_CST);
    case kProxyOr:
    case kProxyFetchOr:
      return __atomic_fetch_or(word, value, __ATOMIC_SEQ_CST);
    case kProxyXor:
    case kProxyFetchXor:
      return __atomic_fetch_xor(word, value, __ATOMIC_SEQ_CST);
    case kProxySet:
    case kProxySwap:
    case kProxyPutSignalSet:
      return __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST);
    case kProxyCompareSwap:
      __atomic_compare_exchange_n(word, &compare, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
      return compare;
    default:
      return __atomic_fetch_add(word, value, __ATOMIC_SEQ_CST);
  }
}

// The next step of an operation whose last one ended with `status`; loops while UCX completes at once.
void advance(ProxyState* s, ProxyPending* op, i32 status) {
  const ProxyDescriptor* d = slot(ring(s), op->index);
  ProxyPeer* to = peer(s, d->pe);
  for (;;) {
    if (status < 0 || (to->status != 0 && op->stage != LAST && op->stage != ANSWERED)) {
      fail(s, op->index, kProxyPeerFailed, d->pe, status < 0 ? status : to->status);
      return;
    }
    u64 handle = 0;
    switch (op->stage) {
      case DATA: {
        // UCX orders nothing between a put and a message: the signal leaves when the data is at its place
        RequestParam param = param_of(s, op);
        op->stage = REMOTE;
        handle = reinterpret_cast<FlushFn>(s->ucp.flush)(to->ep, &param);
        break;
      }
      case REMOTE:
        handle = start_atomic(s, op, d, d->extra, 8);
        if (!failed(handle)) return;
        break;
      default:
        if (fetches(d->op)) memcpy(reinterpret_cast<void*>(d->local), &op->reply, d->bytes);
        finish(s, op->index, false);
        return;
    }
    if (handle != 0 && !failed(handle)) return;
    status = status_of(handle);
  }
}

bool inside(const ProxyPeer* to, u64 offset, u64 bytes) { return bytes <= to->bytes && offset <= to->bytes - bytes; }

// an address of 0 is nobody's
bool sound(ProxyState* s, const ProxyDescriptor* d) {
  if (d->op == kProxyQuiet) return true;
  if (d->pe < 0 || d->pe >= s->n_pes) return false;
  const ProxyPeer* to = peer(s, d->pe);
  if (d->op == kProxyFlush) return true;
  if (is_atomic(d->op))
    return (d->bytes == 4 || d->bytes == 8) && inside(to, d->remote, d->bytes) &&
           (to->base + d->remote) % d->bytes == 0 && (!fetches(d->op) || d->local != 0);
  if (has_signal(d->op) && (!inside(to, d->extra, 8) || (to->base + d->extra) % 8 != 0)) return false;
  return (d->op == kProxyPut || d->op == kProxyGet || has_signal(d->op)) && inside(to, d->remote, d->bytes) &&
         (d->local != 0 || d->bytes == 0);
}

void start(ProxyState* s, u64 index, u64 now) {
  const ProxyDescriptor* d = slot(ring(s), index);
  ProxyPending* op = pending(s, index);
  *op = ProxyPending{};
  op->index = index;
  op->started_ns = now;
  if (!sound(s, d)) {
    fail(s, index, kProxyRefused, d->pe, 0);
    return;
  }
  if (is_flush(d->op)) {
    op->stage = QUEUED;
    return;
  }
  ProxyPeer* to = peer(s, d->pe);
  if (to->status != 0) {
    fail(s, index, kProxyPeerFailed, d->pe, to->status);
    return;
  }
  u64 handle = 0;
  if (is_atomic(d->op)) {
    handle = start_atomic(s, op, d, d->remote, static_cast<u32>(d->bytes));
    if (!failed(handle)) return;
  } else {
    RequestParam param = param_of(s, op);
    auto* local = reinterpret_cast<void*>(d->local);
    u64 remote = to->base + d->remote;
    op->stage = !has_signal(d->op) ? LAST : d->bytes != 0 ? DATA : REMOTE;
    if (d->bytes != 0 && d->op == kProxyGet) {
      handle = reinterpret_cast<GetFn>(s->ucp.get)(to->ep, local, d->bytes, remote, to->rkey, &param);
    } else if (d->bytes != 0) {
      to->dirty = 1;
      handle = reinterpret_cast<PutFn>(s->ucp.put)(to->ep, local, d->bytes, remote, to->rkey, &param);
    }
  }
  if (handle == 0 || failed(handle)) advance(s, op, status_of(handle));
}

// the first reason is the one to report
void fail_peer(ProxyPeer* to, i32 status) {
  if (to->status == 0) to->status = status;
}

void flush_finished(void* request, Status status, void* user) {
  auto* to = static_cast<ProxyPeer*>(user);
  to->flushing = 2;
  if (status < 0) {
    to->dirty = 1;
    fail_peer(to, status);
  }
  reinterpret_cast<FreeFn>(reinterpret_cast<ProxyState*>(to->state)->ucp.request_free)(reinterpret_cast<u64>(request));
}

void start_flush(ProxyState* s, ProxyPending* op, u64 now) {
  const ProxyDescriptor* d = slot(ring(s), op->index);
  op->stage = FLUSHING;
  op->started_ns = now;
  for (i32 pe = 0; pe < s->n_pes; pe++) {
    ProxyPeer* to = peer(s, pe);
    if ((d->op == kProxyFlush && pe != d->pe) || !to->dirty || to->status != 0) continue;
    RequestParam param{};
    param.mask = HAS_CALLBACK | HAS_USER_DATA;
    param.callback = flush_finished;
    param.user_data = to;
    to->dirty = 0;
    u64 handle = reinterpret_cast<FlushFn>(s->ucp.flush)(to->ep, &param);
    if (failed(handle)) {
      to->dirty = 1;
      fail_peer(to, status_of(handle));
    } else if (handle != 0) {
      to->flushing = 1;
    }
  }
}

// A flush has ended when none is in flight to a peer that is there; it failed when a peer that it covers is gone with something
// unflushed.
bool end_flush(ProxyState* s, ProxyPending* op) {
  const ProxyDescriptor* d = slot(ring(s), op->index);
  i32 lost = -1;
  for (i32 pe = 0; pe < s->n_pes; pe++) {
    ProxyPeer* to = peer(s, pe);
    if (to->flushing == 2) to->flushing = 0;
    if (to->flushing != 0 && to->status == 0) return false;
  }
  for (i32 pe = 0; pe < s->n_pes; pe++) {
    ProxyPeer* to = peer(s, pe);
    if ((d->op == kProxyFlush && pe != d->pe) || to->status == 0 || !to->dirty) continue;
    to->dirty = 0;
    if (lost < 0) lost = pe;
  }
  if (lost >= 0)
    fail(s, op->index, kProxyPeerFailed, lost, peer(s, lost)->status);
  else
    finish(s, op->index, false);
  return true;
}

bool take(ProxyState* s, u64 now) {
  ProxyRing* r = ring(s);
  u32 taken = 0;
  for (; taken < BATCH && acquire(&slot(r, s->next)->ready) == s->next + 1; taken++) start(s, s->next++, now);
  return taken != 0;
}

bool go_on(ProxyState* s) {
  bool any = s->finished != 0;
  while (s->finished != 0) {
    auto* op = reinterpret_cast<ProxyPending*>(s->finished);
    s->finished = op->next;
    if (op->stage == LOST)
      op->stage = DONE;
    else
      advance(s, op, op->status);
  }
  return any;
}

// Past every slot that has ended; a flush waits here until it is the oldest.
bool retire(ProxyState* s, u64 now) {
  ProxyRing* r = ring(s);
  u64 before = s->oldest;
  for (; s->oldest < s->next; s->oldest++) {
    ProxyPending* op = pending(s, s->oldest);
    if (op->stage == QUEUED) start_flush(s, op, now);
    if (op->stage == FLUSHING && !end_flush(s, op)) break;
    if (op->stage != DONE && op->stage != LOST) break;
  }
  u64 head = r->head;
  while (head < s->oldest && pending(s, head)->stage == DONE) head++;
  if (head != r->head) release(&r->head, head);
  return s->oldest != before;
}

// Who waits for an answer of a PE that is gone waits no more; UCX itself ends what it has.
void close_failed(ProxyState* s) {
  for (i32 pe = 0; pe < s->n_pes; pe++) {
    ProxyPeer* to = peer(s, pe);
    if (to->status == 0 || to->closed != 0) continue;
    to->closed = 1;
    for (u64 index = s->oldest; index < s->next; index++)
      if (pending(s, index)->stage == SENT && slot(ring(s), index)->pe == pe)
        fail(s, index, kProxyPeerFailed, pe, to->status);
    if (s->force == 0 || pe == s->pe) continue;
    RequestParam param{};
    param.mask = HAS_FLAGS;
    param.flags = FORCE_CLOSE;
    u64 handle = reinterpret_cast<FlushFn>(s->ucp.close)(to->ep, &param);
    if (handle != 0 && !failed(handle)) reinterpret_cast<FreeFn>(s->ucp.request_free)(handle);
  }
}

void look_at_limits(ProxyState* s, u64 now) {
  for (u64 index = s->oldest; index < s->next; index++) {
    ProxyPending* op = pending(s, index);
    if (op->stage == QUEUED || op->stage == LOST || op->stage == DONE) continue;
    if (now - op->started_ns < s->timeout_ns) continue;
    if (op->stage != FLUSHING) {
      i32 pe = slot(ring(s), index)->pe;
      record(s, index, kProxyTimeout, pe, UCS_ERR_ENDPOINT_TIMEOUT);
      fail_peer(peer(s, pe), UCS_ERR_ENDPOINT_TIMEOUT);
      finish(s, index, true, LOST);
      continue;
    }
    for (i32 pe = 0; pe < s->n_pes; pe++) {
      if (peer(s, pe)->flushing != 1) continue;
      record(s, index, kProxyTimeout, pe, UCS_ERR_ENDPOINT_TIMEOUT);
      peer(s, pe)->dirty = 1;
      fail_peer(peer(s, pe), UCS_ERR_ENDPOINT_TIMEOUT);
    }
  }
}

}  // namespace

extern "C" {

// For ucp_ep_create: `user` is the ProxyPeer.
void mori_proxy_peer_failed(void* user, u64 ep, Status status) {
  fail_peer(static_cast<ProxyPeer*>(user), status);
}

// For ucp_worker_set_am_recv_handler, with the ProxyState: an atomic on this PE's heap, and the answer to one of its own.
Status mori_proxy_request(void* user, const void* header, u64 header_bytes, void* data, u64 bytes, const void* param) {
  auto* s = static_cast<ProxyState*>(user);
  ProxyRequest m;
  if (header_bytes != sizeof(m)) return 0;
  memcpy(&m, header, sizeof(m));
  const ProxyPeer* mine = peer(s, s->pe);
  // the sender has looked at this; whoever else writes here gets no answer
  if (m.from < 0 || m.from >= s->n_pes || (m.bytes != 4 && m.bytes != 8) || m.address % m.bytes != 0 ||
      !inside(mine, m.address - mine->base, m.bytes))
    return 0;
  ProxyPeer* to = peer(s, m.from);
  auto* reply = reinterpret_cast<ProxyReply*>(to->replies) + (m.index & (ring(s)->entries - 1));
  *reply = {m.index, m.bytes == 4 ? carry_out<u32>(m) : carry_out<u64>(m)};
  if (to->status == 0) {
    u64 handle = send(s, to, REPLY, reply, sizeof(*reply));
    if (failed(handle)) fail_peer(to, status_of(handle));
  }
  return 0;
}

Status mori_proxy_reply(void* user, const void* header, u64 header_bytes, void* data, u64 bytes, const void* param) {
  auto* s = static_cast<ProxyState*>(user);
  ProxyReply m;
  if (header_bytes != sizeof(m)) return 0;
  memcpy(&m, header, sizeof(m));
  ProxyPending* op = pending(s, m.index);
  if (op->index != m.index || (op->stage != SENT && op->stage != LOST)) return 0;
  if (op->stage == SENT) op->stage = ANSWERED;
  op->reply = m.old;
  op->status = 0;
  op->next = s->finished;
  s->finished = reinterpret_cast<u64>(op);
  return 0;
}

// Serve the ring until `stop`. Returns how many posted operations were left unfinished.
u64 mori_proxy_run(ProxyState* s) {
  u64 idle = 0, looked = now_ns(), stopping = 0;
  long length = SHORT_NAP_NS;
  for (;;) {
    u64 now = now_ns();
    bool busy = take(s, now);
    if (reinterpret_cast<ProgressFn>(s->ucp.progress)(s->worker) != 0) busy = true;
    if (go_on(s)) busy = true;
    close_failed(s);
    if (retire(s, now)) busy = true;
    if (s->timeout_ns != 0 && now - looked >= LOOK_NS) {
      look_at_limits(s, now);
      looked = now;
    }
    u64 limit = acquire(&s->stop);
    if (limit != 0) {
      if (stopping == 0) stopping = now;
      u64 left = acquire(&ring(s)->tail) - ring(s)->head;
      if (left == 0 || now - stopping >= limit) return left;
    }
    if (busy) {
      idle = 0;
      length = SHORT_NAP_NS;
    } else if (++idle >= SPINS + YIELDS) {
      nap(length);
      s->sleeps++;
      // who waits for an answer is to see it soon; a PE that has nothing to do may be slow to wake
      if (s->next == ring(s)->head && length < LONG_NAP_NS) length += length / 4;
    } else if (idle >= SPINS) {
      sched_yield();
    } else {
      __builtin_ia32_pause();
    }
  }
}

// Post `count` descriptors, one index each, into `indices`. Returns how many were posted: fewer when the ring stayed full for
// `limit_ns`. Any number of threads at a time.
u64 mori_proxy_post(ProxyRing* r, const ProxyDescriptor* descriptors, u64 count, u64 limit_ns, u64* indices) {
  for (u64 i = 0; i < count; i++) {
    Patience patience(limit_ns);
    u64 index = __atomic_load_n(&r->tail, __ATOMIC_RELAXED);
    for (;;) {
      // acquire: what the loop read from the slot, it has read
      if (index - acquire(&r->head) < r->entries) {
        if (__atomic_compare_exchange_n(&r->tail, &index, index + 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) break;
      } else {
        if (!patience.more()) return i;
        index = __atomic_load_n(&r->tail, __ATOMIC_RELAXED);
      }
    }
    const ProxyDescriptor* d = descriptors + i;
    ProxyDescriptor* to = slot(r, index);
    to->op = d->op;
    to->pe = d->pe;
    to->local = d->local;
    to->remote = d->remote;
    to->bytes = d->bytes;
    to->value = d->value;
    to->extra = d->extra;
    release(&to->ready, index + 1);
    indices[i] = index;
  }
  return count;
}

// Wait for one operation. 0: done, 1: it failed, 2: not within the limit. Of an index whose slot serves a later one by now, how it
// ended is in the error records only.
u32 mori_proxy_wait(const ProxyRing* r, u64 index, u64 limit_ns) {
  const u64* word = &slot(const_cast<ProxyRing*>(r), index)->done;
  Patience patience(limit_ns);
  for (;;) {
    u64 done = acquire(word);
    if ((done & ~kProxyFailed) >= index + 1) return done == ((index + 1) | kProxyFailed);
    if (!patience.more()) return 2;
  }
}

// Sizes and offsets that layout.py repeats.
#define AT(s, field) static_cast<u32>(__builtin_offsetof(s, field))
extern const u32 mori_proxy_layout[];
const u32 mori_proxy_layout[] = {
    kProxyVersion, kProxyErrors,
    sizeof(ProxyDescriptor), AT(ProxyDescriptor, ready), AT(ProxyDescriptor, done), AT(ProxyDescriptor, op),
    AT(ProxyDescriptor, pe), AT(ProxyDescriptor, local), AT(ProxyDescriptor, remote), AT(ProxyDescriptor, bytes),
    AT(ProxyDescriptor, value), AT(ProxyDescriptor, extra),
    sizeof(ProxyError), AT(ProxyError, kind), AT(ProxyError, status), AT(ProxyError, op), AT(ProxyError, pe),
    AT(ProxyError, index), AT(ProxyError, remote), AT(ProxyError, bytes), AT(ProxyError, elapsed_ns),
    AT(ProxyError, reserved),
    sizeof(ProxyRing), AT(ProxyRing, version), AT(ProxyRing, entries), AT(ProxyRing, reserved0), AT(ProxyRing, tail),
    AT(ProxyRing, head), AT(ProxyRing, errors), AT(ProxyRing, records),
    sizeof(ProxyFunctions), AT(ProxyFunctions, put), AT(ProxyFunctions, get), AT(ProxyFunctions, am_send),
    AT(ProxyFunctions, flush), AT(ProxyFunctions, close), AT(ProxyFunctions, progress), AT(ProxyFunctions, request_free),
    sizeof(ProxyPeer), AT(ProxyPeer, ep), AT(ProxyPeer, rkey), AT(ProxyPeer, base), AT(ProxyPeer, bytes),
    AT(ProxyPeer, status), AT(ProxyPeer, dirty), AT(ProxyPeer, flushing), AT(ProxyPeer, closed), AT(ProxyPeer, state),
    AT(ProxyPeer, replies),
    sizeof(ProxyPending), sizeof(ProxyReply),
    sizeof(ProxyState), AT(ProxyState, ucp), AT(ProxyState, worker), AT(ProxyState, ring), AT(ProxyState, peers),
    AT(ProxyState, pending), AT(ProxyState, pe), AT(ProxyState, n_pes), AT(ProxyState, timeout_ns), AT(ProxyState, stop),
    AT(ProxyState, next), AT(ProxyState, oldest), AT(ProxyState, finished), AT(ProxyState, force), AT(ProxyState, sleeps),
};
#undef AT
}
