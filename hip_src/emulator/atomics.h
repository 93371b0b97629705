// Atomic operations on one word: as host atomics, and as functions of the old value.
#pragma once
#include "memory.h"

namespace {

// operation numbers are those of accesses.py
enum Operation : u32 {
  ADD,
  SUB,
  AND,
  OR,
  XOR,
  SWAP,
  CMPSWAP,
  MAX,
  MIN,
  INC,
  DEC,
  FADD,
  FMAX,
  FMIN,
  RSUB,
  CLAMP_SUB,
  PACKED_F16,
  PACKED_BF16
};

template <class U>
struct Number;
template <>
struct Number<u32> {
  using Signed = i32;
  using Float = float;
};
template <>
struct Number<u64> {
  using Signed = i64;
  using Float = double;
};

template <class U>
INLINE U larger(U a, U b, bool is_signed) {
  using S = typename Number<U>::Signed;
  return (is_signed ? static_cast<S>(a) > static_cast<S>(b) : a > b) ? a : b;
}

// IEEE half in integer arithmetic: not every host has instructions for it, and its library function may be missing
INLINE float from_half(u32 h) {
  const u32 m = h & 0x7FFF;
  const float x = m < 0x7C00 ? __builtin_bit_cast(float, m << 13) * 0x1p112f
                             : __builtin_bit_cast(float, 0x7F800000 | (m & 0x3FF) << 13);
  return __builtin_bit_cast(float, __builtin_bit_cast(u32, x) | (h & 0x8000) << 16);
}
INLINE u32 to_half(float x) {
  const u32 u = __builtin_bit_cast(u32, x), m = u & 0x7FFFFFFF;
  u32 h = (m - 0x38000000 + 0xFFF + (m >> 13 & 1)) >> 13;
  if (m < 0x38800000) h = __builtin_bit_cast(u32, __builtin_bit_cast(float, m) + 0.5f) - 0x3F000000;  // rounds to 2^-24
  if (m >= 0x477FF000) h = m > 0x7F800000 ? 0x7E00 : 0x7C00;
  return h | (u >> 16 & 0x8000);
}

// sum of the halves of two words, each rounded to nearest even; bf16: bfloat16, else IEEE half
INLINE u32 add_halves(u32 a, u32 b, bool bf16) {
  u32 result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    u32 sum;
    if (bf16) {
      float x = __builtin_bit_cast(float, a >> shift << 16) + __builtin_bit_cast(float, b >> shift << 16);
      u32 u = __builtin_bit_cast(u32, x);
      sum = x != x ? u >> 16 | 0x40 : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
    } else {
      sum = to_half(from_half(a >> shift) + from_half(b >> shift));
    }
    result |= sum << shift;
  }
  return result;
}

// new value of a word that holds `old`, for the operations that have no host instruction or act on private memory
template <class U>
INLINE U apply(u32 operation, bool is_signed, U old, U x, U compare) {
  using F = typename Number<U>::Float;
  F a = __builtin_bit_cast(F, old), b = __builtin_bit_cast(F, x);
  switch (operation) {
    case ADD:
      return old + x;
    case SUB:
      return old - x;
    case AND:
      return old & x;
    case OR:
      return old | x;
    case XOR:
      return old ^ x;
    case SWAP:
      return x;
    case CMPSWAP:
      return old == compare ? x : old;
    case MAX:
      return larger(old, x, is_signed);
    case MIN:
      return larger(old, x, is_signed) == old ? x : old;
    case INC:
      return old >= x ? 0 : old + 1;
    case DEC:
      return old == 0 || old > x ? x : old - 1;
    case FADD:
      return __builtin_bit_cast(U, a + b);
    case FMAX:
      return a > b || b != b ? old : x;  // a number wins over a NaN
    case FMIN:
      return a < b || b != b ? old : x;
    case RSUB:
      return x - old;
    case PACKED_F16:
      return add_halves(static_cast<u32>(old), static_cast<u32>(x), false);
    case PACKED_BF16:
      return add_halves(static_cast<u32>(old), static_cast<u32>(x), true);
    default:
      return old < x ? 0 : old - x;
  }
}

template <class U>
INLINE U host_atomic(u64 a, u32 operation, bool is_signed, U x, U compare) {
  U* p = reinterpret_cast<U*>(a);
  switch (operation) {
    case ADD:
      return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);
    case SUB:
      return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST);
    case AND:
      return __atomic_fetch_and(p, x, __ATOMIC_SEQ_CST);
    case OR:
      return __atomic_fetch_or(p, x, __ATOMIC_SEQ_CST);
    case XOR:
      return __atomic_fetch_xor(p, x, __ATOMIC_SEQ_CST);
    case SWAP:
      return __atomic_exchange_n(p, x, __ATOMIC_SEQ_CST);
    case CMPSWAP: {
      U old = compare;
      __atomic_compare_exchange_n(p, &old, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
      return old;
    }
    default: {
      U old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
      while (!__atomic_compare_exchange_n(p, &old, apply(operation, is_signed, old, x, compare), false,
                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
      }
      return old;
    }
  }
}

}  // namespace
