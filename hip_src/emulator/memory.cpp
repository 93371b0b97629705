// Memory instructions of the emulated device: one function per data type, called by the lifted kernels.
//
// Each returns 1, or 0 after it has noted a fault in the wave. Consecutive lanes and lanes that share one address are
// checked once and copied as vectors; anything else goes lane by lane, lowest lane first.
#include "atomics.h"
#include "lanes.h"
#include "ledger.h"
#include "weak_dma.h"

namespace {

template <int W, class T>
INLINE u32 load(Wave* w, const u32* v, u32* reg, u64 base, u64 how, i32 offset, u32 limit, Mask<W> exec) {
  Access<W> a;
  if (!resolve<W, T::BYTES>(a, w, v, base, how, offset, limit, exec)) return 0;
  count_access(w, Kind::LOAD, a, how);
  const Mode mode = mode_of(how);
  if (scope_of(how) != WORKGROUP && a.lanes) w->polls++;
  if (__builtin_expect(a.outside != 0, 0))
    for_lanes(a.outside, [&](int l) {
      for (int i = 0; i < (T::BYTES + 3) / 4; i++) reg[W * i + l] = 0;
    });
  if (__builtin_expect(memory_of(w)->weak != 0, 0) && mode < SCRATCH) {
    u8 bytes[16];
    Reader r = reader(w, how);
    if (!r.g) return fault(w, ARENA_FULL, how, a.base, T::BYTES);
    for_lanes(a.lanes, [&](int l) {
      weak_load(r, a.address(l), T::BYTES, how, bytes);
      load_lane<W, T>(reg, l, reinterpret_cast<u64>(bytes));
    });
    return 1;
  }
  switch (a.kind) {
    case Access<W>::RUN:
      if (a.dense()) {
        load_run<W, T>(reg, a);
      } else {
        for_lanes(a.lanes, [&](int l) { load_lane<W, T>(reg, l, a.base + (l - a.first) * T::BYTES); });
      }
      break;
    case Access<W>::UNIFORM: {
      // the first lane's value to all
      load_lane<W, T>(reg, a.first, a.base);
      if constexpr (T::POSITION < 0) {
        if (a.lanes == static_cast<Mask<W>>(~Mask<W>{0})) {
          for (int i = 0; i < (T::BYTES + 3) / 4; i++) put_words<W>(reg + W * i, Words<W>(reg[W * i]));
          break;
        }
      }
      for_lanes(a.lanes & (a.lanes - 1), [&](int l) {
        if constexpr (is_small<T>) {
          if constexpr (T::POSITION < 0) {
            reg[l] = reg[a.first];
          } else {
            constexpr u32 half = 0xFFFFu << T::POSITION;
            reg[l] = (reg[l] & ~half) | (reg[a.first] & half);
          }
        } else {
          for (int i = 0; i < T::BYTES / 4; i++) reg[W * i + l] = reg[W * i + a.first];
        }
      });
      break;
    }
    case Access<W>::GENERAL:
      for_lanes(a.lanes, [&](int l) { load_lane<W, T>(reg, l, a.addresses[l]); });
      break;
    case Access<W>::NONE:
      break;
  }
  return 1;
}

template <int W, class T>
INLINE u32 store(Wave* w, const u32* v, const u32* reg, u64 base, u64 how, i32 offset, u32 limit, Mask<W> exec) {
  Access<W> a;
  if (!resolve<W, T::BYTES>(a, w, v, base, how, offset, limit, exec)) return 0;
  count_access(w, Kind::STORE, a, how);
  const Mode mode = mode_of(how);
  if (mode < SCRATCH) {
    if (a.lanes) w->changes++;
    if (__builtin_expect(memory_of(w)->weak != 0, 0)) {
      u8 bytes[16];
      Reader r = reader(w, how);
      bool good = r.g || fault(w, ARENA_FULL, how, a.base, T::BYTES);
      for_lanes(a.lanes, [&](int l) {
        store_lane<W, T>(reg, l, reinterpret_cast<u64>(bytes));
        if (good && !weak_store(r, a.address(l), T::BYTES, how, bytes))
          good = fault(w, ARENA_FULL, how, a.address(l), T::BYTES);
      });
      return good;
    }
  }
  switch (a.kind) {
    case Access<W>::RUN:
      if (a.dense()) {
        store_run<W, T>(reg, a);
      } else {
        for_lanes(a.lanes, [&](int l) { store_lane<W, T>(reg, l, a.base + (l - a.first) * T::BYTES); });
      }
      break;
    case Access<W>::UNIFORM:
      store_lane<W, T>(reg, a.last, a.base);
      break;
    case Access<W>::GENERAL:
      for_lanes(a.lanes, [&](int l) { store_lane<W, T>(reg, l, a.addresses[l]); });
      break;
    case Access<W>::NONE:
      break;
  }
  return 1;
}

// data: one register pair per word of the type; compare-and-swap takes the new value, then the one to compare with.
// The operation's top bit (128): a signed comparison.
template <int W, class U>
INLINE u32 atomic(Wave* w, const u32* v, const u32* data, u64 base, u64 how, i32 offset, u32 limit, Mask<W> exec,
                  u32* out) {
  Access<W> a;
  constexpr int BYTES = sizeof(U), WORDS = BYTES / 4;
  if (!resolve<W, BYTES>(a, w, v, base, how, offset, limit, exec)) return 0;
  count_access(w, Kind::ATOMIC, a, how);
  const bool local = mode_of(how) == LOCAL, weak = memory_of(w)->weak != 0 && !local;
  const u32 operation = operation_of(how) & 127;
  const bool is_signed = operation_of(how) & 128;
  u32 good = 1, changed = 0;
  Reader r{};
  if (__builtin_expect(weak, 0)) {
    r = reader(w, how);
    if (!r.g) return fault(w, ARENA_FULL, how, a.base, BYTES);
  }
  for_lanes(a.lanes, [&](int l) {
    const u64 at = a.address(l);
    if (at % BYTES) {
      if (good) good = fault(w, local ? LDS_MISALIGNED : MISALIGNED, how, local ? at - w->lds : at, BYTES);
      return;
    }
    if (!good) return;
    auto operand = [&](int i) -> U {
      U x = data[W * i * WORDS + l];
      if constexpr (WORDS == 2) x |= static_cast<U>(data[W * (2 * i + 1) + l]) << 32;
      return x;
    };
    U x = operand(0), compare = operation == CMPSWAP ? operand(1) : 0, old;
    if (local) {
      old = *reinterpret_cast<U*>(at);
      *reinterpret_cast<U*>(at) = apply(operation, is_signed, old, x, compare);
    } else if (__builtin_expect(weak, 0)) {
      U fresh;
      u64 before;
      if (!weak_atomic(r, at, BYTES, how, &before, [&](u64 seen) -> u64 {
            return fresh = apply<U>(operation, is_signed, static_cast<U>(seen), x, compare);
          })) {
        good = fault(w, ARENA_FULL, how, at, BYTES);
        return;
      }
      old = static_cast<U>(before);
      changed |= fresh != old;
    } else {
      old = host_atomic<U>(at, operation, is_signed, x, compare);
      changed |= apply<U>(operation, is_signed, old, x, compare) != old;
    }
    if (returns(how)) {
      out[l] = static_cast<u32>(old);
      if constexpr (WORDS == 2) out[W + l] = static_cast<u32>(old >> 32);
    }
  });
  w->changes += changed;
  if (!local && a.lanes) w->polls++;
  if (returns(how))
    for_lanes(a.outside, [&](int l) {
      for (int i = 0; i < WORDS; i++) out[W * i + l] = 0;
    });
  return good;
}

}  // namespace

#define ARGUMENTS(W) Wave *w, const u32 *v, u32 *reg, u64 base, u64 how, i32 offset, u32 limit, Mask<W> exec
#define LOAD(NAME, W, ...)                                                  \
  u32 mori_emu_load_##NAME##_w##W(ARGUMENTS(W)) {                           \
    return load<W, __VA_ARGS__>(w, v, reg, base, how, offset, limit, exec); \
  }
#define STORE(NAME, W, ...)                                                  \
  u32 mori_emu_store_##NAME##_w##W(ARGUMENTS(W)) {                           \
    return store<W, __VA_ARGS__>(w, v, reg, base, how, offset, limit, exec); \
  }
#define ATOMIC(NAME, W, U)                                               \
  u32 mori_emu_atomic_##NAME##_w##W(ARGUMENTS(W), u32* out) {            \
    return atomic<W, U>(w, v, reg, base, how, offset, limit, exec, out); \
  }
// clang-format off
#define ALL(W) \
  LOAD(u8, W, Small<u8>) LOAD(i8, W, Small<signed char>) LOAD(u16, W, Small<u16>) LOAD(i16, W, Small<short>) \
  LOAD(b32, W, B32) LOAD(b64, W, B64) LOAD(b96, W, B96) LOAD(b128, W, B128) \
  LOAD(d16_b16, W, Small<u16, 0>) LOAD(d16_hi_b16, W, Small<u16, 16>) LOAD(d16_u8, W, Small<u8, 0>) \
  LOAD(d16_hi_u8, W, Small<u8, 16>) LOAD(d16_i8, W, Small<signed char, 0>) LOAD(d16_hi_i8, W, Small<signed char, 16>) \
  STORE(b8, W, Small<u8>) STORE(b16, W, Small<u16>) STORE(d16_hi_b8, W, Small<u8, 16>) \
  STORE(d16_hi_b16, W, Small<u16, 16>) STORE(b32, W, B32) STORE(b64, W, B64) STORE(b96, W, B96) STORE(b128, W, B128) \
  ATOMIC(32, W, u32) ATOMIC(64, W, u64)
// clang-format on

extern "C" {
extern const u64 mori_emu_weak_layout[];

ALL(32)
ALL(64)

// scalar load of `words` words at a 4-byte aligned address
u32 mori_emu_scalar_load(Wave* w, u64 a, u32* to, u32 words, u64 how) {
  if (!in_range(w, a, 4 * words)) return fault(w, OUTSIDE, how, a, 4 * words);
  if (__builtin_expect(memory_of(w)->ledger != 0, 0)) count(w, Kind::LOAD, 1u, 4 * words, [&](int) { return a; });
  if (__builtin_expect(memory_of(w)->weak != 0, 0)) {
    Reader r = reader(w, how);
    if (!r.g) return fault(w, ARENA_FULL, how, a, 4 * words);
    for (u32 i = 0; i < words; i++) weak_load(r, a + 4 * i, 4, how, reinterpret_cast<u8*>(to + i));
  } else {
    for (u32 i = 0; i < words; i++) to[i] = *reinterpret_cast<const volatile u32*>(a + 4 * i);
  }
  return 1;
}

// cache maintenance and waits: kind as packed by accesses.py
void mori_emu_fence(Wave* w, u32 kind) {
  if (__builtin_expect(memory_of(w)->weak != 0, 0)) weak_fence(w, kind);
}

void mori_emu_wave_end(Wave* w) {
  if (__builtin_expect(memory_of(w)->weak != 0, 0)) weak_wave_end(w);
}

// weak-memory mode: the host's side, see weak.py

void mori_emu_weak_init(WeakSystem* s) {
  s->now = 1;
  s->pool_used = 1;  // version 0 is none
  for (u64 d = 0; d < s->num_devices; d++) s->lists[d] = new_version(s);
}

// everything on its way arrives
void mori_emu_weak_drain(WeakSystem* s) {
  for (u64 i = 1; s->pending && i < s->pool_used; i++)
    if (version(s, static_cast<u32>(i)).live) arrive_system(s, static_cast<u32>(i));
}

// Forgets what was stored to [low, high); with a device, only where the memory was another device's before.
void mori_emu_weak_forget(WeakSystem* s, u64 low, u64 high, u64 device) {
  auto forget = [&](Page* page) {
    for (u64 k = 0; k < PAGE_WORDS; k++) {
      Word* word = page->words + k;
      u64 a = page->address + 4 * k;
      if (!word->count || a + 4 <= low || a >= high || word->home == device) continue;
      // memory that a kernel still stores to is no reused memory, just shared between devices
      if (device == NEVER || all_home(s, word)) clear(s, word);
    }
  };
  constexpr u64 bytes = 4 * PAGE_WORDS;
  if ((high - low) / bytes < s->num_pages) {
    for (u64 a = low & ~(bytes - 1); a < high; a += bytes)
      if (Page* page = page_of(s, a, false)) forget(page);
  } else {
    for (u64 i = 0; i < s->num_pages; i++) {
      auto* page = reinterpret_cast<Page*>(s->arena_start + PAGE_STRIDE * i);
      if (page->address < high && page->address + bytes > low) forget(page);
    }
  }
}

const u64 mori_emu_weak_layout[] = {sizeof(WeakSystem), __builtin_offsetof(WeakSystem, starved),
                                    sizeof(Race),       sizeof(WeakLaunch),
                                    sizeof(Version),    PAGE_STRIDE,
                                    WAVE_MEMORY};
}
