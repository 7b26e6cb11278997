#include "runtime/checkpoint/shard_info.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <charconv>
#include <utility>

#include "runtime/checkpoint/json_tree.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/json.hpp"
#include "tessera/detail/base/utf8.hpp"

namespace tessera::checkpoint {
namespace {

constexpr const char* kSharding = "DCP_SHARDING_INFO";
constexpr const char* kOurs = "tessera";

}  // namespace

std::uint64_t checksum_of(const void* bytes, std::size_t size) { return XXH3_64bits(bytes, size); }

std::string hex(std::uint64_t checksum) {
  std::string text(16, '0');
  for (std::size_t i = 16; i-- > 0; checksum >>= 4) text[i] = "0123456789abcdef"[checksum & 15];
  return text;
}

bool read_hex(std::string_view text, std::uint64_t& checksum) {
  if (text.size() != 16 || text.find_first_not_of("0123456789abcdef") != text.npos) return false;
  std::from_chars(text.data(), text.data() + text.size(), checksum, 16);
  return true;
}

ShardInfo parse_shard_info(const Metadata& metadata, const std::string& file) {
  ShardInfo info;
  const auto sharding = metadata.find(kSharding);
  if (sharding == metadata.end()) return info;
  const std::string what = concat(file, ": ", kSharding);
  const JsonTree boxes = JsonTree::parse(sharding->second, what);
  for (const auto& [name, box] : boxes.members(what))
    info.boxes[name].begin = box.member("saved_offsets", what).sizes(what);
  const auto ours = metadata.find(kOurs);
  if (ours == metadata.end()) return info;
  const std::string where = concat(file, ": its metadata \"", kOurs, '"');
  const JsonTree own = JsonTree::parse(ours->second, where);
  info.id = own.member("id", where).text(where);
  for (const auto& [name, tensor] : own.member("tensors", where).members(where)) {
    const auto box = info.boxes.find(name);
    if (box == info.boxes.end())
      throw DataError(concat(where, " names ", shown(name), ", but ", kSharding, " does not"));
    box->second.shape = tensor.member("shape", where).sizes(where);
    box->second.has_shape = box->second.has_checksums = true;
    std::string_view digits = tensor.member("checksums", where).text(where);
    for (; !digits.empty(); digits.remove_prefix(16)) {
      std::uint64_t checksum = 0;
      if (!read_hex(digits.substr(0, 16), checksum))
        throw DataError(concat(where, " has a checksum of ", shown(name),
                               " that is not 16 hexadecimal digits"));
      box->second.checksums.push_back(checksum);
    }
  }
  return info;
}

Metadata format_shard_info(const ShardInfo& info) {
  std::string sharding = "{", tensors = "{";
  const char* comma = "";
  for (const auto& [name, box] : info.boxes) {
    const std::string key = json::quote(name);
    sharding += concat(comma, key, ": {\"saved_offsets\": ", text_of(box.begin), '}');
    std::string digits;
    for (const std::uint64_t checksum : box.checksums) digits += hex(checksum);
    tensors += concat(comma, key, ": {\"shape\": ", text_of(box.shape), ", \"checksums\": \"",
                      digits, "\"}");
    comma = ", ";
  }
  return {{"format", "pt"},
          {"DCP_VERSION", "1.0"},
          {kSharding, sharding + '}'},
          {kOurs, concat("{\"id\": \"", info.id, "\", \"tensors\": ", tensors, "}}")}};
}

ShardInfo shard_info_of(const SafetensorsReader& file, const WeightFile& meant,
                        std::string_view id) {
  const std::string_view head = file.head();
  if (meant.size_bytes >= 0 && file.size_bytes() != meant.size_bytes)
    throw DataError(concat("'", meant.path, "' has ", file.size_bytes(),
                           " bytes, its manifest says ", meant.size_bytes,
                           "; take another checkpoint"));
  if (meant.size_bytes >= 0 && checksum_of(head.data(), head.size()) != meant.head_checksum)
    throw DataError(
        concat("'", meant.path, "' has another header than was saved; take another checkpoint"));
  ShardInfo info = parse_shard_info(file.metadata(), concat("safetensors file '", meant.path, "'"));
  if (!id.empty() && info.id != id)
    throw DataError(concat("'", meant.path, "' is of save ", shown(info.id),
                           ", its manifest of save ", shown(id), "; take another checkpoint"));
  for (const auto& [name, box] : info.boxes)
    if (!file.find(name))
      throw DataError(concat("'", meant.path, "' has offsets of ", shown(name),
                             ", but no such tensor; fetch the file again"));
  for (const SafetensorsEntry& entry : file.entries()) {
    const auto box = info.boxes.find(entry.name);
    const bool has_any = box != info.boxes.end() && box->second.has_checksums;
    const std::int64_t count = has_any ? std::ssize(box->second.checksums) : 0,
                       pieces = pieces_of(entry.size_bytes);
    // Others' files have none, and no manifest.
    if (has_any ? count != pieces : meant.size_bytes >= 0)
      throw DataError(concat("tensor ", shown(entry.name), " in '", meant.path, "' has ", count,
                             " checksums for ", pieces, " pieces of 4 MiB"));
  }
  return info;
}

void check_piece(const SafetensorsReader& file, const SafetensorsEntry& entry, std::int64_t index,
                 std::span<const std::byte> bytes, std::uint64_t checksum) {
  if (checksum_of(bytes.data(), bytes.size()) == checksum) return;
  throw DataError(concat("tensor ", shown(entry.name), " in '", file.path(),
                         "' has other bytes than were saved, somewhere from byte ",
                         index * kPieceBytes,
                         " on; take another checkpoint, or fetch the file again"));
}

}  // namespace tessera::checkpoint
