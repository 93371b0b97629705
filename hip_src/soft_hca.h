// The soft HCA's own words: what it knows of queue pairs, memory and requests, how it reaches memory, how it refuses a request.
//
// It is a reader of the vendors' byte layouts that shares nothing with the encoders of nic_*.h: soft_hca_{mlx5,bnxt,ionic}.h have
// their own numbers, from the layouts. x86_64 only, freestanding. docs/soft_hca.md says what it models.
#pragma once

extern "C" {
void* calloc(__SIZE_TYPE__, __SIZE_TYPE__);
void free(void*);
int sched_yield(void);
struct timespec {
  long seconds, nanoseconds;
};
int nanosleep(const timespec*, timespec*);
}

namespace soft {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

constexpr u32 kMaxQueuePairs = 4096, kMaxRegions = 4096, kMaxViolations = 256;
constexpr u32 kWindow = 16;            // requests of a queue pair that may be under way
constexpr u32 kMaxPieces = 8;          // a message arrives in
constexpr u64 kMaxMessage = 1ull << 30;
constexpr u64 kNever = ~0ull;

enum Provider : u32 { kMlx5 = 1, kBnxtRe = 2, kIonic = 3 };

// Why a request fails. Each vendor has its own number for each. `FAULTS` of host/nic/soft_hca.py has the names in this order.
enum Fault : u32 {
  kNone = 0, kLength, kOperation, kProtection, kFlush, kRemoteInvalid, kRemoteAccess, kRemoteOperation, kRetry, kRnr, kNumFaults
};

enum Kind : u32 { kWrite = 1, kRead, kInline, kFetchAdd, kCompareSwap };

// How the card of one PE reaches memory. An aligned access of 4 or 8 bytes is one access.
struct Dma {
  void* context;
  void (*read)(void* context, u64 address, u64 bytes, void* out);
  void (*write)(void* context, u64 address, u64 bytes, const void* data);
  u64 (*atomic)(void* context, u64 address, u32 op, u64 value, u64 compare);  // op 0: add, 1: compare-swap; returns the old value
};

struct Region {
  u32 key;  // 0: free
  u32 pe;
  u64 address, bytes;
  bool remote;  // peers may reach it
  Dma dma;
};

// What was wrong; `what` is a text with {want} and {got} in it.
struct Refusal {
  Fault fault;
  const char* what;
  u64 want, got;
};

struct Violation {
  u64 number, index, want, got;
  const char* what;
  u64 fault, pe;
};

// A request that has been fetched, until its completion is written.
struct Message {
  u64 index;
  Kind kind;
  bool signaled;
  Refusal refusal;
  u32 lkey, rkey;
  u64 local, remote, bytes;
  u64 value, compare, old;
  u8 data[32];       // inline
  u64 left, stride;  // pieces that are not at their place (a bit each), and their size; stride 0: none has moved yet
  bool placed;       // nothing of it is left, though an earlier one may not be at its place

  // what later writes may overtake
  bool has_answer() const { return kind == kRead || is_atomic(); }
  bool is_atomic() const { return kind == kFetchAdd || kind == kCompareSwap; }
  void refuse(Fault fault, const char* what, u64 want, u64 got) {
    if (refusal.fault == kNone) refusal = {fault, what, want, got};
  }
  void want(bool ok, Fault fault, const char* what, u64 want, u64 got) {
    if (!ok) refuse(fault, what, want, got);
  }
};

struct QueuePair {
  // facts
  Provider provider;
  u32 number, pe, num_wqes, num_cqes, num_psns, mtu;
  u32 peer, peer_slot;  // the other end's number (0: not connected) and place
  u64 sq, cq, record, doorbell, cq_doorbell, psn_table;
  Dma dma;
  // where it is: retired <= placed <= fetched <= producer, all of them counts of requests; behind `placed` comes one that is not
  u64 seen;  // the doorbell's value that was taken last
  u64 producer, fetched, placed, retired;
  u64 moved;      // bytes
  bool broken;    // a request has failed: what follows is flushed
  u64 asleep;     // steps for which it does nothing (late mode)
  u64 bad_index;  // the request that a bad doorbell stands for
  Refusal bad;
  u64 inject_index;
  Fault inject;
  // completions
  u64 written, acknowledged;
  // mlx5: end of the requests that doorbells have named; of the last one the index and the bytes it must begin with (until it is
  // fetched); the bytes that the last fetched one began with
  u64 rung, named_index, named, last_control;
  u32 psn;  // bnxt_re: of the next request
  Message messages[kWindow];

  Message* message(u64 index) { return messages + (index & (kWindow - 1)); }
  u64 mask() const { return num_wqes - 1; }
  bool failing() const { return broken || bad_index != kNever; }
  // the card itself is told nonsense: the next request fails with it
  void reject(const char* what, u64 want, u64 got) {
    bad = {kOperation, what, want, got};
    bad_index = producer++;
  }
  // Requests up to `candidate` are there to be taken. One slot is always free: else full would look like empty.
  void advance(u64 candidate) {
    u64 room = num_wqes - 1, under_way = candidate - retired;
    if (under_way <= room)
      producer = candidate;
    else if (!failing())
      reject("requests under way: want at most {want}, got {got}", room, under_way);
  }
};

struct Hca {
  bool late;
  u64 stop, random;
  u64 ticket, serving;  // the lock: everything below is touched by its holder only
  u32 last_number, last_tag, num_slots, num_regions;
  u64 num_violations;
  QueuePair* queue_pairs[kMaxQueuePairs];
  Region regions[kMaxRegions];
  Violation violations[kMaxViolations];
};

// ------------------------------------------------------------------------------------------------------------------ bytes
inline u16 be16(const u8* p) { return static_cast<u16>(p[0] << 8 | p[1]); }
inline u32 be24(const u8* p) { return static_cast<u32>(p[0]) << 16 | be16(p + 1); }
inline u32 be32(const u8* p) { return static_cast<u32>(be16(p)) << 16 | be16(p + 2); }
inline u64 be64(const u8* p) { return static_cast<u64>(be32(p)) << 32 | be32(p + 4); }
inline u16 le16(const u8* p) { return static_cast<u16>(p[1] << 8 | p[0]); }
inline u32 le32(const u8* p) { return static_cast<u32>(le16(p + 2)) << 16 | le16(p); }
inline u64 le64(const u8* p) { return static_cast<u64>(le32(p + 4)) << 32 | le32(p); }
inline void put_be(u8* p, u64 value, u32 bytes) {
  for (u32 i = 0; i < bytes; ++i) p[i] = static_cast<u8>(value >> 8 * (bytes - 1 - i));
}
inline void put_le(u8* p, u64 value, u32 bytes) {
  for (u32 i = 0; i < bytes; ++i) p[i] = static_cast<u8>(value >> 8 * i);
}
inline u64 first_nonzero(const u8* p, u64 from, u64 to) {
  for (; from < to; ++from)
    if (p[from]) return from;
  return kNever;
}

// stricter than cards, which do not look: what nobody has written there is somebody's stale bytes
inline void want_zero(Message* m, const u8* wqe, u64 from, u64 to) {
  u64 at = first_nonzero(wqe, from, to);
  if (at != kNever) m->refuse(kOperation, "byte {want} of the request carries nothing: want 0, got {got:#x}", at, wqe[at]);
}

inline void want_length(Message* m, u64 most) {
  m->want(m->bytes > 0 && m->bytes <= most, kLength, "length: want 1 to {want}, got {got}", most, m->bytes);
}

inline void want_same_length(Message* m, u64 got) {
  m->want(got == m->bytes, kLength, "length of the local part: want that of the request, {want}, got {got}", m->bytes, got);
}

inline u64 read64(const Dma& dma, u64 address) {
  u64 value = 0;
  dma.read(dma.context, address, 8, &value);
  return value;
}

}  // namespace soft
