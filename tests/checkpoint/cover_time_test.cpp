// How long it takes to see that boxes are all of their tensors, beside the time in which as many
// are parsed with the headers that name them: ratios of two times of one run. A million of them as
// a grid; other forms with fewer, since the suite has little time.
#include <time.h>

#include <algorithm>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "runtime/checkpoint/box.hpp"
#include "runtime/checkpoint/safetensors_header.hpp"
#include "runtime/checkpoint/shard_info.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;
using checkpoint::Box;
using checkpoint::Sizes;

namespace {

constexpr int kTensors = 10'000;  // a file

// Processor seconds of this thread, which neighbours take no part of.
template <class F>
double seconds(const F& f) {
  const auto now = [] {
    timespec at{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
    return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
  };
  const double begin = now();
  f();
  return now() - begin;
}

// Of a box, in a file of many: the header, and the metadata in it.
double seconds_of_parsing() {
  std::vector<checkpoint::SafetensorsEntry> entries;
  checkpoint::ShardInfo info{.id = "0123456789abcdef"};
  for (int i = 0; i < kTensors; ++i) {
    const std::string name = "model.layers." + std::to_string(i) + ".self_attn.q_proj.weight";
    entries.push_back(
        {.name = name, .dtype = f32, .shape = {1, 4}, .begin_bytes = 16 * i, .size_bytes = 16});
    info.boxes[name] = {.begin = {7, 0}, .shape = {100, 4}, .checksums = {42}};
  }
  const std::string text = format_safetensors_header(entries, format_shard_info(info));
  std::size_t found = 0;
  const double time = seconds([&] {
    const auto header = checkpoint::parse_safetensors_header(text, "file");
    found = checkpoint::parse_shard_info(header.metadata, "file").boxes.size();
  });
  CHECK(found == kTensors);
  return time / kTensors;
}

// All boxes of a grid of so many in each dimension, 3 elements each, in any order.
std::pair<Sizes, std::vector<Box>> grid(const Sizes& boxes, std::mt19937_64& draw) {
  Sizes whole = boxes;
  for (std::int64_t& size : whole) size *= 3;
  std::vector<Box> all;
  for (std::int64_t i = 0; i < checkpoint::numel_of(boxes); ++i) {
    Box box{Sizes(boxes.size()), Sizes(boxes.size(), 3)};
    for (std::size_t d = 0; d < boxes.size(); ++d)
      box.begin[d] = 3 * (i / checkpoint::strides_of(boxes)[d] % boxes[d]);
    all.push_back(std::move(box));
  }
  std::ranges::shuffle(all, draw);
  return {whole, all};
}

// Columns that are cut into rows each at places of its own: no grid.
std::pair<Sizes, std::vector<Box>> staggered(std::int64_t columns, std::int64_t rows) {
  const Sizes whole{rows * columns, columns};
  std::vector<Box> all;
  for (std::int64_t column = 0; column < columns; ++column)
    for (std::int64_t row = 0, begin = 0; row < rows; ++row) {
      const std::int64_t end = row + 1 == rows ? whole[0] : row * columns + column + 1;
      all.push_back({{begin, column}, {end - begin, 1}});
      begin = end;
    }
  return {whole, all};
}

}  // namespace

TEST_CASE("the cover of a million boxes is checked in the time of parsing their headers",
          "[checkpoint]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 draw(seed);
  const double parsing = seconds_of_parsing();
  std::cout << "parsing a box " << 1e6 * parsing << " us";
  const auto check = [&](const char* what, int times,
                         const std::pair<Sizes, std::vector<Box>>& boxes) {
    std::string fault;
    const double time = seconds([&] {
      for (int i = 0; i < times && fault.empty(); ++i)
        fault = checkpoint::fault_of_cover(boxes.first, boxes.second);
    });
    const double each = time / times / static_cast<double>(boxes.second.size());
    std::cout << ", " << what << ' ' << 1e6 * each << " us";
    INFO(what << ": " << 1e6 * each << " us a box, parsing takes " << 1e6 * parsing);
    CHECK(fault.empty());
    CHECK(each <= parsing);
  };
  const auto share = static_cast<std::int64_t>(GridShare::stride());  // one box in so many
  check("a grid", 1, grid({1000 / share, 1000}, draw));
  check("rows of many", 1000, grid({100}, draw));
  check("rows of one", 1, grid({100'000 / share}, draw));
  check("three dimensions", 1, grid({40, 50, 50 / share}, draw));
  check("the last of three", 1, grid({1, 1, 100'000 / share}, draw));
  // One box a tensor and file: of 10,000 files.
  check("no grid", 1, staggered(100, 100));
  std::cout << '\n';
}
