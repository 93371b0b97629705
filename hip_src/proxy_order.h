// In which order operations leave, and quiets.
//
// UCX orders nothing: neither puts among each other, nor a message after a put. Producers are promised that what one of them posts for
// one PE takes effect in the order in which it was posted. So, per PE:
//   * a message (atomic, signal) leaves when all puts posted before it are known to be at their places, by a flush of the endpoint; a
//     get starts then too. One flush is in flight at a time and serves all that came before it, so many signals share a round trip,
//     and where nothing was put since the last flush a message leaves at once.
//   * messages leave in order; they arrive in order and are carried out as they arrive.
//   * a put or get of bytes that an unanswered message changes waits for the answer; other puts pass messages that wait.
//   * behind a put or get that waits everything waits.
// Puts to overlapping bytes with nothing of this between them are in whatever order UCX's transport keeps.
#pragma once

#include "proxy_messages.h"

namespace mori {

// UCX finished an operation: on the list, the rest happens outside of its progress
inline void operation_finished(void* request, Status status, void* user) {
  auto* op = static_cast<ProxyPending*>(user);
  auto* s = reinterpret_cast<ProxyState*>(op->state);
  op->status = status;
  op->next = s->finished;
  s->finished = reinterpret_cast<u64>(op);
  reinterpret_cast<FreeFn>(s->ucp.request_free)(reinterpret_cast<u64>(request));
}

inline void flush_finished(void* request, Status status, void* user) {
  auto* to = static_cast<ProxyPeer*>(user);
  auto* s = reinterpret_cast<ProxyState*>(to->state);
  to->flushing = 2;
  if (status < 0) fail_peer(s, static_cast<i32>(to - peer(s, 0)), kProxyPeerFailed, status);
  reinterpret_cast<FreeFn>(s->ucp.request_free)(reinterpret_cast<u64>(request));
}

// Whether this thread can read a byte. Asked of the kernel, which says so where a load would end the process; a kernel that does not
// answer is no reason to refuse.
inline bool can_touch(u64 address) {
  constexpr int kBadAddress = 14;  // EFAULT
  u8 byte;
  iovec here{&byte, 1}, there{reinterpret_cast<void*>(address), 1};
  return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == 1 || *__errno_location() != kBadAddress;
}

// Whether an operation's local side is good: my heap always. UCX will load and store where it knows no device's memory, and the loop itself
// writes what an atomic has fetched, so what is not mapped for this process, as memory of a GPU, has to be refused. An allocation is one or
// the other, so its ends will do.
inline bool is_local_side_good(ProxyState* s, const ProxyDescriptor* d) {
  const ProxyPeer* mine = peer(s, s->pe);
  bool touched = s->host_only || fetches(d->op);
  u64 bytes = is_atomic(d->op) && (!fetches(d->op) || d->local == 0) ? 0 : d->bytes;
  if (!touched || bytes == 0 || is_flush(d->op) || inside(mine, d->local - mine->base, bytes)) return true;
  return can_touch(d->local) && can_touch(d->local + bytes - 1);
}

// an address of 0 is nobody's
inline bool sound(ProxyState* s, const ProxyDescriptor* d) {
  if (d->ticket > kProxyTickets) return false;
  if (d->op == kProxyQuiet) return true;
  if (d->pe < 0 || d->pe >= s->n_pes) return false;
  const ProxyPeer* to = peer(s, d->pe);
  if (d->op == kProxyFlush) return true;
  if (is_atomic(d->op))
    return is_width(d->op, d->bytes) && inside(to, d->remote, d->bytes) && (to->base + d->remote) % d->bytes == 0 &&
           (!fetches(d->op) || d->local != 0 || d->ticket != 0);
  if (has_signal(d->op) && (!inside(to, d->extra, 8) || (to->base + d->extra) % 8 != 0)) return false;
  return (d->op == kProxyPut || d->op == kProxyGet || has_signal(d->op)) && inside(to, d->remote, d->bytes) &&
         (d->local != 0 || d->bytes == 0);
}

// Whether the put or get of an operation need not wait.
inline bool may_copy(ProxyState* s, const ProxyPending* op) {
  const ProxyDescriptor* d = slot(ring(s), op->index);
  const ProxyPeer* to = peer(s, d->pe);
  if (d->op == kProxyGet && to->flushed != to->puts) return false;
  // its own message does not count
  if (to->messages == op->is_message) return true;
  for (u64 index = s->oldest; index < op->index; index++) {
    const ProxyDescriptor* m = slot(ring(s), index);
    if (!pending(s, index)->is_message || m->pe != d->pe) continue;
    u64 word = has_signal(m->op) ? m->extra : m->remote, bytes = has_signal(m->op) ? 8 : m->bytes;
    if (word < d->remote + d->bytes && d->remote < word + bytes) return false;
  }
  return true;
}

// Give UCX the put or get of an operation. False: it did not take it.
inline bool copy(ProxyState* s, ProxyPending* op) {
  const ProxyDescriptor* d = slot(ring(s), op->index);
  ProxyPeer* to = peer(s, d->pe);
  RequestParam param{};
  param.mask = HAS_CALLBACK | HAS_USER_DATA;
  param.callback = operation_finished;
  param.user_data = op;
  auto* local = reinterpret_cast<void*>(d->local);
  u64 remote = to->base + d->remote, handle;
  if (d->op == kProxyGet) {
    handle = reinterpret_cast<GetFn>(s->ucp.get)(to->ep, local, d->bytes, remote, to->rkey, &param);
  } else {
    to->puts++;
    handle = reinterpret_cast<PutFn>(s->ucp.put)(to->ep, local, d->bytes, remote, to->rkey, &param);
  }
  if (failed(handle)) {
    fail_with_peer(s, op->index, status_of(handle));
    return false;
  }
  op->in_ucx = handle != 0;
  if (has_signal(d->op)) return true;
  op->stage = COPYING;
  if (handle == 0) finish(s, op->index, false);
  return true;
}

inline void start_flush(ProxyState* s, ProxyPeer* to) {
  RequestParam param{};
  param.mask = HAS_CALLBACK | HAS_USER_DATA;
  param.callback = flush_finished;
  param.user_data = to;
  to->covers = to->puts;
  u64 handle = reinterpret_cast<FlushFn>(s->ucp.flush)(to->ep, &param);
  if (failed(handle))
    fail_peer(s, static_cast<i32>(to - peer(s, 0)), kProxyPeerFailed, status_of(handle));
  else if (handle == 0)
    to->flushed = to->covers;
  else
    to->flushing = 1;
}

// What has to be at its place before an operation that waits, the first of them, goes on.
inline u64 needed(const ProxyPeer* to, const ProxyPending* op) { return op->need > to->late ? op->need : to->late; }

// The first of those that wait goes on as far as it can. True: it waits no more.
inline bool try_held(ProxyState* s, ProxyPeer* to, ProxyPending* op) {
  const ProxyDescriptor* d = slot(ring(s), op->index);
  if (op->stage != HELD) return true;
  if (to->status != 0) {
    to->lost = 1;
    fail(s, op->index, kProxyPeerFailed, d->pe, to->status);
    return true;
  }
  if (op->copy_waits) {
    if (!may_copy(s, op)) return false;
    bool taken = copy(s, op);
    to->late = to->puts;
    if (!taken || !has_signal(d->op)) return true;
    op->copy_waits = 0;
    to->copies--;
  }
  // data that UCX still has may yet fail
  if (op->in_ucx || to->flushed < needed(to, op)) return false;
  u64 handle = send_message(s, op);
  if (failed(handle)) fail_with_peer(s, op->index, status_of(handle));
  return true;
}

// Let those go on that wait for their turn, and flush if the first of them or a quiet wants that.
inline bool go_on_with(ProxyState* s, ProxyPeer* to) {
  bool any = false;
  for (;;) {
    while (to->held != 0) {
      auto* op = reinterpret_cast<ProxyPending*>(to->held);
      if (!try_held(s, to, op)) break;
      any = true;
      if (op->copy_waits) to->copies--;
      op->copy_waits = 0;
      to->held = op->behind;
    }
    u64 need = to->held != 0 ? needed(to, reinterpret_cast<ProxyPending*>(to->held)) : 0;
    if (to->wanted > need) need = to->wanted;
    if (to->flushing != 0 || to->status != 0 || to->flushed >= need) return any;
    start_flush(s, to);
    any = true;
  }
}

inline void start(ProxyState* s, u64 index, u64 now) {
  const ProxyDescriptor* d = slot(ring(s), index);
  ProxyPending* op = pending(s, index);
  *op = ProxyPending{};
  op->index = index;
  op->started_ns = now;
  op->state = reinterpret_cast<u64>(s);
  if (!sound(s, d)) {
    fail(s, index, kProxyRefused, d->pe, 0);
    return;
  }
  if (!is_local_side_good(s, d)) {
    fail(s, index, kProxyRefused, d->pe, kProxyStatusLocal);
    return;
  }
  if (is_flush(d->op)) {
    op->stage = QUEUED;
    return;
  }
  ProxyPeer* to = peer(s, d->pe);
  if (to->status != 0) {
    to->lost = 1;
    fail(s, index, kProxyPeerFailed, d->pe, to->status);
    return;
  }
  op->is_message = is_atomic(d->op) || has_signal(d->op);
  to->messages += op->is_message;
  op->stage = HELD;
  if (!is_atomic(d->op) && d->bytes != 0) {
    op->copy_waits = to->copies != 0 || !may_copy(s, op);
    to->copies += op->copy_waits;
    if (!op->copy_waits && !copy(s, op)) return;
  } else if (!op->is_message) {
    finish(s, index, false);
    return;
  }
  if (!op->copy_waits && !op->is_message) return;
  // a put that waits does so for answers
  op->need = op->copy_waits && d->op != kProxyGet ? 0 : to->puts;
  if (to->held == 0)
    to->held = reinterpret_cast<u64>(op);
  else
    reinterpret_cast<ProxyPending*>(to->last)->behind = reinterpret_cast<u64>(op);
  to->last = reinterpret_cast<u64>(op);
  go_on_with(s, to);
}

// What UCX has finished, and answers.
inline bool go_on(ProxyState* s) {
  bool any = s->finished != 0;
  while (s->finished != 0) {
    auto* op = reinterpret_cast<ProxyPending*>(s->finished);
    s->finished = op->next;
    op->in_ucx = 0;
    const ProxyDescriptor* d = slot(ring(s), op->index);
    if (op->stage == LOST) {
      op->stage = DONE;
    } else if (op->status < 0) {
      fail_with_peer(s, op->index, op->status);
    } else if (op->stage == COPYING || op->stage == ANSWERED) {
      if (fetches(d->op) && d->local != 0) memcpy(reinterpret_cast<void*>(d->local), &op->reply, d->bytes);
      finish(s, op->index, false);
    }
  }
  for (i32 pe = 0; pe < s->n_pes; pe++) {
    ProxyPeer* to = peer(s, pe);
    if (to->flushing == 2) {
      to->flushing = 0;
      if (to->status == 0) to->flushed = to->covers;
      any = true;
    }
    if (go_on_with(s, to)) any = true;
  }
  return any;
}

inline bool covers(const ProxyDescriptor* d, i32 pe) { return d->op == kProxyQuiet || d->pe == pe; }

inline void start_quiet(ProxyState* s, ProxyPending* op, u64 now) {
  op->stage = FLUSHING;
  op->started_ns = now;
  for (i32 pe = 0; pe < s->n_pes; pe++) {
    ProxyPeer* to = peer(s, pe);
    if (!covers(slot(ring(s), op->index), pe)) continue;
    to->wanted = to->puts;
    go_on_with(s, to);
  }
}

// A quiet has ended when the puts before it are at their places on every PE that is there; it fails when something was lost with one
// that is gone, and so does every later one.
inline bool end_quiet(ProxyState* s, ProxyPending* op) {
  const ProxyDescriptor* d = slot(ring(s), op->index);
  i32 lost = -1;
  for (i32 pe = s->n_pes - 1; pe >= 0; pe--) {
    const ProxyPeer* to = peer(s, pe);
    if (!covers(d, pe)) continue;
    if (to->status == 0 && to->flushed < to->wanted) return false;
    if (to->status != 0 && to->lost) lost = pe;
  }
  if (lost >= 0)
    fail(s, op->index, kProxyPeerFailed, lost, peer(s, lost)->status);
  else
    finish(s, op->index, false);
  return true;
}

}  // namespace mori
