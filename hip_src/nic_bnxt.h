// bnxt_re: requests of three slots of 16 bytes, little endian; a table with each request's packet numbers; a doorbell; one
// completion that is written over.
#pragma once

#include "request.h"

namespace mori::bnxt {

MORI_INLINE u64 slot(u64 queue, u64 index) {
  return fixed(&facts(queue)->sq) + (index & (fixed(&facts(queue)->num_wqes) - 1)) * 48;
}

MORI_INLINE void build(u64 queue, u64 index, const Request &r) {
  u64 to = slot(queue, index);
  u32 rkey = fixed(&facts(queue)->rkey), flags = r.signaled ? 0x01 : 0;
  if (r.verb == Verb::kAdd || r.verb == Verb::kCompareSwap) {
    u32 opcode = r.verb == Verb::kAdd ? 0x0b : 0x08;
    store_words(to, u32x4{3u << 16 | flags << 8 | opcode, rkey, low(r.remote), high(r.remote)});
    store_words(to + 16, u32x4{low(r.value), high(r.value), low(r.compare), high(r.compare)});
  } else {
    if (r.verb == Verb::kWriteInline) flags |= 0x10;
    store_words(to, u32x4{3u << 16 | flags << 8 | (r.verb == Verb::kRead ? 0x06u : 0x04u), 0, r.num_bytes, 0});
    store_words(to + 16, u32x4{low(r.remote), high(r.remote), rkey, 0});
  }
  if (r.verb == Verb::kWriteInline)
    store_words(to + 32, u32x4{low(r.value), high(r.value), 0, 0});
  else
    store_words(to + 32, u32x4{low(r.local), high(r.local), r.lkey, r.num_bytes});
}

// Packet numbers follow the order of requests, which is known here. A read takes as many as its answer has packets.
MORI_INLINE void number_packets(u64 queue, u64 first, u64 posted) {
  u64 sq = fixed(&facts(queue)->sq), table = fixed(&facts(queue)->psn_table);
  u32 wqes = fixed(&facts(queue)->num_wqes) - 1, entries = fixed(&facts(queue)->num_psns) - 1;
  // a power of two: no division in a kernel
  u32 mtu = fixed(&facts(queue)->mtu), shift = __builtin_ctz(mtu);
  u64 psn = load_system<u64>(MORI_WORD(queue, psn));
#pragma clang loop unroll(disable)
  for (u64 index = first; index != posted; ++index) {
    u64 at = index & wqes, request = sq + at * 48;
    u32 opcode = load_system<u32>(request) & 0xff;
    u32 num_bytes = opcode == 0x0b || opcode == 0x08 ? 8 : load_system<u32>(request + 8);
    u64 next = psn + (((u64)num_bytes + mtu - 1) >> shift);
    store_system<u64>(word_at(table, index & entries), (psn & 0xffffff) | (next & 0xffffff) << 24 | at * 3 << 48);
    psn = next;
  }
  store_system<u64>(MORI_WORD(queue, psn), psn);
}

MORI_INLINE void ring(Call call, u64 queue, u64 first, u64 posted) {
  number_packets(queue, first, posted);
  u32 num_wqes = fixed(&facts(queue)->num_wqes), at = (u32)posted & (num_wqes - 1);
  u32 epoch = (posted & num_wqes) != 0, valid = 1u << 26;
  release_to_system(warm(call.ctx));
  store_system<u64>(fixed(&facts(queue)->doorbell),
                    (u64)((fixed(&facts(queue)->number) & 0xfffff) | valid) << 32 | (at * 3 | epoch << 24));
}

// Requests that are complete after `before`. Written after the status: read before it, it is of the same completion or an older one.
MORI_INLINE u64 completed(u64 queue, u64 before) {
  return (load_first<u32>(fixed(&facts(queue)->cq) + 8) - before) & (fixed(&facts(queue)->num_wqes) - 1);
}

MORI_INLINE void poll(Call call, u64 queue, i32 pe) {
  u64 before = load_first<u64>(MORI_WORD(queue, done)), delta = completed(queue, before);
  u32 status = load_first<u32>(fixed(&facts(queue)->cq) + 24) >> 8 & 0xff;
  if (status == 0) return advance_done(queue, before, delta);
  // the last of those that are complete; its number may not be there yet
  delta = completed(queue, before);
  break_queue(call, queue, pe, delta == 0 ? before : before + delta - 1, status, status == 11);
}

}  // namespace mori::bnxt
