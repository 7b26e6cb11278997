// A box of a tensor that a file holds, and how its elements come into a tensor of this rank: by
// pieces of 4 MiB, each checked as a whole.
//
//   on the host     file ── read ─► rows                    elements in the order of the file
//                   file ── read ─► piece ── copy ─► rows   others, and those of another dtype
//   on a device     file ── read ─► pinned ══► rows
//                   file ── read ─► pinned ══► piece ══► rows
//
// So a load holds two pieces beside the rows, of which a file's order and dtype decide.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/checkpoint/box.hpp"
#include "tessera/checkpoint/safetensors.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::checkpoint {

// A box of a tensor, and where it lies.
struct HeldBox {
  Box box;
  const SafetensorsReader* file;
  const SafetensorsEntry* entry;
  std::vector<std::uint64_t> checksums{};  // of its pieces; none where the file has none

  // Reads piece `index` to the beginning of `room`, which has place for one; returns its bytes.
  // Throws: DataError where they are not what their checksum says; DeviceError as OpenFile::read.
  std::span<const std::byte> read(std::int64_t index, std::span<std::byte> room) const;
};

// Reads boxes into one tensor, as elements of its dtype. Where a piece is refused, the tensor may
// have bytes of it.
class BoxReader {
 public:
  explicit BoxReader(const Tensor& to);
  BoxReader(const BoxReader&) = delete;
  BoxReader& operator=(const BoxReader&) = delete;
  ~BoxReader();

  // The elements of `region`, a part of the box that is not empty. Its first becomes element
  // `first` of the tensor, and those of the box's dimensions follow by `to_strides`.
  // Throws: as HeldBox::read.
  void read(const HeldBox& from, const Box& region, std::int64_t first, const Sizes& to_strides);

 private:
  struct Piece;  // of a box, and what of it is wanted
  void read_on_host(const Piece& piece);
  void read_on_device(const Piece& piece);

  Tensor to_;
  std::byte* host_ = nullptr;             // where the rows lie; null on a device
  std::vector<std::byte> held_;           // a piece, on the host
  HostStaging::Piece* pinned_ = nullptr;  // likewise, on the way to a device
  Tensor uploaded_;                       // a piece, on the device
};

}  // namespace tessera::checkpoint
