// A step whose ranks ignore unlike many targets is that of one rank on all of them.
#include "tessera/distributed/collectives.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr std::int64_t kCountedRows = 4;

// Of row 0 nothing is ignored, of row 1 all but one target, of 2 all, of 3 a half.
std::vector<std::int32_t> some_targets_of(std::int64_t row) {
  const std::vector<std::int32_t> all[] = {
      {1, 2, 3, 4}, {-100, -100, 7, -100}, {-100, -100, -100, -100}, {-100, 9, -100, 10}};
  return all[row];
}

struct CountedStep {
  double loss;       // the mean over ranks, of micro-batches the sum
  Values gradients;  // this rank's rows
};

struct CountedWay {
  std::int64_t micro_batches;
  bool is_fast, is_streamed;
};

CountedStep counted_step_of(World& world, const CountedWay& way) {
  nn::Llama model(small_llama(1));
  model.set_loss_chunk(11);
  const ShardOptions options{.mesh = DeviceMesh::flat(world),
                             .slice_bytes = way.is_streamed ? 64 : std::int64_t{0}};
  shard_parts(model, options);
  nn::init(model, {3}, world.device());
  const std::int64_t own = kCountedRows / world.size(), rows = own / way.micro_batches;
  const auto upload = [&](std::int64_t first, std::int64_t count, bool are_targets) {
    std::vector<std::int32_t> values;
    for (std::int64_t r = first; r < first + count; ++r)
      for (std::size_t t = 0; t < 4; ++t)
        values.push_back(are_targets ? some_targets_of(r)[t]
                                     : static_cast<int>((3 * r + 5 * t) % 11));
    return Tensor::from(values, {count, 4}, world.device());
  };
  nn::LossOrder order{.count = dist::count_targets(upload(world.rank() * own, own, true), world)};
  if (way.is_fast) order.gradient = 1;
  CountedStep step{};
  for (std::int64_t m = 0; m < way.micro_batches; ++m) {
    const std::int64_t first = world.rank() * own + m * rows;
    const Tensor loss = model.loss(upload(first, rows, false), upload(first, rows, true), order);
    loss.backward();
    step.loss += world.sum(loss.item()) / world.size();
  }
  step.gradients = shard_gradients(model);
  return step;
}

}  // namespace

TEST_CASE("ranks that ignore unlike many targets train on the mean over all of them") {
  const auto one =
      on_ranks(1, [](World& world) { return counted_step_of(world, {1, false, false}); });
  CHECK(one[0].loss > 1);
  for (const int ranks : {1, 2, 4})
    for (const std::int64_t micro_batches : {1, 2})
      for (const bool is_fast : {false, true})
        for (const bool is_streamed : {false, true}) {
          if (ranks * micro_batches > kCountedRows) continue;
          INFO(ranks << " ranks, " << micro_batches << " micro-batches, fast " << is_fast
                     << ", streamed " << is_streamed);
          const auto steps = on_ranks(ranks, [&](World& world) {
            return counted_step_of(world, {micro_batches, is_fast, is_streamed});
          });
          std::vector<Values> shards;
          for (const CountedStep& step : steps) {
            // Sums of 7 losses below 8 and of their gradients, below 1, in another order.
            CHECK(std::abs(step.loss - one[0].loss) < 1e-5);
            shards.push_back(step.gradients);
          }
          for (const auto& [name, values] : assemble(shards)) {
            INFO(name);
            const auto& expected = one[0].gradients.at(name);
            REQUIRE(values.size() == expected.size());
            for (std::size_t i = 0; i < values.size(); ++i)
              CHECK(std::abs(values[i] - expected[i]) < 1e-5);
          }
        }
}

TEST_CASE("targets that are not ignored are counted over all ranks") {
  const auto counts = on_ranks(3, [](World& world) {
    const std::vector<std::int64_t> own[] = {{0, -100, 5}, {-100}, {7, 7}};
    const auto& mine = own[world.rank()];
    const auto shape = Shape{static_cast<std::int64_t>(mine.size())};
    const TargetCount count = dist::count_targets(Tensor::from(mine, shape, world.device()), world);
    const TargetCount none =
        dist::count_targets(Tensor::full({4}, kIgnoredTarget, i32, world.device()), world);
    return std::vector<double>{count.all.item(), static_cast<double>(count.ranks), none.all.item()};
  });
  for (const auto& count : counts) CHECK(count == std::vector<double>{4, 3, 0});
}
