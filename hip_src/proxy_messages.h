// Atomics and signals: messages to the loop of the PE whose memory they change.
#pragma once

#include "proxy_end.h"

namespace mori {

inline void message_left(void* request, Status, void* user) {
  auto* header = static_cast<ProxyHeader*>(user);
  reinterpret_cast<FreeFn>(header->request_free)(reinterpret_cast<u64>(request));
  free(header);
}

// What tells of its arrival is the answer; how UCX ends it is of no interest.
inline u64 send(ProxyState* s, ProxyPeer* to, MessageId id, const void* message, u64 bytes) {
  auto* header = static_cast<ProxyHeader*>(calloc(1, sizeof(ProxyHeader)));
  if (header == nullptr) return UCS_ERR_NO_MEMORY;
  header->request_free = s->ucp.request_free;
  memcpy(header->words, message, bytes);
  RequestParam param{};
  param.mask = HAS_CALLBACK | HAS_USER_DATA | HAS_FLAGS;
  param.flags = EAGER;
  param.callback = message_left;
  param.user_data = header;
  u64 handle = reinterpret_cast<SendFn>(s->ucp.am_send)(to->ep, id, header->words, bytes, nullptr, 0, &param);
  if (handle == 0 || failed(handle)) {
    free(header);
    return handle;
  }
  return 0;
}

// The answer may come before this returns: `self` delivers at once.
inline u64 send_message(ProxyState* s, ProxyPending* op) {
  const ProxyDescriptor* d = slot(ring(s), op->index);
  ProxyPeer* to = peer(s, d->pe);
  u64 offset = has_signal(d->op) ? d->extra : d->remote;
  u32 bytes = has_signal(d->op) ? 8 : static_cast<u32>(d->bytes);
  op->stage = SENT;
  ProxyRequest message = {op->index, to->base + offset, d->value, d->extra, d->op, bytes, s->pe, 0};
  return send(s, to, REQUEST, &message, sizeof(message));
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

inline bool inside(const ProxyPeer* to, u64 offset, u64 bytes) { return bytes <= to->bytes && offset <= to->bytes - bytes; }

inline bool is_width(u32 op, u64 bytes) { return bytes == 4 || bytes == 8 || (op == kProxySet && (bytes == 1 || bytes == 2)); }

// Somebody's atomic on this PE's heap: carry it out, and answer.
inline void answer(ProxyState* s, const ProxyRequest& m) {
  const ProxyPeer* mine = peer(s, s->pe);
  // the sender has looked at this; whoever else writes here gets no answer
  if (m.from < 0 || m.from >= s->n_pes || !is_width(m.op, m.bytes) || m.address % m.bytes != 0 ||
      !inside(mine, m.address - mine->base, m.bytes))
    return;
  ProxyPeer* to = peer(s, m.from);
  u64 old = m.bytes == 8 ? carry_out<u64>(m) : m.bytes == 4 ? carry_out<u32>(m) : m.bytes == 2 ? carry_out<u16>(m) : carry_out<u8>(m);
  if (to->status != 0) return;
  ProxyReply reply = {m.index, old};
  u64 handle = send(s, to, REPLY, &reply, sizeof(reply));
  if (failed(handle)) fail_peer(s, m.from, kProxyPeerFailed, status_of(handle));
}

// The answer to one of this PE's own.
inline void take_answer(ProxyState* s, const ProxyReply& m) {
  ProxyPending* op = pending(s, m.index);
  if (op->index != m.index || op->stage != SENT) return;
  op->stage = ANSWERED;
  op->reply = m.old;
  op->status = 0;
  op->next = s->finished;
  s->finished = reinterpret_cast<u64>(op);
}

}  // namespace mori
