// ionic: doorbells, requests of 64 bytes whose color says in which pass of the ring they were written, and a ring of completions
// of 32 bytes that software acknowledges. Big endian but for the request's index and the registers.
#pragma once

#include "soft_hca.h"

namespace soft {

constexpr u32 kIonicStatuses[kNumFaults] = {0, 1, 2, 3, 4, 8, 9, 10, 11, 12};

// bits around the index: `doorbell_values` of host/nic/soft_hca.py hands them out
inline u64 ionic_sq_bits(const QueuePair* q) { return static_cast<u64>(q->number) << 24; }
inline u64 ionic_cq_bits(const QueuePair* q) { return static_cast<u64>(q->number) << 24 | 1ull << 48; }

inline void ionic_ring(QueuePair* q, u64 value) {
  u64 candidate = q->producer + ((value - q->producer) & q->mask());
  if (q->failing()) return q->advance(candidate);
  u64 bits = value & ~q->mask();
  if (bits != ionic_sq_bits(q))
    return q->reject("bits around the doorbell's index: want {want:#x}, got {got:#x}", ionic_sq_bits(q), bits);
  q->advance(candidate);
}

inline void ionic_decode(QueuePair* q, Message* m) {
  u8 w[64];
  q->dma.read(q->dma.context, q->sq + (m->index & q->mask()) * 64, 64, w);
  u32 opcode = w[8], flags = be16(w + 10);
  u32 color = m->index & q->num_wqes ? 0 : 0x10;
  m->want((flags & 0x10) == color, kOperation, "color: want {want:#x}, got {got:#x}", color, flags & 0x10);
  m->want(le64(w) == m->index, kOperation, "index in the request: want {want:#x}, got {got:#x}", m->index, le64(w));
  u32 allowed = opcode == 0x21 ? 0x1c : 0x18;
  m->want((flags & ~allowed) == 0, kOperation, "flags: want only bits of {want:#x}, got {got:#x}", allowed, flags);
  m->signaled = flags & 8;
  bool is_inline = opcode == 0x21 && (flags & 4);
  m->want(w[9] == (is_inline ? 0 : 1), kOperation, "number of local parts: want {want}, got {got}", is_inline ? 0 : 1, w[9]);
  want_zero(m, w, 12, 16);
  m->remote = be64(w + 16);
  m->rkey = be32(w + 24);
  if (opcode == 0x21 || opcode == 0x02) {
    m->kind = is_inline ? kInline : opcode == 0x21 ? kWrite : kRead;
    m->bytes = be32(w + 28);
    want_length(m, is_inline ? 32 : kMaxMessage);
    if (!is_inline) {
      m->local = be64(w + 32);
      m->lkey = be32(w + 44);
      want_same_length(m, be32(w + 40));
      want_zero(m, w, 48, 64);
    } else if (m->refusal.fault == kNone) {
      __builtin_memcpy(m->data, w + 32, m->bytes);
      want_zero(m, w, 32 + m->bytes, 64);
    }
  } else if (opcode == 0x04 || opcode == 0x05) {
    m->kind = opcode == 0x04 ? kCompareSwap : kFetchAdd;
    m->value = be64(w + 28);
    m->compare = be64(w + 36);
    m->lkey = be32(w + 44);
    m->local = be64(w + 48);
    m->bytes = 8;
    want_zero(m, w, 56, 64);
  } else {
    m->refuse(kOperation, "opcode: want 0x21, 0x02, {want:#x} or 0x05, got {got:#x}", 0x04, opcode);
  }
}

// Writes nothing if there is no room for it, or software has acknowledged what was not there; `refusal` says which.
inline void ionic_complete(QueuePair* q, const Message* m, Refusal* refusal) {
  u64 value = read64(q->dma, q->cq_doorbell), mask = q->num_cqes - 1;
  // 0: not rung yet
  u64 bits = value ? value & ~mask : ionic_cq_bits(q);
  u64 acknowledged = q->acknowledged + ((value - q->acknowledged) & mask);
  u64 open = q->written - acknowledged;
  if (bits != ionic_cq_bits(q))
    *refusal = {kOperation, "bits around the completion doorbell's index: want {want:#x}, got {got:#x}", ionic_cq_bits(q), bits};
  else if (acknowledged > q->written)
    *refusal = {kOperation, "completions acknowledged: want at most {want}, got {got}", q->written, acknowledged};
  else if (open >= mask)
    *refusal = {kOperation, "completions not acknowledged: want fewer than {want}, got {got}", mask, open};
  if (refusal->fault != kNone) return;
  q->acknowledged = acknowledged;
  u8 c[32] = {};
  Fault fault = m->refusal.fault;
  put_be(c + 4, (m->index + 1) & 0xffffff, 4);
  put_le(c + 16, m->index & q->mask(), 8);
  put_be(c + 24, fault == kNone ? m->bytes : kIonicStatuses[fault], 4);
  u32 color = q->written & q->num_cqes ? 0 : 1;
  put_be(c + 28, static_cast<u64>(q->number) << 8 | 2 << 5 | (fault == kNone ? 0 : 2) | color, 4);
  u64 at = q->cq + (q->written & mask) * 32;
  q->dma.write(q->dma.context, at, 24, c);
  q->dma.write(q->dma.context, at + 24, 4, c + 24);
  q->dma.write(q->dma.context, at + 28, 4, c + 28);
  ++q->written;
}

}  // namespace soft
