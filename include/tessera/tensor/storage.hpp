// The bytes behind tensors. Several tensors may view one storage; it lives as long as the last of
// them.
#pragma once

#include <memory>
#include <string>

#include "tessera/memory/memory.hpp"

namespace tessera {

// Memory of its own, or a window into memory that a sharding unit opens and closes.
//
// Note [Windows]
// The full tensor of a sharded parameter is one Storage for ever. While its unit is open, `data`
// points into the unit's slot; while it is closed, `data` is null and any use throws, naming the
// unit. A tensor saved for backward holds the Storage with shape and strides, not the bytes, and
// has bytes again when its unit opens for backward. `saved` counts these holders, so that the unit
// can tell them from a tensor that escaped its scope.
struct Storage {
  // Bytes of its own: from the pool, for `stream`, the device's own without one, booked under the
  // current owner. On meta none.
  // Throws: OutOfMemory.
  static std::shared_ptr<Storage> owned(const Device& device, std::int64_t bytes, StreamId stream);
  static std::shared_ptr<Storage> owned(const Device& device, std::int64_t bytes);
  // A closed window of a unit. `unit` is its name, which outlives the storage.
  static std::shared_ptr<Storage> window(const Device& device, std::int64_t bytes,
                                         const std::string& unit);
  // Bytes that somebody else keeps, with what was last done to them. Both outlive the storage.
  static std::shared_ptr<Storage> borrowed(const Device& device, std::byte* data,
                                           std::int64_t bytes, LastUse& use);

  Device device;
  Buffer buffer{};            // empty for what is not owned, for zero bytes, and on meta
  std::byte* data = nullptr;  // null on meta, for zero bytes, and in a closed window
  std::int64_t bytes = 0;
  LastUse* use = nullptr;
  int saved = 0;  // holders of kind autograd::Saved
  // Operations and edits that were submitted to write it; of a window, FlatGroup::version when a
  // call last opened it.
  std::uint64_t version = 0;
  // The last operation that took it as an input, and the last that wrote it: culprits of errors.
  const char* last_op = "";
  const char* last_writer = "";
  const std::string* unit = nullptr;  // set for a window: the unit's name
  // What an error says of a window that is used while it is closed.
  const char* remedy = "use it inside the module's call, or register the method that uses it";
  // Lent by somebody outside, as by DLPack: not overwritten in place; read-only: by no operation.
  bool is_lent = false, is_read_only = false;
  // 8-bit codes whose scales lie elsewhere: no values, see autograd/fp8.hpp.
  bool are_codes = false;

  bool is_closed() const noexcept { return unit != nullptr && data == nullptr && bytes != 0; }
};

}  // namespace tessera
