// A point in a stream's program, and everything that the stream knew there.
#pragma once

#include <memory>

#include "tessera/device/clock.hpp"

namespace tessera {

// A value that Stream::record makes. On CUDA `native` keeps a pooled cudaEvent alive; on the CPU it
// is null.
struct Event {
  StreamId stream = StreamId::compute;
  Tick tick = 0;             // every operation of `stream` up to this one
  Clock clock;               // ... and all that these were ordered after
  std::uint64_t number = 0;  // among the records of its device, from 1
  std::shared_ptr<void> native{};
};

}  // namespace tessera
