// Operations on peers whose memory is not mapped: what p2p.h and sync.h call where load and store do not reach.
//
// Called by the elected thread alone, after the program has met and released to the system. `dst`, `src` and `address` are
// addresses of my own; the symmetric one, and over a card the other one too, has been checked to lie in the heap. 0, or -1 when
// the operation was refused or has failed, with one record of the failure.
#pragma once

#include "nic_proxy.h"
#include "queue.h"

namespace mori {

// Whether this build writes what the context's card reads: a kernel may have been linked in an earlier world.
MORI_INLINE bool is_built_for(Net net) { return build_provider() == kAnyProvider || build_provider() == fixed(&net->provider); }

MORI_INLINE bool is_by_proxy(Call call) { return provider_of(call.ctx) == kProxy && is_built_for(network_of(call.ctx)); }

// The queue pair of (pe, qp); 0, and a record, if there is none. Any qp is good: negative ones count as 0.
MORI_BODY u64 queue_of(Call call, i32 pe, i32 qp, u64 address, u64 num_bytes) {
  Net net = network_of(call.ctx);
  u32 per_pe = fixed(&net->num_qp_per_pe);
  if ((u32)pe < (u32)fixed(&call.ctx->n_pes) && per_pe != 0 && is_built_for(net) && provider_of(call.ctx) != kProxy) {
    u64 queue = fixed(&net->queues) + ((u64)(u32)pe * per_pe + (qp < 0 ? 0 : (u32)qp % per_pe)) * sizeof(Queue);
    u64 offset = address - fixed(&call.ctx->heap_base), size = fixed(&facts(queue)->remote_bytes);
    if (fixed(&facts(queue)->num_wqes) != 0 && offset < size && num_bytes <= size - offset) return queue;
  }
  report_by_one(call, kRefused, pe, 0, address, num_bytes, 0, 0);
  return 0;
}

MORI_INLINE u64 remote_of(Call call, u64 queue, u64 address) {
  return fixed(&facts(queue)->remote_base) + (address - fixed(&call.ctx->heap_base));
}

// Requests for all of num_bytes, each signaled: the index behind the last, 0 if the queue is broken.
MORI_BODY u64 transfer(Call call, u64 queue, i32 pe, Verb verb, u64 remote, u64 local, u64 num_bytes) {
  u32 lkey = fixed(&facts(queue)->lkey);
  u64 end;
#pragma clang loop unroll(disable)
  do {
    u64 now = num_bytes < kMaxRequestBytes ? num_bytes : kMaxRequestBytes;
    end = post(call, queue, pe, verb, remote, local, (u32)now, lkey, 0, 0);
    remote += now;
    local += now;
    num_bytes -= now;
  } while (num_bytes != 0 && end != 0);
  return end;
}

// `complete`: return when the source may be reused
MORI_BODY i32 network_put(Call call, u64 dst, u64 src, u64 num_bytes, bool complete, i32 pe, i32 qp) {
  if (is_by_proxy(call)) return proxy_put(call, dst, src, num_bytes, complete, pe, qp);
  if (num_bytes == 0) return 0;
  u64 queue = queue_of(call, pe, qp, dst, num_bytes);
  if (queue == 0) return -1;
  u64 end = transfer(call, queue, pe, Verb::kWrite, remote_of(call, queue, dst), src, num_bytes);
  if (end == 0) return -1;
  return complete ? wait_done(call, queue, pe, end, clock_ticks()) : 0;
}

MORI_BODY i32 network_get(Call call, u64 dst, u64 src, u64 num_bytes, bool complete, i32 pe, i32 qp) {
  if (is_by_proxy(call)) return proxy_get(call, dst, src, num_bytes, complete, pe, qp);
  if (num_bytes == 0) return 0;
  u64 queue = queue_of(call, pe, qp, src, num_bytes);
  if (queue == 0) return -1;
  u64 end = transfer(call, queue, pe, Verb::kRead, remote_of(call, queue, src), dst, num_bytes);
  if (end == 0) return -1;
  return complete ? wait_done(call, queue, pe, end, clock_ticks()) : 0;
}

// 1, 2, 4 or 8 bytes, the low ones of `value`
MORI_BODY i32 network_put_value(Call call, u64 dst, u64 value, u32 num_bytes, i32 pe, i32 qp) {
  if (is_by_proxy(call)) return proxy_put_value(call, dst, value, num_bytes, pe, qp);
  u64 queue = queue_of(call, pe, qp, dst, num_bytes);
  if (queue == 0) return -1;
  if (num_bytes < 8) value &= (1ull << 8 * num_bytes) - 1;
  u64 end = post(call, queue, pe, Verb::kWriteInline, remote_of(call, queue, dst), 0, num_bytes, 0, value, 0);
  return end == 0 ? -1 : 0;
}

MORI_INLINE u64 unwanted_result(u64 queue) { return fixed(&facts(queue)->results) + 8 * kResultWords; }

// Data, then the signal, on one queue pair: they take effect in order. Neither is sent if either cannot be. num_bytes 0: the signal.
MORI_BODY i32 network_put_signal(Call call, u64 dst, u64 src, u64 num_bytes, u64 address, u64 value, bool add, i32 pe, i32 qp) {
  if (is_by_proxy(call)) return proxy_put_signal(call, dst, src, num_bytes, address, value, add, pe, qp);
  u64 queue = queue_of(call, pe, qp, address, 8);
  if (queue == 0) return -1;
  u64 remote = 0, signal = remote_of(call, queue, address);
  if (num_bytes != 0) {
    if (queue_of(call, pe, qp, dst, num_bytes) == 0) return -1;
    remote = remote_of(call, queue, dst);
    u64 before = (num_bytes - 1) & -kMaxRequestBytes;
    if (before != 0 && transfer(call, queue, pe, Verb::kWrite, remote, src, before) == 0) return -1;
    remote += before;
    src += before;
    num_bytes -= before;
  }
  u32 n = num_bytes != 0 ? 2 : 1;
  u64 index = reserve(call, queue, pe, n);
  if (index == kNoIndex) return -1;
  if (num_bytes != 0)
    build(call, queue, index, Verb::kWrite, false, remote, src, (u32)num_bytes, fixed(&facts(queue)->lkey), 0, 0);
  if (add)
    build(call, queue, index + n - 1, Verb::kAdd, true, signal, unwanted_result(queue), 8,
          fixed(&facts(queue)->results_lkey), value, 0);
  else
    build(call, queue, index + n - 1, Verb::kWriteInline, true, signal, 0, 8, 0, value, 0);
  commit(call, queue, index, n);
  return 0;
}

// What `part` of a word becomes.
MORI_INLINE u64 applied(u64 part, u64 value, u64 compare, i32 op) {
  switch (op) {
    case kInc:
    case kFetchInc:
      return part + 1;
    case kAdd:
    case kSignalAdd:
    case kFetchAdd:
      return part + value;
    case kAnd:
    case kFetchAnd:
      return part & value;
    case kOr:
    case kFetchOr:
      return part | value;
    case kXor:
    case kFetchXor:
      return part ^ value;
    case kCompareSwap:
      return part == compare ? value : part;
    case kFetch:
      return part;
    default:  // kSet, kSignalSet, kSwap
      return value;
  }
}

// Cards add to and compare aligned words of 8 bytes; all else is made of compare-swaps of the word that holds it. `old`: null if
// nobody wants it. Without a result, what is one request does not wait.
MORI_BODY i32 network_atomic(Call call, u64 dst, u64 value, u64 compare, u32 num_bytes, i32 op, u64 *old, i32 pe, i32 qp) {
  if (is_by_proxy(call)) return proxy_atomic(call, dst, value, compare, num_bytes, op, old, pe, qp);
  u64 queue = queue_of(call, pe, qp, dst, num_bytes);
  if (queue == 0) return -1;
  u64 remote = remote_of(call, queue, dst & ~7ull), seen = 0;
  u32 shift = num_bytes == 4 ? (dst & 4) * 8 : 0;
  u64 mask = num_bytes == 4 ? 0xffffffffull : ~0ull;
  bool adds = op == kInc || op == kAdd || op == kSignalAdd || op == kFetchInc || op == kFetchAdd;
  if (op == kFetch || (adds && num_bytes == 8)) {
    u64 summand = op == kFetch ? 0 : applied(0, value, 0, op);
    if (old == nullptr) {
      u64 end = post(call, queue, pe, Verb::kAdd, remote, unwanted_result(queue), 8,
                     fixed(&facts(queue)->results_lkey), summand, 0);
      return end == 0 ? -1 : 0;
    }
    if (fetch(call, queue, pe, Verb::kAdd, remote, summand, 0, &seen) != 0) return -1;
  } else {
    // the first guess is that the word is 0, or what a compare-swap hopes for
    u64 guess = op == kCompareSwap ? compare << shift : 0;
#pragma clang loop unroll(disable)
    for (;;) {
      u64 next = (guess & ~(mask << shift)) | (applied(guess >> shift & mask, value, compare, op) & mask) << shift;
      if (fetch(call, queue, pe, Verb::kCompareSwap, remote, next, guess, &seen) != 0) return -1;
      if (seen == guess) break;
      guess = seen;
      // it was so at that moment
      if (op == kCompareSwap && (seen >> shift & mask) != compare) break;
    }
  }
  if (old != nullptr) *old = seen >> shift & mask;
  return 0;
}

// pe or qp negative: all of them. Complete is what all programs have reserved until now.
MORI_BODY i32 network_quiet(Call call, i32 pe, i32 qp) {
  Net net = network_of(call.ctx);
  u32 n = fixed(&call.ctx->n_pes), per_pe = fixed(&net->num_qp_per_pe);
  u32 first = pe < 0 ? 0 : pe, last = pe < 0 ? n : pe + 1;
  i32 status = 0;
  if (!is_built_for(net)) {
    report_by_one(call, kRefused, pe, 0, 0, 0, 0, 0);
    return -1;
  }
  // nothing is on its way to a PE that does not exist
  if (is_by_proxy(call)) return first < n ? proxy_quiet(call, pe, qp) : 0;
  // one limit for all of them: a card that has died completes none
  u64 start = clock_ticks();
#pragma clang loop unroll(disable)
  for (u32 to = first; to < last && to < n; ++to) {
    u32 low = qp < 0 ? 0 : (u32)qp % per_pe, high = qp < 0 ? per_pe : low + 1;
#pragma clang loop unroll(disable)
    for (u32 i = low; i < high; ++i) {
      u64 queue = fixed(&net->queues) + ((u64)to * per_pe + i) * sizeof(Queue);
      if (fixed(&facts(queue)->num_wqes) == 0) continue;
      u64 end = load_system<u64>(MORI_WORD(queue, reserved));
      if (wait_done(call, queue, (i32)to, end, start) != 0 || is_broken(queue)) status = -1;
    }
  }
  return status;
}

}  // namespace mori
