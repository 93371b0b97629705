// What differs between amdgcn and nvptx64: thread and program ids, barrier, fences, system-scope atomics, pause, clock.
//
// Freestanding: no HIP or CUDA header, no target-cpu. One amdgcn file is linked into kernels for wave32 and wave64 GPUs alike, so
// everything that depends on the GPU (wave size, the clock, which cache operations a fence is) is an LLVM intrinsic that the
// kernel's own code generator resolves.
//
// Every function here and above is called by all threads of a program (workgroup, CTA) in uniform control flow. A function
// named `*_by_one` is called by single threads, in any control flow; most often by the elected one alone.
#pragma once

namespace mori {

using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
using u32x4 = u32 __attribute__((ext_vector_type(4)));

static_assert(sizeof(u64) == 8 && sizeof(u32) == 4 && sizeof(u16) == 2 && sizeof(u32x4) == 16, "fixed widths");

#define MORI_INLINE_MEMBER inline __attribute__((always_inline))
#define MORI_INLINE static MORI_INLINE_MEMBER
// Bodies used by many exported functions. They stay calls in the bitcode, which keeps it small; bitcode/build.py then marks them and
// the exported functions always-inline, so that nothing of the library is left as a call in a kernel.
#define MORI_BODY static __attribute__((noinline))
#define MORI_EXPORT extern "C" __attribute__((noinline, visibility("protected")))

// device memory, written by other agents at any time
template <class T>
using Global = __attribute__((address_space(1))) T *;

template <class T>
MORI_INLINE Global<T> global(u64 address) {
  return reinterpret_cast<Global<T>>(address);
}

#if defined(__AMDGCN__)

#define MORI_CONSTANT __attribute__((address_space(4)))
#define MORI_SHARED __attribute__((address_space(3)))

// 16 bytes of LDS through which the elected thread hands a result to the others. Triton's own (dynamic) LDS starts behind it.
[[clang::loader_uninitialized]] alignas(16) static MORI_SHARED u64 broadcast_word[2];

// A word that is not written while a kernel runs. This address space says so.
template <class T>
MORI_INLINE T fixed(const MORI_CONSTANT T *word) {
  return *word;
}

MORI_INLINE u32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
MORI_INLINE u32 program_index() { return __builtin_amdgcn_workgroup_id_x(); }

// Code object version 5 and later: hidden_group_size_x is 12 bytes into the implicit arguments. Used for copies only: it costs a
// kernel four words of arguments, and Triton 3.6 on gfx1250 has few to give (tests/ops/test_compile.py).
MORI_INLINE u32 num_threads() {
  using Implicit = const MORI_CONSTANT u16 *;
  return ((Implicit)__builtin_amdgcn_implicitarg_ptr())[6];
}

MORI_INLINE u32 wave_size() { return __builtin_amdgcn_wavefrontsize(); }
// One thread's value in all of its wave, which all come by; `lane` is the same in each.
MORI_INLINE u64 of_lane(u64 value, u32 lane) {
  u32 low = (u32)__builtin_amdgcn_readlane((i32)value, (i32)lane), high = (u32)__builtin_amdgcn_readlane((i32)(value >> 32), (i32)lane);
  return (u64)high << 32 | low;
}

MORI_INLINE void program_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// A release is a cache write-back and a wait for it. The LLVM of Triton 3.6 drops that wait on gfx942 and gfx950 where it believes
// that nothing is in flight, since it does not count the write-back itself. A load that starts before the fence and is used after
// it makes every version keep the wait. `warm`: 4 bytes of device memory that are likely cached.
#define MORI_RELEASE(scope, warm)                                                                           \
  do {                                                                                                      \
    u32 in_flight = __scoped_atomic_load_n(global<u32>(warm), __ATOMIC_RELAXED, __MEMORY_SCOPE_WVFRNT);     \
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, scope);                                                        \
    asm volatile("" ::"v"(in_flight) : "memory");                                                           \
  } while (false)

// A barrier neither drains another wave's stores nor cleans its first-level cache. So before the program meets for a release every
// thread releases to the device, and after it has met for an acquire every thread acquires.
MORI_INLINE void release_before_barrier(u64 warm) { MORI_RELEASE("agent", warm); }
MORI_INLINE void acquire_after_barrier_device() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }
MORI_INLINE void acquire_after_barrier() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, ""); }
MORI_INLINE void release_to_system(u64 warm) { MORI_RELEASE("", warm); }
MORI_INLINE void acquire_from_system() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, ""); }

// ticks of 10 ns, the same on every device of a host
MORI_INLINE u64 clock_ticks() { return __builtin_readsteadycounter(); }

// A hint: here loads start early by themselves, in order of the code.
MORI_INLINE void prefetch(u64) {}

// Polls of a wait from one look at the clock to the next.
constexpr u32 kPollsPerClock = 1;

// Between two polls of a wait, `polls` of which were in vain: little at first, for what comes soon, then 64 clocks * 8.
MORI_INLINE void pause_by_one(u32 polls) {
  if (polls >= 64)
    __builtin_amdgcn_s_sleep(8);
  else
    __builtin_amdgcn_s_sleep(1);
}

// The read that ends a wait. Here the acquire is left to acquire_after_barrier().
template <class T>
MORI_INLINE T poll_system(u64 address) {
  return __scoped_atomic_load_n(global<T>(address), __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
}

// Whether this arrival is the last of `count`. Between release_before_barrier() and a barrier, and, of who is last, a release to the
// system, or acquire_arrivals(), a broadcast and acquire_after_barrier_device().
MORI_INLINE bool arrive_device(u64 address, u32 count) {
  return __scoped_atomic_fetch_add(global<u32>(address), 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE) == count - 1;
}

// Before a release to the system: what other programs have released to the device lies in caches that all of it shares, and those a
// release writes back whole, whoever asks. What this program is to see itself it acquires after it has met.
MORI_INLINE void acquire_arrivals() {}

// An address with an index in it. Some LLVMs, for gfx1250, scale the index in the access itself, which not every access can; this
// keeps it out of their sight.
MORI_INLINE u64 word_at(u64 address, u64 index) {
  u64 place = address + 8 * index;
  asm("" : "+v"(place));
  return place;
}

// A load that has come back before any later one starts.
template <class T>
MORI_INLINE T load_first(u64 address) {
  T value = __scoped_atomic_load_n(global<T>(address), __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
  asm volatile("" : "+v"(value)::"memory");
  return value;
}

template <class T>
MORI_INLINE T load_system(u64 address) {
  return __scoped_atomic_load_n(global<T>(address), __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
}

template <class T>
MORI_INLINE void store_system(u64 address, T value) {
  __scoped_atomic_store_n(global<T>(address), value, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
}

#define MORI_FETCH(name, builtin)                                                                     \
  template <class T>                                                                                  \
  MORI_INLINE T name##_system(u64 address, T value) {                                                 \
    return builtin(global<T>(address), value, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);               \
  }
MORI_FETCH(add, __scoped_atomic_fetch_add)
MORI_FETCH(and, __scoped_atomic_fetch_and)
MORI_FETCH(or, __scoped_atomic_fetch_or)
MORI_FETCH(xor, __scoped_atomic_fetch_xor)
MORI_FETCH(swap, __scoped_atomic_exchange_n)
#undef MORI_FETCH

template <class T>
MORI_INLINE T compare_swap_system(u64 address, T expected, T desired) {
  __scoped_atomic_compare_exchange_n(global<T>(address), &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                     __MEMORY_SCOPE_SYSTEM);
  return expected;
}

#elif defined(__NVPTX__)

#define MORI_CONSTANT __attribute__((address_space(1)))
#define MORI_SHARED __attribute__((address_space(3)))

// One word is used. A kilobyte, so aligned, because the dynamic shared memory behind it holds tiles that tensor-memory copies and
// matrix instructions want at multiples of 1024 bytes, as they are when there is no static shared memory. External, so that
// no optimiser shrinks it to the word.
extern "C" [[clang::loader_uninitialized]] alignas(1024) MORI_SHARED u64 mori_shmem_broadcast[128];
#define broadcast_word mori_shmem_broadcast

// A word that is not written while a kernel runs: one load serves the whole kernel, whatever fences it has.
template <class T>
MORI_INLINE T fixed(const MORI_CONSTANT T *word) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "width");
  if constexpr (sizeof(T) == 8)
    return (T)__nvvm_ldg_ull((const u64 *)word);
  else
    return (T)__nvvm_ldg_ui((const u32 *)word);
}

MORI_INLINE u32 thread_index() { return __nvvm_read_ptx_sreg_tid_x(); }
MORI_INLINE u32 program_index() { return __nvvm_read_ptx_sreg_ctaid_x(); }
MORI_INLINE u32 num_threads() { return __nvvm_read_ptx_sreg_ntid_x(); }
MORI_INLINE u32 wave_size() { return 32; }
MORI_INLINE u64 of_lane(u64 value, u32 lane) {
  u32 low, high;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;" : "=r"(low) : "r"((u32)value), "r"(lane) : "memory");
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;" : "=r"(high) : "r"((u32)(value >> 32)), "r"(lane) : "memory");
  return (u64)high << 32 | low;
}

// PTX text instead of builtins: bitcode of this compiler is lowered by whichever LLVM the user's Triton carries, and older ones
// drop the scope of an atomic
MORI_INLINE void program_barrier() { asm volatile("bar.sync 0;" ::: "memory"); }
// A CTA barrier orders memory between its threads, and the elected thread's fences and acquires are cumulative: nothing to do here.
MORI_INLINE void release_before_barrier(u64) {}
MORI_INLINE void acquire_after_barrier_device() {}
MORI_INLINE void acquire_after_barrier() {}
MORI_INLINE void release_to_system(u64) { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
MORI_INLINE void acquire_from_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// nanoseconds
MORI_INLINE u64 clock_ticks() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// A hint: bring a line of memory to the device's cache, waiting for nothing.
MORI_INLINE void prefetch(u64 address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// A look takes about as long as a poll.
constexpr u32 kPollsPerClock = 16;

// A poll takes most of a microsecond, so a pause is only worth it, for others' sake, in a wait that lasts.
MORI_INLINE void pause_by_one(u32 polls) {
  if (polls >= 64) asm volatile("nanosleep.u32 100;" ::: "memory");
}

// The read that ends a wait: an acquire by itself.
template <class T>
MORI_INLINE T poll_system(u64 address) {
  if constexpr (sizeof(T) == 8) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return (T)value;
  } else {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return (T)value;
  }
}

// Each arrival is a release, and who is last acquires all: their additions are one chain, of which it has read the end. An acquire
// drops all of a first-level cache, so the others go without.
MORI_INLINE bool arrive_device(u64 address, u32 count) {
  u32 old;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(address) : "memory");
  return old == count - 1;
}
MORI_INLINE void acquire_arrivals() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

MORI_INLINE u64 word_at(u64 address, u64 index) { return address + 8 * index; }

// A load that has come back before any later one starts.
template <class T>
MORI_INLINE T load_first(u64 address) {
  return poll_system<T>(address);
}

template <class T>
MORI_INLINE T load_system(u64 address) {
  if constexpr (sizeof(T) == 8) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return (T)value;
  } else {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return (T)value;
  }
}

template <class T>
MORI_INLINE void store_system(u64 address, T value) {
  if constexpr (sizeof(T) == 8)
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"((u64)value) : "memory");
  else if constexpr (sizeof(T) == 4)
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"((u32)value) : "memory");
  else if constexpr (sizeof(T) == 2)
    asm volatile("st.relaxed.sys.global.u16 [%0], %1;" ::"l"(address), "h"((u16)value) : "memory");
  else
    asm volatile("st.relaxed.sys.global.u8 [%0], %1;" ::"l"(address), "h"((u16)(u8)value) : "memory");
}

#define MORI_FETCH(name, op, t)                                                                                        \
  template <class T>                                                                                                   \
  MORI_INLINE T name##_system(u64 address, T value) {                                                                  \
    if constexpr (sizeof(T) == 8) {                                                                                    \
      u64 old;                                                                                                         \
      asm volatile("atom.relaxed.sys.global." op "." t "64 %0, [%1], %2;"                                              \
                   : "=l"(old)                                                                                         \
                   : "l"(address), "l"((u64)value)                                                                     \
                   : "memory");                                                                                        \
      return (T)old;                                                                                                   \
    } else {                                                                                                           \
      u32 old;                                                                                                         \
      asm volatile("atom.relaxed.sys.global." op "." t "32 %0, [%1], %2;"                                              \
                   : "=r"(old)                                                                                         \
                   : "l"(address), "r"((u32)value)                                                                     \
                   : "memory");                                                                                        \
      return (T)old;                                                                                                   \
    }                                                                                                                  \
  }
MORI_FETCH(add, "add", "u")
MORI_FETCH(and, "and", "b")
MORI_FETCH(or, "or", "b")
MORI_FETCH(xor, "xor", "b")
MORI_FETCH(swap, "exch", "b")
#undef MORI_FETCH

template <class T>
MORI_INLINE T compare_swap_system(u64 address, T expected, T desired) {
  if constexpr (sizeof(T) == 8) {
    u64 old;
    asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(old)
                 : "l"(address), "l"((u64)expected), "l"((u64)desired)
                 : "memory");
    return (T)old;
  } else {
    u32 old;
    asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old)
                 : "l"(address), "r"((u32)expected), "r"((u32)desired)
                 : "memory");
    return (T)old;
  }
}

#else
#error "hip_src is built for amdgcn and nvptx64"
#endif

// the thread that acts for its program
MORI_INLINE bool is_elected() { return thread_index() == 0; }

// The elected thread's value, in every thread, where the program has met since its last broadcast: a slow wave has read that one.
template <class T>
MORI_INLINE T broadcast_after_barrier(T value) {
  if (is_elected()) broadcast_word[0] = (u64)value;
  program_barrier();
  return (T)broadcast_word[0];
}

template <class T>
MORI_INLINE T broadcast(T value) {
  program_barrier();
  return broadcast_after_barrier(value);
}

}  // namespace mori
