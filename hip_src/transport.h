// Operations on peers whose memory is not mapped: what p2p.h and sync.h call where load and store do not reach.
//
// Called by the elected thread alone, after the program has met and released to the system. `dst`, `src` and `address` are
// addresses of my own; the symmetric one has been checked to lie in the heap. 0, or -1 when the operation failed or was refused, with
// one record.
#pragma once

#include "context.h"

namespace mori {

// `complete`: return when the source may be reused
MORI_INLINE i32 network_put(Call, u64, u64, u64, bool, i32, i32) { return -1; }
// 1, 2, 4 or 8 bytes
MORI_INLINE i32 network_put_value(Call, u64, u64, u32, i32, i32) { return -1; }
MORI_INLINE i32 network_get(Call, u64, u64, u64, bool, i32, i32) { return -1; }
// num_bytes may be 0: only the signal then
MORI_INLINE i32 network_put_signal(Call, u64, u64, u64, u64, u64, bool, i32, i32) { return -1; }
MORI_INLINE i32 network_atomic(Call, u64, u64, u64, u32, i32, u64 *, i32, i32) { return -1; }
// pe or qp -1: all of them
MORI_INLINE i32 network_quiet(Call, i32, i32) { return -1; }

}  // namespace mori
