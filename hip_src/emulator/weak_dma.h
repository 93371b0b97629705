// Weak-memory mode: the network cards' accesses, `WeakMemory.dma` of weak.py.
//
// A card keeps nothing back and caches nothing. It reads what has reached the system, and what it writes is there at
// once and counts as released. A context is the `WeakLaunch` of a card: its `device` is CARDS + PE, its `home` the PE.
#pragma once
#include "weak.h"

namespace {

WeakGroup no_group;  // its number, 0, is no workgroup's

Reader card_of(void* context) {
  auto* l = static_cast<WeakLaunch*>(context);
  return Reader{reinterpret_cast<WeakSystem*>(l->system), l, &no_group, nullptr, nullptr, nullptr, 0, 0, 0};
}

// Notes a store to byte `b` that differs from the last one that a release of system scope covers, and is newer. Whether
// it happens to be at the system makes no difference.
void check_released(Reader& r, const Word* word, int b) {
  WeakSystem* s = r.s;
  u64 floor = 0;
  u32 value = word->baseline;
  for (u32 i = word->newest; i; i = version(s, i).older) {
    const Version& v = version(s, i);
    const u64 at = order(word, v, ~0u);
    if (!(v.bytes >> b & 1) || v.released_system == NEVER || at < floor) continue;
    floor = at;
    value = v.value;
  }
  for (u32 i = word->newest; i; i = version(s, i).older) {
    const Version& v = version(s, i);
    if (!(v.bytes >> b & 1) || order(word, v, ~0u) <= floor || !((v.value ^ value) & 0xFFu << 8 * b)) continue;
    note_race(r, word_address(word), v, SYSTEM);
    return;
  }
}

}  // namespace

extern "C" {

void mori_emu_weak_dma_read(void* context, u64 address, u64 bytes, void* out) {
  Reader r = card_of(context);
  auto* to = static_cast<u8*>(out);
  for_words(address, bytes, [&](u64 at, u8 m, i64 offset) {
    Word* word = word_of(r, at, false);
    const u32 x = word ? at_system(r.s, word, m) : *reinterpret_cast<const volatile u32*>(at);
    for (int b = 0; b < 4; b++) {
      if (!(m >> b & 1)) continue;
      to[offset + b] = static_cast<u8>(x >> 8 * b);
      if (word) check_released(r, word, b);
    }
  });
}

void mori_emu_weak_dma_write(void* context, u64 address, u64 bytes, const void* data) {
  Reader r = card_of(context);
  if (!weak_store(r, address, bytes, SYSTEM << 4, static_cast<const u8*>(data))) r.s->card_full = 1;
}

// operation 0: add, 1: compare and swap; of 8 bytes. Returns the old value.
u64 mori_emu_weak_dma_atomic(void* context, u64 address, u32 operation, u64 value, u64 compare) {
  Reader r = card_of(context);
  u64 old = 0;
  const bool good = weak_atomic(r, address, 8, SYSTEM << 4, &old, [&](u64 seen) {
    if (operation == 0) return seen + value;
    return seen == compare ? value : seen;
  });
  if (!good) r.s->card_full = 1;
  return old;
}
}
