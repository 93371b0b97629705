// What a build of the library is for. The checked-in files are for everything; `mori_triton.bitcode` makes one of these variables
// a constant in a copy, and the optimiser drops what it rules out.
#pragma once

#include "platform.h"

#define MORI_BUILD_TIME extern "C" __attribute__((visibility("protected"), address_space(1)))

// Each is read through its one accessor below.
MORI_BUILD_TIME mori::u32 mori_shmem_provider = 0;  // Provider: the only one that a context has; kP2p: no context has a network
MORI_BUILD_TIME mori::u32 mori_shmem_debug = 0;     // 1: say more in records, check more
MORI_BUILD_TIME mori::u32 mori_shmem_profiler = 0;  // 1: log every operation

#undef MORI_BUILD_TIME

namespace mori {

MORI_INLINE u32 build_provider() { return mori_shmem_provider; }
MORI_INLINE bool is_debug_build() { return mori_shmem_debug != 0; }
MORI_INLINE bool is_profiler_build() { return mori_shmem_profiler != 0; }

}  // namespace mori
