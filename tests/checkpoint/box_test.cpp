// Boxes that are to be all of a tensor, against a count of each element.
#include "runtime/checkpoint/box.hpp"

#include <algorithm>

#include "tests/support/catch.hpp"
#include "tests/support/dice.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::testing;
using checkpoint::Box;
using checkpoint::fault_of_cover;
using checkpoint::Sizes;

namespace {

// How often boxes hold each element.
std::vector<int> held(const Sizes& whole, const std::vector<Box>& boxes) {
  std::vector<int> times(static_cast<std::size_t>(checkpoint::numel_of(whole)), 0);
  for (std::size_t i = 0; i < times.size(); ++i) {
    Sizes at(whole.size());
    auto rest = static_cast<std::int64_t>(i);
    for (std::size_t d = whole.size(); d-- > 0; rest /= whole[d]) at[d] = rest % whole[d];
    for (const Box& box : boxes) {
      bool is_in = true;
      for (std::size_t d = 0; d < at.size(); ++d)
        is_in = is_in && at[d] >= box.begin[d] && at[d] < box.end(d);
      times[i] += is_in;
    }
  }
  return times;
}

// Cuts boxes in two, again and again.
std::vector<Box> cut(Dice& dice, const Sizes& whole, int cuts) {
  std::vector<Box> boxes{{Sizes(whole.size(), 0), whole}};
  for (int i = 0; i < cuts; ++i) {
    Box& box = boxes[static_cast<std::size_t>(dice.below(static_cast<int>(boxes.size())))];
    const auto d = static_cast<std::size_t>(dice.below(static_cast<int>(whole.size())));
    if (box.sizes[d] < 2) continue;
    Box upper = box;
    const std::int64_t at = 1 + dice.below(static_cast<int>(box.sizes[d] - 1));
    upper.begin[d] += at;
    upper.sizes[d] -= at;
    box.sizes[d] = at;
    boxes.push_back(upper);
  }
  return boxes;
}

}  // namespace

TEST_CASE("boxes are all of a tensor where each element is in one of them", "[checkpoint]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  Dice dice(seed);
  int good = 0, bad = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    Sizes whole(static_cast<std::size_t>(1 + dice.below(3)));
    for (std::int64_t& size : whole) size = 1 + dice.below(5);
    std::vector<Box> boxes = cut(dice, whole, dice.below(7));
    if (dice.below(3) == 0) {  // one box is moved, dropped, doubled or of another size
      Box& box = boxes[static_cast<std::size_t>(dice.below(static_cast<int>(boxes.size())))];
      const auto d = static_cast<std::size_t>(dice.below(static_cast<int>(whole.size())));
      const std::int64_t what = dice.below(4);
      if (what == 0) box.begin[d] = dice.below(static_cast<int>(whole[d]));
      if (what == 1) box.sizes[d] = 1 + dice.below(static_cast<int>(whole[d]));
      if (what == 2) boxes.push_back(Box(box));
      if (what == 3 && boxes.size() > 1) boxes.pop_back();
    }
    for (std::size_t i = boxes.size(); i > 1; --i)
      std::swap(boxes[i - 1], boxes[static_cast<std::size_t>(dice.below(static_cast<int>(i)))]);
    const bool is_inside = std::ranges::all_of(boxes, [&](const Box& box) {
      for (std::size_t d = 0; d < whole.size(); ++d)
        if (box.end(d) > whole[d]) return false;
      return true;
    });
    const auto times = held(whole, boxes);
    const bool expected =
        is_inside && std::ranges::all_of(times, [](int count) { return count == 1; });
    INFO("trial " << trial << ": " << fault_of_cover(whole, boxes));
    REQUIRE(fault_of_cover(whole, boxes).empty() == expected);
    ++(expected ? good : bad);
  }
  CHECK(good > 1000);
  CHECK(bad > 500);
}

TEST_CASE("what is wrong with boxes is said with its rows", "[checkpoint]") {
  const auto rows = [](std::int64_t begin, std::int64_t size) {
    return Box{{begin, 0}, {size, 3}};
  };
  CHECK(fault_of_cover({6, 3}, {rows(4, 2), rows(0, 2)}) ==
        "lacks rows 2 to 3, which are in none of its files");
  CHECK(fault_of_cover({6, 3}, {rows(0, 4)}) ==
        "lacks rows 4 to 5, which are in none of its files");
  CHECK(fault_of_cover({6, 3}, {rows(0, 4), rows(3, 3)}) ==
        "is stored 2 times in its files, in rows 3 to 3");
  CHECK(fault_of_cover({6, 3}, {rows(0, 4), {{4, 0}, {2, 2}}}) ==
        "lacks elements 2 to 2 of dimension 1, which are in none of its files, in rows 4 to 5");
  CHECK(has(fault_of_cover({6, 3}, {rows(0, 7)}), "outside of its shape [6, 3]"));
  CHECK(fault_of_cover({}, {{{}, {}}}).empty());
  CHECK(fault_of_cover({}, {{{}, {}}, {{}, {}}}) == "is stored 2 times in its files");
  CHECK(fault_of_cover({0, 3}, {{{0, 0}, {0, 3}}}).empty());
}

TEST_CASE("a run of elements is a few boxes, in the order of the elements", "[checkpoint]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  Dice dice(seed);
  for (int trial = 0; trial < 1000; ++trial) {
    Sizes sizes(static_cast<std::size_t>(dice.below(5)));
    for (std::int64_t& size : sizes) size = 1 + dice.below(4);
    const std::int64_t numel = checkpoint::numel_of(sizes);
    const std::int64_t begin = dice.below(static_cast<int>(numel)),
                       end = begin + dice.below(static_cast<int>(numel - begin + 1));
    std::int64_t next = begin;
    const auto boxes = checkpoint::boxes_of_run(sizes, begin, end);
    for (const Box& box : boxes) {
      const auto times = held(sizes, {box});
      for (std::size_t i = 0; i < times.size(); ++i)
        if (times[i] == 1) REQUIRE(static_cast<std::int64_t>(i) == next++);
    }
    REQUIRE(next == end);
    REQUIRE(boxes.size() <= std::max<std::size_t>(2 * sizes.size(), 2) - 1);
  }
}
