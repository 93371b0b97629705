// The soft HCA: takes the requests of the queue pairs of all PEs of one process, as cards do, and carries them out in memory.
//
// It moves in actions: take a doorbell, fetch a request, put a piece of a message at its place, write a completion. `step` does
// at most one and chooses by its word alone; `run` is a thread that does steps. A lock is held for one action.
#include "soft_hca.h"
#include "soft_hca_bnxt.h"
#include "soft_hca_ionic.h"
#include "soft_hca_messages.h"
#include "soft_hca_mlx5.h"

using namespace soft;

#define SOFT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr u64 SPINS = 256, YIELDS = 32;  // idle rounds before the thread yields, then sleeps
constexpr long SHORT_NAP_NS = 20'000, LONG_NAP_NS = 200'000;
constexpr u64 LONG_NAPS_FROM = 256;
// late mode: after one action in kSleepOneIn a queue pair does nothing for up to 2^(kSleepBits - 1) steps
constexpr u32 kSleepOneIn = 6, kSleepBits = 8;

// ------------------------------------------------------------------------------------------------------------------- lock
// fair: the thread that does steps may not keep everybody else out
class Hold {
 public:
  explicit Hold(Hca* h) : h_(h) {
    u64 mine = __atomic_fetch_add(&h->ticket, 1, __ATOMIC_RELAXED);
    for (u64 rounds = 0; __atomic_load_n(&h->serving, __ATOMIC_ACQUIRE) != mine; ++rounds) {
      if (rounds < SPINS)
        __builtin_ia32_pause();
      else
        sched_yield();
    }
  }
  ~Hold() { __atomic_store_n(&h_->serving, h_->serving + 1, __ATOMIC_RELEASE); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

 private:
  Hca* h_;
};

// --------------------------------------------------------------------------------------------------------------- actions
void fetch(QueuePair* q) {
  Message* m = q->message(q->fetched);
  *m = {};
  m->index = q->fetched;
  if (q->broken) {
    m->refusal = {kFlush, "", 0, 0};
  } else if (q->bad_index == m->index) {
    m->refusal = q->bad;
  } else if (q->inject_index == m->index) {
    m->refusal = {q->inject, "injected", 0, 0};
  } else {
    switch (q->provider) {
      case kMlx5: mlx5_decode(q, m); break;
      case kBnxtRe: bnxt_decode(q, m); break;
      case kIonic: ionic_decode(q, m); break;
    }
  }
  ++q->fetched;
}

void complete(Hca* h, QueuePair* q) {
  const Message* m = q->message(q->retired++);
  if (!m->signaled && m->refusal.fault == kNone) return;
  Refusal refusal{};
  switch (q->provider) {
    case kMlx5: mlx5_complete(q, m); break;
    case kBnxtRe: bnxt_complete(q, m); break;
    case kIonic: ionic_complete(q, m, &refusal); break;
  }
  if (refusal.fault != kNone && !q->broken) {
    record(h, q, m->index, refusal);
    q->broken = true;
  }
}

bool rung(const QueuePair* q) { return read64(q->dma, q->doorbell) != q->seen; }
bool has_work(const QueuePair* q) { return q->retired < q->producer || rung(q); }

void take_doorbell(QueuePair* q) {
  q->seen = read64(q->dma, q->doorbell);
  switch (q->provider) {
    case kMlx5: mlx5_ring(q, q->seen); break;
    case kBnxtRe: bnxt_ring(q, q->seen); break;
    case kIonic: ionic_ring(q, q->seen); break;
  }
}

void act_at_once(Hca* h, QueuePair* q, Dice* dice) {
  if (q->retired == q->producer) return take_doorbell(q);
  if (q->fetched == q->retired) fetch(q);
  while (q->placed < q->fetched) place(h, q, dice, true);
  complete(h, q);
}

void act_late(Hca* h, QueuePair* q, Dice* dice) {
  enum : u32 { RING, FETCH, PLACE, COMPLETE };
  u32 choices[4], n = 0;
  if (rung(q)) choices[n++] = RING;
  if (q->fetched < q->producer && q->fetched - q->retired < kWindow) choices[n++] = FETCH;
  if (q->placed < q->fetched) choices[n++] = PLACE;
  if (q->retired < q->placed) choices[n++] = COMPLETE;
  if (n == 0) return;
  switch (choices[dice->below(n)]) {
    case RING: take_doorbell(q); break;
    case FETCH: fetch(q); break;
    case PLACE: place(h, q, dice, false); break;
    default: complete(h, q); break;
  }
  // only after an action, so nothing is put off for ever
  if (dice->below(kSleepOneIn) == 0) q->asleep = dice->below(1ull << dice->below(kSleepBits)) + 1;
}

bool step(Hca* h, u64 word) {
  Dice dice{word};
  u64 ready = 0;
  QueuePair** all = h->queue_pairs;
  // asked once: a doorbell may be rung between two looks
  static_assert(kMaxQueuePairs % 64 == 0, "whole words");
  u64 is_ready[kMaxQueuePairs / 64];
  for (u32 i = 0; i < (h->num_slots + 63) / 64; ++i) is_ready[i] = 0;
  for (u32 i = 0; i < h->num_slots; ++i) {
    if (!all[i]) continue;
    if (all[i]->asleep)
      --all[i]->asleep;
    else if (has_work(all[i])) {
      is_ready[i / 64] |= 1ull << i % 64;
      ++ready;
    }
  }
  if (ready == 0) return false;
  u64 nth = dice.below(ready);
  u32 at = 0;
  for (;; ++at)
    if (is_ready[at / 64] >> at % 64 & 1 && nth-- == 0) break;
  (h->late ? act_late : act_at_once)(h, all[at], &dice);
  return true;
}

void nap(long ns) {
  timespec t{0, ns};
  nanosleep(&t, nullptr);
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------------ exports
SOFT_EXPORT Hca* mori_soft_hca_new(u32 late, u64 seed) {
  Hca* h = static_cast<Hca*>(calloc(1, sizeof(Hca)));
  if (!h) return nullptr;
  h->late = late;
  h->random = seed;
  // large, and no two bytes alike: a field that is read at a wrong place or in the wrong order is another number
  h->last_number = 0xA0100;
  h->last_tag = 0x5A;
  return h;
}

// Nobody else is in here, and the thread has ended.
SOFT_EXPORT void mori_soft_hca_free(Hca* h) {
  for (u32 i = 0; i < h->num_slots; ++i) free(h->queue_pairs[i]);
  free(h);
}

// dma: context, read, write, atomic; null: plain memory. Returns 0 where there is no room.
SOFT_EXPORT u32 mori_soft_hca_add_memory(Hca* h, const u64* dma, u32 pe, u64 address, u64 bytes, u32 remote) {
  Hold hold(h);
  u32 i = 0;
  while (i < h->num_regions && h->regions[i].key) ++i;
  if (i == kMaxRegions) return 0;
  if (i == h->num_regions) ++h->num_regions;
  // the low byte differs from that of whoever had the place before
  h->last_tag = h->last_tag % 251 + 1;
  h->regions[i] = {(i + 0x1101) << 8 | h->last_tag, pe, address, bytes, remote != 0, dma_of(dma)};
  return h->regions[i].key;
}

SOFT_EXPORT void mori_soft_hca_remove_memory(Hca* h, u32 key) {
  Hold hold(h);
  for (u32 i = 0; i < h->num_regions; ++i)
    if (h->regions[i].key == key) h->regions[i].key = 0;
}

// facts: provider, pe, sq, cq, doorbell, record, cq_doorbell, psn_table, num_wqes, num_cqes, num_psns, mtu, index and packet
// number of the first request
SOFT_EXPORT u32 mori_soft_hca_add_queue_pair(Hca* h, const u64* dma, const u64* facts) {
  Hold hold(h);
  u32 i = 0;
  while (i < h->num_slots && h->queue_pairs[i]) ++i;
  QueuePair* q = i == kMaxQueuePairs ? nullptr : static_cast<QueuePair*>(calloc(1, sizeof(QueuePair)));
  if (!q) return 0;
  q->provider = static_cast<Provider>(facts[0]);
  q->pe = static_cast<u32>(facts[1]);
  q->sq = facts[2], q->cq = facts[3], q->doorbell = facts[4];
  q->record = facts[5], q->cq_doorbell = facts[6], q->psn_table = facts[7];
  q->num_wqes = static_cast<u32>(facts[8]), q->num_cqes = static_cast<u32>(facts[9]);
  q->num_psns = static_cast<u32>(facts[10]), q->mtu = static_cast<u32>(facts[11]);
  q->producer = q->fetched = q->placed = q->retired = q->rung = facts[12];
  q->psn = static_cast<u32>(facts[13]);
  q->dma = dma_of(dma);
  q->named_index = q->bad_index = q->inject_index = kNever;
  do {
    h->last_number = (h->last_number + 1) & 0xfffff;
  } while (h->last_number == 0 || find(h, h->last_number));
  q->number = h->last_number;
  q->seen = read64(q->dma, q->doorbell);
  h->queue_pairs[i] = q;
  if (i == h->num_slots) ++h->num_slots;
  return q->number;
}

SOFT_EXPORT void mori_soft_hca_connect(Hca* h, u32 number, u32 peer) {
  Hold hold(h);
  QueuePair* q = find(h, number);
  for (u32 i = 0; i < h->num_slots; ++i)
    if (h->queue_pairs[i] && h->queue_pairs[i]->number == peer) q->peer = peer, q->peer_slot = i;
}

SOFT_EXPORT void mori_soft_hca_remove_queue_pair(Hca* h, u32 number) {
  Hold hold(h);
  for (u32 i = 0; i < h->num_slots; ++i)
    if (h->queue_pairs[i] && h->queue_pairs[i]->number == number) {
      free(h->queue_pairs[i]);
      h->queue_pairs[i] = nullptr;
    }
}

SOFT_EXPORT void mori_soft_hca_inject(Hca* h, u32 number, u32 fault, u64 index) {
  Hold hold(h);
  QueuePair* q = find(h, number);
  q->inject = static_cast<Fault>(fault);
  q->inject_index = index == kNever ? q->fetched : index;
}

// out: producer, fetched, placed, retired, bytes moved, broken
SOFT_EXPORT void mori_soft_hca_counts(Hca* h, u32 number, u64* out) {
  Hold hold(h);
  const QueuePair* q = find(h, number);
  out[0] = q->producer, out[1] = q->fetched, out[2] = q->placed, out[3] = q->retired, out[4] = q->moved, out[5] = q->broken;
}

SOFT_EXPORT u32 mori_soft_hca_rung(Hca* h, u32 number) {
  Hold hold(h);
  return rung(find(h, number));
}

// How many there have been; of those that were kept, `i` to `out`.
SOFT_EXPORT u64 mori_soft_hca_violation(Hca* h, u64 i, Violation* out) {
  Hold hold(h);
  if (i < h->num_violations && i < kMaxViolations) *out = h->violations[i];
  return h->num_violations;
}

SOFT_EXPORT u32 mori_soft_hca_pending(Hca* h) {
  Hold hold(h);
  for (u32 i = 0; i < h->num_slots; ++i)
    if (h->queue_pairs[i] && has_work(h->queue_pairs[i])) return 1;
  return 0;
}

SOFT_EXPORT u32 mori_soft_hca_step(Hca* h, u64 word) {
  Hold hold(h);
  return step(h, word);
}

SOFT_EXPORT void mori_soft_hca_stop(Hca* h, u64 stop) { __atomic_store_n(&h->stop, stop, __ATOMIC_RELEASE); }

SOFT_EXPORT void mori_soft_hca_run(Hca* h) {
  u64 idle = 0;
  Dice dice{h->random};
  while (!__atomic_load_n(&h->stop, __ATOMIC_ACQUIRE)) {
    if (mori_soft_hca_step(h, dice.next())) {
      idle = 0;
    } else if (++idle < SPINS) {
      __builtin_ia32_pause();
    } else if (idle < SPINS + YIELDS) {
      sched_yield();
    } else {
      nap(idle < LONG_NAPS_FROM + SPINS + YIELDS ? SHORT_NAP_NS : LONG_NAP_NS);
    }
  }
  h->random = dice.state;
}
