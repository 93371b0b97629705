// Weak-memory mode: its structures. mori_triton/emulator/weak.py repeats `WeakSystem`, `WeakLaunch` and `Race`.
#pragma once
#include "memory.h"

constexpr u64 NEVER = ~0ull;
constexpr u64 PAGE_STRIDE = 8192;  // bytes between pages
constexpr u32 NONE = 0;            // no version
constexpr u64 CARDS = 64;          // device number of PE 0's network card
constexpr int MAX_DEVICES = 64, MAX_WAVES = 32, MAX_VERSIONS = 8, MAX_RACES = 64, MAX_STARVED = 32, PAGE_WORDS = 256;

// one store to one word; also used as the head of the lists of versions that wait for a release
struct Version {
  u32 older;  // in the same word
  u32 previous,
      next;  // in the list of its wave, workgroup (waited for, not released) or device (not released to the system)
  u32 value;
  u8 bytes, device, wave, live;
  u32 group;   // unique number of the storing workgroup
  u32 number;  // its number in the grid
  u32 launch, pc;
  u64 word;                              // Word
  u64 at_device, at_system;              // when it arrived
  u64 released_device, released_system;  // when a release covered it
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
  u64 card_full;  // a card's write found the arena full
  Race races[MAX_RACES];
  Race starved[MAX_STARVED];  // polls that do not see a store which has been made
};

// a launch, or a network card: see weak_dma.h
struct WeakLaunch {
  u64 system;
  u64 device, number;
  u64 acquire_per_wave;  // waves have caches of their own: an acquire acts for one wave, not for its workgroup
  u64 release_per_wave;  // a release covers other waves' stores only when those waves have waited for them
  u64 wait_releases;     // a store that has been waited for is at the device
  u64 homes, num_homes;  // u64 triples (start, end, device), sorted
  u64 groups;            // WeakGroup of each workgroup in flight, else 0
  u64 num_groups, started, ended;  // workgroups
  u64 previous, next;              // launches in flight
  u64 acquired, acquired_system;   // its start
  u64 unreleased;                  // list of versions of its ended workgroups; 0: not started
  u64 home;                        // device that memory outside `homes` belongs to
};

INLINE WeakLaunch* weak_launch(Wave* w) { return reinterpret_cast<WeakLaunch*>(memory_of(w)->weak); }

// the memory functions' side of one access; created once per instruction, or by a network card for each of its own
struct Reader {
  WeakSystem* s;
  WeakLaunch* l;
  WeakGroup* g;
  WeakWave* view;    // whose acquires count
  WeakWave* stores;  // whose list new versions join
  Wave* w;           // null: a network card
  u32 wave, pc;
  u32 number;  // of the workgroup in its grid
};
