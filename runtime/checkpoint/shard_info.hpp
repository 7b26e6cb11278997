// What the "__metadata__" of a safetensors file says when it holds boxes of tensors: PyTorch's
// keys, which its HuggingFaceStorageReader reads, and ours beside them.
//
//   "format": "pt", "DCP_VERSION": "1.0"
//   "DCP_SHARDING_INFO": {"up.weight": {"saved_offsets": [8, 0]}, ...}              as JSON text
//   "tessera": {"id": "9f..", "tensors": {"up.weight": {"shape": [16, 4], "checksums": "5a.."}}}
//
// Source: torch/distributed/checkpoint/_hf_utils.py and hf_storage.py of
// github.com/pytorch/pytorch.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/checkpoint/box.hpp"
#include "tessera/checkpoint/model.hpp"

namespace tessera::checkpoint {

// Of which there is a checksum each: the bytes of a box from a multiple of it on.
inline constexpr std::int64_t kPieceBytes = 4 << 20;
constexpr std::int64_t pieces_of(std::int64_t bytes) {
  return (bytes + kPieceBytes - 1) / kPieceBytes;
}

// XXH3 of 64 bits, and its 16 hexadecimal digits.
// Source: github.com/Cyan4973/xxHash, whose header Debian's libxxhash-dev has.
std::uint64_t checksum_of(const void* bytes, std::size_t size);
std::string hex(std::uint64_t checksum);
// Whether `text` is such digits; then `checksum` is set.
bool read_hex(std::string_view text, std::uint64_t& checksum);

// Of a file's box of one tensor.
struct BoxInfo {
  Sizes begin;
  Sizes shape{};                           // of the whole tensor; empty where no key says it
  std::vector<std::uint64_t> checksums{};  // of its pieces; none where no key says them
  bool has_shape = false, has_checksums = false;
};
struct ShardInfo {
  std::string id{};  // of the save; empty in others' files
  std::map<std::string, BoxInfo, std::less<>> boxes{};
};

using Metadata = std::map<std::string, std::string>;

// No boxes where the file holds whole tensors.  Throws: DataError that begins with `file`.
ShardInfo parse_shard_info(const Metadata& metadata, const std::string& file);
Metadata format_shard_info(const ShardInfo& info);

// The same of an open file, once it is known to be the one that is meant; an empty `id` is any.
// Throws: DataError, too, for another size, header or save, for boxes of no tensor, and for other
// checksums than one for each piece, which a file of a manifest has.
ShardInfo shard_info_of(const SafetensorsReader& file, const WeightFile& meant,
                        std::string_view id);
// Throws: DataError where the bytes of a piece of a tensor are not what their checksum says.
void check_piece(const SafetensorsReader& file, const SafetensorsEntry& entry, std::int64_t index,
                 std::span<const std::byte> bytes, std::uint64_t checksum);

}  // namespace tessera::checkpoint
