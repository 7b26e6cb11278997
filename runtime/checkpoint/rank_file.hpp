// One rank's file of a part: which boxes of which tensors are in it, and how it is written.
#pragma once

#include <atomic>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "runtime/checkpoint/manifest.hpp"
#include "runtime/checkpoint/safetensors_header.hpp"
#include "runtime/checkpoint/shard_info.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::checkpoint {

// A box of the file, whose values are made when they are read.
struct OwnBox {
  SafetensorsEntry entry;
  BoxInfo info;
  std::function<Tensor()> values;
  const std::byte* staged = nullptr;  // these values, where the host has a copy
};

// The bytes of a box from `begin` on, a piece of them, until it is called again. Called in the
// order of boxes and pieces; nothing where the save has ended.
using ReadPiece = std::function<std::span<const std::byte>(const OwnBox& box, std::int64_t begin,
                                                           std::int64_t size)>;

// How far a rank's writing is; others look at it meanwhile.
struct WriteProgress {
  std::atomic<std::int64_t> bytes = 0;
  std::atomic<bool> is_cancelled = false;  // ends it at its next piece, as it were written
};

struct RankFile {
  std::string part;
  std::vector<OwnBox> boxes{};
  std::int64_t size_bytes = 0;  // of all boxes

  // This rank's boxes of a part: its rows, of which copies take equal shares.
  // Throws: ContractError for a name that stands twice.
  static RankFile of(const Part& part);

  // As `folder`/PART/NAME; returns what the manifest says of it. By any thread.
  // Throws: NotFinite, DeviceError; what `read` throws.
  Manifest::File write(const std::string& folder, int rank, const std::string& id,
                       bool must_be_finite, const ReadPiece& read, WriteProgress& progress) const;
  static std::string name(int rank);  // of the file
};

}  // namespace tessera::checkpoint
