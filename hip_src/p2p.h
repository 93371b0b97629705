// Pointer translation, and copies and atomics on peers, by load and store where their memory is mapped, else through the network.
//
// A put or get is ONE operation of the program: all its threads call it with the same arguments. The scope says how many of them
// move bytes: thread 1, warp the first wave, block all.
//   * Before a copy all threads meet, so a source that other threads of the program have just written is copied whole.
//   * `_nbi` puts return at once: the source may still be read by slower threads until quiet, fence or a signal. The others
//     end with a barrier. Every get ends with one: all threads may read what it brought.
//   * Nothing here orders anything for another PE; that is fence, quiet and the signals of sync.h.
// Atomics are relaxed, at system scope, done by the elected thread. Those that return a value return it in every thread.
// Through the network the elected thread posts what transport.h says. Whatever the program has stored is released before, so that a
// network card finds it in memory; a get that is complete is followed by an acquire in all threads.
#pragma once

#include "profile.h"
#include "transport.h"

namespace mori {

enum class Scope { kThread, kWarp, kBlock };

// Where `address` of my heap lies in the heap of `pe`, as my device sees it. 0 if pe is out of range or not reachable by load and
// store, or if any of the bytes is outside the heap.
MORI_BODY u64 translate(Ctx ctx, u64 address, u64 num_bytes, i32 pe) {
  // all in flight at once, and none of them under a condition: the next translation need not load them again
  u64 offset = address - fixed(&ctx->heap_base), size = fixed(&ctx->heap_size);
  auto bases = reinterpret_cast<const MORI_CONSTANT u64 *>(fixed(&ctx->peer_bases));
  u32 n = fixed(&ctx->n_pes);
  if ((u32)pe >= n || offset >= size || num_bytes > size - offset) return 0;
  u64 base = fixed(bases + pe);
  return base == 0 ? 0 : base + offset;
}

// Whether a range is in my heap.
MORI_INLINE bool is_symmetric(Ctx ctx, u64 address, u64 num_bytes) {
  u64 offset = address - fixed(&ctx->heap_base), size = fixed(&ctx->heap_size);
  return offset < size && num_bytes <= size - offset;
}

// Instead of an address: transport.h gets there.
constexpr u64 kOverNetwork = 1;
MORI_INLINE bool is_over_network(u64 there) { return build_provider() != kP2p && there == kOverNetwork; }

// translate(), or kOverNetwork for a PE that is not mapped and can be reached
MORI_BODY u64 locate(Ctx ctx, u64 address, u64 num_bytes, i32 pe) {
  u64 there = translate(ctx, address, num_bytes, pe);
  // asked first, so that a build without a network keeps nothing of the rest
  if (has_network(ctx) && there == 0 && (u32)pe < (u32)fixed(&ctx->n_pes) && is_symmetric(ctx, address, num_bytes))
    return kOverNetwork;
  return there;
}

// locate(), with a record by the elected thread when the operation cannot be done
MORI_BODY u64 locate_or_report(Call call, u64 address, u64 num_bytes, u32 alignment, i32 pe) {
  u64 there = locate(call.ctx, address, num_bytes, pe);
  if (address % alignment != 0) there = 0;
  if (there == 0 && is_elected()) report_by_one(call, kRefused, pe, 0, address, num_bytes, 0, 0);
  return there;
}

// Half of a release: the caller's elected thread goes on with release_to_system().
MORI_INLINE void gather_stores(Ctx ctx) {
  release_before_barrier(warm(ctx));
  program_barrier();
}

// The elected thread's `post()`, after a release of all that the program has stored; its status, in every thread.
template <class Post>
MORI_INLINE i32 over_network(Ctx ctx, Post post) {
  i32 status = 0;
  gather_stores(ctx);
  if (is_elected()) {
    release_to_system(warm(ctx));
    status = post();
  }
  return broadcast_after_barrier(status);
}

// The same for what brings data: every thread may read it on return.
template <class Post>
MORI_INLINE i32 over_network_and_acquire(Ctx ctx, Post post) {
  i32 status = over_network(ctx, [&] {
    i32 result = post();
    acquire_from_system();
    return result;
  });
  acquire_after_barrier();
  return status;
}

MORI_INLINE u64 bytes_of(u64 num_elements, u64 element_bytes) {
  return num_elements > ~0ull / element_bytes ? ~0ull : num_elements * element_bytes;
}

// Copy elements first, first + stride, ... of count.
template <class T>
MORI_BODY void copy_elements(u64 dst, u64 src, u64 count, u64 first, u64 stride) {
  Global<T> to = global<T>(dst);
  Global<const T> from = global<const T>(src);
  u64 i = first;
#pragma clang loop unroll(disable)
  for (; i + 3 * stride < count; i += 4 * stride) {
    T a = from[i], b = from[i + stride], c = from[i + 2 * stride], d = from[i + 3 * stride];
    to[i] = a;
    to[i + stride] = b;
    to[i + 2 * stride] = c;
    to[i + 3 * stride] = d;
  }
#pragma clang loop unroll(disable)
  for (; i < count; i += stride) to[i] = from[i];
}

MORI_BODY void copy_bytes(u64 dst, u64 src, u64 count, u64 first, u64 stride) {
  Global<u8> to = global<u8>(dst);
  Global<const u8> from = global<const u8>(src);
#pragma clang loop unroll(disable)
  for (u64 i = first; i < count; i += stride) to[i] = from[i];
}

// The share of one of `stride` threads. Bytes up to an aligned address, then the widest element for which source and destination
// are aligned alike (16, 4 or 1 bytes), then the bytes that are left. Never touches a byte outside [src, src + n), [dst, dst + n).
MORI_BODY void copy_share(u64 dst, u64 src, u64 num_bytes, u64 first, u64 stride) {
  u64 skew = (dst ^ src) & 15;
  u64 width = skew == 0 ? 16 : skew % 4 == 0 ? 4 : 1;
  u64 head = -dst & (width - 1);
  if (head > num_bytes) head = num_bytes;
  copy_bytes(dst, src, head, first, stride);
  dst += head;
  src += head;
  num_bytes -= head;
  u64 body = num_bytes & -width;
  if (width == 16)
    copy_elements<u32x4>(dst, src, body / 16, first, stride);
  else if (width == 4)
    copy_elements<u32>(dst, src, body / 4, first, stride);
  else
    copy_bytes(dst, src, body, first, stride);
  copy_bytes(dst + body, src + body, num_bytes - body, first, stride);
}

MORI_BODY void copy(Scope scope, u64 dst, u64 src, u64 num_bytes) {
  program_barrier();
  u32 movers = scope == Scope::kThread ? 1 : scope == Scope::kWarp ? wave_size() : num_threads();
  u32 me = thread_index();
  if (me < movers) copy_share(dst, src, num_bytes, me, movers);
}

// Whether the local side of a copy can be served, else a record. A network card has a key for my heap, and for nothing else. A debug
// build refuses too what begins in the heap and does not end there.
MORI_BODY bool local_side_is_good(Call call, u64 there, u64 address, u64 num_bytes, i32 pe) {
  bool by_card = is_over_network(there) && provider_of(call.ctx) != kProxy;
  bool must_fit = by_card || (is_debug_build() && is_symmetric(call.ctx, address, 0));
  bool good = !must_fit || is_symmetric(call.ctx, address, num_bytes);
  if (!good) report(call, kRefused, pe, 0, address, num_bytes, 1);
  return good;
}

// 0, or -1 if refused or failed (and recorded)
MORI_BODY i32 put(Call call, Scope scope, bool nbi, u64 dst, u64 src, u64 num_bytes, i32 pe, i32 qp) {
  Logged logged(call, pe, num_bytes);
  if (num_bytes == 0) return 0;
  u64 there = locate_or_report(call, dst, num_bytes, 1, pe);
  if (there == 0 || !local_side_is_good(call, there, src, num_bytes, pe)) return -1;
  if (is_over_network(there))
    return over_network(call.ctx, [&] { return network_put(call, dst, src, num_bytes, !nbi, pe, qp); });
  copy(scope, there, src, num_bytes);
  if (!nbi) program_barrier();
  return 0;
}

// `nbi` makes a difference over a network only.
MORI_BODY i32 get(Call call, Scope scope, bool nbi, u64 dst, u64 src, u64 num_bytes, i32 pe, i32 qp) {
  Logged logged(call, pe, num_bytes);
  if (num_bytes == 0) return 0;
  u64 there = locate_or_report(call, src, num_bytes, 1, pe);
  if (there == 0 || !local_side_is_good(call, there, dst, num_bytes, pe)) return -1;
  if (is_over_network(there)) {
    if (nbi) return over_network(call.ctx, [&] { return network_get(call, dst, src, num_bytes, false, pe, qp); });
    return over_network_and_acquire(call.ctx, [&] { return network_get(call, dst, src, num_bytes, true, pe, qp); });
  }
  copy(scope, dst, there, num_bytes);
  program_barrier();
  return 0;
}

// One element of 1, 2, 4 or 8 bytes, single-copy atomic when aligned.
template <class T>
MORI_BODY i32 put_value(Call call, u64 dst, T value, i32 pe, i32 qp) {
  Logged logged(call, pe, sizeof(T));
  u64 there = locate_or_report(call, dst, sizeof(T), sizeof(T), pe);
  if (there == 0) return -1;
  if (is_over_network(there))
    return over_network(call.ctx, [&] { return network_put_value(call, dst, value, sizeof(T), pe, qp); });
  if (is_elected()) store_system<T>(there, value);
  return 0;
}

// A put of few bytes, from any memory of the device: through a network they travel inside the request.
MORI_BODY i32 put_small(Call call, u64 dst, u64 src, u64 num_bytes, i32 pe, i32 qp) {
  bool fits = num_bytes == 1 || num_bytes == 2 || num_bytes == 4 || num_bytes == 8;
  // the proxy's loop stores a value as one word, where a card writes any bytes
  if (!fits || !is_over_network(locate(call.ctx, dst, num_bytes, pe)) ||
      (provider_of(call.ctx) == kProxy && (dst & (num_bytes - 1)) != 0))
    return put(call, Scope::kThread, true, dst, src, num_bytes, pe, qp);
  Logged logged(call, pe, num_bytes);
  return over_network(call.ctx, [&] {
    u64 value = 0;
#pragma clang loop unroll(disable)
    for (u64 i = 0; i < num_bytes; i++) value |= (u64)*global<const u8>(src + i) << 8 * i;
    return network_put_value(call, dst, value, (u32)num_bytes, pe, qp);
  });
}

template <class T>
MORI_BODY T apply_by_one(u64 there, T value, T compare, i32 op) {
  switch (op) {
    case kInc:
    case kFetchInc:
      return add_system<T>(there, 1);
    case kAdd:
    case kSignalAdd:
    case kFetchAdd:
      return add_system<T>(there, value);
    case kAnd:
    case kFetchAnd:
      return and_system<T>(there, value);
    case kOr:
    case kFetchOr:
      return or_system<T>(there, value);
    case kXor:
    case kFetchXor:
      return xor_system<T>(there, value);
    case kCompareSwap:
      return compare_swap_system<T>(there, compare, value);
    case kFetch:
      return load_system<T>(there);
    default:  // kSet, kSignalSet, kSwap; is_atomic_op() let nothing else through
      return swap_system<T>(there, value);
  }
}

MORI_INLINE bool is_atomic_op(i32 op) {
  return (op >= kInc && op <= kXor) || op == kSignalSet || op == kSignalAdd || (op >= kFetch && op <= kCompareSwap);
}

// 0 without effect, and recorded, for a PE, address, alignment or operation that cannot be served.
template <class T>
MORI_INLINE u64 atomic_target(Call call, u64 dst, i32 op, i32 pe) {
  return locate_or_report(call, dst, is_atomic_op(op) ? sizeof(T) : ~0ull, sizeof(T), pe);
}

template <class T>
MORI_BODY i32 atomic_nonfetch(Call call, u64 dst, T value, T compare, i32 op, i32 pe, i32 qp) {
  Logged logged(call, pe, sizeof(T));
  u64 there = atomic_target<T>(call, dst, op, pe);
  if (there == 0) return -1;
  if (is_over_network(there))
    return over_network(call.ctx, [&] { return network_atomic(call, dst, value, compare, sizeof(T), op, nullptr, pe, qp); });
  if (is_elected()) apply_by_one<T>(there, value, compare, op);
  return 0;
}

// The operand lies in memory, as 4 or 8 bytes.
MORI_BODY i32 atomic_from(Call call, u64 dst, u64 value_address, u64 num_bytes, i32 op, i32 pe, i32 qp) {
  // it may have been written by another thread of the program
  program_barrier();
  if (num_bytes == 4) return atomic_nonfetch<u32>(call, dst, *global<u32>(value_address), 0, op, pe, qp);
  if (num_bytes == 8) return atomic_nonfetch<u64>(call, dst, *global<u64>(value_address), 0, op, pe, qp);
  if (is_elected()) report_by_one(call, kRefused, pe, 0, dst, num_bytes, 0, 0);
  return -1;
}

template <class T>
MORI_BODY T atomic_fetch(Call call, u64 dst, T value, T compare, i32 op, i32 pe, i32 qp) {
  Logged logged(call, pe, sizeof(T));
  u64 there = atomic_target<T>(call, dst, op, pe);
  u64 old = 0;
  if (is_over_network(there)) {
    gather_stores(call.ctx);
    if (is_elected()) {
      release_to_system(warm(call.ctx));
      if (network_atomic(call, dst, value, compare, sizeof(T), op, &old, pe, qp) != 0) old = 0;
    }
  } else if (there != 0 && is_elected()) {
    old = apply_by_one<T>(there, value, compare, op);
  }
  return broadcast((T)old);
}

}  // namespace mori
