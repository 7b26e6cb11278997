// The bytes behind tensors. Several tensors may view one storage. It lives as long as the last of
// them.
#pragma once

#include <memory>
#include <string>

#include "tessera/memory/memory.hpp"

namespace tessera {

// Memory of its own, memory lent by others, or a window that a sharding unit opens and closes.
//
// Note [Windows]
// The full tensor of a sharded parameter is one Storage for ever. While its unit is open, `data`
// points into the unit's slot. While it is closed, `data` is null, and any use throws, naming the
// unit. A tensor saved for backward holds the Storage with shape and strides, not the bytes. It has
// bytes again when its unit opens for backward. `saved` counts these holders, so that the unit can
// tell them from a tensor that escaped its scope.
struct Storage {
  // Owns new bytes from the pool, booked under the current owner. They are for `stream`, or without
  // one for the device's own stream. On meta there are none.
  //   Throws: OutOfMemory.
  static std::shared_ptr<Storage> owned(const Device& device, std::int64_t bytes, StreamId stream);
  static std::shared_ptr<Storage> owned(const Device& device, std::int64_t bytes);
  // Makes a closed window of a unit. `unit` is the unit's name, which outlives the storage.
  static std::shared_ptr<Storage> window(const Device& device, std::int64_t bytes,
                                         const std::string& unit);
  // Borrows bytes that somebody else keeps, and the record of their last use. Both outlive the
  // storage.
  static std::shared_ptr<Storage> borrowed(const Device& device, std::byte* data,
                                           std::int64_t bytes, LastUse& use);

  Device device;
  Buffer buffer{};            // empty if nothing is owned: a window, lent or no bytes, meta
  std::byte* data = nullptr;  // null on meta, for zero bytes, and in a closed window
  std::int64_t bytes = 0;
  LastUse* use = nullptr;
  int saved = 0;  // holders of kind autograd::Saved
  // How many operations and edits were submitted to write it. A window has FlatGroup::version from
  // when a call last opened it.
  std::uint64_t version = 0;
  // The last operation that took it as an input, and the last that wrote it. Errors name them.
  const char* last_op = "";
  const char* last_writer = "";
  const std::string* unit = nullptr;  // set for a window: the unit's name
  // What an error advises if the window is used while it is closed.
  const char* remedy = "use it inside the module's call, or register the method that uses it";
  // is_lent: somebody outside lends it, as by DLPack, so it is not overwritten in place.
  // is_read_only: no operation writes it.
  bool is_lent = false, is_read_only = false;
  // Whether it holds 8-bit codes whose scales lie elsewhere. Codes are no values; see
  // autograd/fp8.hpp.
  bool are_codes = false;

  bool is_closed() const noexcept { return unit != nullptr && data == nullptr && bytes != 0; }
};

}  // namespace tessera
