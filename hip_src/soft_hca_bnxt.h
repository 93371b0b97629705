// bnxt_re, little endian: doorbells, requests of three slots of 16 bytes, the table of packet numbers, and the one completion of
// 32 bytes that is written over.
#pragma once

#include "soft_hca.h"

namespace soft {

constexpr u32 kBnxtStatuses[kNumFaults] = {0, 2, 3, 4, 0xB, 6, 7, 8, 0xA, 9};

inline u32 log2_of(u64 power) { return static_cast<u32>(__builtin_ctzll(power)); }

inline void bnxt_ring(QueuePair* q, u64 value) {
  u32 low = static_cast<u32>(value), high = static_cast<u32>(value >> 32);
  u32 slot = low & 0xffffff, epoch = low >> 24 & 1;
  u64 candidate = q->producer + ((slot / 3 - q->producer) & q->mask());
  if (q->failing()) return q->advance(candidate);
  u32 want_high = q->number | 1u << 26;
  if (high != want_high)
    return q->reject("doorbell's upper half: want queue pair, valid, type SQ, {want:#x}, got {got:#x}", want_high, high);
  if (low >> 25) return q->reject("bits 25 to 31 of the doorbell: want {want}, got {got:#x}", 0, low >> 25);
  if (slot % 3 || slot / 3 >= q->num_wqes)
    return q->reject("slot in the doorbell: want a multiple of 3 below {want}, got {got}", 3ull * q->num_wqes, slot);
  u64 want_epoch = candidate >> log2_of(q->num_wqes) & 1;
  if (epoch != want_epoch) return q->reject("epoch in the doorbell: want {want}, got {got}", want_epoch, epoch);
  q->advance(candidate);
}

// The card takes a request's packet numbers from the table.
inline void bnxt_check_psn(QueuePair* q, Message* m) {
  u64 entry = read64(q->dma, q->psn_table + (m->index & (q->num_psns - 1)) * 8);
  u64 packets = m->kind == kWrite || m->kind == kRead ? (m->bytes + q->mtu - 1) / q->mtu : 1;
  u32 next = static_cast<u32>((q->psn + packets) & 0xffffff);
  u64 want = static_cast<u64>(q->psn) | static_cast<u64>(next) << 24 | (m->index & q->mask()) * 3 << 48;
  m->want(entry == want, kOperation, "packet number table (slot, next, start): want {want:#018x}, got {got:#018x}", want, entry);
  q->psn = next;
}

inline void bnxt_decode(QueuePair* q, Message* m) {
  u8 w[48];
  q->dma.read(q->dma.context, q->sq + (m->index & q->mask()) * 48, 48, w);
  u32 opcode = w[0], flags = w[1];
  m->want(w[2] == 3, kOperation, "ws: want {want}, got {got}", 3, w[2]);
  want_zero(m, w, 3, 4);
  m->want(opcode == 0x04 || opcode == 0x06 || opcode == 0x08 || opcode == 0x0B, kOperation,
          "opcode: want 0x04, 0x06, {want:#x} or 0x0b, got {got:#x}", 0x08, opcode);
  u32 allowed = opcode == 0x04 ? 0x11 : 0x01;
  m->want((flags & ~allowed) == 0, kOperation, "flags: want only bits of {want:#x}, got {got:#x}", allowed, flags);
  m->signaled = flags & 1;
  if (opcode == 0x04 || opcode == 0x06) {
    m->kind = opcode == 0x06 ? kRead : flags & 0x10 ? kInline : kWrite;
    want_zero(m, w, 4, 8);
    m->bytes = le64(w + 8);
    m->remote = le64(w + 16);
    m->rkey = le32(w + 24);
    want_zero(m, w, 28, 32);
    want_length(m, m->kind == kInline ? 16 : kMaxMessage);
    if (m->kind != kInline) {
      m->local = le64(w + 32);
      m->lkey = le32(w + 40);
      want_same_length(m, le32(w + 44));
    } else if (m->refusal.fault == kNone) {
      __builtin_memcpy(m->data, w + 32, m->bytes);
      want_zero(m, w, 32 + m->bytes, 48);
    }
  } else {
    m->kind = opcode == 0x08 ? kCompareSwap : kFetchAdd;
    m->rkey = le32(w + 4);
    m->remote = le64(w + 8);
    m->value = le64(w + 16);
    m->compare = le64(w + 24);
    m->local = le64(w + 32);
    m->lkey = le32(w + 40);
    m->bytes = 8;
    m->want(le32(w + 44) == 8, kLength, "length of an atomic: want {want}, got {got}", 8, le32(w + 44));
  }
  if (m->refusal.fault == kNone) bnxt_check_psn(q, m);
}

inline void bnxt_complete(QueuePair* q, const Message* m) {
  u8 c[32] = {};
  put_le(c, q->number, 8);  // what the driver has named the queue pair
  put_le(c + 8, (m->index + 1) & q->mask(), 4);
  // a queue of one entry begins anew with each: so does its phase
  put_le(c + 24, kBnxtStatuses[m->refusal.fault] << 8 | (~q->written & 1), 4);
  q->dma.write(q->dma.context, q->cq + 16, 16, c + 16);
  q->dma.write(q->dma.context, q->cq, 8, c);
  q->dma.write(q->dma.context, q->cq + 8, 8, c + 8);
  ++q->written;
}

}  // namespace soft
