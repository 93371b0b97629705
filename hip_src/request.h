// What the queue and the encoders of nic_*.h share: a request before it is bytes, the words of a Queue, and how one breaks.
#pragma once

#include "context.h"

namespace mori {

enum class Verb : u32 { kWrite, kWriteInline, kRead, kAdd, kCompareSwap };

constexpr u64 kMaxRequestBytes = 1ull << 30;  // every card here takes this much in one request

struct Request {
  Verb verb;
  bool signaled;   // the card reports it and, with it, all before it
  u64 remote;      // as the peer's card calls it
  u64 local;       // kWriteInline: unused
  u32 num_bytes;   // at most kMaxRequestBytes; kWriteInline 1, 2, 4, 8; atomics 8
  u32 lkey;
  u64 value;       // kWriteInline: the bytes, zero beyond them; kAdd: summand; kCompareSwap: what to swap in
  u64 compare;
};

// the facts of a Queue, which the host wrote before any kernel started
using Facts = const MORI_CONSTANT Queue *;
MORI_INLINE Facts facts(u64 queue) { return reinterpret_cast<Facts>(queue); }

// address of one of its words that kernels write
#define MORI_WORD(queue, field) ((queue) + __builtin_offsetof(Queue, field))

MORI_INLINE u32 swap_bytes(u32 word) { return __builtin_bswap32(word); }
MORI_INLINE u32 high(u64 word) { return (u32)(word >> 32); }
MORI_INLINE u32 low(u64 word) { return (u32)word; }
MORI_INLINE void store_words(u64 to, u32x4 words) { *global<u32x4>(to) = words; }

constexpr u64 kBroken = 1ull << 63, kFlushed = 1ull << 62;  // of Queue::error
constexpr u32 kLooksForReason = 64;

// The first failure of a queue pair: it is recorded, and nothing is posted any more. `status`: the vendor's in bits 0-7, its syndrome
// in 8-23. `flushed`: it only says that an earlier request has failed. Somebody else may have read why, and not have said so yet: that
// is waited for, but not for long, and a reason that comes still later is a record too.
MORI_BODY void break_queue(Call call, u64 queue, i32 pe, u64 index, u64 status, bool flushed) {
  u64 error = MORI_WORD(queue, error), known = load_system<u64>(error);
#pragma clang loop unroll(disable)
  for (u32 i = 0; flushed && known == 0 && i < kLooksForReason; ++i) {
    pause_by_one(kLooksForReason);
    known = load_system<u64>(error);
  }
#pragma clang loop unroll(disable)
  while (known == 0 || (!flushed && (known & kFlushed) != 0)) {
    u64 seen = compare_swap_system<u64>(error, known, kBroken | (flushed ? kFlushed : 0) | status);
    if (seen == known)
      return report_by_one(call, kNetworkFailed, pe, kTagNetwork, fixed(&facts(queue)->number), index, status,
                           provider_of(call.ctx));
    known = seen;
  }
}

// The same for a wait that has reached its limit: at least `expected` was wanted of what is at `seen`.
MORI_BODY void give_up(Call call, u64 queue, i32 pe, u64 expected, u64 seen) {
  if (compare_swap_system<u64>(MORI_WORD(queue, error), 0, kBroken) != 0) return;
  report_by_one(call, kWaitTimeout, pe, kTagNetwork, queue, expected, seen, kGe);
}

// The card says that `delta` requests after `before`, which was read before the card's word, are complete. What cannot be is what the
// card has not said yet: an old word, or none.
MORI_INLINE void advance_done(u64 queue, u64 before, u64 delta) {
  if (delta == 0 || delta > load_system<u64>(MORI_WORD(queue, posted)) - before) return;
  u64 known = before, done = before + delta;
#pragma clang loop unroll(disable)
  while (known < done) {
    u64 seen = compare_swap_system<u64>(MORI_WORD(queue, done), known, done);
    if (seen == known) return;
    known = seen;
  }
}

}  // namespace mori
