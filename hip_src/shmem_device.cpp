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
static const MORI_CONSTANT Context no_context = {kAbiVersion, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};

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
    __builtin_offsetof(Context, network),
    __builtin_offsetof(Context, profile),
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
    __builtin_offsetof(ErrorRecord, symbol),
    sizeof(ErrorLog),
    __builtin_offsetof(ErrorLog, count),
    __builtin_offsetof(ErrorLog, limit),
    __builtin_offsetof(ErrorLog, records),
    sizeof(ProfileRecord),
    __builtin_offsetof(ProfileRecord, start),
    __builtin_offsetof(ProfileRecord, end),
    __builtin_offsetof(ProfileRecord, num_bytes),
    __builtin_offsetof(ProfileRecord, symbol),
    __builtin_offsetof(ProfileRecord, peer),
    __builtin_offsetof(ProfileRecord, program),
    __builtin_offsetof(ProfileLog, count),
    __builtin_offsetof(ProfileLog, capacity),
    __builtin_offsetof(ProfileLog, records),
    sizeof(Network),
    __builtin_offsetof(Network, provider),
    __builtin_offsetof(Network, num_qp_per_pe),
    __builtin_offsetof(Network, queues),
    __builtin_offsetof(Network, ring),
    sizeof(Queue),
    __builtin_offsetof(Queue, sq),
    __builtin_offsetof(Queue, cq),
    __builtin_offsetof(Queue, record),
    __builtin_offsetof(Queue, doorbell),
    __builtin_offsetof(Queue, doorbell_value),
    __builtin_offsetof(Queue, cq_doorbell),
    __builtin_offsetof(Queue, cq_doorbell_value),
    __builtin_offsetof(Queue, psn_table),
    __builtin_offsetof(Queue, number),
    __builtin_offsetof(Queue, num_wqes),
    __builtin_offsetof(Queue, num_cqes),
    __builtin_offsetof(Queue, num_psns),
    __builtin_offsetof(Queue, lkey),
    __builtin_offsetof(Queue, rkey),
    __builtin_offsetof(Queue, results_lkey),
    __builtin_offsetof(Queue, mtu),
    __builtin_offsetof(Queue, remote_base),
    __builtin_offsetof(Queue, remote_bytes),
    __builtin_offsetof(Queue, results),
    __builtin_offsetof(Queue, ready),
    __builtin_offsetof(Queue, reserved),
    __builtin_offsetof(Queue, psn),
    __builtin_offsetof(Queue, posted),
    __builtin_offsetof(Queue, ringing),
    __builtin_offsetof(Queue, done),
    __builtin_offsetof(Queue, consumed),
    __builtin_offsetof(Queue, polling),
    __builtin_offsetof(Queue, error),
    __builtin_offsetof(Queue, free_results),
    kErrorCapacity,
    kContextBytes,
    kBarrierWords,
    kResultWords,
};

MORI_INLINE Ctx module_context() {
  u64 address = mori_shmem_context;
  return address == 0 ? &no_context : context_at(address);
}

template <u32 value>
struct Known {
  static constexpr u32 kValue = value;
};

// of the exported function that this stands in
#define MORI_CALL(ctx) (Call{ctx, Known<symbol_of(__func__)>::kValue})

// ---------------------------------------------------------------------------------------------------------- first layer: ctx
// `qp` chooses one of the queue pairs to a PE that is not mapped.

#define CTX(name) mori_shmem_ctx_##name
#define CTX_CALL MORI_CALL(context_at(ctx))

MORI_EXPORT i32 CTX(my_pe)(u64 ctx) { return fixed(&context_at(ctx)->pe); }
MORI_EXPORT i32 CTX(n_pes)(u64 ctx) { return fixed(&context_at(ctx)->n_pes); }
MORI_EXPORT u64 CTX(ptr)(u64 ctx, u64 address, i32 pe) { return translate(context_at(ctx), address, 1, pe); }

MORI_EXPORT i32 CTX(prefetch)(u64 ctx) {
  prefetch(context_at(ctx));
  return 0;
}
MORI_EXPORT i32 CTX(fence)(u64 ctx, i32 pe, i32 qp) { return quiet(CTX_CALL, pe, qp); }
MORI_EXPORT i32 CTX(quiet)(u64 ctx, i32 pe, i32 qp) { return quiet(CTX_CALL, pe, qp); }
MORI_EXPORT i32 CTX(acquire)(u64) { return acquire(); }
MORI_EXPORT i32 CTX(barrier_all)(u64 ctx) { return barrier_all(CTX_CALL); }

MORI_EXPORT i32 CTX(signal_set)(u64 ctx, u64 address, u64 value, i32 pe, i32 qp) {
  return signal(CTX_CALL, address, value, false, pe, qp);
}
MORI_EXPORT i32 CTX(signal_add)(u64 ctx, u64 address, u64 value, i32 pe, i32 qp) {
  return signal(CTX_CALL, address, value, true, pe, qp);
}

MORI_EXPORT i32 CTX(signal_set_all)(u64 ctx, u64 address, u64 value) {
  return signal_set_all(CTX_CALL, address, value);
}

#define CTX_WAIT(name, compare)                                                          \
  MORI_EXPORT i64 CTX(wait_##name)(u64 ctx, u64 address, i64 value, i32 peer, i32 tag) { \
    return wait<i64>(CTX_CALL, address, compare, value, peer, tag);                      \
  }
CTX_WAIT(eq, kEq)
CTX_WAIT(ne, kNe)
CTX_WAIT(gt, kGt)
CTX_WAIT(ge, kGe)
CTX_WAIT(lt, kLt)
CTX_WAIT(le, kLe)
// words of other types; `compare` is one of Compare
#define CTX_WAIT_OF(name, T)                                                                        \
  MORI_EXPORT T CTX(wait_##name)(u64 ctx, u64 address, T value, i32 compare, i32 peer, i32 tag) { \
    return wait<T>(CTX_CALL, address, (Compare)compare, value, peer, tag);                          \
  }
CTX_WAIT_OF(int32, i32)
CTX_WAIT_OF(uint32, u32)
CTX_WAIT_OF(uint64, u64)

MORI_EXPORT i64 CTX(wait_all_ge)(u64 ctx, u64 address, i32 num, i64 value, i32 tag) {
  return wait_all_ge(CTX_CALL, address, num, value, tag);
}
MORI_EXPORT i32 CTX(arrive_last)(u64 ctx, u64 counter, i32 count) {
  return arrive_last(CTX_CALL, counter, count);
}
MORI_EXPORT i32 CTX(signal_set_all_last)(u64 ctx, u64 address, u64 value, u64 counter, i32 count) {
  return signal_set_all_last(CTX_CALL, address, value, counter, count);
}

MORI_EXPORT i32 CTX(report)(u64 ctx, i32 kind, i32 peer, i32 tag, u64 address, u64 expected, u64 seen) {
  report(CTX_CALL, (u32)kind, peer, tag, address, expected, seen);
  return 0;
}

#define CTX_COPY(name, scope)                                                                              \
  MORI_EXPORT i32 CTX(put_##name)(u64 ctx, u64 dst, u64 src, u64 num_bytes, i32 pe, i32 qp) {              \
    return put(CTX_CALL, scope, false, dst, src, num_bytes, pe, qp);                                       \
  }                                                                                                        \
  MORI_EXPORT i32 CTX(put_nbi_##name)(u64 ctx, u64 dst, u64 src, u64 num_bytes, i32 pe, i32 qp) {          \
    return put(CTX_CALL, scope, true, dst, src, num_bytes, pe, qp);                                        \
  }                                                                                                        \
  MORI_EXPORT i32 CTX(get_##name)(u64 ctx, u64 dst, u64 src, u64 num_bytes, i32 pe, i32 qp) {              \
    return get(CTX_CALL, scope, false, dst, src, num_bytes, pe, qp);                                       \
  }                                                                                                        \
  MORI_EXPORT i32 CTX(get_nbi_##name)(u64 ctx, u64 dst, u64 src, u64 num_bytes, i32 pe, i32 qp) {          \
    return get(CTX_CALL, scope, true, dst, src, num_bytes, pe, qp);                                        \
  }                                                                                                        \
  MORI_EXPORT i32 CTX(put_signal_##name)(u64 ctx, u64 dst, u64 src, u64 num_bytes, u64 address, u64 value, \
                                         i32 op, i32 pe, i32 qp) {                                         \
    return put_signal(CTX_CALL, scope, dst, src, num_bytes, address, value, op, pe, qp);                   \
  }
CTX_COPY(thread, Scope::kThread)
CTX_COPY(warp, Scope::kWarp)
CTX_COPY(block, Scope::kBlock)

MORI_EXPORT i32 CTX(put_small)(u64 ctx, u64 dst, u64 src, u64 num_bytes, i32 pe, i32 qp) {
  return put_small(CTX_CALL, dst, src, num_bytes, pe, qp);
}

#define CTX_VALUE(name, T)                                                           \
  MORI_EXPORT i32 CTX(put_value_##name)(u64 ctx, u64 dst, T value, i32 pe, i32 qp) { \
    return put_value<T>(CTX_CALL, dst, value, pe, qp);                               \
  }
CTX_VALUE(uint8, u8)
CTX_VALUE(uint16, u16)
CTX_VALUE(uint32, u32)
CTX_VALUE(uint64, u64)

MORI_EXPORT i32 CTX(atomic_from)(u64 ctx, u64 dst, u64 value_address, u64 num_bytes, i32 op, i32 pe, i32 qp) {
  return atomic_from(CTX_CALL, dst, value_address, num_bytes, op, pe, qp);
}

#define CTX_ATOMIC(name, T)                                                                              \
  MORI_EXPORT i32 CTX(atomic_##name)(u64 ctx, u64 dst, T value, T compare, i32 op, i32 pe, i32 qp) {     \
    return atomic_nonfetch<T>(CTX_CALL, dst, value, compare, op, pe, qp);                                \
  }                                                                                                      \
  MORI_EXPORT T CTX(atomic_fetch_##name)(u64 ctx, u64 dst, T value, T compare, i32 op, i32 pe, i32 qp) { \
    return atomic_fetch<T>(CTX_CALL, dst, value, compare, op, pe, qp);                                   \
  }
CTX_ATOMIC(uint32, u32)
CTX_ATOMIC(uint64, u64)

// ------------------------------------------------------------------------------------------------- second layer: MORI's names

#define MORI(name) mori_shmem_##name
#define MODULE_CALL MORI_CALL(module_context())

MORI_EXPORT i32 MORI(my_pe)() { return fixed(&module_context()->pe); }
MORI_EXPORT i32 MORI(n_pes)() { return fixed(&module_context()->n_pes); }
MORI_EXPORT u64 MORI(ptr)(u64 address, i32 pe) { return translate(module_context(), address, 1, pe); }
MORI_EXPORT u64 MORI(ptr_p2p)(u64 address, i32, i32 pe) { return translate(module_context(), address, 1, pe); }

MORI_EXPORT i32 MORI(quiet_thread)() { return quiet(MODULE_CALL, -1, -1); }
MORI_EXPORT i32 MORI(quiet_thread_pe)(i32 pe) { return quiet(MODULE_CALL, pe, -1); }
MORI_EXPORT i32 MORI(quiet_thread_pe_qp)(i32 pe, i32 qp) { return quiet(MODULE_CALL, pe, qp); }
MORI_EXPORT i32 MORI(fence_thread)() { return quiet(MODULE_CALL, -1, -1); }
MORI_EXPORT i32 MORI(fence_thread_pe)(i32 pe) { return quiet(MODULE_CALL, pe, -1); }
MORI_EXPORT i32 MORI(fence_thread_pe_qp)(i32 pe, i32 qp) { return quiet(MODULE_CALL, pe, qp); }
MORI_EXPORT i32 MORI(barrier_all_thread)() { return barrier_all(MODULE_CALL); }
MORI_EXPORT i32 MORI(barrier_all_block)() { return barrier_all(MODULE_CALL); }

#define MORI_COPY(type, bytes, name, scope)                                                   \
  MORI_EXPORT i32 MORI(put##type##_nbi_##name)(u64 dst, u64 src, u64 count, i32 pe, i32 qp) { \
    return put(MODULE_CALL, scope, true, dst, src, bytes_of(count, bytes), pe, qp);           \
  }                                                                                           \
  MORI_EXPORT i32 MORI(get##type##_nbi_##name)(u64 dst, u64 src, u64 count, i32 pe, i32 qp) { \
    return get(MODULE_CALL, scope, true, dst, src, bytes_of(count, bytes), pe, qp);           \
  }                                                                                           \
  MORI_EXPORT i32 MORI(get##type##_##name)(u64 dst, u64 src, u64 count, i32 pe, i32 qp) {     \
    return get(MODULE_CALL, scope, false, dst, src, bytes_of(count, bytes), pe, qp);          \
  }
#define MORI_SCOPE(name, scope)                                                                           \
  MORI_COPY(mem, 1, name, scope)                                                                          \
  MORI_COPY(_uint32, 4, name, scope)                                                                      \
  MORI_COPY(_uint64, 8, name, scope)                                                                      \
  MORI_COPY(_float, 4, name, scope)                                                                       \
  MORI_COPY(_double, 8, name, scope)                                                                      \
  MORI_EXPORT i32 MORI(putmem_nbi_signal_##name)(u64 dst, u64 src, u64 num_bytes, u64 address, u64 value, \
                                                 i32 op, i32 pe, i32 qp) {                                \
    return put_signal(MODULE_CALL, scope, dst, src, num_bytes, address, value, op, pe, qp);               \
  }
MORI_SCOPE(thread, Scope::kThread)
MORI_SCOPE(warp, Scope::kWarp)
MORI_SCOPE(block, Scope::kBlock)

MORI_EXPORT i32 MORI(put_size_imm_nbi_thread)(u64 dst, u64 value_address, u64 num_bytes, i32 pe, i32 qp) {
  return put_small(MODULE_CALL, dst, value_address, num_bytes, pe, qp);
}

#define MORI_P(name, T, Bits)                                                          \
  MORI_EXPORT i32 MORI(name##_p)(u64 dst, T value, i32 pe, i32 qp) {                   \
    return put_value<Bits>(MODULE_CALL, dst, __builtin_bit_cast(Bits, value), pe, qp); \
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

MORI_EXPORT i32 MORI(atomic_size_nonfetch_thread)(u64 dst, u64 value_address, u64 num_bytes, i32 op, i32 pe, i32 qp) {
  return atomic_from(MODULE_CALL, dst, value_address, num_bytes, op, pe, qp);
}

#define MORI_ATOMIC(name, T, Bits)                                                                        \
  MORI_EXPORT i32 MORI(atomic_##name##_nonfetch_thread)(u64 dst, T value, i32 op, i32 pe, i32 qp) {       \
    return atomic_nonfetch<Bits>(MODULE_CALL, dst, (Bits)value, 0, op, pe, qp);                           \
  }                                                                                                       \
  MORI_EXPORT T MORI(atomic_##name##_fetch_thread)(u64 dst, T value, T compare, i32 op, i32 pe, i32 qp) { \
    return (T)atomic_fetch<Bits>(MODULE_CALL, dst, (Bits)value, (Bits)compare, op, pe, qp);               \
  }                                                                                                       \
  MORI_EXPORT i32 MORI(name##_atomic_add_thread)(u64 dst, T value, i32 pe, i32 qp) {                      \
    return atomic_nonfetch<Bits>(MODULE_CALL, dst, (Bits)value, 0, kAdd, pe, qp);                         \
  }                                                                                                       \
  MORI_EXPORT T MORI(name##_atomic_fetch_add_thread)(u64 dst, T value, i32 pe, i32 qp) {                  \
    return (T)atomic_fetch<Bits>(MODULE_CALL, dst, (Bits)value, 0, kFetchAdd, pe, qp);                    \
  }
MORI_ATOMIC(uint32, u32, u32)
MORI_ATOMIC(uint64, u64, u64)
MORI_ATOMIC(int64, i64, u64)

#define MORI_WAIT(name, T)                                                                 \
  MORI_EXPORT T MORI(name##_wait_until_greater_than)(u64 address, T value) {               \
    return wait<T>(MODULE_CALL, address, kGt, value, -1, kTagWaitUntil);                   \
  }                                                                                        \
  MORI_EXPORT i32 MORI(name##_wait_until_equals)(u64 address, T value) {                   \
    return wait<T>(MODULE_CALL, address, kEq, value, -1, kTagWaitUntil) == value ? 0 : -1; \
  }
MORI_WAIT(uint32, u32)
MORI_WAIT(uint64, u64)
MORI_WAIT(int32, i32)
MORI_WAIT(int64, i64)
