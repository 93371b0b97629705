// Weak-memory mode: what a load may return when stores arrive late.
//
// A plain load may return every version of a word that became visible since the reader's last acquire. A version counts
// as synchronised only if a *release* before that acquire covered it, so the outcome of a load depends on luck but the
// report of a race does not. The rules in words: docs/emulator.md.
#pragma once
#include "weak_groups.h"

namespace {

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
  return Race{a,
              1,
              static_cast<u32>(r.l->number),
              r.pc,
              r.number,
              r.wave,
              v.launch,
              v.pc,
              v.number,
              v.wave,
              missing,
              4};
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
  // no address goes into it: a seed repeats in another process
  u64 x = (s->salt ^ v.at_system) * 0x9E3779B97F4A7C15ull;
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
  const Version* v = hidden(r, word, m, scope);
  for (u64 i = 0; i < s->num_starved; i++) {
    Race& k = s->starved[i];
    if (k.address != a || k.load_launch != r.l->number || k.load_pc != r.pc || k.load_group != r.number) continue;
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

// the bytes `m` of a word as all devices see them
u32 at_system(WeakSystem* s, const Word* word, u8 m) {
  u32 x = 0;
  for (int b = 0; b < 4; b++) {
    if (!(m >> b & 1)) continue;
    u64 latest = 0;
    u32 byte = word->baseline;
    for (u32 i = word->newest; i; i = version(s, i).older) {
      const Version& v = version(s, i);
      const u64 at = order(word, v, ~0u);
      if (v.bytes >> b & 1 && at != NEVER && at > latest) {
        latest = at;
        byte = v.value;
      }
    }
    x |= byte & 0xFFu << 8 * b;
  }
  return x;
}

// bytes [a, a + n) word by word: body(word address, mask of its bytes, bytes from the start of the access)
template <class F>
INLINE void for_words(u64 a, u64 n, F body) {
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

// One lane's accesses; `reader` is called once per instruction. false (and a reader without a group): the arena is
// full.
COLD inline void weak_load(Reader& r, u64 a, u32 n, u64 how, u8* out) { load_bytes(r, a, n, scope_of(how), out); }

COLD inline bool weak_store(Reader& r, u64 a, u64 n, u64 how, const u8* bytes) {
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

template <class F>
COLD inline bool weak_atomic(Reader& r, u64 a, u32 n, u64 how, u64* seen, F change) {
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
      x = at_system(r.s, words[i], 15);
    }
    *seen |= static_cast<u64>(x) << 32 * i;
  }
  u64 fresh = change(*seen);
  bool good = true;
  if (fresh == *seen && scope != WORKGROUP && r.w)
    for (u32 i = 0; i < n / 4; i++) note_poll(r, words[i], 15, scope);
  for (u32 i = 0; i < n / 4; i++)
    if (static_cast<u32>(fresh >> 32 * i) != static_cast<u32>(*seen >> 32 * i))
      good = good && put_bytes(r, words[i], static_cast<u32>(fresh >> 32 * i), 15, scope);
  return good;
}

// kinds of mori_emu_fence, as packed by accesses.py
enum FenceKind : u32 {
  WAIT_STORES,
  WRITEBACK_AGENT,
  WRITEBACK_SYSTEM,
  INVALIDATE_WORKGROUP,
  INVALIDATE_AGENT,
  INVALIDATE_SYSTEM
};

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
