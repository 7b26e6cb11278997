// What tests ask of an emulated device beside the driver table: delays, a small memory, faults, and
// how often each call came. The module's second symbol, `tessera_emulator`, returns it.
#pragma once

#include <cstdint>

namespace tessera::kernels::cuda::emulator {

// Calls since the process began.
struct Counts {
  std::int64_t streams, events;  // made
  std::int64_t records, waits, blocks;
  std::int64_t allocations, host_allocations, mappings;
  std::int64_t copies, batches, fills;  // copies that came in batches, too
  std::int64_t ranges, open_ranges;     // pushed, and not popped yet
  std::int64_t kernels;                 // queued, with calls of libraries
};

struct Control {
  // Each piece of queued work starts up to `most_us` microseconds late, as the seed has it; 0:
  // none.
  void (*delay)(std::uint64_t seed, std::int32_t most_us);
  // How many devices there are from here on, at first 1, and whether they reach each other's
  // memory: where not, what is queued on one with an address of another is refused.
  void (*devices)(std::int32_t count, bool reach);
  // Bytes in use of one device.
  std::int64_t (*used)(std::int32_t device);
  // Of each device, for `allocate` and `map` together; 0: no limit.
  void (*limit_memory)(std::int64_t bytes);
  // `failure` says `line` once, as if a kernel had failed; a string that lasts.
  void (*fail)(const char* line);
  void (*counts)(Counts* out);
  // Whether kernels that multiply by warpgroups run from here on, as on sm_90; at first they do.
  void (*warpgroups)(bool are_there);
  // For a library that queues work of its own, as nccl/: `run(data)` when `stream` comes to it, or
  // at each launch of a graph that it is captured in; `drop(data)` once it can run no more.
  void (*queue)(void (*run)(void* data), void (*drop)(void* data), void* data, void* stream);
  bool (*is_captured)(void* stream);
  // Which device a stream is on, or the calling thread where it is null.
  std::int32_t (*device_of)(void* stream);
  // Which device's memory this is; -1 where it is the host's.
  std::int32_t (*holder_of)(const void* memory);
};

using ControlEntry = const Control* (*)();
inline constexpr const char* kControlSymbol = "tessera_emulator";

}  // namespace tessera::kernels::cuda::emulator
