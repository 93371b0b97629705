// Weak-memory mode: stores on their way from a workgroup to its device and on to the system.
//
// Every 4-byte word that a kernel has stored to keeps its recent stores ("versions") until nobody can miss them any
// more. A version is private to its workgroup, then at its device, then at the system; it moves on at random moments
// and, at the latest, at the releases that cover it.
#pragma once
#include "weak_state.h"

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
      if (b.device == version(s, i).device && b.at_system == NEVER && b.at_device < version(s, first).at_device)
        first = k;
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
  if (s->last_page && reinterpret_cast<Page*>(s->last_page)->address == base)
    return reinterpret_cast<Page*>(s->last_page);
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
  return static_cast<u8>(low && a < table[3 * low - 2] ? table[3 * low - 1] : l->home);
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
  if (v.device < CARDS && v.released_device > s->floor_agent[v.device]) return false;
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
    if (version(s, i).at_system != NEVER && (!victim || version(s, i).at_system < version(s, victim).at_system))
      victim = i;
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
  v.number = r.number;
  v.launch = static_cast<u32>(r.l->number);
  v.pc = r.pc;
  v.word = reinterpret_cast<u64>(word);
  v.at_device = v.at_system = v.released_device = v.released_system = NEVER;
  word->newest = i;
  word->count++;
  s->pending++;
  return i;
}

}  // namespace
