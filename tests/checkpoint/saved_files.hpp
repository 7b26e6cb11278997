// Saved checkpoints whose files a test changes, and what it says of the refusals.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "runtime/checkpoint/manifest.hpp"
#include "runtime/checkpoint/shard_info.hpp"
#include "tests/checkpoint/mutations.hpp"
#include "tests/checkpoint/saved_steps.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

namespace tessera::testing {

namespace fs = std::filesystem;

inline constexpr int kShards = 3;

inline std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
inline void write_to(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// A folder with checkpoints that are whole, and the files of step 1.
class Saved {
 public:
  explicit Saved(std::int64_t steps = 1) {
    for (std::int64_t step = 1; step <= steps; ++step)
      run_local(kShards, {.threads = 1}, [&](World& world) { save_step(folder(), step, world); });
    for (const auto& at : fs::recursive_directory_iterator(step()))
      if (at.is_regular_file()) files.push_back(at.path());
    std::ranges::sort(files);
  }
  std::string folder() const { return root_.path().string(); }
  fs::path step(std::int64_t n = 1) const { return checkpoint::step_folder(folder(), n); }
  fs::path shard(int rank, const char* part = "model") const {
    return step() / part / concat("shard-0000", rank + 1, "-model-00001-of-00001.safetensors");
  }
  fs::path manifest() const { return step() / "manifest.json"; }
  const TemporaryFolder& root() const { return root_; }

  std::vector<fs::path> files{};

 private:
  TemporaryFolder root_;
};

// Where the data of a safetensors file begins.
inline std::size_t data_begin(const std::string& bytes) {
  std::size_t length = 0;
  for (std::size_t i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(bytes[i]);
  return 8 + length;
}

// That what is said of a file is one line that names it.
inline void check_line(const std::string& said, const std::string& file) {
  INFO(said);
  CHECK(has(said, file));
  CHECK(is_one_line(said));
}

// A manifest's text with another checksum at its end: of what it says now.
inline std::string sealed(std::string text) {
  const std::size_t at = text.rfind("\n\"checksum\": \"");
  REQUIRE(at != text.npos);
  return text.substr(0, at) + "\n\"checksum\": \"" +
         checkpoint::hex(checkpoint::checksum_of(text.data(), at)) + "\"}\n";
}

inline std::string replaced(std::string text, const std::string& old, const std::string& with) {
  const std::size_t at = text.find(old);
  REQUIRE(at != text.npos);
  return text.replace(at, old.size(), with);
}

}  // namespace tessera::testing
