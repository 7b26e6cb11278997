// Copies and fills for bodies: done at once on the CPU, queued on the body's stream elsewhere.
#pragma once

#include <cstdint>
#include <cstring>

#include "tessera/detail/device/driver.hpp"
#include "tessera/device/op.hpp"

namespace tessera {

// `to` and `from` do not overlap. Host memory is pinned where there is a driver.
inline void queue_copy(Exec& exec, void* to, const void* from, std::int64_t bytes) {
  if (exec.driver)
    exec.error = exec.driver->copy(to, from, bytes, exec.native_stream);
  else
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

inline void queue_fill(Exec& exec, void* to, std::uint8_t byte, std::int64_t bytes) {
  if (exec.driver)
    exec.error = exec.driver->fill(to, byte, bytes, exec.native_stream);
  else
    std::memset(to, byte, static_cast<std::size_t>(bytes));
}

}  // namespace tessera
