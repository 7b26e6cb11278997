// The JSON of a safetensors file's head, and of an index: what it has to say, and how it is
// written. Private to checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/safetensors.hpp"

namespace tessera::checkpoint {

// No reader takes more: the reference implementation's limit.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

struct SafetensorsHeader {
  // In the order of the document; offsets as they stand there.
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata;
};

// Throws: DataError ("<file> ..."), for everything but well-formed UTF-8 JSON of the right shape.
// Offsets are only known to be non-negative and to fit the tensor's size.
SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& file);

// The "weight_map" of model.safetensors.index.json: names of tensors and the files that hold them.
// Throws: DataError likewise.
std::map<std::string, std::string> parse_safetensors_index(std::string_view json,
                                                           const std::string& file);

// "00007" of 7, as names of numbered files have it.
std::string five_digits(std::int64_t number);

// The JSON text, padded with spaces to a multiple of 8 bytes. Entries need their offsets. Throws:
// ContractError for more than kMaxHeaderBytes, and for names that are not UTF-8.
std::string format_safetensors_header(const std::vector<SafetensorsEntry>& entries,
                                      const std::map<std::string, std::string>& metadata);

}  // namespace tessera::checkpoint
