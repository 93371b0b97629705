// Signal, wait, fence, quiet, barrier_all.
//
// Release: a signal covers ALL earlier stores of the whole program, to any PE. Every thread writes its stores back to the device
// (on AMD a barrier does not drain stores), the program meets, and the elected thread alone writes back to the system and signals.
// Acquire: after a wait every wave of the program sees what the signal's sender had released; on AMD a wave has its own first-level
// cache, so every thread fences after the program has met, not only the one that polled.
// fence and quiet are the same: all earlier stores of the program are visible to every PE on return, and what it has asked of the
// network is complete. Through the network a signal covers what the program has put before to the same PE on the same queue pair, and
// all that it has stored to mapped memory; a quiet in between covers the rest.
// arrive_last is the same at device scope, between the programs of one launch, none of which waits; signal_set_all_last is both, but
// for the acquire.
// No wait is without an end unless the host asked for it: after ctx->timeout_ticks it appends a record and returns what it saw.
#pragma once

#include "p2p.h"

namespace mori {

// `pe`, `qp`: of the network's requests only these; negative: all. -1 if one failed.
MORI_BODY i32 quiet(Call call, i32 pe, i32 qp) {
  Logged logged(call, pe);
  Ctx ctx = call.ctx;
  if (has_network(ctx)) return over_network_and_acquire(ctx, [&] { return network_quiet(call, pe, qp); });
  gather_stores(ctx);
  if (is_elected()) release_to_system(warm(ctx));
  // a later store by another thread must not pass the elected thread's release
  program_barrier();
  return 0;
}

MORI_INLINE i32 acquire() {
  acquire_from_system();
  return 0;
}

MORI_INLINE void signal_by_one(Ctx ctx, u64 there, u64 value, bool add) {
  release_to_system(warm(ctx));
  if (add)
    add_system<u64>(there, value);
  else
    store_system<u64>(there, value);
}

// `address` is this PE's own address of the symmetric 64-bit word.
MORI_BODY i32 signal(Call call, u64 address, u64 value, bool add, i32 pe, i32 qp) {
  Logged logged(call, pe, 8);
  u64 there = locate_or_report(call, address, 8, 8, pe);
  if (there == 0) return -1;
  if (is_over_network(there))
    return over_network(call.ctx, [&] { return network_put_signal(call, 0, 0, 0, address, value, add, pe, qp); });
  gather_stores(call.ctx);
  if (is_elected()) signal_by_one(call.ctx, there, value, add);
  return 0;
}

// What signal_set_all() does for the PEs that are not mapped, after its release; its status, in every thread.
MORI_BODY i32 signal_set_all_over_network(Call call, u64 address, u64 value) {
  i32 status = 0;
  if (is_elected()) {
    u32 n = fixed(&call.ctx->n_pes);
#pragma clang loop unroll(disable)
    for (u32 pe = 0; pe < n; pe++)
      if (is_over_network(locate(call.ctx, address, 8, (i32)pe)))
        status |= network_put_signal(call, 0, 0, 0, address, value, false, (i32)pe, 0);
  }
  return broadcast(status);
}

// The first wave's half of a signal to all PEs, after gather_stores(): one thread releases and sets the words of the PEs that are mapped,
// each of the others looks one up for it.
MORI_INLINE void signal_all_by_wave(Call call, u64 address, u64 value) {
  Ctx ctx = call.ctx;
  u32 n = fixed(&ctx->n_pes), wave = wave_size();
#pragma clang loop unroll(disable)
  for (u32 first = 0; first < n; first += wave) {
    // before the release, after which the context is no longer in the first-level cache
    u64 mine = translate(ctx, address, 8, (i32)(first + thread_index()));
    if (first == 0 && is_elected()) release_to_system(warm(ctx));
#pragma clang loop unroll(disable)
    for (u32 pe = first; pe < n && pe < first + wave; pe++) {
      u64 there = of_lane(mine, pe - first);
      if (!is_elected()) continue;
      if (there != 0)
        store_system<u64>(there, value);
      else if (!has_network(ctx))
        report_by_one(call, kRefused, (i32)pe, 0, address, 8, 0, 0);
    }
  }
}

// signal() with SET to every PE, mine included, after one release. -1 for an address outside the heap; a PE that cannot be reached gets a
// record and no signal.
MORI_BODY i32 signal_set_all(Call call, u64 address, u64 value) {
  Logged logged(call, -1, 8);
  if (locate_or_report(call, address, 8, 8, fixed(&call.ctx->pe)) == 0) return -1;
  gather_stores(call.ctx);
  if (thread_index() < wave_size()) signal_all_by_wave(call, address, value);
  return has_network(call.ctx) ? signal_set_all_over_network(call, address, value) : 0;
}

// Zero bytes still signal. If data or signal is refused, neither is sent.
MORI_BODY i32 put_signal(Call call, Scope scope, u64 dst, u64 src, u64 num_bytes, u64 address, u64 value, i32 op, i32 pe, i32 qp) {
  Logged logged(call, pe, num_bytes);
  bool add = op == kSignalAdd || op == kAdd, known = add || op == kSignalSet || op == kSet;
  u64 signal_there = locate_or_report(call, address, known ? 8 : ~0ull, 8, pe);
  u64 there = num_bytes == 0 ? signal_there : locate_or_report(call, dst, num_bytes, 1, pe);
  if (signal_there == 0 || there == 0) return -1;
  if (num_bytes != 0 && !local_side_is_good(call, there, src, num_bytes, pe)) return -1;
  if (is_over_network(there))
    return over_network(call.ctx,
                        [&] { return network_put_signal(call, dst, src, num_bytes, address, value, add, pe, qp); });
  if (num_bytes != 0) copy(scope, there, src, num_bytes);
  gather_stores(call.ctx);
  if (is_elected()) signal_by_one(call.ctx, signal_there, value, add);
  return 0;
}

template <class T>
MORI_INLINE bool holds(T seen, Compare compare, T value) {
  switch (compare) {
    case kEq:
      return seen == value;
    case kNe:
      return seen != value;
    case kGt:
      return seen > value;
    case kGe:
      return seen >= value;
    case kLt:
      return seen < value;
    default:
      return seen <= value;
  }
}

// Poll my own word at `address`; the last value seen. The acquire is the caller's, after the program has met.
template <class T>
MORI_BODY T poll_by_one(Call call, u64 address, Compare compare, T value, i32 peer, i32 tag) {
  T seen = poll_system<T>(address);
  if (!holds(seen, compare, value)) {
    u64 limit = fixed(&call.ctx->timeout_ticks), start = clock_ticks();
    u32 polls = 0;
#pragma clang loop unroll(disable)
    do {
      pause_by_one(polls);
      polls += 1;
      bool late = limit != 0 && polls % kPollsPerClock == 0 && clock_ticks() - start >= limit;
      // the word is read once more after the clock, so a time-out means that it did not come in time
      seen = poll_system<T>(address);
      if (late && !holds(seen, compare, value)) {
        report_by_one(call, kWaitTimeout, peer, tag, address, (u64)value, (u64)seen, compare);
        break;
      }
    } while (!holds(seen, compare, value));
  }
  return seen;
}

// The value seen, in every thread. On time-out it does not satisfy the comparison and the caller should end.
template <class T>
MORI_BODY T wait(Call call, u64 address, Compare compare, T value, i32 peer, i32 tag) {
  Logged logged(call, peer);
  T seen = 0;
  bool bad = address == 0 || address % sizeof(T) != 0 || fixed(&call.ctx->n_pes) == 0 || (u32)compare - kEq > kLe - kEq;
  // the program meets before the wait, so that little is left to do after it
  program_barrier();
  if (is_elected()) {
    if (bad)
      report_by_one(call, kRefused, peer, tag, address, sizeof(T), 0, compare);
    else
      seen = poll_by_one<T>(call, address, compare, value, peer, tag);
  }
  seen = broadcast_after_barrier(seen);
  acquire_after_barrier();
  return seen;
}

// Word i of `num` 64-bit words at `address`, in my heap, is written by PE i: wait until every one is >= value, the threads of the
// first wave polling a share each. `value` if all have come; else a smaller value that one of those missing had, and a record for each of them.
MORI_BODY i64 wait_all_ge(Call call, u64 address, i32 num, i64 value, i32 tag) {
  Logged logged(call);
  i64 seen = value;
  bool bad = address == 0 || address % 8 != 0 || num < 0 || fixed(&call.ctx->n_pes) == 0;
  // those that will miss a word write over this
  broadcast(value);
  if (bad) {
    seen = 0;
    if (is_elected()) report_by_one(call, kRefused, -1, tag, address, 8 * (u64)(u32)num, 0, kGe);
  } else {
    u32 me = thread_index(), wave = wave_size();
    if (me < wave) {
#pragma clang loop unroll(disable)
      for (u32 i = me; i < (u32)num; i += wave) {
        i64 word = poll_by_one<i64>(call, address + 8ull * i, kGe, value, (i32)i, tag);
        if (word < value) seen = word;
      }
    }
  }
  // they may overwrite each other: any of the values says that something is missing
  if (seen < value) broadcast_word[0] = (u64)seen;
  program_barrier();
  acquire_after_barrier();
  return bad ? 0 : (i64)broadcast_word[0];
}

// The program that calls it last of `count` gets 1 and sees what all of them stored before; the others get 0 and go on. `counter`
// is a 32-bit word of this device, 0 before the first call and after the last, so the next launch can use it again.
MORI_BODY i32 arrive_last(Call call, u64 counter, i32 count) {
  Logged logged(call);
  i32 last = 0;
  gather_stores(call.ctx);
  // nobody to ask, and nobody's stores to see but those of this program, which has met
  if (count == 1) return 1;
  if (is_elected()) {
    last = arrive_device(counter, (u32)count);
    if (last) {
      acquire_arrivals();
      // read again by the next launch only
      *global<u32>(counter) = 0;
    }
  }
  last = broadcast_after_barrier(last);
  // the others read nothing of anybody's, and keep what is cached
  if (last) acquire_after_barrier_device();
  return last;
}

// What arrive_last() and, of the program that is last, signal_set_all() do together; but that program does not acquire what the others
// have stored. The thread that has seen them arrive is the one that releases and signals, so one fence does for what takes two, one
// behind the other, when the two are called.
MORI_BODY i32 signal_set_all_last(Call call, u64 address, u64 value, u64 counter, i32 count) {
  Logged logged(call, -1, 8);
  bool good = address % 8 == 0 && locate(call.ctx, address, 8, fixed(&call.ctx->pe)) != 0;
  i32 last = 0;
  gather_stores(call.ctx);
  if (thread_index() < wave_size()) {
    if (is_elected()) last = count == 1 || arrive_device(counter, (u32)count);
    last = (i32)of_lane((u64)(u32)last, 0);
    if (last && good) signal_all_by_wave(call, address, value);
    if (last && is_elected()) {
      if (!good) report_by_one(call, kRefused, fixed(&call.ctx->pe), 0, address, 8, 0, 0);
      // read again by the next launch only
      if (count != 1) *global<u32>(counter) = 0;
    }
  }
  last = broadcast_after_barrier(last);
  if (last && good && has_network(call.ctx)) signal_set_all_over_network(call, address, value);
  return last;
}

// A round's peers of barrier_all(), and how many PEs its words are enough for.
constexpr u32 kBarrierPeers = 7, kMostBarrierPes = 1u << 27;
static_assert((kBarrierWords - 1) / kBarrierPeers == 9 && kMostBarrierPes == 1u << 3 * 9, "each round, eight times as many PEs are known");

// Which of n PEs comes `distance` after `me`; n if that is once round or more.
MORI_INLINE u64 pe_at(u64 me, u64 distance, u64 n) {
  return distance >= n ? n : me + distance < n ? me + distance : me + distance - n;
}

// Tells the PEs of a round that are not mapped; 0, or -1 if a request failed.
MORI_BODY i32 tell_over_network_by_one(Call call, u64 word, u64 epoch, u64 step) {
  u32 n = fixed(&call.ctx->n_pes), me = fixed(&call.ctx->pe);
  i32 status = 0;
#pragma clang loop unroll(disable)
  for (u64 distance = step; distance <= kBarrierPeers * step && distance < n; distance += step, word += 8) {
    i32 to = (i32)pe_at(me, distance, n);
    if (is_over_network(locate(call.ctx, word, 8, to)))
      status |= network_put_signal(call, 0, 0, 0, word, epoch, false, to, 0);
  }
  return status;
}

// Every PE's stores before it are visible to every PE after it. Dissemination: in round r PE i tells the PEs i + j * 8^r, j = 1 .. 7,
// that it has come, and hears from the PEs i - j * 8^r, in word 7 r + j - 1: one round for 8 PEs, two for 64. Distances of n or more
// are left out, for smaller ones reach the same PEs. What a round costs is a write-back and the way of a signal, which its peers
// share: thread j - 1 sees to the j-th, and all have told before the first one listens.
// Words hold epochs, so nothing is ever cleared: a PE that is already in the next barrier writes a larger one. One program per PE at
// a time; calls from several streams in turn are fine, since the epoch is in memory.
// What the program has asked of the network is complete before the first signal, on every queue pair.
// 0, or -1 after a time-out, or if a PE cannot be reached (recorded with tag kTagBarrierAll, for each PE of the round that was not heard
// of or told). Who misses a PE, or cannot tell it, tells the others of the round, and nobody in later ones.
MORI_BODY i32 barrier_all(Call call) {
  Logged logged(call);
  Ctx ctx = call.ctx;
  u64 sync = fixed(&ctx->sync), epoch_at = sync + 8 * (kBarrierWords - 1), epoch = 0;
  u32 n = fixed(&ctx->n_pes), me = fixed(&ctx->pe), thread = thread_index();
  bool bad = sync == 0 || n - 1 >= kMostBarrierPes;
  u64 word = sync + 8 * thread, step = 1, distance = thread < kBarrierPeers ? thread + 1 : n;
  // looked up before the release, after which the context is no longer in the first-level cache
  u64 there = locate(ctx, word, 8, (i32)pe_at(me, distance, n));
  // read before the program meets, and written after
  if (!bad && thread < kBarrierPeers) epoch = load_system<u64>(epoch_at) + 1;
  gather_stores(ctx);
  if (bad) return -1;
  i32 status = 0;
  if (is_elected()) {
    // those that miss a PE will write over this
    broadcast_word[0] = 0;
    if (has_network(ctx)) {
      release_to_system(warm(ctx));
      status = network_quiet(call, -1, -1);
    }
  }
  bool heard = true;
#pragma clang loop unroll(disable)
  do {
    // behind the quiet, and behind every thread's look at how the last round ended
    program_barrier();
    if (distance < n) {
      if (there == 0)
        report_by_one(call, kRefused, (i32)pe_at(me, distance, n), kTagBarrierAll, word, 8, 0, 0);
      else if (!is_over_network(there))
        signal_by_one(ctx, there, epoch, false);
    }
    if (has_network(ctx)) {
      if (is_elected()) status |= tell_over_network_by_one(call, word, epoch, step);
      // no code generator may have the others listen first
      program_barrier();
    }
    // behind the signals, which need not wait for it
    if (is_elected()) store_system<u64>(epoch_at, epoch);
    if (distance < n) {
      i32 from = (i32)pe_at(me, n - distance, n);
      if (there == 0 || poll_by_one<u64>(call, word, kGe, epoch, from, kTagBarrierAll) < epoch) broadcast_word[0] = 1;
    }
    step *= kBarrierPeers + 1;
    distance *= kBarrierPeers + 1;
    word += 8 * kBarrierPeers;
    there = locate(ctx, word, 8, (i32)pe_at(me, distance, n));
    program_barrier();
    heard = broadcast_word[0] == 0;
  } while (heard && step < n);
  if (has_network(ctx)) {
    if (is_elected()) acquire_from_system();
    status = broadcast(status);
  }
  acquire_after_barrier();
  return heard ? status : -1;
}

}  // namespace mori
