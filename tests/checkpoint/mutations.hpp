// Mutations of manifests, headers and indices, and what their readers make of them: a DataError of
// one line, or a value.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "runtime/checkpoint/json_tree.hpp"
#include "runtime/checkpoint/manifest.hpp"
#include "runtime/checkpoint/safetensors_header.hpp"
#include "runtime/checkpoint/shard_info.hpp"
#include "tessera/base/error.hpp"
#include "tests/support/dice.hpp"

namespace tessera::testing {

// Whether an error's text is one line that a terminal shows as it is.
inline bool is_one_line(const std::string& text) {
  for (const char c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return false;
  return !text.empty() && text.size() < 2000;
}

// Some of a JSON text flipped, dropped, doubled, moved, or in the place of something that matters.
inline std::string mutated(std::string text, Dice& dice) {
  static const std::vector<std::string> words = {"{",
                                                 "}",
                                                 "[",
                                                 "]",
                                                 "\"",
                                                 ":",
                                                 ",",
                                                 "\\",
                                                 "\\u0000",
                                                 "\\ud800",
                                                 "\xff",
                                                 "\x1b[2J",
                                                 "\n",
                                                 "null",
                                                 "true",
                                                 "nan",
                                                 "-",
                                                 "-1",
                                                 "0",
                                                 "1e999",
                                                 "1.5",
                                                 "00",
                                                 "9223372036854775807",
                                                 "9223372036854775808",
                                                 "4611686018427387904",
                                                 "18446744073709551615",
                                                 "__metadata__",
                                                 "DCP_SHARDING_INFO",
                                                 "tessera",
                                                 "data_offsets",
                                                 "shape",
                                                 "dtype",
                                                 "F8_E4M3",
                                                 "U64",
                                                 "../x",
                                                 "saved_offsets",
                                                 "checksums",
                                                 "weight_map",
                                                 "",
                                                 "/dev/zero"};
  const auto below = [&](std::size_t n) {
    return static_cast<std::size_t>(dice.below(static_cast<int>(n)));
  };
  const auto place = [&] { return below(text.size() + 1); };
  for (int left = 1 + dice.below(4); left > 0; --left) {
    const std::size_t at = place(), size = 1 + below(12);
    switch (dice.below(7)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << dice.below(8)));
        break;
      case 1:
        text.erase(at, size);
        break;
      case 2:
        text.insert(at, text.substr(at, size));
        break;
      case 3:
        text.insert(place(), text.substr(at, 4 * size));
        break;
      case 4:
        text.insert(at, words[below(words.size())]);
        break;
      case 5: {  // a number
        const std::size_t begin = text.find_first_of("0123456789", at);
        if (begin == text.npos) break;
        const std::size_t end = text.find_first_not_of("0123456789", begin);
        text.replace(begin, end - begin, words[16 + below(10)]);
        break;
      }
      default:
        if (dice.once_in(8)) text.resize(at);
    }
  }
  return text;
}

// A safetensors file with another header, and the length that it has.
inline std::string resealed(const std::string& file,
                            const std::function<std::string(std::string)>& change) {
  std::size_t length = 0;
  for (std::size_t i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(file[i]);
  const std::string json = change(file.substr(8, length));
  std::string out(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) out[i] = static_cast<char>(json.size() >> (8 * i) & 0xffu);
  return out + json + file.substr(8 + length);
}

// The same with a mutated header, or with changed data or length.
inline std::string mutated_shard(const std::string& file, Dice& dice) {
  std::string out = resealed(
      file, [&](std::string json) { return dice.once_in(20) ? json : mutated(json, dice); });
  if (dice.once_in(10)) {
    char& byte = out[static_cast<std::size_t>(dice.below(8))];
    byte = static_cast<char>(byte ^ (1 << dice.below(8)));
  }
  if (dice.once_in(10))
    out.resize(static_cast<std::size_t>(dice.below(static_cast<int>(out.size()) + 1)));
  return out;
}

struct FuzzCounts {
  std::uint64_t taken = 0, refused = 0;
  std::string fault{};  // the first, which is none of both
};

// The readers of texts, on mutations of those that a save has written.
class ReaderFuzz {
 public:
  ReaderFuzz(std::string manifest, const std::vector<std::string>& shards)
      : manifest_(manifest.substr(0, manifest.rfind("\n\"checksum\""))) {
    for (const std::string& shard : shards) {
      (void)resealed(shard, [&](std::string json) {
        headers_.push_back(json);
        return json;
      });
      metadata_.push_back(checkpoint::parse_safetensors_header(headers_.back(), "shard").metadata);
    }
  }

  FuzzCounts run(std::uint64_t trials, std::uint64_t seed) const {
    FuzzCounts counts;
    Dice dice(seed);
    for (std::uint64_t trial = 0; trial < trials && counts.fault.empty(); ++trial) {
      try {
        read_one(dice);
        ++counts.taken;
      } catch (const DataError& error) {
        ++counts.refused;
        if (!is_one_line(error.what())) counts.fault = concat("trial ", trial, ": ", error.what());
      } catch (const std::exception& error) {
        counts.fault = concat("trial ", trial, " is no DataError: ", error.what());
      }
    }
    return counts;
  }

 private:
  void read_one(Dice& dice) const {
    using namespace checkpoint;
    const auto of = static_cast<std::size_t>(dice.below(static_cast<int>(headers_.size())));
    switch (dice.below(4)) {
      case 0: {
        const std::string text = mutated(manifest_, dice);
        const Manifest manifest = Manifest::parse(
            concat(text, "\n\"checksum\": \"", hex(checksum_of(text.data(), text.size())), "\"}\n"),
            "manifest");
        (void)manifest.to_string();
        for (const auto& [name, part] : manifest.parts) (void)manifest.files("folder", name);
        return;
      }
      case 1:
        (void)parse_safetensors_header(mutated(headers_[of], dice), "shard");
        return;
      case 2: {
        Metadata metadata = metadata_[of];
        for (auto& [key, text] : metadata)
          if (dice.once_in(2)) text = mutated(text, dice);
        (void)parse_shard_info(metadata, "shard");
        return;
      }
      default:
        (void)parse_safetensors_index(
            mutated(R"({"metadata": {"total_size": 8}, "weight_map": {"a": "1.safetensors", )"
                    R"("b.\u00e9": "2.safetensors"}})",
                    dice),
            "index");
    }
  }

  std::string manifest_;
  std::vector<std::string> headers_{};
  std::vector<checkpoint::Metadata> metadata_{};
};

}  // namespace tessera::testing
