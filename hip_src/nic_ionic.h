// ionic: requests of 64 bytes, big endian but for their index, valid by their color; a doorbell; a ring of completions, which are
// valid by their color too, and a doorbell that gives them back.
#pragma once

#include "request.h"

namespace mori::ionic {

MORI_INLINE void build(Call call, u64 queue, u64 index, const Request &r) {
  u32 num_wqes = fixed(&facts(queue)->num_wqes);
  u64 to = fixed(&facts(queue)->sq) + (index & (num_wqes - 1)) * 64;
  bool is_inline = r.verb == Verb::kWriteInline;
  u32 opcode = r.verb == Verb::kRead ? 0x02 : r.verb == Verb::kAdd ? 0x05 : r.verb == Verb::kCompareSwap ? 0x04 : 0x21;
  u32 flags = (r.signaled ? 0x8 : 0) | (is_inline ? 0x4 : 0) | ((index & num_wqes) == 0 ? 0x10 : 0);
  u32 lkey = swap_bytes(r.lkey), local_high = swap_bytes(high(r.local)), local_low = swap_bytes(low(r.local));
  *global<u64>(to) = index;
  *global<u32>(to + 12) = 0;
  u32x4 remote = {swap_bytes(high(r.remote)), swap_bytes(low(r.remote)), swap_bytes(fixed(&facts(queue)->rkey)),
                  swap_bytes(r.num_bytes)};
  if (r.verb == Verb::kAdd || r.verb == Verb::kCompareSwap) {
    remote[3] = swap_bytes(high(r.value));
    store_words(to + 32, u32x4{swap_bytes(low(r.value)), swap_bytes(high(r.compare)), swap_bytes(low(r.compare)), lkey});
    store_words(to + 48, u32x4{local_high, local_low, 0, 0});
  } else {
    if (is_inline)
      store_words(to + 32, u32x4{low(r.value), high(r.value), 0, 0});
    else
      store_words(to + 32, u32x4{local_high, local_low, swap_bytes(r.num_bytes), lkey});
    store_words(to + 48, u32x4{0, 0, 0, 0});
  }
  store_words(to + 16, remote);
  // the color last: a card may look at a slot before it is told to
  release_to_system(warm(call.ctx));
  store_system<u32>(to + 8, opcode | (is_inline ? 0u : 1u) << 8 | flags << 24);
}

MORI_INLINE void ring(Call call, u64 queue, u64 posted) {
  release_to_system(warm(call.ctx));
  store_system<u64>(fixed(&facts(queue)->doorbell),
                    fixed(&facts(queue)->doorbell_value) | (posted & (fixed(&facts(queue)->num_wqes) - 1)));
}

// Completions are taken by one at a time, who alone changes `done`. Whoever does not get to it need not: all who wait come again.
// They are given back before `done` makes room for more, so the card never has more of them than requests.
MORI_INLINE void poll(Call call, u64 queue, i32 pe) {
  u32 num_cqes = fixed(&facts(queue)->num_cqes);
  u64 polling = MORI_WORD(queue, polling);
  if (compare_swap_system<u64>(polling, 0, 1) != 0) return;
  acquire_from_system();
  u64 consumed = load_system<u64>(MORI_WORD(queue, consumed)), taken = consumed;
  u64 before = load_first<u64>(MORI_WORD(queue, done)), delta = 0, failed = 0, status = 0;
  bool has_failed = false;
#pragma clang loop unroll(disable)
  for (;; ++taken) {
    u64 cqe = fixed(&facts(queue)->cq) + (taken & (num_cqes - 1)) * 32;
    u32 flags = swap_bytes(load_first<u32>(cqe + 28));
    if ((flags & 1) != ((taken & num_cqes) == 0 ? 1u : 0u)) break;
    u64 now = (swap_bytes(load_system<u32>(cqe + 4)) - (u32)before) & 0xffffff;
    if ((flags & 2) == 0) {
      delta = now;
    } else if (!has_failed) {
      has_failed = true;
      failed = now;
      status = swap_bytes(load_system<u32>(cqe + 24)) & 0xffffff;
    }
  }
  if (taken != consumed) {
    store_system<u64>(MORI_WORD(queue, consumed), taken);
    store_system<u64>(fixed(&facts(queue)->cq_doorbell),
                      fixed(&facts(queue)->cq_doorbell_value) | (taken & (num_cqes - 1)));
    // neither a later doorbell nor a request in the room that is made now may overtake this
    release_to_system(warm(call.ctx));
    advance_done(queue, before, delta);
    // the first of the ring, which nobody has passed: it is the reason, whatever follows
    if (has_failed) break_queue(call, queue, pe, before + failed - 1, status, false);
    release_to_system(warm(call.ctx));
  }
  store_system<u64>(polling, 0);
}

}  // namespace mori::ionic
