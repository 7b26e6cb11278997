// What Stream::launch, through which all device work goes, is given: the description of an
// operation, and its body. Also what the body sees when it runs.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>

#include "tessera/device/clock.hpp"
#include "tessera/device/cost.hpp"

namespace tessera {

class WorkerPool;

enum class AccessMode : std::uint8_t { read, write };

// Bytes [begin, end) of the allocation behind `use` that an operation reads or writes.
struct Access {
  LastUse* use = nullptr;
  const void* begin = nullptr;
  const void* end = nullptr;
  AccessMode mode = AccessMode::read;
};

// Name (a string that lives as long as the device), cost and accesses of one operation.
struct Op {
  const char* name = "";
  Cost cost{};
  std::span<const Access> accesses{};
};

struct Driver;

// What a body sees when it runs. Filled by the executor.
struct Exec {
  const Driver* driver = nullptr;  // of the device; null on the CPU
  void* native_stream = nullptr;   // the cudaStream_t on CUDA
  void* workspace = nullptr;       // of this stream, for libraries; null if it has none
  std::size_t workspace_bytes = 0;
  const char* error = nullptr;    // a body that could not be queued sets it: one lasting line
  const char* note = nullptr;     // a body sets it for the log: one lasting line
  WorkerPool* workers = nullptr;  // threads for `parallel_for`, null for one thread
  StreamId stream = StreamId::compute;
  int rank = 0;
  enum class Phase : std::uint8_t { run, publish } phase = Phase::run;  // see CollectiveBarrier
};

inline constexpr std::size_t kBodyBytes = 128;

// A type-erased body. It is trivially copyable, owns nothing and allocates nothing.
struct Body {
  alignas(16) std::byte bytes[kBodyBytes];
  void (*invoke)(const void* bytes, Exec& exec) = nullptr;

  Body() = default;
  template <class F>
    requires(!std::is_same_v<F, Body>)
  explicit Body(const F& f) {
    static_assert(std::is_trivially_copyable_v<F>, "a body is copied as bytes and owns nothing");
    static_assert(sizeof(F) <= kBodyBytes, "a body is at most 128 bytes");
    static_assert(alignof(F) <= 16);
    std::memcpy(bytes, &f, sizeof(F));
    invoke = [](const void* p, Exec& exec) { (*static_cast<const F*>(p))(exec); };
  }
};

}  // namespace tessera
