// mlx5, big endian: doorbells, requests of 64 bytes, and the one completion of 64 bytes that is written over.
#pragma once

#include "soft_hca.h"

namespace soft {

constexpr u32 kMlx5Syndromes[kNumFaults] = {0, 0x01, 0x02, 0x04, 0x05, 0x12, 0x13, 0x14, 0x15, 0x16};
constexpr char kMlx5Named[] = "doorbell: want the first 8 bytes of the last request, {want:#018x}, got {got:#018x}";

// The register says that there is something, the record up to where. It may be ahead: the doorbell for that is still to come.
inline void mlx5_ring(QueuePair* q, u64 value) {
  u8 control[8], record[4] = {};
  put_le(control, value, 8);
  q->dma.read(q->dma.context, q->record, 4, record);
  u32 producer = be32(record), number = be24(control + 4);
  u64 candidate = q->producer + static_cast<u16>(producer - q->producer);
  if (q->failing()) return q->advance(candidate);
  if (producer >> 16) return q->reject("doorbell record: want at most {want:#x}, got {got:#x}", 0xffff, producer);
  if (number != q->number) return q->reject("queue pair in the doorbell: want {want:#x}, got {got:#x}", q->number, number);
  u16 behind = static_cast<u16>(candidate - 1 - be16(control + 1));
  if (behind >= candidate - q->rung)
    return q->reject("request that the doorbell names: want one that the record covers, up to {want:#x}, got {got:#x}",
                     (candidate - 1) & 0xffff, be16(control + 1));
  u64 named = candidate - 1 - behind;
  q->rung = named + 1;
  if (named >= q->fetched) {
    q->named_index = named;
    q->named = value;
  } else if (named + 1 == q->fetched && value != q->last_control) {
    return q->reject(kMlx5Named, q->last_control, value);
  }
  q->advance(candidate);
}

inline void mlx5_decode(QueuePair* q, Message* m) {
  u8 w[64];
  q->dma.read(q->dma.context, q->sq + (m->index & q->mask()) * 64, 64, w);
  q->last_control = le64(w);
  if (q->named_index == m->index) {
    m->want(q->named == le64(w), kOperation, kMlx5Named, le64(w), q->named);
    q->named_index = kNever;
  }
  u32 opcode = w[3], ds = w[7];
  m->want(w[0] == 0, kOperation, "opcode modifier: want {want}, got {got:#x}", 0, w[0]);
  m->want(be16(w + 1) == static_cast<u16>(m->index), kOperation, "index in the request: want {want:#x}, got {got:#x}",
          m->index & 0xffff, be16(w + 1));
  u32 number = be24(w + 4);
  m->want(number == q->number, kOperation, "queue pair in the request: want {want:#x}, got {got:#x}", q->number, number);
  m->want(w[11] == 0 || w[11] == 8, kOperation, "byte 11, completion mode: want 0 or {want}, got {got:#x}", 8, w[11]);
  m->signaled = w[11] == 8;
  want_zero(m, w, 8, 11);
  want_zero(m, w, 12, 16);
  m->remote = be64(w + 16);
  m->rkey = be32(w + 24);
  want_zero(m, w, 28, 32);
  u32 want_ds = 3;
  if (opcode == 0x08 && (w[32] & 0x80)) {
    m->kind = kInline;
    m->bytes = be32(w + 32) & 0x7fffffff;
    want_length(m, 28);
    if (m->refusal.fault == kNone) {
      __builtin_memcpy(m->data, w + 36, m->bytes);
      want_zero(m, w, 36 + m->bytes, 64);
      want_ds = 2 + static_cast<u32>((4 + m->bytes + 15) / 16);
    }
  } else if (opcode == 0x08 || opcode == 0x10) {
    m->kind = opcode == 0x08 ? kWrite : kRead;
    m->bytes = be32(w + 32);
    m->lkey = be32(w + 36);
    m->local = be64(w + 40);
    want_length(m, kMaxMessage);
    want_zero(m, w, 48, 64);
  } else if (opcode == 0x11 || opcode == 0x12) {
    m->kind = opcode == 0x11 ? kCompareSwap : kFetchAdd;
    m->value = be64(w + 32);
    m->compare = be64(w + 40);
    m->bytes = 8;
    m->lkey = be32(w + 52);
    m->local = be64(w + 56);
    m->want(be32(w + 48) == 8, kLength, "length of an atomic: want {want}, got {got}", 8, be32(w + 48));
    want_ds = 4;
  } else {
    m->refuse(kOperation, "opcode: want 0x08, {want:#x}, 0x11 or 0x12, got {got:#x}", 0x10, opcode);
  }
  m->want(ds == want_ds, kOperation, "ds: want {want}, got {got}", want_ds, ds);
}

inline void mlx5_complete(QueuePair* q, const Message* m) {
  u8 c[64] = {};
  Fault fault = m->refusal.fault;
  put_be(c + 44, m->bytes, 4);
  put_be(c + 48, q->written + 1, 8);  // stands for the time
  put_be(c + 56, q->number, 4);
  if (fault != kNone) {
    c[54] = static_cast<u8>(0x80 | fault);
    c[55] = static_cast<u8>(kMlx5Syndromes[fault]);
  }
  put_be(c + 60, m->index & 0xffff, 2);
  // nobody may rely on the owner bit of a completion that is written over: it flips
  c[63] = static_cast<u8>((fault == kNone ? 0 : 13) << 4 | (q->written & 1));
  q->dma.write(q->dma.context, q->cq, 56, c);
  q->dma.write(q->dma.context, q->cq + 56, 4, c + 56);
  q->dma.write(q->dma.context, q->cq + 60, 4, c + 60);
  ++q->written;
}

}  // namespace soft
