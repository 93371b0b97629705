// What every memory instruction of the emulated device shares: bounds checks, faults, lane addresses, copies.
//
// A wave's vector register is W consecutive 32-bit words, one a lane. Global memory is host memory that other threads
// and processes may use at the same time, so lane accesses of 4 and 8 aligned bytes are never split.
#pragma once
#include "wave.h"

using u16 = unsigned short;
using i64 = long long;

#define INLINE inline __attribute__((always_inline))
#define COLD __attribute__((noinline, cold))

// fields of the wave header that only the memory functions use; the offset is that of state.py
struct WaveMemory {
  u64 weak;        // WeakLaunch of the weak-memory mode, 0: normal mode
  u64 fault_size;  // bytes of the access that faulted
  u64 ledger;      // `Ledger` of the wave's launch, 0: accesses are not counted
};
constexpr u64 WAVE_MEMORY = 512 + 8 * 40;
INLINE WaveMemory* memory_of(Wave* w) { return reinterpret_cast<WaveMemory*>(reinterpret_cast<u8*>(w) + WAVE_MEMORY); }

enum Fault : u32 {
  OUTSIDE = 1,
  LDS_OUTSIDE = 2,
  MISALIGNED = 3,
  SCRATCH_OUTSIDE = 5,
  LDS_MISALIGNED = 6,
  ARENA_FULL = 7
};

// `how` of every access: bits as packed by accesses.py
enum Mode : u32 {
  BASE_AND_OFFSET = 0,
  ADDRESS = 1,
  BUFFER = 2,
  BUFFER_OFFSET = 3,
  SCRATCH = 4,
  SCRATCH_OFFSET = 5,
  LOCAL = 6
};
enum Scope : u32 { WORKGROUP = 0, AGENT = 1, SYSTEM = 2 };
INLINE Mode mode_of(u64 how) { return static_cast<Mode>(how & 7); }
INLINE bool scaled(u64 how) { return how & 8; }
INLINE Scope scope_of(u64 how) { return static_cast<Scope>(how >> 4 & 3); }
INLINE bool returns(u64 how) { return how & 64; }
INLINE u32 operation_of(u64 how) { return how >> 8 & 255; }
INLINE u32 pc_of(u64 how) { return static_cast<u32>(how >> 32); }

COLD inline u32 fault(Wave* w, Fault kind, u64 how, u64 address, u64 size) {
  w->fault = kind;
  w->fault_pc = pc_of(how);
  w->fault_addr = address;
  memory_of(w)->fault_size = size;
  return 0;
}

// the ranges are sorted by start; the one hit last is tried first
COLD inline bool find_range(Wave* w, u64 a, u64 end) {
  const u64* table = reinterpret_cast<const u64*>(w->ranges);
  u64 low = 0, high = w->nranges;
  while (low < high) {
    u64 middle = (low + high) / 2;
    if (table[2 * middle] <= a) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0 || end < a || table[2 * low - 1] < end) return false;
  w->last_lo = table[2 * low - 2];
  w->last_hi = table[2 * low - 1];
  return true;
}

INLINE bool in_range(Wave* w, u64 a, u64 n) {
  u64 end = a + n;
  if (__builtin_expect(w->last_lo <= a && end <= w->last_hi && a <= end, 1)) return true;
  return find_range(w, a, end);
}

template <int W>
struct Types;
template <>
struct Types<32> {
  using Mask = u32;
};
template <>
struct Types<64> {
  using Mask = u64;
};
template <int W>
using Mask = typename Types<W>::Mask;

template <int N>
using Words = u32 __attribute__((ext_vector_type(N)));
template <int N>
using Flags = bool __attribute__((ext_vector_type(N)));

template <int N>
INLINE Words<N> words_at(const u32* p) {
  Words<N> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <int N>
INLINE void put_words(u32* p, Words<N> v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <int W>
INLINE Mask<W> equal_bits(Words<W> a, Words<W> b) {
  return __builtin_bit_cast(Mask<W>, __builtin_convertvector(a == b, Flags<W>));
}
alignas(64) constexpr u32 LANE_NUMBERS[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                              16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                              32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                              48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
template <int W>
INLINE Words<W> lane_numbers() {
  return words_at<W>(LANE_NUMBERS);
}
template <class M>
INLINE int lowest(M m) {
  return __builtin_ctzll(m);
}
template <class M>
INLINE int highest(M m) {
  return 63 - __builtin_clzll(m);
}

// Copies between host memory that others may use and private words. `words` at 4-byte aligned addresses; 8-byte lanes
// at 8-byte aligned ones stay whole: every piece is at most 16 bytes and aligned to its size, which AVX hosts access at
// once.
using Piece = u32 __attribute__((ext_vector_type(4)));

INLINE void pull(u32* to, u64 from, int words) {
  int i = 0;
  if (from & 4 && words) to[i++] = *reinterpret_cast<const volatile u32*>(from);
  if ((from + 4 * i) & 8 && words - i >= 2) {
    u64 x = *reinterpret_cast<const volatile u64*>(from + 4 * i);
    __builtin_memcpy(to + i, &x, 8);
    i += 2;
  }
  for (; words - i >= 4; i += 4) {
    Piece x = *reinterpret_cast<const volatile Piece*>(from + 4 * i);
    __builtin_memcpy(to + i, &x, 16);
  }
  if (words - i >= 2) {
    u64 x = *reinterpret_cast<const volatile u64*>(from + 4 * i);
    __builtin_memcpy(to + i, &x, 8);
    i += 2;
  }
  if (words > i) to[i] = *reinterpret_cast<const volatile u32*>(from + 4 * i);
}

INLINE void push(u64 to, const u32* from, int words) {
  int i = 0;
  if (to & 4 && words) *reinterpret_cast<volatile u32*>(to) = from[i++];
  if ((to + 4 * i) & 8 && words - i >= 2) {
    u64 x;
    __builtin_memcpy(&x, from + i, 8);
    *reinterpret_cast<volatile u64*>(to + 4 * i) = x;
    i += 2;
  }
  for (; words - i >= 4; i += 4) {
    Piece x;
    __builtin_memcpy(&x, from + i, 16);
    *reinterpret_cast<volatile Piece*>(to + 4 * i) = x;
  }
  if (words - i >= 2) {
    u64 x;
    __builtin_memcpy(&x, from + i, 8);
    *reinterpret_cast<volatile u64*>(to + 4 * i) = x;
    i += 2;
  }
  if (words > i) *reinterpret_cast<volatile u32*>(to + 4 * i) = from[i];
}

// one lane's access of T; whole when aligned
template <class T>
INLINE T get(u64 a) {
  if (__builtin_expect(a % sizeof(T) == 0, 1)) return __atomic_load_n(reinterpret_cast<const T*>(a), __ATOMIC_ACQUIRE);
  T v;
  __builtin_memcpy(&v, reinterpret_cast<const void*>(a), sizeof v);
  return v;
}
template <class T>
INLINE void set(u64 a, T v) {
  if (__builtin_expect(a % sizeof(T) == 0, 1)) {
    __atomic_store_n(reinterpret_cast<T*>(a), v, __ATOMIC_RELEASE);
  } else {
    __builtin_memcpy(reinterpret_cast<void*>(a), &v, sizeof v);
  }
}

// Where the active lanes of an access point.
template <int W>
struct Access {
  enum Kind { NONE, RUN, UNIFORM, GENERAL } kind;
  Mask<W> lanes;     // active lanes whose address is to be accessed
  Mask<W> outside;   // active lanes past the end of a buffer: loads give 0, the rest is dropped
  int first, last;   // lowest and highest lane of `lanes`
  u64 base;          // address of lane `first`
  u64 size;          // bytes a lane
  u64 addresses[W];  // of each of `lanes`, when GENERAL

  bool dense() const {  // no gap between the first and the last lane
    Mask<W> m = lanes >> first;
    return !(m & (m + 1));
  }
  u64 address(int lane) const {
    return kind == RUN ? base + (lane - first) * size : kind == UNIFORM ? base : addresses[lane];
  }
};

template <class M, class F>
INLINE void for_lanes(M mask, F body) {
  for (; mask; mask &= mask - 1) body(lowest(mask));
}

// Addresses of the active lanes and their checks; false: a fault was noted in the wave.
// v: the offset or address register(s). offset: of the instruction. limit: bytes of a buffer or of a lane's scratch
// memory.
template <int W, int N>
INLINE bool resolve(Access<W>& a, Wave* w, const u32* v, u64 base, u64 how, i32 offset, u32 limit, Mask<W> exec) {
  a.size = N;
  a.outside = 0;
  a.lanes = exec;
  a.kind = Access<W>::NONE;
  if (!exec) return true;
  const Mode mode = mode_of(how);
  a.first = lowest(exec);
  a.last = highest(exec);
  if (__builtin_expect(mode == SCRATCH || mode == SCRATCH_OFFSET, 0)) {
    a.kind = Access<W>::GENERAL;
    bool good = true;
    for_lanes(exec, [&](int l) {
      u64 o = static_cast<u32>(offset) + (mode == SCRATCH ? 0 : v[l]);
      if (o + N > limit && good) good = fault(w, SCRATCH_OUTSIDE, how, o, N);
      a.addresses[l] = base + static_cast<u64>(l) * limit + o;
    });
    return good;
  }
  const u64 factor = scaled(how) ? N : 1, step = scaled(how) ? 1 : N, span = a.last - a.first;
  const u64 shift = mode == BUFFER || mode == BUFFER_OFFSET ? static_cast<u64>(static_cast<u32>(offset))
                                                            : static_cast<u64>(static_cast<i64>(offset));
  u64 x0 = mode == BUFFER ? 0 : v[a.first];
  if (mode == BUFFER) {
    a.kind = Access<W>::UNIFORM;
  } else {
    Words<W> x = words_at<W>(v), first = static_cast<u32>(x0);
    Mask<W> same_high = ~Mask<W>{0};
    if (mode == ADDRESS) {
      Words<W> high = v[W + a.first];
      same_high = equal_bits<W>(words_at<W>(v + W), high);
    }
    Words<W> expected = first + (lane_numbers<W>() - static_cast<u32>(a.first)) * static_cast<u32>(step);
    if (!(exec & ~(equal_bits<W>(x, expected) & same_high)) && x0 + span * step < 1ull << 32) {
      a.kind = Access<W>::RUN;
    } else if (!(exec & ~(equal_bits<W>(x, first) & same_high))) {
      a.kind = Access<W>::UNIFORM;
    } else {
      a.kind = Access<W>::GENERAL;
    }
    if (mode == ADDRESS) x0 |= static_cast<u64>(v[W + a.first]) << 32;
  }
  const bool buffer = mode == BUFFER || mode == BUFFER_OFFSET;
  if (__builtin_expect(a.kind != Access<W>::GENERAL, 1)) {
    const u64 bytes = (a.kind == Access<W>::RUN ? span * N : 0) + N;
    a.base = base + x0 * factor + shift;
    if (buffer && shift + x0 + bytes > limit) {
      if (a.kind == Access<W>::UNIFORM || shift + x0 + N > limit) {
        a.outside = exec;
        a.lanes = 0;
        a.kind = Access<W>::NONE;
        return true;
      }
      a.kind = Access<W>::GENERAL;
    } else if (mode == LOCAL) {
      u64 o = x0 + shift;
      a.base = w->lds + o;
      if (__builtin_expect(o + bytes <= w->lds_size, 1)) return true;
      return fault(w, LDS_OUTSIDE, how, o, N);
    } else {
      if (__builtin_expect(in_range(w, a.base, bytes), 1)) return true;
      if (a.kind == Access<W>::UNIFORM) return fault(w, OUTSIDE, how, a.base, N);
      a.kind = Access<W>::GENERAL;  // finds the lane that is outside, or lanes in different allocations
    }
  }
  bool good = true;
  for_lanes(exec, [&](int l) {
    u64 o = (mode == ADDRESS ? v[l] | static_cast<u64>(v[W + l]) << 32 : v[l] * factor) + shift;
    if (buffer && o + N > limit) {
      a.outside |= Mask<W>{1} << l;
    } else if (mode == LOCAL) {
      if (good && o + N > w->lds_size) good = fault(w, LDS_OUTSIDE, how, o, N);
      a.addresses[l] = w->lds + o;
    } else {
      a.addresses[l] = base + o;
      if (good && !in_range(w, base + o, N)) good = fault(w, OUTSIDE, how, base + o, N);
    }
  });
  a.lanes &= ~a.outside;
  if (!a.lanes) a.kind = Access<W>::NONE;
  return good;
}
