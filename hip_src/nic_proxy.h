// The proxy: operations as descriptors in a ring that a host thread serves. proxy_ring.h has its layout, proxy_order.h the order in
// which it carries out what one PE is sent.
//
// The ring lies in host memory, where a device's atomics are only atomic among its own threads. So while kernels run nobody else posts
// (`tail`) or takes tickets (`free_tickets`). The local side may be any memory of this process that UCX can read or write.
#pragma once

#include "proxy_ring.h"
#include "queue.h"

namespace mori {

// address of a word of the ring's head, of a slot, a ticket, a PE's words
#define MORI_RING(ring, field) ((ring) + __builtin_offsetof(ProxyRing, field))
#define MORI_TICKET(place, field) ((place) + __builtin_offsetof(ProxyTicket, field))

MORI_INLINE u64 proxy_ring(Call call) { return fixed(&network_of(call.ctx)->ring); }
MORI_INLINE u64 proxy_entries(u64 ring) { return fixed(&reinterpret_cast<const MORI_CONSTANT ProxyRing *>(ring)->entries); }
MORI_INLINE u64 proxy_slot(u64 ring, u64 index) {
  return ring + sizeof(ProxyRing) + (index & (proxy_entries(ring) - 1)) * sizeof(ProxyDescriptor);
}
MORI_INLINE u64 proxy_peer(u64 ring, i32 pe) {
  return ring + sizeof(ProxyRing) + proxy_entries(ring) * sizeof(ProxyDescriptor) + (u64)(u32)pe * sizeof(ProxyRingPeer);
}
MORI_INLINE u64 proxy_ticket(u64 ring, u32 ticket) { return MORI_RING(ring, tickets) + (ticket - 1) * sizeof(ProxyTicket); }

// What has failed, once for each PE that is gone: whoever finds it first records it.
MORI_BODY void proxy_failed(Call call, i32 pe, u64 address, u64 index, u32 reason, u32 op) {
  u64 ring = proxy_ring(call);
  if ((u32)pe < (u32)fixed(&call.ctx->n_pes)) {
    u64 peer = proxy_peer(ring, pe);
    bool gone = load_system<u32>(peer + __builtin_offsetof(ProxyRingPeer, gone)) != 0;
    if (gone && swap_system<u32>(peer + __builtin_offsetof(ProxyRingPeer, reported), 1) != 0) return;
  }
  report_by_one(call, kNetworkFailed, pe, kTagNetwork, address, index, reason, kProxy | op << 8);
}

MORI_INLINE bool proxy_is_broken(u64 ring) { return load_system<u64>(MORI_RING(ring, broken)) != 0; }

// The first wait that has reached its limit is recorded, and nothing is posted any more: at least `expected` was wanted of what is at
// `seen`. A loop that serves its ring speaks before, so this one does not, and nobody else need find out for as long.
MORI_BODY void proxy_give_up(Call call, u64 ring, i32 pe, u64 expected, u64 seen) {
  if (compare_swap_system<u64>(MORI_RING(ring, broken), 0, 1) != 0) return;
  report_by_one(call, kWaitTimeout, pe, kTagNetwork, ring, expected, seen, kGe);
}

// The index of a descriptor that the loop will take; kNoIndex, and a record, if it cannot be posted (of a broken ring there is one
// already). `address`: symmetric.
MORI_BODY u64 proxy_post(Call call, u32 op, u32 ticket, i32 pe, u64 address, u64 local, u64 num_bytes, u64 value, u64 extra) {
  Net net = network_of(call.ctx);
  u64 ring = proxy_ring(call), tail = MORI_RING(ring, tail);
  // a kernel may have been linked in an earlier world
  if (fixed(&net->provider) != kProxy || ring == 0) {
    report_by_one(call, kRefused, pe, 0, address, num_bytes, 0, 0);
    return kNoIndex;
  }
  u64 index = load_system<u64>(tail);
  if (pe >= 0 && load_system<u64>(MORI_RING(ring, num_gone)) != 0) {
    u32 reason = load_system<u32>(proxy_peer(ring, pe) + __builtin_offsetof(ProxyRingPeer, gone));
    if (reason != 0) {
      proxy_failed(call, pe, address, index, reason, op);
      return kNoIndex;
    }
  }
  u64 entries = proxy_entries(ring);
  Patience limit = patience(call.ctx);
  bool over = false;
#pragma clang loop unroll(disable)
  for (;;) {
    if (proxy_is_broken(ring)) return kNoIndex;
    u64 head = load_system<u64>(MORI_RING(ring, head));
    // an index older than `head` is far more than there is room for
    if (index - head < entries) {
      u64 seen = compare_swap_system<u64>(tail, index, index + 1);
      if (seen == index) break;
      index = seen;
      continue;
    }
    if (over) {
      proxy_give_up(call, ring, pe, index + 1 - entries, head);
      return kNoIndex;
    }
    over = is_over(limit);
    index = load_system<u64>(tail);
  }
  // what the loop wanted of the slot, it has read
  acquire_from_system();
  u64 slot = proxy_slot(ring, index);
  Global<u64> words = global<u64>(slot);
  words[2] = op | (u64)ticket << 16 | (u64)(u32)pe << 32;
  words[3] = local;
  words[4] = address - fixed(&call.ctx->heap_base);
  words[5] = num_bytes;
  words[6] = value;
  words[7] = extra;
  release_to_system(warm(call.ctx));
  store_system<u64>(slot, index + 1);
  return index;
}

// Number of a ticket from 1 on; 0, and a record, if all stay taken; 0 if the ring is broken.
MORI_BODY u32 proxy_take_ticket(Call call, u64 ring, i32 pe) {
  u64 pool = MORI_RING(ring, free_tickets);
  Patience limit = patience(call.ctx);
  bool over = false;
#pragma clang loop unroll(disable)
  for (;;) {
    if (proxy_is_broken(ring)) return 0;
    if (u64 bit = take_bit(pool)) return (u32)__builtin_ctzll(bit) + 1;
    if (over) {
      proxy_give_up(call, ring, pe, 1, 0);
      return 0;
    }
    over = is_over(limit);
  }
}

MORI_INLINE void proxy_give_ticket(u64 ring, u32 ticket) { give_bit(MORI_RING(ring, free_tickets), 1ull << (ticket - 1)); }

// Post, and wait for the end: 0, what it fetched in *value, and what it brought can be read; or -1.
MORI_BODY i32 proxy_do(Call call, u32 op, i32 pe, u64 address, u64 local, u64 num_bytes, u64 operand, u64 extra, u64 *value) {
  u64 ring = proxy_ring(call);
  u32 ticket = ring == 0 ? 0 : proxy_take_ticket(call, ring, pe);
  if (ring != 0 && ticket == 0) return -1;
  u64 index = proxy_post(call, op, ticket, pe, address, local, num_bytes, operand, extra);
  if (index == kNoIndex) {
    if (ticket != 0) proxy_give_ticket(ring, ticket);
    return -1;
  }
  u64 place = proxy_ticket(ring, ticket), done;
  Patience limit = patience(call.ctx);
  bool over = false;
#pragma clang loop unroll(disable)
  while (((done = load_system<u64>(MORI_TICKET(place, done))) & ~kProxyFailed) != index + 1) {
    // the ticket is not given back: the loop may yet write it
    if (proxy_is_broken(ring)) return -1;
    if (over) {
      proxy_give_up(call, ring, pe, index + 1, load_system<u64>(MORI_RING(ring, head)));
      return -1;
    }
    over = is_over(limit);
  }
  acquire_from_system();
  bool failed = (done & kProxyFailed) != 0;
  if (failed) {
    u32 reason = load_first<u32>(MORI_TICKET(place, reason));
    proxy_failed(call, load_first<i32>(MORI_TICKET(place, pe)), address, index, reason, op);
  } else if (value != nullptr) {
    *value = load_first<u64>(MORI_TICKET(place, value));
  }
  proxy_give_ticket(ring, ticket);
  return failed ? -1 : 0;
}

MORI_INLINE i32 proxy_post_only(Call call, u32 op, i32 pe, u64 address, u64 local, u64 num_bytes, u64 operand, u64 extra) {
  return proxy_post(call, op, 0, pe, address, local, num_bytes, operand, extra) == kNoIndex ? -1 : 0;
}

// What follows is what transport.h says of the functions of these names; `qp` chooses nothing: all keep the order of one queue.

MORI_BODY i32 proxy_put(Call call, u64 dst, u64 src, u64 num_bytes, bool complete, i32 pe, i32 qp) {
  if (num_bytes == 0) return 0;
  if (complete) return proxy_do(call, kProxyPut, pe, dst, src, num_bytes, 0, 0, nullptr);
  return proxy_post_only(call, kProxyPut, pe, dst, src, num_bytes, 0, 0);
}

MORI_BODY i32 proxy_put_value(Call call, u64 dst, u64 value, u32 num_bytes, i32 pe, i32 qp) {
  return proxy_post_only(call, kProxySet, pe, dst, 0, num_bytes, value, 0);
}

MORI_BODY i32 proxy_get(Call call, u64 dst, u64 src, u64 num_bytes, bool complete, i32 pe, i32 qp) {
  if (num_bytes == 0) return 0;
  if (complete) return proxy_do(call, kProxyGet, pe, src, dst, num_bytes, 0, 0, nullptr);
  return proxy_post_only(call, kProxyGet, pe, src, dst, num_bytes, 0, 0);
}

MORI_BODY i32 proxy_put_signal(Call call, u64 dst, u64 src, u64 num_bytes, u64 address, u64 value, bool add, i32 pe, i32 qp) {
  u64 base = fixed(&call.ctx->heap_base);
  if (num_bytes == 0) dst = base;
  return proxy_post_only(call, add ? kProxyPutSignalAdd : kProxyPutSignalSet, pe, dst, src, num_bytes, value, address - base);
}

// The ring's operation for one of AtomicOp whose result somebody wants, or nobody.
MORI_INLINE u32 proxy_op(i32 op, bool wanted) {
  switch (op) {
    case kAnd:
    case kFetchAnd:
      return wanted ? kProxyFetchAnd : kProxyAnd;
    case kOr:
    case kFetchOr:
      return wanted ? kProxyFetchOr : kProxyOr;
    case kXor:
    case kFetchXor:
      return wanted ? kProxyFetchXor : kProxyXor;
    case kSet:
    case kSignalSet:
    case kSwap:
      return wanted ? kProxySwap : kProxySet;
    case kCompareSwap:
      return kProxyCompareSwap;
    default:  // kInc, kAdd, kSignalAdd, kFetch, kFetchInc, kFetchAdd
      return wanted ? kProxyFetchAdd : kProxyAdd;
  }
}

MORI_BODY i32 proxy_atomic(Call call, u64 dst, u64 value, u64 compare, u32 num_bytes, i32 op, u64 *old, i32 pe, i32 qp) {
  bool waits = old != nullptr || op == kCompareSwap;
  u32 as = proxy_op(op, waits);
  if (op == kInc || op == kFetchInc) value = 1;
  if (op == kFetch) value = 0;
  if (waits) return proxy_do(call, as, pe, dst, 0, num_bytes, value, compare, old);
  return proxy_post_only(call, as, pe, dst, 0, num_bytes, value, 0);
}

// Complete is what all programs have posted before.
MORI_BODY i32 proxy_quiet(Call call, i32 pe, i32 qp) {
  u64 base = fixed(&call.ctx->heap_base);
  return proxy_do(call, pe < 0 ? kProxyQuiet : kProxyFlush, pe < 0 ? kProxyAllPes : pe, base, 0, 0, 0, 0, nullptr);
}

#undef MORI_TICKET
#undef MORI_RING

}  // namespace mori
