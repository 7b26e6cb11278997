// The bytes behind tensors. Several tensors may view one storage; it lives as long as the last of
// them.
#pragma once

#include <memory>
#include <string>

#include "tessera/memory/memory.hpp"

namespace tessera {

// Owned memory, or a window into memory that a sharding unit opens and closes.
//
// Note [Windows]
// The full tensor of a sharded parameter is one Storage for ever. While its unit is open, `data`
// points into the unit's slot; while it is closed, `data` is null and any use throws, naming the
// unit. A tensor saved for backward holds storage and geometry, that is (parameter, view), and is
// whole again when its unit opens for backward. `saved` counts these holders, so that the unit can
// tell them from a tensor that escaped its scope.
struct Storage {
  Device device;
  Buffer buffer;              // empty for a window and on meta
  std::byte* data = nullptr;  // null on meta, for zero bytes, and in a closed window
  std::int64_t bytes = 0;
  LastUse* use = nullptr;
  int saved = 0;  // holders of kind autograd::Saved
  // The last operation that took it as an input: names the culprit of an escape.
  const char* last_op = "";
  const std::string* unit = nullptr;  // set for a window: the unit's name

  bool is_closed() const noexcept { return unit != nullptr && data == nullptr && bytes != 0; }
};

}  // namespace tessera
