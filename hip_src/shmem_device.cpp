// Every exported symbol of libmori_shmem_device.bc, and nothing else.
//
// First layer: `mori_shmem_ctx_*` take the address of a Context. Second layer: MORI's names, which read it from `mori_shmem_context`.
// The table of both is mori_triton/abi.py; a test compares it with this file's bitcode, symbol by symbol and type by type.

#include "sync.h"

using namespace mori;

// ---------------------------------------------------------------------------------------------------------------- module data

// Set by the host in every loaded module whose kernels use MORI's names: address of the Context of the PE that loaded it.
extern "C" __attribute__((visibility("protected"), address_space(1))) u64 mori_shmem_context = 0;

// Stands in until the host has set it: PE -1 of 0, every operation is refused.
static const MORI_CONSTANT Context no_context = {kAbiVersion, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0};

// version, sizes, offsets; the order is that of abi.LAYOUT
extern "C" __attribute__((visibility("protected"))) const MORI_CONSTANT u32 mori_shmem_abi_layout[] = {
    kAbiVersion,
    sizeof(Context),
    __builtin_offsetof(Context, version),
    __builtin_offsetof(Context, pe),
    __builtin_offsetof(Context, n_pes),
    __builtin_offsetof(Context, flags),
    __builtin_offsetof(Context, heap_base),
    __builtin_offsetof(Context, heap_size),
    __builtin_offsetof(Context, peer_bases),
    __builtin_offsetof(Context, sync),
    __builtin_offsetof(Context, errors),
    __builtin_offsetof(Context, timeout_ticks),
    __builtin_offsetof(Context, reserved),
    sizeof(ErrorRecord),
    __builtin_offsetof(ErrorRecord, kind),
    __builtin_offsetof(ErrorRecord, pe),
    __builtin_offsetof(ErrorRecord, peer),
    __builtin_offsetof(ErrorRecord, tag),
    __builtin_offsetof(ErrorRecord, address),
    __builtin_offsetof(ErrorRecord, expected),
    __builtin_offsetof(ErrorRecord, seen),
    __builtin_offsetof(ErrorRecord, compare),
    __builtin_offsetof(ErrorRecord, sequence),
    sizeof(ErrorLog),
    __builtin_offsetof(ErrorLog, count),
    __builtin_offsetof(ErrorLog, limit),
    __builtin_offsetof(ErrorLog, records),
    kErrorCapacity,
    kContextBytes,
    kBarrierWords,
};

MORI_INLINE Ctx module_context() {
  u64 address = mori_shmem_context;
  return address == 0 ? &no_context : context_at(address);
}

// ---------------------------------------------------------------------------------------------------------- first layer: ctx

#define CTX(name) mori_shmem_ctx_##name

MORI_EXPORT i32 CTX(my_pe)(u64 ctx) { return fixed(&context_at(ctx)->pe); }
MORI_EXPORT i32 CTX(n_pes)(u64 ctx) { return fixed(&context_at(ctx)->n_pes); }
MORI_EXPORT u64 CTX(ptr)(u64 ctx, u64 address, i32 pe) { return translate(context_at(ctx), address, 1, pe); }

MORI_EXPORT i32 CTX(prefetch)(u64 ctx) {
  prefetch(context_at(ctx));
  return 0;
}
MORI_EXPORT i32 CTX(fence)(u64 ctx) { return fence(context_at(ctx)); }
MORI_EXPORT i32 CTX(quiet)(u64 ctx) { return fence(context_at(ctx)); }
MORI_EXPORT i32 CTX(acquire)(u64) { return acquire(); }
MORI_EXPORT i32 CTX(barrier_all)(u64 ctx) { return barrier_all(context_at(ctx)); }

MORI_EXPORT i32 CTX(signal_set)(u64 ctx, u64 address, u64 value, i32 pe) {
  return signal(context_at(ctx), address, value, false, pe);
}
MORI_EXPORT i32 CTX(signal_add)(u64 ctx, u64 address, u64 value, i32 pe) {
  return signal(context_at(ctx), address, value, true, pe);
}

MORI_EXPORT i32 CTX(signal_set_all)(u64 ctx, u64 address, u64 value) {
  return signal_set_all(context_at(ctx), address, value);
}

#define CTX_WAIT(name, compare)                                                               \
  MORI_EXPORT i64 CTX(wait_##name)(u64 ctx, u64 address, i64 value, i32 peer, i32 tag) {      \
    return wait<i64>(context_at(ctx), address, compare, value, peer, tag);                    \
  }
CTX_WAIT(eq, kEq)
CTX_WAIT(ne, kNe)
CTX_WAIT(gt, kGt)
CTX_WAIT(ge, kGe)
CTX_WAIT(lt, kLt)
CTX_WAIT(le, kLe)

MORI_EXPORT i64 CTX(wait_all_ge)(u64 ctx, u64 address, i32 num, i64 value, i32 tag) {
  return wait_all_ge(context_at(ctx), address, num, value, tag);
}
MORI_EXPORT i32 CTX(arrive_last)(u64 ctx, u64 counter, i32 count) {
  return arrive_last(context_at(ctx), counter, count);
}

MORI_EXPORT i32 CTX(report)(u64 ctx, i32 kind, i32 peer, i32 tag, u64 address, u64 expected, u64 seen) {
  report(context_at(ctx), (u32)kind, peer, tag, address, expected, seen);
  return 0;
}

#define CTX_COPY(name, scope)                                                                               \
  MORI_EXPORT i32 CTX(put_##name)(u64 ctx, u64 dst, u64 src, u64 num_bytes, i32 pe) {                       \
    return put(context_at(ctx), scope, false, dst, src, num_bytes, pe);                                     \
  }                                                                                                         \
  MORI_EXPORT i32 CTX(put_nbi_##name)(u64 ctx, u64 dst, u64 src, u64 num_bytes, i32 pe) {                   \
    return put(context_at(ctx), scope, true, dst, src, num_bytes, pe);                                      \
  }                                                                                                         \
  MORI_EXPORT i32 CTX(get_##name)(u64 ctx, u64 dst, u64 src, u64 num_bytes, i32 pe) {                       \
    return get(context_at(ctx), scope, dst, src, num_bytes, pe);                                            \
  }                                                                                                         \
  MORI_EXPORT i32 CTX(put_signal_##name)(u64 ctx, u64 dst, u64 src, u64 num_bytes, u64 address, u64 value,  \
                                         i32 op, i32 pe) {                                                  \
    return put_signal(context_at(ctx), scope, dst, src, num_bytes, address, value, op, pe);                 \
  }
CTX_COPY(thread, Scope::kThread)
CTX_COPY(warp, Scope::kWarp)
CTX_COPY(block, Scope::kBlock)

#define CTX_ATOMIC(name, T)                                                                                      \
  MORI_EXPORT i32 CTX(put_value_##name)(u64 ctx, u64 dst, T value, i32 pe) {                                     \
    return put_value<T>(context_at(ctx), dst, value, pe);                                                        \
  }                                                                                                              \
  MORI_EXPORT i32 CTX(atomic_##name)(u64 ctx, u64 dst, T value, T compare, i32 op, i32 pe) {                     \
    return atomic_nonfetch<T>(context_at(ctx), dst, value, compare, op, pe);                                     \
  }                                                                                                              \
  MORI_EXPORT T CTX(atomic_fetch_##name)(u64 ctx, u64 dst, T value, T compare, i32 op, i32 pe) {                 \
    return atomic_fetch<T>(context_at(ctx), dst, value, compare, op, pe);                                        \
  }
CTX_ATOMIC(uint32, u32)
CTX_ATOMIC(uint64, u64)

// ------------------------------------------------------------------------------------------------- second layer: MORI's names
// `qp` chooses a queue pair, which mapped memory has not.

#define MORI(name) mori_shmem_##name

MORI_EXPORT i32 MORI(my_pe)() { return fixed(&module_context()->pe); }
MORI_EXPORT i32 MORI(n_pes)() { return fixed(&module_context()->n_pes); }
MORI_EXPORT u64 MORI(ptr)(u64 address, i32 pe) { return translate(module_context(), address, 1, pe); }
MORI_EXPORT u64 MORI(ptr_p2p)(u64 address, i32, i32 pe) { return translate(module_context(), address, 1, pe); }

MORI_EXPORT i32 MORI(quiet_thread)() { return fence(module_context()); }
MORI_EXPORT i32 MORI(quiet_thread_pe)(i32) { return fence(module_context()); }
MORI_EXPORT i32 MORI(quiet_thread_pe_qp)(i32, i32) { return fence(module_context()); }
MORI_EXPORT i32 MORI(fence_thread)() { return fence(module_context()); }
MORI_EXPORT i32 MORI(fence_thread_pe)(i32) { return fence(module_context()); }
MORI_EXPORT i32 MORI(fence_thread_pe_qp)(i32, i32) { return fence(module_context()); }
MORI_EXPORT i32 MORI(barrier_all_thread)() { return barrier_all(module_context()); }
MORI_EXPORT i32 MORI(barrier_all_block)() { return barrier_all(module_context()); }

#define MORI_COPY(type, bytes, name, scope)                                                              \
  MORI_EXPORT i32 MORI(put##type##_nbi_##name)(u64 dst, u64 src, u64 count, i32 pe, i32) {               \
    return put(module_context(), scope, true, dst, src, bytes_of(count, bytes), pe);                     \
  }                                                                                                      \
  MORI_EXPORT i32 MORI(get##type##_nbi_##name)(u64 dst, u64 src, u64 count, i32 pe, i32) {               \
    return get(module_context(), scope, dst, src, bytes_of(count, bytes), pe);                           \
  }                                                                                                      \
  MORI_EXPORT i32 MORI(get##type##_##name)(u64 dst, u64 src, u64 count, i32 pe, i32) {                   \
    return get(module_context(), scope, dst, src, bytes_of(count, bytes), pe);                           \
  }
#define MORI_SCOPE(name, scope)                                                                          \
  MORI_COPY(mem, 1, name, scope)                                                                         \
  MORI_COPY(_uint32, 4, name, scope)                                                                     \
  MORI_COPY(_uint64, 8, name, scope)                                                                     \
  MORI_COPY(_float, 4, name, scope)                                                                      \
  MORI_COPY(_double, 8, name, scope)                                                                     \
  MORI_EXPORT i32 MORI(putmem_nbi_signal_##name)(u64 dst, u64 src, u64 num_bytes, u64 address, u64 value, \
                                                 i32 op, i32 pe, i32) {                                  \
    return put_signal(module_context(), scope, dst, src, num_bytes, address, value, op, pe);             \
  }
MORI_SCOPE(thread, Scope::kThread)
MORI_SCOPE(warp, Scope::kWarp)
MORI_SCOPE(block, Scope::kBlock)

MORI_EXPORT i32 MORI(put_size_imm_nbi_thread)(u64 dst, u64 value_address, u64 num_bytes, i32 pe, i32) {
  return put(module_context(), Scope::kThread, true, dst, value_address, num_bytes, pe);
}

#define MORI_P(name, T, Bits)                                                          \
  MORI_EXPORT i32 MORI(name##_p)(u64 dst, T value, i32 pe, i32) {                      \
    return put_value<Bits>(module_context(), dst, __builtin_bit_cast(Bits, value), pe); \
  }
MORI_P(int32, i32, u32)
MORI_P(int64, i64, u64)
MORI_P(uint32, u32, u32)
MORI_P(uint64, u64, u64)
MORI_P(int, i32, u32)
MORI_P(float, float, u32)
MORI_P(double, double, u64)
MORI_P(char, i8, u8)
MORI_P(uchar, u8, u8)
MORI_P(short, i16, u16)
MORI_P(ushort, u16, u16)
MORI_P(uint, u32, u32)
MORI_P(long, i64, u64)
MORI_P(ulong, u64, u64)
MORI_P(longlong, i64, u64)
MORI_P(ulonglong, u64, u64)

// the operand lies in memory, as 4 or 8 bytes
MORI_EXPORT i32 MORI(atomic_size_nonfetch_thread)(u64 dst, u64 value_address, u64 num_bytes, i32 op, i32 pe, i32) {
  // it may have been written by another thread of the program
  program_barrier();
  if (num_bytes == 4) return atomic_nonfetch<u32>(module_context(), dst, *global<u32>(value_address), 0, op, pe);
  if (num_bytes == 8) return atomic_nonfetch<u64>(module_context(), dst, *global<u64>(value_address), 0, op, pe);
  if (is_elected()) report_by_one(module_context(), kRefused, pe, 0, dst, num_bytes, 0, 0);
  return -1;
}

#define MORI_ATOMIC(name, T, Bits)                                                                     \
  MORI_EXPORT i32 MORI(atomic_##name##_nonfetch_thread)(u64 dst, T value, i32 op, i32 pe, i32) {       \
    return atomic_nonfetch<Bits>(module_context(), dst, (Bits)value, 0, op, pe);                       \
  }                                                                                                    \
  MORI_EXPORT T MORI(atomic_##name##_fetch_thread)(u64 dst, T value, T compare, i32 op, i32 pe, i32) { \
    return (T)atomic_fetch<Bits>(module_context(), dst, (Bits)value, (Bits)compare, op, pe);           \
  }                                                                                                    \
  MORI_EXPORT i32 MORI(name##_atomic_add_thread)(u64 dst, T value, i32 pe, i32) {                      \
    return atomic_nonfetch<Bits>(module_context(), dst, (Bits)value, 0, kAdd, pe);                     \
  }                                                                                                    \
  MORI_EXPORT T MORI(name##_atomic_fetch_add_thread)(u64 dst, T value, i32 pe, i32) {                  \
    return (T)atomic_fetch<Bits>(module_context(), dst, (Bits)value, 0, kFetchAdd, pe);                \
  }
MORI_ATOMIC(uint32, u32, u32)
MORI_ATOMIC(uint64, u64, u64)
MORI_ATOMIC(int64, i64, u64)

#define MORI_WAIT(name, T)                                                                  \
  MORI_EXPORT T MORI(name##_wait_until_greater_than)(u64 address, T value) {                \
    return wait<T>(module_context(), address, kGt, value, -1, kTagWaitUntil);               \
  }                                                                                         \
  MORI_EXPORT i32 MORI(name##_wait_until_equals)(u64 address, T value) {                    \
    return wait<T>(module_context(), address, kEq, value, -1, kTagWaitUntil) == value ? 0 : -1; \
  }
MORI_WAIT(uint32, u32)
MORI_WAIT(uint64, u64)
MORI_WAIT(int32, i32)
MORI_WAIT(int64, i64)
