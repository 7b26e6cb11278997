// What libtessera-nccl.so exports: NCCL as a table of plain functions on plain data.
//
// The module links nothing of ours and throws nothing across. It opens libnccl.so.2 itself, one
// for the process, so that a program without several GPUs never loads it. Communicators never
// block: what a call has begun goes on while `poll` says so, and meanwhile the communicator takes
// no other call than that and `abort`.
//
//   a NcclError is null, or one line that says what failed, valid until the thread's next call
//   communicators and streams are of the calling thread's device
#pragma once

#include <cstdint>

namespace tessera::kernels {

using NcclError = const char*;

struct NcclId {
  char bytes[128];
};

struct NcclLibrary {
  char file[512];
  std::int32_t version;  // 22809: 2.28.9
};

// How a communicator's kernels run.
struct NcclShape {
  std::int32_t most_blocks;    // of threads; 0: as many as NCCL wants
  std::int32_t has_zero_ctas;  // copy engines move what they can, from NCCL 2.28 on
};

// As which NCCL adds. What it only carries is bytes.
enum class NcclSum : std::int32_t { i32, i64, f32, f64 };

// Changes whenever the table does.
inline constexpr std::uint32_t kNcclDriverVersion = 2;

struct NcclDriver {
  std::uint32_t version;       // kNcclDriverVersion of the module's build
  std::uint32_t driver_bytes;  // sizeof(NcclDriver) there

  // Loads `file`; where that is empty, libnccl.so.2: the process's own, the system's, a toolkit's
  // or a Python wheel's. First of all calls. An error where there is none, it is older than 2.27,
  // or the process has another one already.
  NcclError (*open)(const char* file, NcclLibrary* out);

  // --- communicators
  NcclError (*make_id)(NcclId* out);
  // Of all ranks that give this id.
  NcclError (*join)(const NcclId* id, std::int32_t size, std::int32_t rank, void** comm);
  // A part of `comm`: the ranks that give the same color, in the order of their keys. All ranks of
  // `comm` call; a negative color gets null. *out is there once `comm` is not busy any more.
  NcclError (*split)(void* comm, std::int32_t color, std::int32_t key, const NcclShape* shape,
                     void** out);
  // Also tells of a peer that has failed, where NCCL has noticed.
  NcclError (*poll)(void* comm, bool* is_busy);
  // The last calls: all ranks are done with it, and what it holds is freed.
  NcclError (*finalize)(void* comm);
  NcclError (*destroy)(void* comm);
  // Instead of them: ends what is under way on the device, of all at once. They are gone.
  NcclError (*abort)(void* const* comms, std::int32_t count);

  // --- memory that NCCL can move without a copy of its own, on the calling thread's device, where
  // it is a window of the communicator. All ranks of `comm` make their windows in one order;
  // *window is there once `comm` is not busy any more, and null where NCCL has no use for one.
  NcclError (*allocate)(std::int64_t bytes, void** data);
  NcclError (*release)(void* data);
  NcclError (*make_window)(void* comm, void* data, std::int64_t bytes, void** window);
  NcclError (*end_window)(void* comm, void* window);

  // --- queued on a stream, between `begin` and `end`, in any order; after `end` each communicator
  // is busy until all of it is queued
  NcclError (*begin)();
  NcclError (*end)();
  NcclError (*all_gather)(const void* send, void* recv, std::int64_t bytes, void* comm,
                          void* stream);
  NcclError (*broadcast)(const void* send, void* recv, std::int64_t bytes, std::int32_t root,
                         void* comm, void* stream);
  NcclError (*send)(const void* data, std::int64_t bytes, std::int32_t to, void* comm,
                    void* stream);
  NcclError (*recv)(void* data, std::int64_t bytes, std::int32_t from, void* comm, void* stream);
  // `bytes` from each of the communicator's `ranks` for each; before NCCL 2.28 sends and receives.
  NcclError (*all_to_all)(const void* send, void* recv, std::int64_t bytes, std::int32_t ranks,
                          void* comm, void* stream);
  NcclError (*reduce_scatter)(const void* send, void* recv, std::int64_t count, NcclSum as,
                              void* comm, void* stream);
  NcclError (*all_reduce)(const void* send, void* recv, std::int64_t count, NcclSum as, void* comm,
                          void* stream);
};

// The one symbol of a module: null where it can't serve `version`.
using NcclEntry = const NcclDriver* (*)(std::uint32_t version);
inline constexpr const char* kNcclSymbol = "tessera_nccl";

}  // namespace tessera::kernels
