// Weak-memory mode: what a load may return when stores reach other workgroups and devices late.
//
// Every 4-byte word that a kernel has stored to keeps its recent stores ("versions") until nobody can miss them any more. A
// version is private to its workgroup, then at its device, then at the system; it moves on at random moments and, at the
// latest, at the releases that cover it. A plain load may return every version that became visible since the reader's last
// acquire. A version counts as synchronised only if a *release* before that acquire covered it, so the outcome of a load
// depends on luck but the report of a race does not. The rules in words: docs/emulator.md.
#pragma once
#include "memory.h"

constexpr u64 NEVER = ~0ull;
constexpr u64 PAGE_STRIDE = 8192;  // bytes between pages
constexpr u32 NONE = 0;  // no version
constexpr int MAX_DEVICES = 64, MAX_WAVES = 32, MAX_VERSIONS = 8, MAX_RACES = 64, MAX_STARVED = 32, PAGE_WORDS = 256;

// one store to one word; also used as the head of the lists of versions that wait for a release
struct Version {
  u32 older;       // in the same word
  u32 previous, next;  // in the list of its wave, workgroup (waited for, not released) or device (not released to the system)
  u32 value;
  u8 bytes, device, wave, live;
  u32 group;   // unique number of the storing workgroup
  u32 number;  // its number in the grid
  u32 launch, pc;
  u64 word;                                // Word
  u64 at_device, at_system;                // when it arrived
  u64 released_device, released_system;    // when a release covered it
};

struct Word {
  u32 newest;
  u32 baseline;  // value before the oldest version
  u32 expected;  // what real memory holds unless the host has written it
  u8 count, home;
  u16 reserved;
};

struct Page {
  u64 address;
  Word words[PAGE_WORDS];
};

struct WeakWave {
  u64 acquired, acquired_system;  // last acquire of agent scope or wider; of system scope as far as this wave knows
  u32 list;                       // its versions that no wait or release covers
  u32 writeback;                  // scope of a write-back that is not waited for yet
};

struct WeakGroup {
  u64 previous, next;  // active groups
  u64 acquired, acquired_system;
  u32 id, drained;  // list of versions that their wave has waited for
  u32 ended, device, views;
  WeakWave waves[MAX_WAVES];
};

struct Race {
  u64 address, count;
  u32 load_launch, load_pc, load_group, load_wave;
  u32 store_launch, store_pc, store_group, store_wave;
  u32 missing, size;
};
enum Missing : u32 { AGENT_RELEASE = 1, SYSTEM_RELEASE = 2, SYSTEM_ACQUIRE = 4, AGENT_ACQUIRE = 8, SYSTEM_LOAD = 16 };

struct WeakSystem {
  u64 now;  // counts events
  u64 rng;
  u64 pool, pool_size, pool_used, pool_free;  // versions; free ones are linked through `older`
  u64 arena_start, arena, arena_end;          // pages from the start, groups from the end
  u64 table, table_mask, num_pages;           // open-addressing hash of Page*
  u64 groups, free_groups, num_groups;        // active and free WeakGroup lists, next unique number
  u64 launches;                               // in flight
  u64 pending;                                // versions that have not arrived at the system
  u64 floors_at;                              // when the floors were computed
  u64 num_devices, num_races, lost_races, last_page;
  u64 acquired_system[MAX_DEVICES];  // last system acquire by any workgroup of a device
  u64 floor_agent[MAX_DEVICES], floor_system[MAX_DEVICES];
  u64 lists[MAX_DEVICES];  // versions at a device that no system release covers
  u64 salt;  // decides for good which stores of peers an agent-scope load can see; bit 0: nothing arrives by itself
  u64 num_starved;
  Race races[MAX_RACES];
  Race starved[MAX_STARVED];  // polls that do not see a store which has been made
};

struct WeakLaunch {
  u64 system;
  u64 device, number;
  u64 acquire_per_wave;  // waves have caches of their own: an acquire acts for one wave, not for its workgroup
  u64 release_per_wave;  // a release covers other waves' stores only when those waves have waited for them
  u64 wait_releases;     // a store that has been waited for is at the device
  u64 homes, num_homes;  // u64 triples (start, end, device), sorted
  u64 groups;            // WeakGroup of each workgroup in flight, else 0
  u64 num_groups, started, ended;  // workgroups
  u64 previous, next;             // launches in flight
  u64 acquired, acquired_system;  // its start
  u64 unreleased;                 // list of versions of its ended workgroups; 0: not started
};

INLINE WeakLaunch* weak_launch(Wave* w) { return reinterpret_cast<WeakLaunch*>(memory_of(w)->weak); }

// the memory functions' side of one access; created once per instruction
struct Reader {
  WeakSystem* s;
  WeakLaunch* l;
  WeakGroup* g;
  WeakWave* view;    // whose acquires count
  WeakWave* stores;  // whose list new versions join
  Wave* w;
  u32 wave, pc;
};

namespace {

INLINE Version& version(WeakSystem* s, u32 i) { return reinterpret_cast<Version*>(s->pool)[i]; }

INLINE u64 draw(WeakSystem* s) {
  u64 x = s->rng;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  s->rng = x;
  return x >> 11;
}

// lists of versions: circular, the head is a version too
void unlink(WeakSystem* s, u32 i) {
  Version& v = version(s, i);
  version(s, v.previous).next = v.next;
  version(s, v.next).previous = v.previous;
  v.previous = v.next = i;
}

void link(WeakSystem* s, u32 list, u32 i) {
  unlink(s, i);
  Version &head = version(s, list), &v = version(s, i);
  v.previous = head.previous;
  v.next = list;
  version(s, head.previous).next = i;
  head.previous = i;
}

u32 new_version(WeakSystem* s) {
  u32 i = static_cast<u32>(s->pool_free);
  if (i) {
    s->pool_free = version(s, i).older;
  } else if (s->pool_used < s->pool_size) {
    i = static_cast<u32>(s->pool_used++);
  } else {
    return NONE;
  }
  version(s, i) = Version{};
  version(s, i).previous = version(s, i).next = i;
  return i;
}

void free_version(WeakSystem* s, u32 i) {
  unlink(s, i);
  if (version(s, i).at_system == NEVER) s->pending--;
  version(s, i).live = 0;
  version(s, i).older = static_cast<u32>(s->pool_free);
  s->pool_free = i;
}

u64 word_address(const Word* word) {
  // pages are aligned to their size's next power of two: see page_of
  auto* page = reinterpret_cast<const Page*>(reinterpret_cast<u64>(word) & ~(PAGE_STRIDE - 1));
  return page->address + 4 * static_cast<u64>(word - page->words);
}

u32 real(const Word* word) { return *reinterpret_cast<const volatile u32*>(word_address(word)); }
u32 spread(u8 bytes) {
  u32 m = 0;
  for (int i = 0; i < 4; i++)
    if (bytes >> i & 1) m |= 0xFFu << 8 * i;
  return m;
}

void clear(WeakSystem* s, Word* word) {
  for (u32 i = word->newest; i;) {
    u32 older = version(s, i).older;
    free_version(s, i);
    i = older;
  }
  word->newest = NONE;
  word->count = 0;
}

// every version is in real memory
bool all_home(WeakSystem* s, const Word* word) {
  for (u32 i = word->newest; i; i = version(s, i).older) {
    const Version& v = version(s, i);
    if ((v.device == word->home ? v.at_device : v.at_system) == NEVER) return false;
  }
  return true;
}

// the host has written the word: its bytes are what everybody sees
void check_host(WeakSystem* s, Word* word) {
  u32 seen = real(word), changed = seen ^ word->expected;
  if (!changed) return;
  word->expected = seen;
  if (all_home(s, word)) {
    clear(s, word);
    word->baseline = seen;
    return;
  }
  // stores are still on their way to other bytes of the word: keep those
  u8 written = 0;
  for (int i = 0; i < 4; i++)
    if (changed >> 8 * i & 0xFF) written |= 1 << i;
  for (u32 i = word->newest; i; i = version(s, i).older) version(s, i).bytes &= ~written;
  word->baseline = (word->baseline & ~spread(written)) | (seen & spread(written));
}

void write_real(WeakSystem* s, Word* word, Version& v) {
  check_host(s, word);
  u32 m = v.live ? spread(v.bytes) : 0;
  u32 x = (word->expected & ~m) | (v.value & m);
  if (x != word->expected) *reinterpret_cast<volatile u32*>(word_address(word)) = x;
  word->expected = x;
}

// stores of one workgroup to one word arrive in order, and so do those of one device
void arrive_device(WeakSystem* s, u32 i) {
  Version& v = version(s, i);
  if (v.at_device != NEVER) return;
  auto* word = reinterpret_cast<Word*>(v.word);
  while (true) {
    u32 before = NONE;
    for (u32 k = v.older; k; k = version(s, k).older)
      if (version(s, k).group == v.group && version(s, k).at_device == NEVER) before = k;
    if (!before) break;
    Version& b = version(s, before);
    b.at_device = ++s->now;
    if (b.device == word->home) write_real(s, word, b);
  }
  v.at_device = ++s->now;
  if (v.device == word->home) write_real(s, word, v);
}

void arrive_system(WeakSystem* s, u32 i) {
  arrive_device(s, i);
  auto* word = reinterpret_cast<Word*>(version(s, i).word);
  while (version(s, i).live && version(s, i).at_system == NEVER) {
    u32 first = i;
    for (u32 k = word->newest; k; k = version(s, k).older) {
      Version& b = version(s, k);
      if (b.device == version(s, i).device && b.at_system == NEVER && b.at_device < version(s, first).at_device) first = k;
    }
    Version& b = version(s, first);
    b.at_system = ++s->now;
    s->pending--;
    if (b.device != word->home) write_real(s, word, b);
  }
}

void released_at_device(WeakSystem* s, u32 i) {
  arrive_device(s, i);
  Version& v = version(s, i);
  if (!v.live) return;
  v.released_device = ++s->now;
  link(s, static_cast<u32>(s->lists[v.device]), i);
}

void release_list(WeakSystem* s, u32 list) {
  for (u32 i; (i = version(s, list).next) != list;) {
    released_at_device(s, i);
    if (version(s, list).next == i) unlink(s, i);
  }
}

void release_system(WeakSystem* s, u32 device) {
  u32 list = static_cast<u32>(s->lists[device]);
  for (u32 i; (i = version(s, list).next) != list;) {
    arrive_system(s, i);
    if (version(s, i).live) version(s, i).released_system = ++s->now;
    unlink(s, i);
  }
}

// pages of words by address
Page* page_of(WeakSystem* s, u64 a, bool make) {
  u64 base = a & ~static_cast<u64>(4 * PAGE_WORDS - 1);
  if (s->last_page && reinterpret_cast<Page*>(s->last_page)->address == base) return reinterpret_cast<Page*>(s->last_page);
  auto** table = reinterpret_cast<Page**>(s->table);
  u64 h = (base * 0x9E3779B97F4A7C15ull >> 20) & s->table_mask;
  while (table[h] && table[h]->address != base) h = (h + 1) & s->table_mask;
  if (!table[h]) {
    if (!make || s->arena + PAGE_STRIDE > s->arena_end || 2 * s->num_pages > s->table_mask) return nullptr;
    table[h] = reinterpret_cast<Page*>(s->arena);  // zero, like the whole arena
    s->arena += PAGE_STRIDE;
    s->num_pages++;
    table[h]->address = base;
  }
  s->last_page = reinterpret_cast<u64>(table[h]);
  return table[h];
}
static_assert(sizeof(Page) <= PAGE_STRIDE);

u8 home_of(WeakLaunch* l, u64 a) {
  auto* table = reinterpret_cast<const u64*>(l->homes);
  u64 low = 0, high = l->num_homes;
  while (low < high) {
    u64 middle = (low + high) / 2;
    if (table[3 * middle] <= a) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return static_cast<u8>(low && a < table[3 * low - 2] ? table[3 * low - 1] : l->device);
}

// the word's record with the host's writes taken in; null when it has none (or, with make, when the arena is full)
Word* word_of(Reader& r, u64 a, bool make) {
  Page* page = page_of(r.s, a, make);
  if (!page) return nullptr;
  Word* word = page->words + (a / 4) % PAGE_WORDS;
  if (word->count) {
    check_host(r.s, word);
    if (word->count || make) return word;
    return nullptr;
  }
  if (!make) return nullptr;
  word->home = home_of(r.l, a & ~3ull);
  word->expected = word->baseline = real(word);
  return word;
}

// what every reader has certainly acquired, by device
void compute_floors(WeakSystem* s) {
  s->floors_at = s->now;
  for (u64 d = 0; d < s->num_devices; d++) {
    s->floor_agent[d] = s->now;
    s->floor_system[d] = s->acquired_system[d];
  }
  auto lower = [&](u64 d, u64 acquired, u64 acquired_system) {
    if (acquired < s->floor_agent[d]) s->floor_agent[d] = acquired;
    if (acquired_system < s->floor_system[d]) s->floor_system[d] = acquired_system;
  };
  // workgroups that have not started yet see what their launch does
  for (u64 p = s->launches; p; p = reinterpret_cast<WeakLaunch*>(p)->next) {
    auto* l = reinterpret_cast<WeakLaunch*>(p);
    if (l->started < l->num_groups) lower(l->device, l->acquired, l->acquired_system);
  }
  for (u64 p = s->groups; p; p = reinterpret_cast<WeakGroup*>(p)->next) {
    auto* g = reinterpret_cast<WeakGroup*>(p);
    for (u32 i = 0; i < g->views; i++) lower(g->device, g->waves[i].acquired, g->waves[i].acquired_system);
  }
}

bool everybody_has(WeakSystem* s, const Version& v) {
  if (v.released_device > s->floor_agent[v.device]) return false;
  for (u64 d = 0; d < s->num_devices; d++)
    if (d != v.device && v.released_system > s->floor_system[d]) return false;
  return true;
}

// forget a word's history when nobody can see anything but its last value
void settle(WeakSystem* s, Word* word) {
  for (u32 i = word->newest; i; i = version(s, i).older)
    if (!everybody_has(s, version(s, i))) return;
  clear(s, word);
  word->baseline = word->expected;
}

u64 order(const Word* word, const Version& v, u32 device) {
  if (v.device == device) return v.at_device;
  if (v.at_system == NEVER) return NEVER;
  return v.device == word->home ? v.at_device : v.at_system;
}

// drop the oldest version: what everybody sees at least
void drop_oldest(WeakSystem* s, Word* word) {
  u32 victim = NONE;
  for (u32 i = word->newest; i; i = version(s, i).older)
    if (version(s, i).at_system != NEVER && (!victim || version(s, i).at_system < version(s, victim).at_system)) victim = i;
  if (!victim) {
    for (u32 i = word->newest; i; i = version(s, i).older) victim = i;
    arrive_system(s, victim);
    if (!word->count) return;
  }
  u32* link_to = &word->newest;
  while (*link_to != victim) link_to = &version(s, *link_to).older;
  Version& v = version(s, victim);
  *link_to = v.older;
  word->baseline = (word->baseline & ~spread(v.bytes)) | (v.value & spread(v.bytes));
  word->count--;
  free_version(s, victim);
}

bool collect(WeakSystem* s) {
  compute_floors(s);
  for (u64 i = 1; i < s->pool_used; i++)
    if (version(s, i).live) settle(s, reinterpret_cast<Word*>(version(s, i).word));
  return s->pool_free;
}

// a new version of a word, private to the wave; NONE: arena full
u32 add_version(Reader& r, Word* word, u32 value, u8 bytes) {
  WeakSystem* s = r.s;
  if (word->count) {
    if (s->now - s->floors_at > 4096) compute_floors(s);
    settle(s, word);
  }
  if (word->count == MAX_VERSIONS) drop_oldest(s, word);
  u32 i = new_version(s);
  if (!i && collect(s)) i = new_version(s);
  if (!i) return NONE;
  Version& v = version(s, i);
  v.older = word->newest;
  v.value = value;
  v.bytes = bytes;
  v.device = static_cast<u8>(r.l->device);
  v.wave = static_cast<u8>(r.wave);
  v.live = 1;
  v.group = r.g->id;
  v.number = static_cast<u32>(r.w->group->number);
  v.launch = static_cast<u32>(r.l->number);
  v.pc = r.pc;
  v.word = reinterpret_cast<u64>(word);
  v.at_device = v.at_system = v.released_device = v.released_system = NEVER;
  word->newest = i;
  word->count++;
  s->pending++;
  return i;
}

// circular lists: all of `from` to the end of `list`
void join(WeakSystem* s, u32 list, u32 from) {
  Version &to = version(s, list), &head = version(s, from);
  if (head.next == from) return;
  version(s, head.next).previous = to.previous;
  version(s, to.previous).next = head.next;
  version(s, head.previous).next = list;
  to.previous = head.previous;
  head.previous = head.next = from;
}

// the caches are clean when a kernel starts; its workgroups may find what earlier ones of the same kernel left there
void start_launch(WeakSystem* s, WeakLaunch* l) {
  l->unreleased = new_version(s);
  if (!l->unreleased) return;
  l->acquired = s->now;
  l->acquired_system = s->acquired_system[l->device];
  l->next = s->launches;
  if (s->launches) reinterpret_cast<WeakLaunch*>(s->launches)->previous = reinterpret_cast<u64>(l);
  s->launches = reinterpret_cast<u64>(l);
}

void end_launch(WeakSystem* s, WeakLaunch* l) {
  for (u64 i = 0; i < s->num_starved;)
    if (s->starved[i].load_launch == l->number) {
      s->starved[i] = s->starved[--s->num_starved];
    } else {
      i++;
    }
  release_list(s, static_cast<u32>(l->unreleased));
  free_version(s, static_cast<u32>(l->unreleased));
  (l->previous ? reinterpret_cast<WeakLaunch*>(l->previous)->next : s->launches) = l->next;
  if (l->next) reinterpret_cast<WeakLaunch*>(l->next)->previous = l->previous;
}

INLINE u64 aligned(u64 n) { return (n + 63) & ~63ull; }

COLD WeakGroup* start_group(WeakSystem* s, WeakLaunch* l, Wave* w) {
  if (!l->unreleased) start_launch(s, l);
  if (!l->unreleased || s->pool_used + MAX_WAVES + 1 > s->pool_size) return nullptr;
  u64 p = s->free_groups;
  if (p) {
    s->free_groups = reinterpret_cast<WeakGroup*>(p)->next;
  } else {
    // groups come from the far end of the arena; pages from the near one
    if (s->arena + aligned(sizeof(WeakGroup)) > s->arena_end) return nullptr;
    p = s->arena_end -= aligned(sizeof(WeakGroup));
    auto* fresh = reinterpret_cast<WeakGroup*>(p);
    fresh->drained = new_version(s);
    for (auto& wave : fresh->waves) wave.list = new_version(s);
  }
  auto* g = reinterpret_cast<WeakGroup*>(p);
  g->id = static_cast<u32>(++s->num_groups);
  l->started++;
  g->ended = 0;
  g->views = l->acquire_per_wave ? static_cast<u32>(w->launch->num_waves) : 1;
  g->device = static_cast<u32>(l->device);
  g->acquired = l->acquired;
  g->acquired_system = l->acquired_system;
  for (auto& wave : g->waves) {
    wave.acquired = g->acquired;
    wave.acquired_system = g->acquired_system;
    wave.writeback = 0;
  }
  g->previous = 0;
  g->next = s->groups;
  if (s->groups) reinterpret_cast<WeakGroup*>(s->groups)->previous = p;
  s->groups = p;
  reinterpret_cast<u64*>(l->groups)[w->group->number] = p;
  return g;
}

// a random version, or one of its neighbours in the pool, moves one level on
COLD void random_arrival(Reader& r) {
  WeakSystem* s = r.s;
  u64 i = 1 + draw(s) % (s->pool_used - 1);
  for (int tries = 0; tries < 32; tries++) {
    Version& v = version(s, i);
    if (v.live && v.at_system == NEVER) {
      if (v.at_device == NEVER) {
        arrive_device(s, i);
      } else {
        arrive_system(s, i);
      }
      r.w->changes++;
      return;
    }
    if (++i == s->pool_used) i = 1;
  }
}

COLD Reader reader(Wave* w, u64 how) {
  WeakLaunch* l = weak_launch(w);
  auto* s = reinterpret_cast<WeakSystem*>(l->system);
  auto* g = reinterpret_cast<WeakGroup*>(reinterpret_cast<u64*>(l->groups)[w->group->number]);
  if (!g) g = start_group(s, l, w);
  u32 wave = static_cast<u32>((reinterpret_cast<u64>(w) - w->group->waves) / w->launch->wave_stride);
  Reader r{s, l, g, nullptr, nullptr, w, wave, pc_of(how)};
  if (!g) return r;
  r.view = g->waves + (l->acquire_per_wave ? wave : 0);
  r.stores = g->waves + (l->release_per_wave ? wave : 0);
  if (s->pending && !(s->salt & 1) && draw(s) % 4 == 0) random_arrival(r);
  return r;
}

// what keeps this reader from seeing the version
Race race_with(const Reader& r, u64 a, const Version& v, Scope scope) {
  const u64 device = r.l->device;
  u32 missing = v.released_device == NEVER ? AGENT_RELEASE : 0;
  if (v.device != device && v.released_system == NEVER) missing |= SYSTEM_RELEASE;
  if (!missing && scope == AGENT) {
    missing = SYSTEM_LOAD;
  } else if (!missing) {
    const bool fresh = v.device != device && v.released_system > r.s->acquired_system[device];
    missing = fresh ? SYSTEM_ACQUIRE : AGENT_ACQUIRE;
  }
  return Race{a, 1, static_cast<u32>(r.l->number), r.pc, static_cast<u32>(r.w->group->number), r.wave,
              v.launch, v.pc, v.number, v.wave, missing, 4};
}

COLD void note_race(Reader& r, u64 a, const Version& v, Scope scope) {
  WeakSystem* s = r.s;
  const Race race = race_with(r, a, v, scope);
  for (u64 i = 0; i < s->num_races; i++) {
    Race& k = s->races[i];
    if (k.load_launch == race.load_launch && k.load_pc == race.load_pc && k.store_launch == race.store_launch &&
        k.store_pc == race.store_pc && k.missing == race.missing) {
      k.count++;
      return;
    }
  }
  if (s->num_races == MAX_RACES) {
    s->lost_races++;
  } else {
    s->races[s->num_races++] = race;
  }
}

// Has an agent-scope load a chance to see this store of a peer? Its device's cache need not look again, ever.
bool lucky(const WeakSystem* s, const Version& v) {
  u64 x = (s->salt ^ v.word ^ v.at_system) * 0x9E3779B97F4A7C15ull;
  return x >> 63;
}

// a version that this load of a scope beyond the workgroup cannot see, though it has been stored; null: none
const Version* hidden(Reader& r, const Word* word, u8 m, Scope scope) {
  WeakSystem* s = r.s;
  const u32 device = static_cast<u32>(r.l->device);
  for (u32 i = word->newest; i; i = version(s, i).older) {
    const Version& v = version(s, i);
    if (!(v.bytes & m) || v.group == r.g->id) continue;
    const u64 at = order(word, v, device);
    if (at == NEVER) return &v;
    if (scope == AGENT && v.device != device && v.at_system > s->acquired_system[device] && !lucky(s, v)) return &v;
  }
  return nullptr;
}

// Keeps the list of polls that wait for a store which may never reach them.
COLD void note_poll(Reader& r, const Word* word, u8 m, Scope scope) {
  WeakSystem* s = r.s;
  const u64 a = word_address(word);
  const u32 group = static_cast<u32>(r.w->group->number);
  const Version* v = hidden(r, word, m, scope);
  for (u64 i = 0; i < s->num_starved; i++) {
    Race& k = s->starved[i];
    if (k.address != a || k.load_launch != r.l->number || k.load_pc != r.pc || k.load_group != group) continue;
    if (v) {
      k = race_with(r, a, *v, scope);
    } else {
      k = s->starved[--s->num_starved];
    }
    return;
  }
  if (v && s->num_starved < MAX_STARVED) s->starved[s->num_starved++] = race_with(r, a, *v, scope);
}

// the bytes `m` of a word as this reader may see them; each version covers all of m or nothing of it
u32 choose(Reader& r, Word* word, u8 m, Scope scope) {
  WeakSystem* s = r.s;
  const u32 device = static_cast<u32>(r.l->device), keep = spread(m);
  u64 floor = 0, acquired = r.view->acquired, acquired_system = r.view->acquired_system;
  u32 value = word->baseline;
  if (scope != WORKGROUP) {
    acquired = NEVER - 1;
    acquired_system = scope == SYSTEM ? NEVER - 1 : s->acquired_system[device];
  }
  for (u32 i = word->newest; i; i = version(s, i).older) {
    Version& v = version(s, i);
    if (!(v.bytes & m)) continue;
    const bool own = v.group == r.g->id;
    if (own && v.at_device == NEVER) return v.value & keep;
    const u64 at = order(word, v, device);
    if (at == NEVER || at < floor) continue;
    const u64 released = scope == WORKGROUP ? (v.device == device ? v.released_device : v.released_system) : at;
    if (own || released <= (v.device == device ? acquired : acquired_system)) {
      floor = at;
      value = v.value;
    }
  }
  u32 candidates[MAX_VERSIONS + 1] = {value}, n = 1, newest = 0;
  u64 newest_at = floor;
  const Version* racing = nullptr;
  for (u32 i = word->newest; i; i = version(s, i).older) {
    Version& v = version(s, i);
    if (!(v.bytes & m)) continue;
    const u64 at = order(word, v, device);
    if (at <= floor) continue;
    const bool unordered = scope == WORKGROUP || (scope == AGENT && v.device != device);
    if (unordered && !racing && v.group != r.g->id && (v.value ^ value) & keep) racing = &v;
    if (at == NEVER || (scope == AGENT && v.device != device && !lucky(s, v))) continue;
    if (at > newest_at) {
      newest_at = at;
      newest = n;
    }
    candidates[n++] = v.value;
  }
  if (racing) note_race(r, word_address(word), *racing, scope);
  if (n > 1) value = candidates[scope != WORKGROUP || draw(s) & 1 ? newest : draw(s) % n];
  return value & keep;
}

u32 read_word(Reader& r, Word* word, u8 m, Scope scope) {
  bool split = false;
  for (u32 i = word->newest; i; i = version(r.s, i).older) {
    u8 covered = version(r.s, i).bytes & m;
    split |= covered && covered != m;
  }
  if (!split) return choose(r, word, m, scope);
  u32 x = 0;
  for (int i = 0; i < 4; i++)
    if (m >> i & 1) x |= choose(r, word, 1 << i, scope);
  return x;
}

// bytes [a, a + n) word by word: body(word address, mask of its bytes, bytes from the start of the access)
template <class F> INLINE void for_words(u64 a, u32 n, F body) {
  for (u64 word = a & ~3ull; word < a + n; word += 4) {
    u8 m = 15;
    if (word < a) m &= static_cast<u8>(15 << (a - word));
    if (a + n - word < 4) m &= static_cast<u8>((1 << (a + n - word)) - 1);
    body(word, m, static_cast<i64>(word - a));
  }
}

void load_bytes(Reader& r, u64 a, u32 n, Scope scope, u8* out) {
  for_words(a, n, [&](u64 at, u8 m, i64 offset) {
    Word* word = word_of(r, at, false);
    u32 x = word ? read_word(r, word, m, scope) : *reinterpret_cast<const volatile u32*>(at);
    if (word && scope != WORKGROUP) note_poll(r, word, m, scope);
    for (int i = 0; i < 4; i++)
      if (m >> i & 1) out[offset + i] = static_cast<u8>(x >> 8 * i);
  });
}

// everything of this workgroup (scope AGENT), or of this device and the word's own (SYSTEM), becomes visible there
void flush_word(Reader& r, Word* word, Scope scope) {
  WeakSystem* s = r.s;
  for (u32 i = word->newest; i; i = version(s, i).older)
    if (version(s, i).group == r.g->id) arrive_device(s, i);
  if (scope != SYSTEM) return;
  for (u32 i = word->newest; i; i = version(s, i).older) {
    Version& v = version(s, i);
    if ((v.device == r.l->device || v.device == word->home) && v.at_device != NEVER) arrive_system(s, i);
  }
}

bool put_bytes(Reader& r, Word* word, u32 value, u8 m, Scope scope) {
  WeakSystem* s = r.s;
  if (scope == WORKGROUP) {
    u32 i = word->newest;
    Version* v = i ? &version(s, i) : nullptr;
    if (v && v->group == r.g->id && v->wave == r.wave && v->at_device == NEVER) {
      v->value = (v->value & ~spread(m)) | (value & spread(m));
      v->bytes |= m;
      v->pc = r.pc;
    } else {
      i = add_version(r, word, value, m);
      if (!i) return false;
    }
    link(s, r.stores->list, i);
    return true;
  }
  flush_word(r, word, scope);
  u32 i = add_version(r, word, value, m);
  if (!i) return false;
  Version& v = version(s, i);
  v.at_device = v.released_device = ++s->now;
  if (scope == SYSTEM) {
    v.at_system = v.released_system = ++s->now;
    s->pending--;
    write_real(s, word, v);
  } else {
    link(s, static_cast<u32>(s->lists[v.device]), i);
    if (v.device == word->home) write_real(s, word, v);
  }
  return true;
}

}  // namespace

// One lane's accesses; `reader` is called once per instruction. false (and a reader without a group): the arena is full.
COLD inline void weak_load(Reader& r, u64 a, u32 n, u64 how, u8* out) { load_bytes(r, a, n, scope_of(how), out); }

COLD inline bool weak_store(Reader& r, u64 a, u32 n, u64 how, const u8* bytes) {
  bool good = true;
  for_words(a, n, [&](u64 at, u8 m, i64 offset) {
    Word* word = good ? word_of(r, at, true) : nullptr;
    u32 x = 0;
    for (int i = 0; i < 4; i++)
      if (m >> i & 1) x |= static_cast<u32>(bytes[offset + i]) << 8 * i;
    good = word && put_bytes(r, word, x, m, scope_of(how));
  });
  return good;
}

template <class F> COLD inline bool weak_atomic(Reader& r, u64 a, u32 n, u64 how, u64* seen, F change) {
  const Scope scope = scope_of(how);
  Word* words[2] = {word_of(r, a, true), n == 8 ? word_of(r, a + 4, true) : nullptr};
  *seen = 0;
  for (u32 i = 0; i < n / 4; i++) {
    if (!words[i]) return false;
    u32 x = 0;
    if (scope != WORKGROUP) flush_word(r, words[i], scope);
    if (scope != SYSTEM) {
      // of narrow scope: what this workgroup, or device, would load
      x = read_word(r, words[i], 15, scope);
    } else {
      // an atomic never acts on an old value
      for (int b = 0; b < 4; b++) {
        u64 latest = 0;
        u32 byte = words[i]->baseline;
        for (u32 k = words[i]->newest; k; k = version(r.s, k).older) {
          Version& v = version(r.s, k);
          u64 at = order(words[i], v, ~0u);
          if (v.bytes >> b & 1 && at != NEVER && at > latest) {
            latest = at;
            byte = v.value;
          }
        }
        x |= byte & 0xFFu << 8 * b;
      }
    }
    *seen |= static_cast<u64>(x) << 32 * i;
  }
  u64 fresh = change(*seen);
  bool good = true;
  if (fresh == *seen && scope != WORKGROUP)
    for (u32 i = 0; i < n / 4; i++) note_poll(r, words[i], 15, scope);
  for (u32 i = 0; i < n / 4; i++)
    if (static_cast<u32>(fresh >> 32 * i) != static_cast<u32>(*seen >> 32 * i)) good = good && put_bytes(r, words[i], static_cast<u32>(fresh >> 32 * i), 15, scope);
  return good;
}

// kinds of mori_emu_fence, as packed by memory.py
enum FenceKind : u32 { WAIT_STORES, WRITEBACK_AGENT, WRITEBACK_SYSTEM, INVALIDATE_WORKGROUP, INVALIDATE_AGENT, INVALIDATE_SYSTEM };

COLD inline void weak_fence(Wave* w, u32 kind) {
  Reader r = reader(w, 0);
  if (!r.g) return;
  WeakSystem* s = r.s;
  const u64 device = r.l->device;
  WeakWave& own = r.g->waves[r.wave];
  switch (kind) {
    case WRITEBACK_AGENT:
    case WRITEBACK_SYSTEM:
      // takes effect when it has been waited for
      if (kind > own.writeback) own.writeback = kind;
      break;
    case WAIT_STORES:
      if (r.l->wait_releases || own.writeback) {
        release_list(s, r.stores->list);
      } else if (r.l->release_per_wave) {
        for (u32 i; (i = version(s, r.stores->list).next) != r.stores->list;) link(s, r.g->drained, i);
      }
      if (own.writeback) release_list(s, r.g->drained);
      if (own.writeback == WRITEBACK_SYSTEM) release_system(s, static_cast<u32>(device));
      own.writeback = 0;
      break;
    case INVALIDATE_WORKGROUP:
      if (r.view->acquired < r.g->acquired) r.view->acquired = r.g->acquired;
      if (r.view->acquired_system < r.g->acquired_system) r.view->acquired_system = r.g->acquired_system;
      break;
    default:
      r.view->acquired = ++s->now;
      if (kind == INVALIDATE_SYSTEM) s->acquired_system[device] = s->now;
      r.view->acquired_system = s->acquired_system[device];
      r.g->acquired = r.view->acquired;
      r.g->acquired_system = r.view->acquired_system;
  }
}

// The end of a kernel releases at agent scope: the kernel's, not the workgroup's.
COLD inline void weak_wave_end(Wave* w) {
  Reader r = reader(w, 0);
  if (!r.g) return;
  WeakSystem* s = r.s;
  WeakGroup* g = r.g;
  const u32 list = static_cast<u32>(r.l->unreleased);
  if (r.l->release_per_wave) join(s, list, r.stores->list);
  if (++g->ended != w->launch->num_waves) return;
  join(s, list, g->waves[0].list);
  join(s, list, g->drained);
  (g->previous ? reinterpret_cast<WeakGroup*>(g->previous)->next : s->groups) = g->next;
  if (g->next) reinterpret_cast<WeakGroup*>(g->next)->previous = g->previous;
  g->next = s->free_groups;
  s->free_groups = reinterpret_cast<u64>(g);
  reinterpret_cast<u64*>(r.l->groups)[w->group->number] = 0;
  if (++r.l->ended == r.l->num_groups) end_launch(s, r.l);
}
