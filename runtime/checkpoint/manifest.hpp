// The manifest of a checkpoint: the one file that says which others belong to it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/model.hpp"

namespace tessera::checkpoint {

struct Manifest {
  static constexpr std::int64_t kVersion = 1;
  static constexpr const char* kName = "manifest.json";

  struct File {
    std::string name;
    std::int64_t size_bytes = 0;
    std::uint64_t head_checksum = 0;
  };
  struct Part {
    std::string prefix{};
    Scalars scalars{};
    std::vector<File> files{};
  };

  std::string id;
  std::int64_t step = 0, ranks = 0;
  Scalars scalars;
  std::map<std::string, Part, std::less<>> parts{};

  // Whether `folder` is a checkpoint, by the name of this file.
  static bool is_in(const std::string& folder) { return why_not_in(folder).empty(); }
  // Why it is none, as "does not exist"; empty where it is one.
  static std::string why_not_in(const std::string& folder);
  // Throws: DataError for a manifest that has changed or that is none.
  static Manifest read(const std::string& folder);
  // Of its text.  Throws: likewise, beginning with `what`.
  static Manifest parse(std::string_view text, const std::string& what);

  // What is wrong with the name of `folder`, where it is another step's, as step-7; else empty.
  std::string fault_of_name(const std::string& folder) const;
  // As JSON, which ends with its own checksum.  Throws: ContractError for numbers that are not
  // finite, and texts that are not UTF-8.
  std::string to_string() const;
  // Throws: DataError for a part that is not there.
  const Part& part(const std::string& folder, std::string_view name) const;
  std::vector<WeightFile> files(const std::string& folder, std::string_view part) const;
};

// As JSON.  Throws: ContractError for a number that is not finite and a text that is not UTF-8,
// which `name` has.
std::string json_of(const std::string& name, const Scalar& value);
std::string json_of(const Scalars& scalars);

// N of "step-N", as save writes it; none of another name.
std::optional<std::int64_t> step_of(std::string_view name);

// Whether `name` is one of a file in its folder that a message may quote: no slash, nothing that a
// terminal obeys, and not hidden.
bool is_plain_name(std::string_view name);

}  // namespace tessera::checkpoint
