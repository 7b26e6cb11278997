// The plan of slots as arithmetic: what is alive at one time lies apart, in little more than it
// needs.
#include "runtime/shard/slot_plan.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using shard::SlotPlan, shard::SlotUse, shard::UnitNeeds;

namespace {

// Each unit is called once.
std::vector<shard::AssumedCall> once(std::span<const UnitNeeds> units) {
  std::vector<shard::AssumedCall> calls;
  for (std::size_t i = 0; i < units.size(); ++i)
    calls.push_back({static_cast<int>(i), units[i].parent});
  return calls;
}

}  // namespace

TEST_CASE("slots that are alive at one time lie apart, in plans of any units") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<UnitNeeds> units(1 + random() % 12);
    for (std::size_t i = 0; i < units.size(); ++i) {
      units[i].parent = i == 0 ? -1 : static_cast<int>(random() % i);
      units[i].keeps_open = random() % 4 == 0;
      units[i].gather_bytes = static_cast<std::int64_t>(random() % 5 * (1 + random() % 999));
      for (auto pieces = random() % 4; pieces > 0; --pieces)
        units[i].pieces.push_back(static_cast<std::int64_t>(1 + random() % 999));
      units[i].prefetch_depth = 1 + static_cast<int>(random() % 3);
      units[i].reductions_in_flight = 1 + static_cast<int>(random() % 3);
    }
    const std::vector<SlotUse> uses = shard::assumed_step(units, once(units));
    const SlotPlan plan = plan_slots(uses, units);
    CHECK(plan.bytes >= plan.most_alive);
    bool apart = true;
    for (std::size_t a = 0; a < uses.size(); ++a) {
      CHECK(uses[a].begin < uses[a].end);
      for (std::size_t b = 0; b < a; ++b)
        apart = apart && (uses[a].begin >= uses[b].end || uses[b].begin >= uses[a].end ||
                          plan.offsets[a] >= plan.offsets[b] + uses[b].bytes ||
                          plan.offsets[b] >= plan.offsets[a] + uses[a].bytes);
    }
    CHECK(apart);
    CHECK(fingerprint(uses) == fingerprint(shard::assumed_step(units, once(units))));
  }
}

TEST_CASE("equal blocks between two tables need no more than what is alive of them") {
  // Most is alive near the end: the first table with its gradient, and that of the block behind it,
  // which is being reduced.
  constexpr std::int64_t kBlock = 1 << 20, kTable = 5 << 20;
  std::vector<UnitNeeds> units{{.keeps_open = true, .gather_bytes = 256, .pieces = {256}}};
  for (const std::int64_t bytes : {kTable, kBlock, kBlock, kBlock, kBlock, kTable})
    units.push_back({.parent = 0, .gather_bytes = bytes, .pieces = {2 * bytes}});
  const SlotPlan plan = plan_slots(shard::assumed_step(units, once(units)), units);
  CHECK(plan.most_alive == 512 + kTable + 2 * kTable + 2 * kBlock);
  CHECK(plan.bytes == plan.most_alive);
}

TEST_CASE("blocks and tables of Llamas need little more than what is alive of them") {
  struct Shape {  // elements of a block and of a table: of 1 B, 8 B, 70 B, and in between
    int layers;
    std::int64_t block, table;
  };
  double sum = 0;
  int plans = 0;
  for (const Shape& shape :
       {Shape{16, 60'821'504, 262'668'288}, Shape{32, 218'112'000, 525'336'576},
        Shape{48, 300'000'000, 400'000'000}, Shape{80, 855'654'400, 1'050'673'152}})
    for (const std::int64_t element : {2, 4})
      for (const int depth : {1, 2, 3})
        for (const int in_flight : {1, 2}) {
          std::vector<UnitNeeds> units{{.keeps_open = true, .gather_bytes = 4096 * element}};
          const auto add = [&](std::int64_t elements) {
            units.push_back({.parent = 0,
                             .gather_bytes = elements * element,
                             .pieces = {elements * 4},
                             .prefetch_depth = depth,
                             .reductions_in_flight = in_flight});
          };
          add(shape.table);
          for (int i = 0; i < shape.layers; ++i) add(shape.block);
          add(shape.table);
          const SlotPlan plan = plan_slots(shard::assumed_step(units, once(units)), units);
          const double ratio =
              static_cast<double>(plan.bytes) / static_cast<double>(plan.most_alive);
          INFO(shape.layers << " layers, " << element << " bytes, depth " << depth << ", "
                            << in_flight << " in flight");
          CHECK(ratio <= 1.16);
          sum += ratio;
          ++plans;
        }
  CHECK(sum / plans <= 1.05);
}
