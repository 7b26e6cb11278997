// Any data set as batches: which samples a step takes, threads that make them ahead, resuming.
#include "tessera/data/data_loader.hpp"

#include "tessera/data/batches.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>

#include "tessera/tensor/tensor.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using namespace tessera::data;
using Catch::Matchers::Contains;
using tessera::testing::TemporaryFolder;

// A data set or a loader that would be gone is refused.
static_assert(std::is_constructible_v<DataLoader<std::vector<int>>, const std::vector<int>&,
                                      std::vector<int> (*)(std::vector<int>), DataLoaderOptions>);
static_assert(!std::is_constructible_v<DataLoader<std::vector<int>>, std::vector<int>,
                                       std::vector<int> (*)(std::vector<int>), DataLoaderOptions>);
static_assert(!std::is_constructible_v<Batches, TokenLoader, BatchesOptions, Device>);

namespace {

using Indices = std::vector<std::int64_t>;

Indices together(Indices samples) { return samples; }
std::int64_t itself(std::int64_t index) { return index; }

DataLoader<Indices> indices_of(std::int64_t size, const DataLoaderOptions& options) {
  return DataLoader(size, itself, together, options);
}

std::vector<Indices> batches_of(const DataLoader<Indices>& loader, std::int64_t first,
                                std::int64_t steps) {
  std::vector<Indices> out;
  for (Indices& batch : loader.run(first, steps)) out.push_back(std::move(batch));
  return out;
}

// What all ranks take in a step, rank after rank.
Indices global_batch(std::int64_t size, DataLoaderOptions options, std::int64_t step) {
  Indices all;
  for (options.rank = 0; options.rank < options.world; ++options.rank)
    for (const std::int64_t i : SamplePlan(size, options).indices(step)) all.push_back(i);
  return all;
}

}  // namespace

TEST_CASE("a data loader takes the samples that token batches take") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  constexpr std::int64_t kSamples = 13, kLength = 2, kGlobal = 4;
  std::string text;  // token i is i / 2: sample s begins with token s
  for (std::int64_t i = 0; i <= kSamples * kLength; ++i) text += static_cast<char>(i / kLength);
  const TemporaryFolder folder;
  const TokenLoader tokens(TokenFile(folder.write("t.txt", text), 256),
                           {.seq_len = kLength, .global_batch = kGlobal, .seed = seed});
  REQUIRE(tokens.samples() == kSamples);
  for (const int world : {1, 2, 4})
    for (int rank = 0; rank < world; ++rank) {
      const SamplePlan plan(
          kSamples, {.batch_size = kGlobal / world, .seed = seed, .rank = rank, .world = world});
      for (std::int64_t step = 0; step < 10; ++step) {
        std::vector<std::int32_t> inputs(kLength * kGlobal / static_cast<std::size_t>(world)),
            targets(inputs.size());
        tokens.batch(step, rank, world, 0, inputs, targets);
        const Indices indices = plan.indices(step);
        for (std::size_t row = 0; row < indices.size(); ++row)
          CHECK(indices[row] == inputs[row * kLength]);
      }
    }
}

TEST_CASE("an epoch has every sample once, up to what its last batch is") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  constexpr std::int64_t kSize = 23;
  Indices all(kSize);
  std::iota(all.begin(), all.end(), 0);
  for (const int world : {1, 2, 3}) {
    DataLoaderOptions options{.batch_size = 4, .seed = seed, .world = world};
    const std::int64_t global = 4 * world;
    for (const LastBatch last : {LastBatch::drop, LastBatch::keep}) {
      options.last_batch = last;
      const std::int64_t steps = SamplePlan(kSize, options).steps_per_epoch();
      CHECK(steps == (last == LastBatch::drop ? kSize / global : (kSize + global - 1) / global));
      std::set<Indices> epochs;
      for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
        Indices seen;
        for (std::int64_t step = epoch * steps; step < (epoch + 1) * steps; ++step)
          for (const std::int64_t i : global_batch(kSize, options, step)) seen.push_back(i);
        epochs.insert(seen);
        std::ranges::sort(seen);
        if (last == LastBatch::keep)
          CHECK(seen == all);
        else
          CHECK((static_cast<std::int64_t>(seen.size()) == steps * global &&
                 std::ranges::adjacent_find(seen) == seen.end()));
      }
      CHECK(epochs.size() == 3);  // each in another order
    }
    options.last_batch = LastBatch::run_on;
    Indices seen;
    for (std::int64_t step = 0; static_cast<std::int64_t>(seen.size()) < 2 * kSize; ++step)
      for (const std::int64_t i : global_batch(kSize, options, step)) seen.push_back(i);
    for (int epoch = 0; epoch < 2; ++epoch) {
      Indices part(seen.begin() + epoch * kSize, seen.begin() + (epoch + 1) * kSize);
      std::ranges::sort(part);
      CHECK(part == all);
    }
  }
}

TEST_CASE("the last batch is split as evenly as the ranks allow") {
  DataLoaderOptions options{
      .batch_size = 4, .order = SampleOrder::sequential, .last_batch = LastBatch::keep, .world = 3};
  std::vector<std::size_t> sizes;
  for (options.rank = 0; options.rank < 3; ++options.rank)
    sizes.push_back(SamplePlan(17, options).indices(1).size());
  CHECK(sizes == std::vector<std::size_t>{2, 2, 1});
  CHECK(global_batch(17, options, 1) == Indices{12, 13, 14, 15, 16});
  CHECK(global_batch(17, options, 2).size() == 12);
}

TEST_CASE("any number of workers gives the same batches in order, from any step", "[threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  DataLoaderOptions options{.batch_size = 3, .seed = seed, .last_batch = LastBatch::keep};
  const auto expected = batches_of(indices_of(20, options), 0, 30);
  CHECK(expected.size() == 30);
  for (const int workers : {0, 1, 3, 8})
    for (const int prefetch : {0, 1, 5})
      for (const std::int64_t from : {0, 1, 17, 30}) {
        INFO(workers << " workers, " << prefetch << " ahead, from " << from);
        options.workers = workers;
        options.prefetch = prefetch;
        const auto loader = indices_of(20, options);
        CHECK(batches_of(loader, from, 30 - from) ==
              std::vector<Indices>(expected.begin() + from, expected.end()));
      }
}

TEST_CASE("the state of a run is the step that comes next", "[threads]") {
  DataLoaderOptions options{.batch_size = 2, .workers = 3};
  const auto loader = indices_of(9, options);
  std::int64_t saved = 0;
  {
    auto run = loader.run(5, 100);
    CHECK(run.next_step() == 5);
    for (int i = 0; i < 4; ++i) CHECK(run.next() == loader.at(5 + i));
    saved = run.next_step();
  }
  CHECK(saved == 9);
  options.workers = 1;
  CHECK(indices_of(9, options).run(saved, 1).next() == loader.at(9));
}

TEST_CASE("what the user's code throws reaches who asks for that batch, and no earlier",
          "[threads]") {
  for (const int workers : {0, 1, 4}) {
    INFO(workers << " workers");
    const auto get = [](std::int64_t index) {
      if (index == 5) throw std::range_error("sample 5 is bad");
      return index;
    };
    const DataLoader loader(std::int64_t{8}, get, together,
                            {.order = SampleOrder::sequential, .workers = workers});
    auto run = loader.run(0, 8);
    for (std::int64_t i = 0; i < 5; ++i) CHECK(run.next() == Indices{i});
    CHECK_THROWS_AS(run.next(), std::range_error);
    CHECK(run.next_step() == 6);
    CHECK(run.next() == Indices{6});
    CHECK(run.next() == Indices{7});
    CHECK_FALSE(run.next());
  }
}

TEST_CASE("workers are ahead by no more than was asked for", "[threads]") {
  std::atomic<std::int64_t> made = 0;
  const auto get = [&made](std::int64_t index) {
    ++made;
    made.notify_all();
    return index;
  };
  const DataLoader loader(std::int64_t{1000}, get, together, {.workers = 4, .prefetch = 6});
  auto run = loader.run(0, 1000);
  for (std::int64_t n = made; n < 6; n = made) made.wait(n);  // they begin before anybody asks
  for (int taken = 1; taken <= 20; ++taken) {
    run.next();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(made <= taken + 6);
  }
}

TEST_CASE("a run that is left early ends its workers", "[threads]") {
  std::atomic<int> inside = 0;
  const auto get = [&inside](std::int64_t index) {
    ++inside;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    --inside;
    return index;
  };
  const DataLoader loader(std::int64_t{1000}, get, together, {.workers = 4});
  {
    auto run = loader.run(0, 1000);
    run.next();
  }
  CHECK(inside == 0);
  const auto fails = [&] {
    for (const Indices& batch : loader.run(0, 1000))
      if (!batch.empty()) throw std::runtime_error("in the loop");
  };
  CHECK_THROWS_AS(fails(), std::runtime_error);
  CHECK(inside == 0);
}

TEST_CASE("a data set is anything with a size and samples, and a batch whatever collate makes") {
  struct Squares {
    std::int64_t size() const { return 6; }
    float get(std::int64_t index) const { return static_cast<float>(index * index); }
  };
  struct Named {
    std::size_t size() const { return 3; }
    std::string operator()(std::int64_t index) const { return std::string(1, "abc"[index]); }
  };
  const Device device = Device::cpu();
  const DataLoaderOptions options{.batch_size = 3, .order = SampleOrder::sequential, .workers = 2};
  const Squares squares;
  const DataLoader loader(
      squares, [](const std::vector<float>& samples) { return samples; }, options);
  std::vector<float> seen;
  for (const std::vector<float>& batch : loader.run(0, 2))
    for (const float v : Tensor::from(batch, {3}, device).to_vector<float>()) seen.push_back(v);
  CHECK(seen == std::vector<float>{0, 1, 4, 9, 16, 25});

  const Named named;
  const DataLoader names(
      named,
      [](std::vector<std::string> samples) {
        return std::accumulate(samples.begin(), samples.end(), std::string());
      },
      options);
  CHECK(names.at(0) == "abc");

  const std::vector<double> numbers = {0.5, 1.5, 2.5};
  const DataLoader sums(
      numbers,
      [](const std::vector<double>& samples) {
        return std::make_unique<double>(samples[0] + samples[1] + samples[2]);
      },
      options);
  for (const auto& sum : sums.run(0, 1)) CHECK(*sum == 4.5);  // batches that only move
}

TEST_CASE("options of a data loader that do not fit are refused in one line") {
  CHECK_THROWS_WITH(indices_of(0, {}), Contains("0 samples"));
  CHECK_THROWS_WITH(indices_of(5, {.batch_size = 0}), Contains("batch_size=0"));
  CHECK_THROWS_WITH(indices_of(5, {.workers = -1}), Contains("workers=-1"));
  CHECK_THROWS_WITH(indices_of(5, {.rank = 2, .world = 2}), Contains("rank is 2, expected 0 to 1"));
  CHECK_THROWS_WITH(indices_of(5, {.batch_size = 3, .last_batch = LastBatch::drop, .world = 2}),
                    Contains("5 samples") && Contains("2 x 3"));
  CHECK_THROWS_WITH(indices_of(9, {.batch_size = 2, .last_batch = LastBatch::keep, .world = 4}),
                    Contains("1 samples for 4 ranks"));
  CHECK_THROWS_WITH(indices_of(5, {}).at(-1), Contains("step -1"));
}
