// Data of the memory instructions: between host memory, lane after lane, and registers, word after word.
#pragma once
#include "memory.h"

namespace {

// data types: BYTES of a lane in memory, registers it takes
template <int N>
struct Whole {
  static constexpr int BYTES = N, POSITION = -1;
};
using B32 = Whole<4>;
using B64 = Whole<8>;
using B96 = Whole<12>;
using B128 = Whole<16>;
template <class T, int SHIFT = -1>
struct Small {  // SHIFT: position in a register whose other half stays, -1: whole register
  static constexpr int BYTES = sizeof(T);
  using Type = T;
  static constexpr int POSITION = SHIFT;
};
template <class T>
constexpr bool is_small = T::BYTES < 4;

template <class T>
INLINE u32 extend(T x) {
  return static_cast<u32>(static_cast<i32>(x));
}

template <class S>
INLINE void put_small(u32& reg, typename S::Type x) {
  if constexpr (S::POSITION < 0) {
    reg = extend(x);
  } else {
    reg = (reg & ~(0xFFFFu << S::POSITION)) | (extend(x) & 0xFFFF) << S::POSITION;
  }
}

// one lane: memory at a -> lane l of the registers
template <int W, class T>
INLINE void load_lane(u32* reg, int l, u64 a) {
  if constexpr (is_small<T>) {
    put_small<T>(reg[l], get<typename T::Type>(a));
  } else if constexpr (T::BYTES == 4) {
    reg[l] = get<u32>(a);
  } else if constexpr (T::BYTES == 8) {
    u64 x = get<u64>(a);
    reg[l] = static_cast<u32>(x);
    reg[W + l] = static_cast<u32>(x >> 32);
  } else {
    u32 x[T::BYTES / 4];
    for (int i = 0; i < T::BYTES / 4; i++) x[i] = get<u32>(a + 4 * i);
    for (int i = 0; i < T::BYTES / 4; i++) reg[W * i + l] = x[i];
  }
}

template <int W, class T>
INLINE void store_lane(const u32* reg, int l, u64 a) {
  if constexpr (is_small<T>) {
    set<typename T::Type>(a, static_cast<typename T::Type>(reg[l] >> (T::POSITION < 0 ? 0 : T::POSITION)));
  } else if constexpr (T::BYTES == 8) {
    set<u64>(a, reg[l] | static_cast<u64>(reg[W + l]) << 32);
  } else {
    for (int i = 0; i < T::BYTES / 4; i++) set<u32>(a + 4 * i, reg[W * i + l]);
  }
}

// memory holds lane after lane, registers hold word after word
template <int W, int N>
INLINE void lanes_to_registers(u32* reg, const u32* packed) {
  if constexpr (N == 2) {
    for (int l = 0; l < W; l += 8) {
      Words<16> x = words_at<16>(packed + 2 * l);
      put_words<8>(reg + l, __builtin_shufflevector(x, x, 0, 2, 4, 6, 8, 10, 12, 14));
      put_words<8>(reg + W + l, __builtin_shufflevector(x, x, 1, 3, 5, 7, 9, 11, 13, 15));
    }
  } else if constexpr (N == 4) {
    for (int l = 0; l < W; l += 4) {
      Words<16> x = words_at<16>(packed + 4 * l);
      put_words<4>(reg + l, __builtin_shufflevector(x, x, 0, 4, 8, 12));
      put_words<4>(reg + W + l, __builtin_shufflevector(x, x, 1, 5, 9, 13));
      put_words<4>(reg + 2 * W + l, __builtin_shufflevector(x, x, 2, 6, 10, 14));
      put_words<4>(reg + 3 * W + l, __builtin_shufflevector(x, x, 3, 7, 11, 15));
    }
  } else {
    for (int l = 0; l < W; l++)
      for (int i = 0; i < N; i++) reg[W * i + l] = packed[N * l + i];
  }
}

template <int W, int N>
INLINE void registers_to_lanes(u32* packed, const u32* reg) {
  if constexpr (N == 2) {
    for (int l = 0; l < W; l += 8) {
      Words<8> a = words_at<8>(reg + l), b = words_at<8>(reg + W + l);
      put_words<16>(packed + 2 * l,
                    __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    }
  } else if constexpr (N == 4) {
    for (int l = 0; l < W; l += 4) {
      Words<4> a = words_at<4>(reg + l), b = words_at<4>(reg + W + l), c = words_at<4>(reg + 2 * W + l),
               d = words_at<4>(reg + 3 * W + l);
      Words<8> ab = __builtin_shufflevector(a, b, 0, 4, 1, 5, 2, 6, 3, 7),
               cd = __builtin_shufflevector(c, d, 0, 4, 1, 5, 2, 6, 3, 7);
      put_words<16>(packed + 4 * l,
                    __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    }
  } else {
    for (int l = 0; l < W; l++)
      for (int i = 0; i < N; i++) packed[N * l + i] = reg[W * i + l];
  }
}

// consecutive lanes first .. last, no gap
template <int W, class T>
INLINE void load_run(u32* reg, const Access<W>& a) {
  const int count = a.last - a.first + 1;
  if constexpr (is_small<T>) {
    using Type = typename T::Type;
    if (count == W) {
      Type packed[W];
      if (a.base % 4 == 0) {
        pull(reinterpret_cast<u32*>(packed), a.base, W * T::BYTES / 4);
      } else {
        __builtin_memcpy(packed, reinterpret_cast<const void*>(a.base), sizeof packed);
      }
      for (int l = 0; l < W; l++) put_small<T>(reg[l], packed[l]);
    } else {
      for (int i = 0; i < count; i++) put_small<T>(reg[a.first + i], get<Type>(a.base + i * T::BYTES));
    }
  } else {
    constexpr int N = T::BYTES / 4;
    if (a.base % 4) {
      for (int i = 0; i < count; i++) load_lane<W, T>(reg, a.first + i, a.base + i * T::BYTES);
    } else if (N == 1) {
      if (count == W) {
        pull(reg, a.base, W);
      } else {
        pull(reg + a.first, a.base, count);
      }
    } else if (count == W) {
      u32 packed[W * N];
      pull(packed, a.base, W * N);
      lanes_to_registers<W, N>(reg, packed);
    } else {
      u32 packed[W * N];
      pull(packed, a.base, count * N);
      for (int l = 0; l < count; l++)
        for (int i = 0; i < N; i++) reg[W * i + a.first + l] = packed[N * l + i];
    }
  }
}

template <int W, class T>
INLINE void store_run(const u32* reg, const Access<W>& a) {
  const int count = a.last - a.first + 1;
  if constexpr (is_small<T>) {
    using Type = typename T::Type;
    constexpr int SHIFT = T::POSITION < 0 ? 0 : T::POSITION;
    if (count == W && a.base % 4 == 0) {
      Type packed[W];
      for (int l = 0; l < W; l++) packed[l] = static_cast<Type>(reg[l] >> SHIFT);
      push(a.base, reinterpret_cast<const u32*>(packed), W * T::BYTES / 4);
    } else {
      for (int i = 0; i < count; i++) set<Type>(a.base + i * T::BYTES, static_cast<Type>(reg[a.first + i] >> SHIFT));
    }
  } else {
    constexpr int N = T::BYTES / 4;
    if (a.base % 4) {
      for (int i = 0; i < count; i++) store_lane<W, T>(reg, a.first + i, a.base + i * T::BYTES);
    } else if (N == 1) {
      if (count == W) {
        push(a.base, reg, W);
      } else {
        push(a.base, reg + a.first, count);
      }
    } else {
      u32 packed[W * N];
      registers_to_lanes<W, N>(packed, reg);
      if (count == W) {
        push(a.base, packed, W * N);
      } else {
        push(a.base, packed + N * a.first, count * N);
      }
    }
  }
}

}  // namespace
