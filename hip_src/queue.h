// The queue pair of a card, to which all programs of a PE post at the same time: reserve, build, commit, ring; and poll.
//
//   reserve  takes indices, if there is room for all of them: who gives up has taken none
//   build    writes the request's bytes, in any order among programs
//   commit   says that they are whole, in ready[slot], and comes to ring
//   ring     one program at a time gives all to the card that are whole and follow one another; who finds it busy leaves, and
//            the one at it looks again before it goes
//   poll     done = what the card says, if that is more
//
// No program waits for another one, except for room: which only the card makes. So the last request of a reservation is always
// signaled; a program that reserved the rest later could find a ring full of requests whose completion nobody will hear of.
// docs/queue_pairs.md has the argument for each fence.
#pragma once

#include "nic_bnxt.h"
#include "nic_ionic.h"
#include "nic_mlx5.h"

namespace mori {

// A wait's limit.
struct Patience {
  u64 limit, start;
  u32 polls;
};

MORI_INLINE Patience patience(Ctx ctx) { return {fixed(&ctx->timeout_ticks), clock_ticks(), 0}; }

// Pause; whether the limit is over. One more look is taken after that.
MORI_INLINE bool is_over(Patience &p) {
  pause_by_one(p.polls);
  p.polls += 1;
  return p.limit != 0 && p.polls % kPollsPerClock == 0 && clock_ticks() - p.start >= p.limit;
}

MORI_INLINE bool is_broken(u64 queue) { return load_system<u64>(MORI_WORD(queue, error)) != 0; }

MORI_BODY void poll(Call call, u64 queue, i32 pe) {
  switch (provider_of(call.ctx)) {
    case kMlx5:
      return mlx5::poll(call, queue, pe);
    case kBnxtRe:
      return bnxt::poll(call, queue, pe);
    case kIonic:
      return ionic::poll(call, queue, pe);
    default:
      return;
  }
}

// Wait until all indices below `end` are complete: 0, and what the card has written can be read; -1 if the queue is broken. The
// wait began at `start`: one of several that are to take no longer than one.
MORI_BODY i32 wait_done(Call call, u64 queue, i32 pe, u64 end, u64 start) {
  Patience limit = {fixed(&call.ctx->timeout_ticks), start, 0};
  bool over = false;
#pragma clang loop unroll(disable)
  while (load_system<u64>(MORI_WORD(queue, done)) < end) {
    poll(call, queue, pe);
    u64 done = load_system<u64>(MORI_WORD(queue, done));
    if (done >= end) break;
    if (is_broken(queue)) return -1;
    if (over) {
      give_up(call, queue, pe, end, done);
      return -1;
    }
    over = is_over(limit);
  }
  acquire_from_system();
  return 0;
}

constexpr u64 kNoIndex = ~0ull;

// The first of `n` indices, or kNoIndex if the queue is broken. A slot is given again when its request is complete, so the card has
// read it.
MORI_BODY u64 reserve(Call call, u64 queue, i32 pe, u32 n) {
  u64 reserved = MORI_WORD(queue, reserved), room = fixed(&facts(queue)->num_wqes) - 1;
  u64 index = load_system<u64>(reserved);
  Patience limit = patience(call.ctx);
  bool over = false;
#pragma clang loop unroll(disable)
  for (;;) {
    if (is_broken(queue)) return kNoIndex;
    u64 done = load_system<u64>(MORI_WORD(queue, done));
    // an index older than `done` is far more than `room`
    if (index + n - done <= room) {
      u64 seen = compare_swap_system<u64>(reserved, index, index + n);
      if (seen == index) break;
      index = seen;
      continue;
    }
    if (over) {
      give_up(call, queue, pe, index + n - room, done);
      return kNoIndex;
    }
    poll(call, queue, pe);
    over = is_over(limit);
    index = load_system<u64>(reserved);
  }
  acquire_from_system();
  return index;
}

MORI_BODY void build(Call call, u64 queue, u64 index, Verb verb, bool signaled, u64 remote, u64 local, u32 num_bytes,
                     u32 lkey, u64 value, u64 compare) {
  Request request = {verb, signaled, remote, local, num_bytes, lkey, value, compare};
  switch (provider_of(call.ctx)) {
    case kMlx5:
      return mlx5::build(queue, index, request);
    case kBnxtRe:
      return bnxt::build(queue, index, request);
    case kIonic:
      return ionic::build(call, queue, index, request);
    default:
      return;
  }
}

// `ringing` counts those who have come since the one who rings last looked: the first one rings, and leaves when nobody has come.
MORI_BODY void ring(Call call, u64 queue) {
  u64 ringing = MORI_WORD(queue, ringing), ready = fixed(&facts(queue)->ready);
  u64 mask = fixed(&facts(queue)->num_wqes) - 1, come = add_system<u64>(ringing, 1) + 1;
  if (come != 1) return;
#pragma clang loop unroll(disable)
  for (;;) {
    acquire_from_system();
    u64 first = load_system<u64>(MORI_WORD(queue, posted)), posted = first;
#pragma clang loop unroll(disable)
    while (load_system<u64>(word_at(ready, posted & mask)) == posted + 1) posted += 1;
    if (posted != first) {
      // the bytes of those who set `ready`
      acquire_from_system();
      store_system<u64>(MORI_WORD(queue, posted), posted);
      switch (provider_of(call.ctx)) {
        case kMlx5:
          mlx5::ring(call, queue, posted);
          break;
        case kBnxtRe:
          bnxt::ring(call, queue, first, posted);
          break;
        case kIonic:
          ionic::ring(call, queue, posted);
          break;
        default:
          break;
      }
      // the next one's doorbell must not overtake this one
      release_to_system(warm(call.ctx));
    }
    u64 now = compare_swap_system<u64>(ringing, come, 0);
    if (now == come) return;
    come = now;
  }
}

// The n requests from `index` on are whole.
MORI_BODY void commit(Call call, u64 queue, u64 index, u32 n) {
  u64 ready = fixed(&facts(queue)->ready), mask = fixed(&facts(queue)->num_wqes) - 1;
  release_to_system(warm(call.ctx));
#pragma clang loop unroll(disable)
  for (u32 i = 0; i < n; ++i, ++index) store_system<u64>(word_at(ready, index & mask), index + 1);
  // whoever rings and sees that I have come sees this too
  release_to_system(warm(call.ctx));
  ring(call, queue);
}

// One request by itself: the index behind it, 0 if the queue is broken.
MORI_BODY u64 post(Call call, u64 queue, i32 pe, Verb verb, u64 remote, u64 local, u32 num_bytes, u32 lkey, u64 value,
                   u64 compare) {
  u64 index = reserve(call, queue, pe, 1);
  if (index == kNoIndex) return 0;
  build(call, queue, index, verb, true, remote, local, num_bytes, lkey, value, compare);
  commit(call, queue, index, 1);
  return index + 1;
}

// A bit that is set in a word of what is free, and now is not; 0: none was.
MORI_INLINE u64 take_bit(u64 pool) {
#pragma clang loop unroll(disable)
  for (;;) {
    u64 free = load_system<u64>(pool), bit = free & -free;
    // not an atomic AND: AMD's code generator makes that one of a load without scope and this
    if (bit == 0 || compare_swap_system<u64>(pool, free, free - bit) == free) return bit;
  }
}

MORI_INLINE void give_bit(u64 pool, u64 bit) { add_system<u64>(pool, bit); }

// A word for a fetch's result, as a bit of free_results; 0 if the queue is broken.
MORI_BODY u64 take_result(Call call, u64 queue, i32 pe) {
  u64 pool = MORI_WORD(queue, free_results);
  Patience limit = patience(call.ctx);
  bool over = false;
#pragma clang loop unroll(disable)
  for (;;) {
    if (is_broken(queue)) return 0;
    if (u64 bit = take_bit(pool)) return bit;
    if (over) {
      give_up(call, queue, pe, 1, 0);
      return 0;
    }
    over = is_over(limit);
  }
}

// 0 and *old, or -1. The result's word is given back only if the card has written it: it might do so later.
MORI_BODY i32 fetch(Call call, u64 queue, i32 pe, Verb verb, u64 remote, u64 value, u64 compare, u64 *old) {
  u64 bit = take_result(call, queue, pe);
  if (bit == 0) return -1;
  u64 place = word_at(fixed(&facts(queue)->results), __builtin_ctzll(bit));
  u64 end = post(call, queue, pe, verb, remote, place, 8, fixed(&facts(queue)->results_lkey), value, compare);
  if (end == 0 || wait_done(call, queue, pe, end, clock_ticks()) != 0) return -1;
  *old = load_first<u64>(place);
  give_bit(MORI_WORD(queue, free_results), bit);
  return 0;
}

}  // namespace mori
