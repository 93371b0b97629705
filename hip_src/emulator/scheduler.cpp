// Interleaves the waves of every launch in flight on one host thread.
//
// Two policies. Random: every switch picks a wave and a quantum from the seed. Rotation: one wave after another with a long
// quantum, further workgroups start only when those in flight wait, so short workgroups run one by one in a warm slot.
#include "wave.h"

extern "C" {
void* memcpy(void*, const void*, __SIZE_TYPE__);
void* memset(void*, int, __SIZE_TYPE__);
int sched_yield(void);
struct timespec {
  long seconds, nanoseconds;
};
int nanosleep(const timespec*, timespec*);
}

namespace {

enum Event : u32 { LIMIT = 0, FINISHED = 1, FAULT = 2, STUCK = 3, QUIET = 4, STOPPED = 5, WAITING = 6 };

constexpr u64 POLL_QUANTUM = 64;       // instructions for a wave that only polls
constexpr u64 POLL_BARRIERS = 8;       // barriers in one round of a polling loop, at most
constexpr u64 ENDLESS_POLLS = 1 << 20;  // a wave that still polls after so many does so for ever
constexpr u64 CLOCK_POLLS = 64;        // readings of the clock after which a wave waits for a time to come
constexpr u64 YIELDS = 16;             // idle rounds that yield the core before the thread sleeps
constexpr long SLEEP_NS = 50'000;      // one idle round asleep
constexpr u64 IDLE_ROUNDS = 400;       // idle rounds before the host may look at the time

// the i-th wave that can run; the list is a ring
Wave*& ready(Scheduler* s, u64 i) { return reinterpret_cast<Wave**>(s->ready)[(s->first + i) & s->ready_mask]; }

void push(Scheduler* s, Wave* w) { ready(s, s->num_ready++) = w; }

WaveTail* tail(Wave* w) { return reinterpret_cast<WaveTail*>(reinterpret_cast<u8*>(w) + WAVE_TAIL); }

void start_group(Scheduler* s, Launch* l) {
  u64 slot = reinterpret_cast<u64*>(l->free_slots)[--l->num_free], number = l->next++;
  u8* base = reinterpret_cast<u8*>(l->slots + slot * l->slot_stride);
  auto* g = reinterpret_cast<Group*>(base);
  *g = Group{};
  g->waves = reinterpret_cast<u64>(base) + l->waves_offset;
  g->slot = slot;
  g->number = number;
  g->silent = ~0u;
  u64 ids[3] = {number % l->grid[0], number / l->grid[0] % l->grid[1], number / (l->grid[0] * l->grid[1])};
  for (u64 i = 0; i < l->num_waves; i++) {
    auto* w = reinterpret_cast<Wave*>(g->waves + i * l->wave_stride);
    memcpy(w, reinterpret_cast<void*>(l->wave_template), VREGS);
    memset(reinterpret_cast<u8*>(w) + VREGS, 0, l->wave_stride - VREGS);
    w->group = g;
    w->launch = l;
    w->lds = reinterpret_cast<u64>(base) + l->lds_offset;
    w->wave_id = l->first_wave + number * l->num_waves + i;
    if (l->weak_records) w->weak = reinterpret_cast<u64*>(l->weak_records)[number * l->num_waves + i];
    if (l->id_registers[0] == TTMP_IDS) {
      w->sgpr[TTMP + 9] = static_cast<u32>(ids[0]);
      w->sgpr[TTMP + 7] = static_cast<u32>(ids[1] | ids[2] << 16);
      w->sgpr[TTMP + 8] = static_cast<u32>(i << 25);
    } else {
      for (int d = 0; d < 3; d++)
        if (l->id_registers[d] != NO_REGISTER) w->sgpr[l->id_registers[d]] = static_cast<u32>(ids[d]);
    }
    auto* v0 = reinterpret_cast<u32*>(reinterpret_cast<u8*>(w) + VREGS);
    for (u64 lane = 0; lane < l->warp_size; lane++) v0[lane] = static_cast<u32>(i * l->warp_size + lane);
    push(s, w);
  }
}

bool can_start(const Launch* l) { return l->num_free && l->next < l->groups; }

// the last wave of the group has arrived at the barrier or ended
void release_barrier(Scheduler* s, Launch* l, Group* g) {
  g->waiting = 0;
  for (u64 i = 0; i < l->num_waves; i++) {
    auto* w = reinterpret_cast<Wave*>(g->waves + i * l->wave_stride);
    if (w->status == BARRIER) {
      w->status = RUNNING;
      push(s, w);
    }
  }
}

// true when the group was the launch's last
bool end_group(Scheduler* s, Launch* l, Group* g) {
  reinterpret_cast<u64*>(l->free_slots)[l->num_free++] = g->slot;
  if (--l->left == 0) {
    l->ended = 1;
    s->finished = reinterpret_cast<u64>(l);
    if (s->starting == s->finished) s->starting = 0;
    return true;
  }
  if (can_start(l)) start_group(s, l);
  return false;
}

// Polls until some time has come: nothing but the clock can end that.
bool waits_for_the_clock(const Scheduler* s, const Wave* w, const WaveTail* t) {
  return t->idle >= s->quiet_polls && w->clock_reads - t->clock_reads >= CLOCK_POLLS;
}

// every wave that could run has for long done nothing that others could notice
bool quiet(Scheduler* s) {
  for (u64 i = 0; i < s->num_ready; i++) {
    WaveTail* t = tail(ready(s, i));
    if (t->epoch != s->epoch || t->idle + t->turns < s->quiet_polls) return false;
  }
  return true;
}

// of everything that decides what a wave does next, except global memory and the clock
u64 fingerprint(const Wave* w) {
  u64 h = w->scc << 32 ^ w->pc;
  auto mix = [&](const void* from, u64 bytes) {
    auto* x = static_cast<const u64*>(from);
    for (u64 i = 0; i < (bytes + 7) / 8; i++) h = ((h << 23 | h >> 41) ^ x[i]) * 0x9E3779B97F4A7C15ull;
  };
  mix(w->sgpr, sizeof w->sgpr);
  mix(reinterpret_cast<const u8*>(w) + VREGS, w->launch->wave_stride - VREGS);
  // followed by padding
  mix(reinterpret_cast<const void*>(w->lds), w->lds_size);
  return h;
}

// A wave's turn during a proof: a wave that comes back to its state, with memory as it was, does so for ever.
void prove(const Scheduler* s, const Wave* w, WaveTail* t) {
  if (t->generation != s->proof) {
    t->generation = s->proof;
    t->loops = 0;
    t->fingerprint = fingerprint(w);
  } else if (!t->loops) {
    t->loops = fingerprint(w) == t->fingerprint;
  }
}

// Can nothing change any more? Asked now and then. Loops that count their rounds are given time to end.
bool standstill(Scheduler* s) {
  if (!quiet(s)) return false;
  bool proven = s->proof_epoch == s->epoch + 1, fresh = !proven;
  for (u64 i = 0; proven && i < s->num_ready; i++) {
    Wave* w = ready(s, i);
    WaveTail* t = tail(w);
    proven = (t->generation == s->proof && t->loops) || waits_for_the_clock(s, w, t) || t->idle >= ENDLESS_POLLS;
  }
  if (proven) return true;
  // not all waves may have been in their last loop when the proof started
  if (fresh) s->proof_span = 32 * (s->num_ready + 1);
  if (fresh || s->switches - s->proof_at > s->proof_span) {
    s->proof++;
    s->proof_epoch = s->epoch + 1;
    s->proof_at = s->switches;
    s->proof_span *= 2;
  }
  return false;
}

// Rotation: every wave has had its turn. Starts a further workgroup if those in flight only wait or have run for long, else lets
// others have the core while nothing moves; true when that has gone on for a while.
bool end_round(Scheduler* s) {
  bool waiting = !s->round_busy && s->round_polls;
  auto* l = reinterpret_cast<Launch*>(s->starting);
  bool look = false;
  if (l && can_start(l) && (waiting || s->num_ready == 0 || s->clock - s->started_at > s->quantum_min * s->num_ready)) {
    start_group(s, l);
    s->started_at = s->clock;
    s->idle_rounds = 0;
  } else if (s->round_busy) {
    s->idle_rounds = 0;
  } else if (waiting) {
    if (s->idle_rounds++ < YIELDS) {
      sched_yield();
    } else {
      timespec t{0, SLEEP_NS};
      nanosleep(&t, nullptr);
    }
    look = s->idle_rounds % IDLE_ROUNDS == 0;
  }
  s->round_left = s->num_ready;
  s->round_busy = s->round_polls = 0;
  return look;
}

}  // namespace

extern "C" {

// Puts a launch in flight. Random order starts as many workgroups as there are slots, rotation starts one.
void mori_emulator_submit(Scheduler* s, Launch* l) {
  start_group(s, l);
  if (s->random)
    while (can_start(l)) start_group(s, l);
  else
    s->starting = can_start(l) ? reinterpret_cast<u64>(l) : 0;
}

// Takes a launch's waves off the ready list after a fault or an abort.
void mori_emulator_drop(Scheduler* s, Launch* l) {
  u64 kept = 0;
  for (u64 i = 0; i < s->num_ready; i++)
    if (ready(s, i)->launch != l) ready(s, kept++) = ready(s, i);
  s->num_ready = kept;
  if (s->starting == reinterpret_cast<u64>(l)) s->starting = 0;
}

// Runs waves until something happens that the host has to know, or for about `limit` instructions. Returns an Event.
u32 mori_emulator_run(Scheduler* s, u64 limit) {
  u64 end = s->clock + limit;
  while (true) {
    if (__atomic_load_n(&s->stop, __ATOMIC_RELAXED)) return STOPPED;
    if (s->clock >= end) return LIMIT;
    u64 quantum = s->quantum_min;
    Wave* w;
    // take a wave off the list
    if (s->random) {
      if (s->num_ready == 0) return STUCK;
      if (s->switches - s->quiet_checked > 64 + 16 * s->num_ready) {
        s->quiet_checked = s->switches;
        if (standstill(s)) return QUIET;
      }
      u64 x = s->rng;
      x ^= x << 13;
      x ^= x >> 7;
      x ^= x << 17;
      s->rng = x;
      quantum += (x & 0x7FFFFFFF) % s->quantum_span;
      Wave*& place = ready(s, (x >> 33) % s->num_ready);
      w = place;
      place = ready(s, --s->num_ready);
    } else {
      if (s->round_left == 0 || s->num_ready == 0) {
        bool waiting = end_round(s);
        if (s->num_ready == 0) return STUCK;
        if (waiting) return WAITING;
      }
      w = ready(s, 0);
      s->first++;
      s->num_ready--;
      s->round_left--;
    }

    WaveTail* t = tail(w);
    if (t->only_polled && quantum > POLL_QUANTUM) quantum = POLL_QUANTUM;
    u64 count = w->count, changes = w->changes, polls = w->polls;
    u32 status = w->run(w, quantum);
    u64 used = w->count - count;
    s->clock += used;
    s->switches++;
    s->hash = (s->hash ^ (w->wave_id << 32 ^ used << 3 ^ status)) * 0x9E3779B97F4A7C15ull;

    // what kind of quantum was it? To meet at a barrier is to wait too when the group polls between its barriers
    Group* g = w->group;
    u64 waited = w->polls - polls + (status == SLEEPING);
    s->round_polls += waited;
    if (waited) g->silent = 0;
    if (status == BARRIER) waited += ++g->silent <= POLL_BARRIERS * w->launch->num_waves;
    if (w->changes != changes || status == DONE) s->epoch++;
    if (t->epoch != s->epoch) {
      t->epoch = s->epoch;
      t->idle = t->turns = 0;
      t->clock_reads = w->clock_reads;
    }
    t->idle += waited;
    t->turns += !waited;
    if (s->proof_epoch == s->epoch + 1 && !waits_for_the_clock(s, w, t)) prove(s, w, t);
    t->only_polled = w->changes == changes && waited && status != BARRIER;
    if (w->changes != changes || !waited) s->round_busy = 1;

    if (status == FAULTED) {
      s->faulted = reinterpret_cast<u64>(w);
      return FAULT;
    }
    if (status == RUNNING || status == SLEEPING) {
      push(s, w);
      continue;
    }

    // the wave ended or waits at a barrier
    Launch* l = w->launch;
    w->status = status;
    if (status == DONE) {
      g->done++;
    } else {
      g->waiting++;
    }
    if (g->done == l->num_waves) {
      if (end_group(s, l, g)) return FINISHED;
    } else if (g->done + g->waiting == l->num_waves) {
      release_barrier(s, l, g);
    }
  }
}

// Byte offsets that state.py and machine.py repeat; a test compares them.
extern const u64 mori_emulator_layout[];
const u64 mori_emulator_layout[] = {
    __builtin_offsetof(Wave, scc),    __builtin_offsetof(Wave, count),  __builtin_offsetof(Wave, run),
    __builtin_offsetof(Wave, launch), __builtin_offsetof(Wave, polls),  __builtin_offsetof(Wave, weak),
    sizeof(Group),                    __builtin_offsetof(Group, number), sizeof(Launch),
    __builtin_offsetof(Launch, ended), sizeof(Scheduler),               __builtin_offsetof(Scheduler, quiet_polls),
    __builtin_offsetof(Wave, clock_reads),
};
}
