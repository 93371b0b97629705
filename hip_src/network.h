// Structs through which a kernel reaches PEs whose memory is not mapped. `mori_triton/abi.py` holds the same table; offsets are
// compared as those of context.h are. docs/queue_pairs.md says what each field is for.
#pragma once

#include "platform.h"

namespace mori {

enum Provider : u32 { kAnyProvider = 0, kMlx5 = 1, kBnxtRe = 2, kIonic = 3, kProxy = 4, kP2p = 5 };

constexpr u32 kResultWords = 64;  // fetches of one queue that may be on their way; results has one word more, for what nobody wants

// One per PE, in memory its device reads. The host writes it before any kernel starts.
struct Network {
  u32 provider;        // Provider, never kAnyProvider
  u32 num_qp_per_pe;
  u64 queues;          // Queue[n_pes * num_qp_per_pe]; those of a mapped peer and of myself are all zero
  u64 ring;            // proxy: ProxyRing as the device sees it
  u64 reserved[5];
};

// "index" is the 64-bit running number of a request, never reset; its slot is index & (num_wqes - 1).
struct alignas(64) Queue {
  u64 sq;                 // send ring: mlx5 and ionic 64 bytes a slot, bnxt_re 48
  u64 cq;                 // completions: mlx5 one of 64 bytes, bnxt_re one of 32, ionic num_cqes of 32
  u64 record;             // mlx5: the send doorbell record, 4 bytes big endian
  u64 doorbell;           // register, 8 bytes
  u64 doorbell_value;     // ionic: bits around the index
  u64 cq_doorbell;        // ionic
  u64 cq_doorbell_value;  // ionic
  u64 psn_table;          // bnxt_re: u64[num_psns]
  u32 number;             // of the queue pair
  u32 num_wqes;           // power of two
  u32 num_cqes;           // power of two (ionic), else 1
  u32 num_psns;           // power of two (bnxt_re)
  u32 lkey;               // of my heap
  u32 rkey;               // of the peer's
  u32 results_lkey;
  u32 mtu;                // bytes
  u64 remote_base;        // first byte of the peer's heap as its card calls it
  u64 remote_bytes;
  u64 results;            // u64[kResultWords + 1], in memory the card may write
  u64 ready;              // u64[num_wqes]: index + 1 once the request in that slot is whole; 0 at start
  u64 reserved;           // indices given out                       --- from here on kernels alone write
  u64 psn;                // bnxt_re: packed by nic_bnxt.h
  u64 pad0[6];
  u64 posted;             // indices that the doorbell covers
  u64 ringing;            // 1: someone rings, and does it for all that are ready
  u64 pad1[6];
  u64 done;               // indices known complete
  u64 consumed;           // ionic: completions taken
  u64 polling;            // ionic: 1: someone takes completions
  u64 error;              // 0, or why it is broken: bit 63 set, the vendor's status in bits 0-7, its syndrome in 8-23;
                          // bit 62: only that a request was flushed is known
  u64 free_results;       // bit i: results[i] is free; all ones at start
  u64 pad2[3];
};

#define MORI_FIELD(s, field, at) static_assert(__builtin_offsetof(s, field) == (at), #s "." #field)
MORI_FIELD(Network, provider, 0);
MORI_FIELD(Network, num_qp_per_pe, 4);
MORI_FIELD(Network, queues, 8);
MORI_FIELD(Network, ring, 16);
static_assert(sizeof(Network) == 64, "Network");
MORI_FIELD(Queue, sq, 0);
MORI_FIELD(Queue, cq, 8);
MORI_FIELD(Queue, record, 16);
MORI_FIELD(Queue, doorbell, 24);
MORI_FIELD(Queue, doorbell_value, 32);
MORI_FIELD(Queue, cq_doorbell, 40);
MORI_FIELD(Queue, cq_doorbell_value, 48);
MORI_FIELD(Queue, psn_table, 56);
MORI_FIELD(Queue, number, 64);
MORI_FIELD(Queue, num_wqes, 68);
MORI_FIELD(Queue, num_cqes, 72);
MORI_FIELD(Queue, num_psns, 76);
MORI_FIELD(Queue, lkey, 80);
MORI_FIELD(Queue, rkey, 84);
MORI_FIELD(Queue, results_lkey, 88);
MORI_FIELD(Queue, mtu, 92);
MORI_FIELD(Queue, remote_base, 96);
MORI_FIELD(Queue, remote_bytes, 104);
MORI_FIELD(Queue, results, 112);
MORI_FIELD(Queue, ready, 120);
MORI_FIELD(Queue, reserved, 128);
MORI_FIELD(Queue, psn, 136);
MORI_FIELD(Queue, posted, 192);
MORI_FIELD(Queue, ringing, 200);
MORI_FIELD(Queue, done, 256);
MORI_FIELD(Queue, consumed, 264);
MORI_FIELD(Queue, polling, 272);
MORI_FIELD(Queue, error, 280);
MORI_FIELD(Queue, free_results, 288);
static_assert(sizeof(Queue) == 320, "Queue");
#undef MORI_FIELD

using Net = const MORI_CONSTANT Network *;

}  // namespace mori
