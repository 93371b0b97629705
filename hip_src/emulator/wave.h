// State shared by the lifted kernels, the scheduler and the host: waves, workgroups, launches.
//
// Offsets of `Wave` are those of mori_triton/emulator/state.py, `Group`, `Launch` and `Scheduler` those of
// mori_triton/emulator/machine.py; `mori_emulator_layout` (scheduler.cpp) lets a test compare them.
#pragma once

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;

// what run() returns
enum Status : u32 { RUNNING = 0, DONE = 1, BARRIER = 2, FAULTED = 3, SLEEPING = 4 };

// scalar registers by hardware number
constexpr u32 TTMP = 108;
constexpr u64 VREGS = 1024;  // vector registers follow the header

struct Group;
struct Launch;

struct Wave {
  u32 sgpr[128];
  u64 scc, pc, fault, fault_pc, fault_addr, budget;
  u64 count;  // instructions executed
  u64 lds, lds_size, ranges, nranges, last_lo, last_hi, data;
  u64 clock;  // address of the virtual clock, 0: the host's clock
  u64 wave_id;
  u32 (*run)(Wave*, u64 budget);
  Group* group;
  u64 status;
  Launch* launch;
  u64 changes;      // stores and atomics that changed global memory
  u64 polls;        // atomics and coherent loads
  u64 clock_reads;  // of the virtual clock
  u64 reserved[17];
  u64 weak;  // the weak-memory model's record of this wave, 0: ordinary memory
};

// scheduler's own words of a wave, at the end of the header so that the lifter's fields can grow
struct WaveTail {
  // since memory last changed: waiting events (polls, sleeps, barriers that follow them), other turns, readings of the clock
  u64 epoch, idle, turns, clock_reads;
  u64 only_polled;                     // the last quantum did nothing but poll
  u64 generation, fingerprint, loops;  // the state at the start of a proof, and whether the wave has been in it again
};
constexpr u64 WAVE_TAIL = VREGS - sizeof(WaveTail);

struct Group {
  u64 waves;  // address of the first wave
  u64 done, waiting, slot, number;
  u64 silent;  // arrivals at barriers since a wave of the group last polled or slept
};

struct Launch {
  u64 left;    // workgroups that have not ended
  u64 next;    // next workgroup to start
  u64 groups;  // workgroups of the grid
  u64 grid[3];
  u64 num_waves;    // per workgroup
  u64 wave_stride;  // bytes
  u64 slots, slot_stride, lds_offset, waves_offset;
  u64 free_slots, num_free;  // u64 array of slots not in use
  u64 wave_template;         // 1024 bytes: scalar registers and header at start
  u64 warp_size;
  u64 id_registers[3];  // scalar register that receives a workgroup id, NO_REGISTER: none
  u64 first_wave;       // number of the launch's first wave
  u64 ended;            // 1 when every workgroup has ended
  u64 weak_records;     // u64 per wave of the grid: what `Wave::weak` becomes, 0: ordinary memory
};
constexpr u64 NO_REGISTER = ~0ull;
constexpr u64 TTMP_IDS = ~0ull - 1;  // ids in ttmp7/ttmp9, wave number in ttmp8

struct Scheduler {
  u64 clock;        // instructions executed by every wave
  u64 random;       // 1: random wave and quantum, 0: one wave after another
  u64 rng;          // xorshift state
  u64 quantum_min;  // instructions
  u64 quantum_span;
  u64 switches, hash;
  u64 ready, ready_mask;  // ring of Wave*, its size less one; Python sees to its capacity
  u64 first, num_ready;
  u64 epoch;             // counts quanta that changed memory
  u64 faulted;           // wave
  u64 finished;          // launch
  u64 stop;              // set by another thread: return at once
  u64 starting;          // launch with workgroups left to start (rotation), 0: none
  u64 idle_rounds;       // rotation: rounds in a row in which every wave only waited
  u64 round_left;        // rotation: turns left in this round
  u64 round_busy;        // rotation: this round changed memory or computed
  u64 round_polls;       // rotation: polls and sleeps of this round
  u64 started_at;        // rotation: clock when a workgroup was last started early
  u64 quiet_checked;     // switches at the last check for quiescence
  u64 quiet_polls;       // waiting events or turns of every wave before a proof starts that nothing can change any more
  u64 proof;             // number of the proof
  u64 proof_epoch;       // epoch that it is about, plus one
  u64 proof_at;          // switches at its start
  u64 proof_span;        // switches until it is given up and started anew
};
