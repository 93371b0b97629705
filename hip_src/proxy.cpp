// The proxy: serves the descriptor ring of one PE through UCX. x86_64 only, freestanding, run by one host thread.
//
// `mori_proxy_run` is the loop; `mori_proxy_post` and `mori_proxy_wait` are the producers' side for host threads. libucp's
// functions come as addresses. Everything UCX calls back runs inside `progress`, so in the loop's thread.
#include "proxy_order.h"

using namespace mori;

namespace {

constexpr u32 BATCH = 64;               // descriptors taken before UCX gets its turn
constexpr u64 SPINS = 256, YIELDS = 32;  // idle rounds before the thread yields, then sleeps
constexpr long SHORT_NAP_NS = 20'000, LONG_NAP_NS = 500'000;
constexpr u64 LOOK_NS = 5'000'000;  // between two looks at the limits

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

bool take(ProxyState* s, u64 now) {
  ProxyRing* r = ring(s);
  u32 taken = 0;
  for (; taken < BATCH && acquire(&slot(r, s->next)->ready) == s->next + 1; taken++) start(s, s->next++, now);
  return taken != 0;
}

// Past every slot that has ended; a quiet waits here until it is the oldest.
bool retire(ProxyState* s, u64 now) {
  ProxyRing* r = ring(s);
  u64 before = s->oldest;
  for (; s->oldest < s->next; s->oldest++) {
    ProxyPending* op = pending(s, s->oldest);
    if (op->stage == QUEUED) start_quiet(s, op, now);
    if (op->stage == FLUSHING && !end_quiet(s, op)) break;
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
    const ProxyDescriptor* d = slot(ring(s), index);
    if (op->stage != FLUSHING) {
      fail_peer(s, d->pe, kProxyTimeout, kProxyStatusTimeout);
      peer(s, d->pe)->lost = 1;
      fail(s, index, kProxyTimeout, d->pe, kProxyStatusTimeout);
      continue;
    }
    for (i32 pe = 0; pe < s->n_pes; pe++) {
      ProxyPeer* to = peer(s, pe);
      if (!covers(d, pe) || to->status != 0 || to->flushed >= to->wanted) continue;
      record(s, index, kProxyTimeout, pe, kProxyStatusTimeout);
      fail_peer(s, pe, kProxyTimeout, kProxyStatusTimeout);
    }
  }
}

}  // namespace

extern "C" {

// For ucp_ep_create: `user` is the ProxyPeer.
void mori_proxy_peer_failed(void* user, u64 ep, Status status) {
  auto* to = static_cast<ProxyPeer*>(user);
  auto* s = reinterpret_cast<ProxyState*>(to->state);
  fail_peer(s, static_cast<i32>(to - peer(s, 0)), kProxyPeerFailed, status);
}

// For ucp_worker_set_am_recv_handler, with the ProxyState.
Status mori_proxy_request(void* user, const void* header, u64 header_bytes, void* data, u64 bytes, const void* param) {
  ProxyRequest message;
  if (header_bytes != sizeof(message)) return 0;
  memcpy(&message, header, sizeof(message));
  answer(static_cast<ProxyState*>(user), message);
  return 0;
}

Status mori_proxy_reply(void* user, const void* header, u64 header_bytes, void* data, u64 bytes, const void* param) {
  ProxyReply message;
  if (header_bytes != sizeof(message)) return 0;
  memcpy(&message, header, sizeof(message));
  take_answer(static_cast<ProxyState*>(user), message);
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
    to->ticket = d->ticket;
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
    kProxyVersion, kProxyErrors, kProxyTickets,
    sizeof(ProxyDescriptor), AT(ProxyDescriptor, ready), AT(ProxyDescriptor, done), AT(ProxyDescriptor, op),
    AT(ProxyDescriptor, ticket), AT(ProxyDescriptor, pe), AT(ProxyDescriptor, local), AT(ProxyDescriptor, remote),
    AT(ProxyDescriptor, bytes), AT(ProxyDescriptor, value), AT(ProxyDescriptor, extra),
    sizeof(ProxyError), AT(ProxyError, kind), AT(ProxyError, status), AT(ProxyError, op), AT(ProxyError, pe),
    AT(ProxyError, index), AT(ProxyError, remote), AT(ProxyError, bytes), AT(ProxyError, elapsed_ns),
    AT(ProxyError, reserved),
    sizeof(ProxyTicket), AT(ProxyTicket, done), AT(ProxyTicket, value), AT(ProxyTicket, reason), AT(ProxyTicket, pe),
    AT(ProxyTicket, reserved),
    sizeof(ProxyRing), AT(ProxyRing, version), AT(ProxyRing, entries), AT(ProxyRing, n_pes), AT(ProxyRing, reserved0),
    AT(ProxyRing, tail), AT(ProxyRing, broken), AT(ProxyRing, head), AT(ProxyRing, num_gone), AT(ProxyRing, errors),
    AT(ProxyRing, free_tickets), AT(ProxyRing, records), AT(ProxyRing, tickets),
    sizeof(ProxyRingPeer), AT(ProxyRingPeer, gone), AT(ProxyRingPeer, reported),
    sizeof(ProxyFunctions), AT(ProxyFunctions, put), AT(ProxyFunctions, get), AT(ProxyFunctions, am_send),
    AT(ProxyFunctions, flush), AT(ProxyFunctions, close), AT(ProxyFunctions, progress), AT(ProxyFunctions, request_free),
    sizeof(ProxyPeer), AT(ProxyPeer, ep), AT(ProxyPeer, rkey), AT(ProxyPeer, base), AT(ProxyPeer, bytes),
    AT(ProxyPeer, status), AT(ProxyPeer, closed), AT(ProxyPeer, state), AT(ProxyPeer, puts),
    sizeof(ProxyPending),
    sizeof(ProxyState), AT(ProxyState, ucp), AT(ProxyState, worker), AT(ProxyState, ring), AT(ProxyState, peers),
    AT(ProxyState, pending), AT(ProxyState, pe), AT(ProxyState, n_pes), AT(ProxyState, timeout_ns), AT(ProxyState, stop),
    AT(ProxyState, next), AT(ProxyState, oldest), AT(ProxyState, finished), AT(ProxyState, force), AT(ProxyState, sleeps),
    AT(ProxyState, host_only),
};
#undef AT
}
