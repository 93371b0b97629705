// Byte ledger: what the waves of a launch access in global memory, by the PE that owns the memory. See docs/emulator.md.
//
// The structures are those of mori_triton/emulator/ledger.py. A launch runs on one host thread at a time: plain counters.
#pragma once
#include "memory.h"

enum class Kind : u32 { LOAD, STORE, ATOMIC, COUNT };
constexpr u64 MESSAGE_BYTES = 256;

struct Counts {
  u64 operations;  // active lanes of every instruction
  u64 bytes;       // lanes of one instruction that share an address count once; every atomic counts
  u64 messages;    // runs of consecutive addresses within an aligned block of MESSAGE_BYTES
};
struct OwnedRange {
  u64 low, high;
  u64 owner;  // row of `counts`
};
struct Ledger {
  u64 ranges, num_ranges;  // OwnedRange, by address
  u64 counts;              // Counts [owners + 1][Kind::COUNT]; the last row: memory that is in no range
  u64 nobody;              // number of that row
};

INLINE u64 owner_of(const Ledger* ledger, u64 address) {
  auto* table = reinterpret_cast<const OwnedRange*>(ledger->ranges);
  u64 low = 0, high = ledger->num_ranges;
  while (low < high) {
    u64 middle = (low + high) / 2;
    if (table[middle].low <= address) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low && address < table[low - 1].high ? table[low - 1].owner : ledger->nobody;
}

// One instruction's accesses of `size` bytes at address(lane), for each lane of `lanes`, lowest first.
template <class M, class F>
INLINE void count(Wave* w, Kind kind, M lanes, u64 size, F address) {
  auto* ledger = reinterpret_cast<const Ledger*>(memory_of(w)->ledger);
  auto* counts = reinterpret_cast<Counts*>(ledger->counts);
  u64 end = 0, open = 0;  // of the last message: where it ends, whose memory
  for_lanes(lanes, [&](int l) {
    const u64 at = address(l), owner = owner_of(ledger, at);
    Counts& c = counts[owner * static_cast<u32>(Kind::COUNT) + static_cast<u32>(kind)];
    c.operations++;
    if (kind == Kind::ATOMIC) {
      c.bytes += size;
      c.messages++;
      return;
    }
    bool again = false;
    for_lanes(lanes & ((M{1} << l) - 1), [&](int earlier) { again |= address(earlier) == at; });
    if (again) return;
    c.bytes += size;
    const bool goes_on = at == end && at % MESSAGE_BYTES && owner == open;
    c.messages += (at + size - 1) / MESSAGE_BYTES - at / MESSAGE_BYTES + !goes_on;
    end = at + size;
    open = owner;
  });
}

template <int W>
COLD void count_lanes(Wave* w, Kind kind, typename Access<W>::Kind shape, Mask<W> lanes, u64 base, u64 size,
                      const u64* addresses) {
  if (!lanes) return;
  const int first = lowest(lanes);
  count(w, kind, lanes, size, [&](int l) {
    return shape == Access<W>::RUN ? base + (l - first) * size : shape == Access<W>::UNIFORM ? base : addresses[l];
  });
}

// after `resolve`
template <int W>
INLINE void count_access(Wave* w, Kind kind, const Access<W>& a, u64 how) {
  if (__builtin_expect(memory_of(w)->ledger != 0, 0) && mode_of(how) < SCRATCH)
    count_lanes<W>(w, kind, a.kind, a.lanes, a.base, a.size, a.addresses);
}
