// What a kind of device other than the CPU is made of: the table that a driver module exports.
//
// The CUDA side of the library is one shared module, loaded when a device is first asked for. It
// exports one C function that returns this table of plain functions on plain structs; it links
// nothing of ours, and nothing is thrown across. A module built for the host, which runs the same
// kernels thread by thread, exports the same table, so that all above it is tested where no device
// is.
//
//   calls on a device act on the calling thread's, chosen by `use`; who changes it behind the
//   module's back, in a body for instance, changes it back
//   a DriverError is null, or one line that says what failed, valid until the thread's next call
#pragma once

#include <cstdint>

namespace tessera {

using DriverError = const char*;

struct DriverDevice {
  char name[96];              // "NVIDIA H200"
  std::int32_t major, minor;  // compute capability: 9, 0
  std::int32_t multiprocessors;
  std::int64_t memory_bytes;  // of the device
  double bytes_per_second;    // of its memory, by clock and width; 0 where unknown
  char versions[160];         // of driver and libraries: "driver 580.65, CUDA 13.0, cuBLASLt 13.1"
  char uuid[48];              // of this one among all there are: "GPU-2e5c..."
  std::int32_t cuda_version;  // the newest that the machine's driver knows: 13010 of CUDA 13.1
};

// Changes whenever this table or Exec does, or what a kernel means; kernels that were added, taken
// away or given other arguments show in `kernels_layout`.
inline constexpr std::uint32_t kDriverVersion = 8;

// One of several copies; either side may be another device's memory.
struct DriverCopy {
  void* to;
  const void* from;
  std::int64_t bytes;
};

struct Driver {
  std::uint32_t version;         // kDriverVersion of the module's build
  std::uint32_t driver_bytes;    // sizeof(Driver) there
  std::uint64_t kernels_layout;  // which list of kernels they are, see kernels/kernel_table.hpp
  const char* architectures;     // what its kernels were built for: "sm_90, PTX"
  const void* kernels;           // their table; the layer above knows its type

  // --- devices
  // How many there are; an error where none can be used: no libcuda, too old, none.
  DriverError (*count)(std::int32_t* devices);
  // Also checks that the module has kernels for this one.
  DriverError (*describe)(std::int32_t device, DriverDevice* out);
  // The calling thread's device from here on. Costs nothing where it is that already.
  DriverError (*use)(std::int32_t device);
  // Lets kernels on `device` read and write memory of `peer`: what has been allocated there, and
  // what is mapped there later. False where the machine can't. Copies need it not. May change the
  // calling thread's device.
  DriverError (*reach)(std::int32_t device, std::int32_t peer, bool* reaches);

  // --- streams and events. `priority` 0 is the most urgent; larger ones are capped at the least.
  DriverError (*make_stream)(std::int32_t priority, void** stream);
  DriverError (*end_stream)(void* stream);
  DriverError (*make_event)(void** event);
  DriverError (*end_event)(void* event);
  DriverError (*record)(void* event, void* stream);
  DriverError (*wait)(void* stream, void* event);  // later work of `stream` follows `event`
  DriverError (*block)(void* event);               // the host sleeps until `event`
  // Whether the stream has come to `event`. From any thread; never of an event in a capture.
  DriverError (*query)(void* event, bool* is_reached);
  DriverError (*failure)();  // what a kernel before has left, if anything

  // --- memory. Where there is no more, *data is null and the error too.
  DriverError (*allocate)(std::int64_t bytes, void** data);
  DriverError (*release)(void* data);
  DriverError (*allocate_host)(std::int64_t bytes, void** data);  // pinned
  DriverError (*release_host)(void* data);
  // By mapping: a range of addresses, in which pieces get memory behind them. `granularity` divides
  // all sizes and addresses below.
  DriverError (*granularity)(std::int64_t* bytes);
  DriverError (*reserve)(std::int64_t bytes, void** range);
  DriverError (*free_range)(void* range, std::int64_t bytes);
  DriverError (*map)(void* at, std::int64_t bytes, bool* mapped);  // false: there is no more
  // One or more neighbouring pieces, each whole as `map` was given it.
  DriverError (*unmap)(void* at, std::int64_t bytes);
  DriverError (*memory_info)(std::int64_t* free_bytes, std::int64_t* total_bytes);

  // --- queued on a stream. Host memory in a copy is pinned, or the copy is not asynchronous.
  // Between devices it goes from one to the other where `reach` is true, else by way of the host.
  DriverError (*copy)(void* to, const void* from, std::int64_t bytes, void* stream);
  // Copies that touch no other's output, in one submission where the driver has it.
  DriverError (*copy_all)(const DriverCopy* copies, std::int32_t count, void* stream);
  DriverError (*fill)(void* to, std::uint8_t byte, std::int64_t bytes, void* stream);

  // Calls `function(data)` on a thread of the host when `stream` comes to it; what follows on the
  // stream waits for its end. It may not call the driver.
  DriverError (*call_host)(void (*function)(void* data), void* data, void* stream);

  // --- graphs: what streams are given between two calls, kept instead of run, to be launched as
  // one. A stream that waits for an event of a captured one is captured from there on; at the end
  // `stream` has waited for all of them. None of them may wait for what came before, and nobody
  // else for what is captured. The host may not sleep.
  DriverError (*begin_capture)(void* stream);
  DriverError (*end_capture)(void* stream, void** graph);  // *graph is null where it failed
  DriverError (*launch_graph)(void* graph, void* stream);
  DriverError (*end_graph)(void* graph);

  // --- for measurements and tests
  DriverError (*make_timer)(void** event);  // an event that also says when it was reached
  DriverError (*elapsed)(void* from, void* to, double* seconds);  // both have been reached
  DriverError (*delay)(std::int64_t nanoseconds, void* stream);   // the stream is busy for so long

  // --- annotations for a profiler, nested per thread
  void (*push_range)(const char* name);
  void (*pop_range)();
};

// The one symbol of a module: null where it can't serve `version`.
using DriverEntry = const Driver* (*)(std::uint32_t version);
inline constexpr const char* kDriverSymbol = "tessera_driver";

}  // namespace tessera
