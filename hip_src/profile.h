// The log of operations that a profiler build writes; mori_triton/host/profile.py reads it.
#pragma once

#include "context.h"

namespace mori {

// Memory that the host sees. It reads when no kernel runs, and then sets `count` back: so every word is stored at system scope, and
// nothing is released, which would hide that a kernel has forgotten to.
struct ProfileRecord {
  u64 start, end;  // clock_ticks() of the elected thread
  u64 num_bytes;   // that the operation moves for its caller, 0 for one that moves none
  u32 symbol;      // Call::symbol
  i32 peer;        // -1: several or none
  u64 program;     // its index along the first axis of the grid
};

struct ProfileLog {
  u64 count;     // operations so far, also those there was no room for
  u64 capacity;  // records there is room for
  ProfileRecord records[1];
};

#define MORI_FIELD(s, field, at) static_assert(__builtin_offsetof(s, field) == (at), #s "." #field)
MORI_FIELD(ProfileRecord, start, 0);
MORI_FIELD(ProfileRecord, end, 8);
MORI_FIELD(ProfileRecord, num_bytes, 16);
MORI_FIELD(ProfileRecord, symbol, 24);
MORI_FIELD(ProfileRecord, peer, 28);
MORI_FIELD(ProfileRecord, program, 32);
static_assert(sizeof(ProfileRecord) == 40, "ProfileRecord");
MORI_FIELD(ProfileLog, count, 0);
MORI_FIELD(ProfileLog, capacity, 8);
MORI_FIELD(ProfileLog, records, 16);
#undef MORI_FIELD

MORI_BODY void log_by_one(Call call, i32 peer, u64 num_bytes, u64 start) {
  u64 end = clock_ticks(), log = fixed(&call.ctx->profile);
  if (log == 0) return;
  u64 slot = add_system<u64>(log + __builtin_offsetof(ProfileLog, count), 1);
  if (slot >= load_system<u64>(log + __builtin_offsetof(ProfileLog, capacity))) return;
  u64 record = log + __builtin_offsetof(ProfileLog, records) + slot * sizeof(ProfileRecord);
  store_system<u64>(record + __builtin_offsetof(ProfileRecord, start), start);
  store_system<u64>(record + __builtin_offsetof(ProfileRecord, end), end);
  store_system<u64>(record + __builtin_offsetof(ProfileRecord, num_bytes), num_bytes);
  store_system<u32>(record + __builtin_offsetof(ProfileRecord, symbol), call.symbol);
  store_system<u32>(record + __builtin_offsetof(ProfileRecord, peer), (u32)peer);
  store_system<u64>(record + __builtin_offsetof(ProfileRecord, program), program_index());
}

// Logs the operation whose body it is declared first in.
class Logged {
 public:
  MORI_INLINE_MEMBER Logged(Call call, i32 peer = -1, u64 num_bytes = 0) : call_(call), peer_(peer), num_bytes_(num_bytes) {
    if (is_profiler_build()) start_ = clock_ticks();
  }
  MORI_INLINE_MEMBER ~Logged() {
    if (is_profiler_build() && is_elected()) log_by_one(call_, peer_, num_bytes_, start_);
  }

 private:
  Call call_;
  i32 peer_;
  u64 num_bytes_, start_ = 0;
};

}  // namespace mori
