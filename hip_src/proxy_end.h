// How operations end, well or not, and what counts as gone.
#pragma once

#include "proxy.h"

extern "C" {
void* memcpy(void*, const void*, __SIZE_TYPE__);
void* calloc(__SIZE_TYPE__, __SIZE_TYPE__);
void free(void*);
int sched_yield(void);
struct timespec {
  long seconds, nanoseconds;
};
int nanosleep(const timespec*, timespec*);
int clock_gettime(int, timespec*);
int getpid();
struct iovec {
  void* base;
  __SIZE_TYPE__ bytes;
};
long process_vm_readv(int, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);
int* __errno_location();
}

namespace mori {

// Where an operation is. HELD: it waits for its turn. COPYING: UCX has its last step. SENT, ANSWERED: the peer's loop has it, its
// answer is here. QUEUED, FLUSHING: of quiets. LOST: it has failed, but UCX still has its data: neither its slot nor its words here
// may be used again until UCX says so.
enum Stage : u32 { IDLE = 0, HELD, COPYING, SENT, ANSWERED, QUEUED, FLUSHING, LOST, DONE };

inline u64 now_ns() {
  timespec t;
  clock_gettime(1, &t);
  return static_cast<u64>(t.seconds) * 1'000'000'000ull + static_cast<u64>(t.nanoseconds);
}

inline void nap(long ns) {
  timespec t{0, ns};
  nanosleep(&t, nullptr);
}

inline void record(ProxyState* s, u64 index, ProxyErrorKind kind, i32 pe, i32 status) {
  ProxyRing* r = ring(s);
  ProxyPending* op = pending(s, index);
  if (op->reported) return;
  op->reported = 1;
  ProxyDescriptor* d = slot(r, index);
  if (d->ticket != 0 && d->ticket <= kProxyTickets) {
    ProxyTicket* ticket = r->tickets + d->ticket - 1;
    ticket->reason = proxy_reason(kind, status);
    ticket->pe = pe;
  }
  u64 count = r->errors;
  if (count < kProxyErrors)
    r->records[count] = {kind, status, d->op, pe, index, d->remote, d->bytes, now_ns() - op->started_ns, {}};
  release(&r->errors, count + 1);
}

inline void finish(ProxyState* s, u64 index, bool failed) {
  ProxyPending* op = pending(s, index);
  ProxyRing* r = ring(s);
  ProxyDescriptor* d = slot(r, index);
  if (op->is_message) {
    op->is_message = 0;
    peer(s, d->pe)->messages--;
  }
  op->stage = op->in_ucx ? LOST : DONE;
  u64 done = (index + 1) | (failed ? kProxyFailed : 0);
  if (d->ticket != 0 && d->ticket <= kProxyTickets) {
    ProxyTicket* ticket = r->tickets + d->ticket - 1;
    ticket->value = op->reply;
    release(&ticket->done, done);
  }
  release(&d->done, done);
}

// The first reason is the one to report. Nothing more is sent to that PE, so no signal ever comes after data that was lost.
inline void fail_peer(ProxyState* s, i32 pe, ProxyErrorKind kind, i32 status) {
  ProxyPeer* to = peer(s, pe);
  if (to->status != 0) return;
  to->status = status;
  if (to->flushed != to->puts || to->messages != 0) to->lost = 1;
  release(&ring_peer(ring(s), pe)->gone, proxy_reason(kind, status));
  release(&ring(s)->num_gone, ring(s)->num_gone + 1);
}

inline void fail(ProxyState* s, u64 index, ProxyErrorKind kind, i32 pe, i32 status) {
  record(s, index, kind, pe, status);
  finish(s, index, true);
}

// An operation of one PE that UCX has refused or ended badly.
inline void fail_with_peer(ProxyState* s, u64 index, i32 status) {
  i32 pe = slot(ring(s), index)->pe;
  fail_peer(s, pe, kProxyPeerFailed, status);
  peer(s, pe)->lost = 1;
  fail(s, index, kProxyPeerFailed, pe, status);
}

}  // namespace mori
