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
  std::atomic<std::int64_t> bytes = 0, syncs = 0;
  std::int64_t moves() const { return bytes + syncs; }
  std::atomic<bool> is_cancelled = false;  // ends it at its next piece, as it were written
};

struct RankFile {
  std::string part;
  std::vector<OwnBox> boxes{};
  std::int64_t size_bytes = 0;  // of all boxes
  // Of the ranks' ends of boxes, as numbers that add up; see Note [Why sums tell a cover].
  std::uint64_t written = 0, wanted = 0, own = 0;

  // This rank's boxes of a part: its rows, of which copies take equal shares.
  // Throws: ContractError for a name that stands twice, or that the format keeps for itself.
  static RankFile of(const Part& part);

  // As `folder`/PART/NAME; returns what the manifest says of it. By any thread.
  // Throws: NotFinite, DeviceError; what `read` throws.
  Manifest::File write(const std::string& folder, int rank, const std::string& id,
                       bool must_be_finite, const ReadPiece& read, WriteProgress& progress) const;
  static std::string name(int rank);  // of the file

  // Note [Why sums tell a cover]
  // A box takes rows from a to b of a tensor of E rows. It adds h(a) - h(b) to `written`, where h
  // is a hash of the tensor's name, dtype and shape and of the row. Over all boxes this is h(0) -
  // h(E) where they cover each row once, and by nothing but chance where they do not. Each rank
  // that has the tensor in its list adds h(0) - h(E) to `wanted`. So if all ranks list all tensors,
  // ranks * written - wanted is 0 over the ranks. If fewer do, it is not, since a row cannot be
  // covered a part of a time. What rank 0 alone has, as buffers, is `own`: the other ranks need not
  // list it.
  //
  // The sum of this over the ranks is 0 only if the boxes make up each tensor. It may be another
  // number for ranks that list other tensors, as the stages of a pipeline; then headers tell.
  std::uint64_t cover(int rank, int ranks) const {
    const auto n = static_cast<std::uint64_t>(ranks);
    return n * written - wanted - (rank == 0 ? (n - 1) * own : 0);
  }
};

}  // namespace tessera::checkpoint
