// mlx5: requests of 64 bytes, big endian; a doorbell record and a doorbell; one completion that is written over.
#pragma once

#include "request.h"

namespace mori::mlx5 {

MORI_INLINE u64 slot(u64 queue, u64 index) {
  return fixed(&facts(queue)->sq) + (index & (fixed(&facts(queue)->num_wqes) - 1)) * 64;
}

MORI_INLINE void build(u64 queue, u64 index, const Request &r) {
  u64 to = slot(queue, index);
  bool atomic = r.verb == Verb::kAdd || r.verb == Verb::kCompareSwap;
  u32 opcode = r.verb == Verb::kRead ? 0x10 : r.verb == Verb::kAdd ? 0x12 : r.verb == Verb::kCompareSwap ? 0x11 : 0x08;
  u32 sixteenths = atomic ? 4 : 3, rkey = swap_bytes(fixed(&facts(queue)->rkey)), lkey = swap_bytes(r.lkey);
  store_words(to, u32x4{swap_bytes((u32)(index & 0xffff) << 8 | opcode),
                        swap_bytes(fixed(&facts(queue)->number) << 8 | sixteenths), r.signaled ? 0x08000000u : 0, 0});
  store_words(to + 16, u32x4{swap_bytes(high(r.remote)), swap_bytes(low(r.remote)), rkey, 0});
  u32 local_high = swap_bytes(high(r.local)), local_low = swap_bytes(low(r.local));
  if (atomic) {
    store_words(to + 32, u32x4{swap_bytes(high(r.value)), swap_bytes(low(r.value)), swap_bytes(high(r.compare)),
                               swap_bytes(low(r.compare))});
    store_words(to + 48, u32x4{swap_bytes(8), lkey, local_high, local_low});
  } else {
    // an inline payload is bytes, not a number; it starts at 36
    if (r.verb == Verb::kWriteInline)
      store_words(to + 32, u32x4{swap_bytes(r.num_bytes | 1u << 31), low(r.value), high(r.value), 0});
    else
      store_words(to + 32, u32x4{swap_bytes(r.num_bytes), lkey, local_high, local_low});
    store_words(to + 48, u32x4{0, 0, 0, 0});
  }
}

// All before `posted` are the card's: the doorbell is the beginning of the last of them.
MORI_INLINE void ring(Call call, u64 queue, u64 posted) {
  u64 beginning = load_system<u64>(slot(queue, posted - 1));
  store_system<u32>(fixed(&facts(queue)->record), swap_bytes((u32)(posted & 0xffff)));
  release_to_system(warm(call.ctx));
  store_system<u64>(fixed(&facts(queue)->doorbell), beginning);
}

MORI_INLINE void poll(Call call, u64 queue, i32 pe) {
  u64 cqe = fixed(&facts(queue)->cq), before = load_first<u64>(MORI_WORD(queue, done));
  u32 word = load_system<u32>(cqe + 60);  // counter, signature, opcode and owner: one load, so of one completion
  u32 counter = swap_bytes(word) >> 16, opcode = word >> 28;
  if (opcode == 13 || opcode == 14) {
    // the card has written it before that word: it is of the same completion or of a newer one, which was flushed
    acquire_from_system();
    u32 reason = load_system<u32>(cqe + 52), syndrome = reason >> 24;
    break_queue(call, queue, pe, before + (u16)(counter - (u32)before), syndrome | (reason >> 16 & 0xff) << 8,
                syndrome == 0x05);
  } else {
    // 0xffff before the first
    advance_done(queue, before, (u16)(counter + 1 - (u32)before));
  }
}

}  // namespace mori::mlx5
