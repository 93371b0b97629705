// What the soft HCA does with a request that it has fetched: checks keys and ranges, and moves its bytes, in pieces or at once.
#pragma once

#include "soft_hca.h"

namespace soft {

// ---------------------------------------------------------------------------------------------------------------- choices
struct Dice {
  u64 state;
  // splitmix64
  u64 next() {
    u64 z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  u64 below(u64 n) { return next() % n; }
};

// ----------------------------------------------------------------------------------------------------------- plain memory
template <class T>
inline bool move_one(u64* address, u64* bytes, u8** host, bool load) {
  if (*bytes < sizeof(T) || *address % sizeof(T)) return false;
  T value;
  if (load) {
    value = __atomic_load_n(reinterpret_cast<T*>(*address), __ATOMIC_ACQUIRE);
    __builtin_memcpy(*host, &value, sizeof(T));
  } else {
    __builtin_memcpy(&value, *host, sizeof(T));
    __atomic_store_n(reinterpret_cast<T*>(*address), value, __ATOMIC_RELEASE);
  }
  *address += sizeof(T);
  *bytes -= sizeof(T);
  *host += sizeof(T);
  return true;
}

inline void move_plain(u64 address, u64 bytes, u8* host, bool load) {
  while (bytes)
    if (!move_one<u64>(&address, &bytes, &host, load) && !move_one<u32>(&address, &bytes, &host, load) &&
        !move_one<u16>(&address, &bytes, &host, load))
      move_one<u8>(&address, &bytes, &host, load);
}

inline void plain_read(void*, u64 address, u64 bytes, void* out) { move_plain(address, bytes, static_cast<u8*>(out), true); }

inline void plain_write(void*, u64 address, u64 bytes, const void* data) {
  move_plain(address, bytes, static_cast<u8*>(const_cast<void*>(data)), false);
}

inline u64 plain_atomic(void*, u64 address, u32 op, u64 value, u64 compare) {
  u64* word = reinterpret_cast<u64*>(address);
  if (op == 0) return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
  __atomic_compare_exchange_n(word, &compare, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return compare;
}

inline Dma dma_of(const u64* words) {
  if (!words) return {nullptr, plain_read, plain_write, plain_atomic};
  Dma dma;
  static_assert(sizeof(dma) == 32, "four words");
  __builtin_memcpy(&dma, words, sizeof(dma));
  return dma;
}

// ----------------------------------------------------------------------------------------------------------------- lookup
inline QueuePair* find(Hca* h, u32 number) {
  for (u32 i = 0; i < h->num_slots; ++i)
    if (h->queue_pairs[i] && h->queue_pairs[i]->number == number) return h->queue_pairs[i];
  return nullptr;
}

inline const Region* find_region(Hca* h, u32 key) {
  for (u32 i = 0; key && i < h->num_regions; ++i)
    if (h->regions[i].key == key) return h->regions + i;
  return nullptr;
}

inline bool holds(const Region* r, u64 address, u64 bytes) {
  return address >= r->address && bytes <= r->bytes && address - r->address <= r->bytes - bytes;
}

// ---------------------------------------------------------------------------------------------------------------- messages
// late mode: a write that may overtake what waits for an answer does, but for one time in so many
constexpr u32 kOvertakeIn = 4;

struct Ends {
  const Region *local, *remote;
};

// What the two cards check before anything moves, this one first. Null regions where something was refused, or none is needed.
inline Ends check_memory(Hca* h, QueuePair* q, Message* m) {
  Ends ends{};
  m->want(q->peer != 0, kOperation, "queue pair: want a connected one, got {got:#x}, which is not", 0, q->number);
  const QueuePair* peer = q->peer ? h->queue_pairs[q->peer_slot] : nullptr;
  bool there = peer && peer->number == q->peer && peer->peer == q->number;
  m->want(!q->peer || there, kRetry, "the peer's queue pair {want:#x}: want one that is connected to {got:#x}, there is none",
          q->peer, q->number);
  if (m->refusal.fault != kNone) return ends;
  static const char outside[] = "address {got:#x}: want all of {want} bytes in the memory of its key";
  bool atomic = m->is_atomic();
  if (m->kind != kInline) {
    const Region* r = find_region(h, m->lkey);
    m->want(r && r->pe == q->pe, kProtection, "lkey: want one of PE {want}, got {got:#x}", q->pe, m->lkey);
    if (r) m->want(holds(r, m->local, m->bytes), kProtection, outside, m->bytes, m->local);
    m->want(!atomic || m->local % 8 == 0, kOperation, "local address: want a multiple of {want}, got {got:#x}", 8, m->local);
    ends.local = r;
  }
  if (m->refusal.fault != kNone) return ends;
  const Region* r = find_region(h, m->rkey);
  m->want(r && r->pe == peer->pe && r->remote, kRemoteAccess, "rkey: want one of PE {want}, got {got:#x}", peer->pe, m->rkey);
  if (r) m->want(holds(r, m->remote, m->bytes), kRemoteAccess, outside, m->bytes, m->remote);
  m->want(!atomic || m->remote % 8 == 0, kRemoteInvalid, "remote address: want a multiple of {want}, got {got:#x}", 8, m->remote);
  ends.remote = r;
  return ends;
}

constexpr u64 kChunk = 4096;

inline void copy(const Dma& from, u64 source, const Dma& to, u64 target, u64 bytes) {
  u8 buffer[kChunk];
  while (bytes) {
    // no 8-byte word of the target is cut
    u64 n = kChunk - target % 8 < bytes ? kChunk - target % 8 : bytes;
    from.read(from.context, source, n, buffer);
    to.write(to.context, target, n, buffer);
    source += n, target += n, bytes -= n;
  }
}

// One piece, as bit `piece` of `left`. The source is read now, so as late as its owner must expect.
inline void move_piece(const Message* m, const Ends& ends, u64 piece) {
  u64 target = m->kind == kRead ? m->local : m->remote;
  u64 first = (target & ~7ull) + piece * m->stride, last = first + m->stride;
  if (first < target) first = target;
  if (last > target + m->bytes) last = target + m->bytes;
  u64 skip = first - target, bytes = last - first;
  if (m->kind == kInline)
    ends.remote->dma.write(ends.remote->dma.context, first, bytes, m->data + skip);
  else if (m->kind == kWrite)
    copy(ends.local->dma, m->local + skip, ends.remote->dma, first, bytes);
  else
    copy(ends.remote->dma, m->remote + skip, ends.local->dma, first, bytes);
}

inline void record(Hca* h, const QueuePair* q, u64 index, const Refusal& r) {
  if (h->num_violations < kMaxViolations)
    h->violations[h->num_violations] = {q->number, index, r.want, r.got, r.what, r.fault, q->pe};
  ++h->num_violations;
}

// Past all messages that are at their places. What has overtaken one that fails is flushed as what is behind it.
inline void advance_placed(QueuePair* q) {
  for (; q->placed < q->fetched && q->message(q->placed)->placed; ++q->placed)
    if (q->broken) q->message(q->placed)->refuse(kFlush, "", 0, 0);
}

inline bool is_good(Hca* h, QueuePair* q, const Message* m) {
  Message copy = *m;
  check_memory(h, q, &copy);
  return copy.refusal.fault == kNone;
}

// The message that moves next: the oldest one that is not at its place, or, if that one and all behind it wait for an answer, the
// first write that has no such order to keep. Nothing overtakes what will fail.
inline Message* choose_message(Hca* h, QueuePair* q, Dice* dice) {
  Message* oldest = q->message(q->placed);
  for (u64 i = q->placed; i < q->fetched && !q->broken; ++i) {
    Message* m = q->message(i);
    if (m->placed) continue;
    if (!is_good(h, q, m)) break;
    if (m->has_answer()) continue;
    return m != oldest && dice->below(kOvertakeIn) != 0 ? m : oldest;
  }
  return oldest;
}

// Move one piece of a message, or all of it. No later message has begun, but for a write behind reads and atomics.
inline void place(Hca* h, QueuePair* q, Dice* dice, bool all) {
  Message* m = all ? q->message(q->placed) : choose_message(h, q, dice);
  bool atomic = m->is_atomic();
  if (q->broken) m->refusal = {kFlush, "", 0, 0};
  Ends ends{};
  if (m->refusal.fault == kNone) ends = check_memory(h, q, m);
  if (m->refusal.fault != kNone) {
    if (!q->broken) record(h, q, m->index, m->refusal);
    q->broken = true;
    m->placed = true;
    return advance_placed(q);
  }
  if (m->stride == 0) {
    u64 target = m->kind == kRead ? m->local : m->remote;
    u64 pieces = all ? 1 : 1 + dice->below(kMaxPieces), span = target % 8 + m->bytes;
    m->stride = ((span + pieces - 1) / pieces + 7) & ~7ull;
    // an atomic has two: what it does to the peer's word, then the answer
    m->left = atomic ? 3 : (1ull << (span + m->stride - 1) / m->stride) - 1;
  }
  do {
    u64 piece = static_cast<u64>(__builtin_ctzll(m->left));
    if (!atomic)
      for (u64 skip = dice->below(static_cast<u64>(__builtin_popcountll(m->left))); skip; --skip)
        piece = static_cast<u64>(__builtin_ctzll(m->left & ~((2ull << piece) - 1)));
    m->left &= ~(1ull << piece);
    if (!atomic)
      move_piece(m, ends, piece);
    else if (piece == 0)
      m->old = ends.remote->dma.atomic(ends.remote->dma.context, m->remote, m->kind == kCompareSwap, m->value, m->compare);
    else
      ends.local->dma.write(ends.local->dma.context, m->local, 8, &m->old);
  } while (all && m->left);
  if (m->left == 0) {
    q->moved += m->bytes;
    m->placed = true;
    advance_placed(q);
  }
}

}  // namespace soft
