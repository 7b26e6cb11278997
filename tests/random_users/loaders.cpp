// Data loaders of random sizes, worlds, workers and positions. What a step sees follows from its
// number: each epoch has its samples once, other numbers of ranks share the same global batches,
// and a run that ends anywhere goes on there with any number of workers.
#include <algorithm>
#include <set>

#include "tessera/data/data_loader.hpp"
#include "tests/random_users/draw.hpp"
#include "tests/random_users/users.hpp"

namespace tessera::testing {
namespace {

using Samples = std::vector<std::int64_t>;

struct RandomLoader {
  explicit RandomLoader(std::uint64_t seed) {
    Draw draw(seed);
    size = draw.chance(0.05) ? 0 : draw.whole(1, draw.chance(0.3) ? 300 : 20);
    constexpr data::LastBatch kLast[] = {data::LastBatch::run_on, data::LastBatch::drop,
                                         data::LastBatch::keep};
    options = {
        .batch_size = draw.whole(1, 6),
        .order = draw.chance(0.7) ? data::SampleOrder::shuffled : data::SampleOrder::sequential,
        .seed = draw.bits(),
        .last_batch = draw.one_of(kLast),
        .world = draw.number(1, 4)};
  }
  std::int64_t global() const { return options.batch_size * options.world; }
  bool is_refused() const {
    const std::int64_t rest = size % global();
    return size == 0 || (options.last_batch == data::LastBatch::drop && size < global()) ||
           (options.last_batch == data::LastBatch::keep && rest > 0 && rest < options.world);
  }
  // What all ranks take in a step, rank after rank.
  Samples step(std::int64_t number) const {
    Samples all;
    for (data::DataLoaderOptions mine = options; mine.rank < mine.world; ++mine.rank)
      std::ranges::copy(data::SamplePlan(size, mine).indices(number), std::back_inserter(all));
    return all;
  }

  std::int64_t size;
  data::DataLoaderOptions options;
};

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

void check_epochs(const RandomLoader& of, std::int64_t steps) {
  constexpr std::int64_t kEpochs = 3;
  const bool runs_on = of.options.last_batch == data::LastBatch::run_on;
  const bool drops = of.options.last_batch == data::LastBatch::drop;
  expect(steps == (drops ? of.size / of.global() : (of.size + of.global() - 1) / of.global()),
         concat(steps, " steps an epoch"));
  // The samples of each epoch, of which `drop` leaves some out.
  const std::int64_t seen = drops ? steps * of.global() : of.size;
  Samples all;
  for (std::int64_t i = 0; std::ssize(all) < kEpochs * seen; ++i)
    std::ranges::copy(of.step(i), std::back_inserter(all));
  for (std::int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    const Samples part(all.begin() + epoch * seen, all.begin() + (epoch + 1) * seen);
    expect(std::ssize(std::set(part.begin(), part.end())) == seen,
           concat("epoch ", epoch, " has a sample twice"));
    for (std::int64_t i = 0; i < seen; ++i)
      expect(part[static_cast<std::size_t>(i)] ==
                 data::sample_at(epoch * of.size + i, of.size, of.options.order, of.options.seed),
             concat("epoch ", epoch, " has another sample ", i));
  }
  if (runs_on && of.options.batch_size % 2 == 0) {
    RandomLoader other = of;
    other.options.batch_size /= 2;
    other.options.world *= 2;
    expect(other.step(steps) == of.step(steps), "twice as many ranks see other samples");
  }
}

// Sample `bad` throws where it is read.
void check_runs(const RandomLoader& of, Draw& draw) {
  const std::int64_t bad = draw.chance(0.5) ? draw.whole(0, of.size - 1) : -1;
  data::DataLoaderOptions options = of.options;
  options.rank = draw.number(0, options.world - 1);
  const data::SamplePlan plan(of.size, options);
  const auto get = [bad](std::int64_t i) {
    if (i == bad) throw std::range_error("a bad sample");
    return i;
  };
  const auto together = [](Samples samples) { return samples; };
  std::int64_t step = draw.whole(0, 20);
  for (int run_number = 0; run_number < 3; ++run_number) {
    options.workers = draw.number(0, 3);
    options.prefetch = draw.number(0, 6);
    const data::DataLoader loader(of.size, get, together, options);
    const std::int64_t first = step, count = draw.whole(0, 15), taken = draw.whole(0, count);
    auto run = loader.run(first, count);
    for (; step < first + taken; ++step) {
      expect(run.next_step() == step, "a run is at another step");
      const Samples expected = plan.indices(step);
      const bool throws = std::ranges::find(expected, bad) != expected.end();
      std::optional<Samples> got;
      try {
        got = run.next();
      } catch (const std::range_error&) {
        expect(throws, concat("step ", step, " throws"));
        continue;
      }
      expect(!throws && got == expected, concat("step ", step, " of a run has another batch"));
    }
    if (taken == count) expect(!run.next(), "a run has one batch too many");
  }
}

}  // namespace

std::string describe_loader(std::uint64_t seed) {
  const RandomLoader of(seed);
  return concat("loader of ", of.size, " samples, batch ", of.options.batch_size, " of each of ",
                of.options.world, " ranks, last batch ", static_cast<int>(of.options.last_batch),
                ", order ", static_cast<int>(of.options.order), " by ", of.options.seed, '\n');
}

std::string loader_complaint(std::uint64_t seed) {
  const RandomLoader of(seed);
  try {
    std::int64_t steps = 0;
    try {
      steps = data::SamplePlan(of.size, of.options).steps_per_epoch();
    } catch (const ContractError& error) {
      return of.is_refused() ? "" : concat(describe_loader(seed), error.what());
    }
    expect(!of.is_refused(), "accepted");
    check_epochs(of, steps);
    Draw draw(seed + 1);
    check_runs(of, draw);
  } catch (const std::exception& error) {
    return concat(error.what(), "\n  ", describe_loader(seed));
  }
  return "";
}

}  // namespace tessera::testing
