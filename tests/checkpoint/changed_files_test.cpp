// Nothing is taken from files of a checkpoint that are not as they were written.
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <regex>

#include "tests/checkpoint/resumable.hpp"
#include "tests/checkpoint/saved_files.hpp"
#include "tests/support/dice.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Whether the byte is of a count of steps that only PyTorch takes. A load of ours does not read it;
// `tessera-checkpoint verify` looks at every byte.
bool is_of_pytorch_alone(const std::string& file, std::size_t byte) {
  std::uint64_t size = 0;
  std::memcpy(&size, file.data(), sizeof size);
  const std::string header = file.substr(sizeof size, size);
  const std::regex counts(
      R"re(\.step":\{"dtype":"F32","shape":\[\],"data_offsets":\[(\d+),(\d+))re");
  const std::size_t data = sizeof size + size;
  for (std::sregex_iterator at(header.begin(), header.end(), counts), end; at != end; ++at)
    if (byte >= data + std::stoull((*at)[1]) && byte < data + std::stoull((*at)[2])) return true;
  return false;
}

}  // namespace

TEST_CASE("files that are not as they were written are refused", "[checkpoint]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  Dice dice(seed);
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  on_ranks(3, [&](World& world) {
    Resumable saved = made({}, world, 5);
    for (const int step : {1, 2}) save_at(at, step, saved, world);
    return 0;
  });
  CHECK(load_complaint(at, 1).empty());
  const auto files = files_below(checkpoint::step_folder(at, 1));
  REQUIRE(files.size() == 7);
  for (const auto& file : files) {
    const std::string good = bytes_of(file);
    for (int trial = 0; trial < 12; ++trial) {
      std::string bad = good;
      const auto byte = static_cast<std::size_t>(dice.below(static_cast<int>(good.size())));
      bad[byte] = static_cast<char>(bad[byte] ^ (1 << dice.below(8)));
      write_to(file, bad);
      INFO(file << ", byte " << byte);
      if (is_of_pytorch_alone(good, byte)) continue;
      CHECK_THAT(load_complaint(at, 1), Catch::Contains(file.filename().string()));
      write_to(file, good.substr(0, byte));
      CHECK_THAT(load_complaint(at, 1), Catch::Contains(file.filename().string()));
    }
    std::filesystem::remove(file);
    CHECK(has(load_complaint(at, 1), "step-1"));
    // Of another save of the same values, and a link.
    const auto other = checkpoint::step_folder(at, 2) /
                       std::filesystem::relative(file, checkpoint::step_folder(at, 1));
    std::filesystem::create_symlink(other, file);
    CHECK_FALSE(load_complaint(at, 1).empty());
    std::filesystem::remove(file);
    if (file.filename() != "manifest.json") {
      std::filesystem::copy_file(other, file);
      CHECK(has(load_complaint(at, 1), "take another checkpoint"));
    }
    write_to(file, good);
  }
  CHECK(load_complaint(at, 1).empty());
  // What no manifest names.
  write_to(checkpoint::step_folder(at, 1) + "/model/zz.safetensors", "no");
  CHECK(has(load_complaint(at, 1),
            "has file 'zz.safetensors' in part 'model', which its manifest does not name"));
}
