// Weak-memory mode: launches, workgroups and waves, and what each of them has acquired and not yet released.
#pragma once
#include "weak_versions.h"

namespace {

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
  Reader r{s, l, g, nullptr, nullptr, w, wave, pc_of(how), static_cast<u32>(w->group->number)};
  if (!g) return r;
  r.view = g->waves + (l->acquire_per_wave ? wave : 0);
  r.stores = g->waves + (l->release_per_wave ? wave : 0);
  if (s->pending && !(s->salt & 1) && draw(s) % 4 == 0) random_arrival(r);
  return r;
}

}  // namespace
