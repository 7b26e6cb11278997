// Declared state over ranks, by Adafactor (tests/support/adafactor.hpp): rows and whole factors of
// uneven, empty and column shards; resumed from files on other numbers of ranks; after a reset.
//
// Tolerance between numbers of ranks. Only sums differ: gradients of equal ranks, and squares over
// a parameter, at most 48 positive terms. A step's relative error is below (48 + 32) 2^-24, with
// the roundings of its formula; it moves a value by at most kLr max(rms(p), eps2) |u|, below 1 here
// as checked. Gradients do not depend on values, so the errors of kSteps steps add up.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/distributed/state.hpp"
#include "tests/shard/cuts.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/adafactor.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr int kSteps = 5;
constexpr double kLr = 0.1, kBound = kSteps * (48 + 32) * 0x1p-24;

// Over four ranks the rows of the first are uneven, and those of the third leave ranks without any.
struct FactoredModel : nn::Module {
  FactoredModel() {
    for (const Shape& shape : {Shape{5, 7}, Shape{7}, Shape{2, 6}, Shape{3, 4, 2}, Shape{4, 12}}) {
      items.emplace_back(shape, Initializer::normal(0, 0.5));
      register_parameter(std::to_string(items.size() - 1), items.back());
    }
  }
  // A loss whose gradient depends on the step alone, and is the same on each rank.
  Tensor operator()(int step, const Device& device) {
    return call([&] {
      Tensor loss;
      for (std::size_t i = 0; i < items.size(); ++i) {
        std::vector<float> g;
        for (std::int64_t e = 0; e < items[i].shape().numel(); ++e)
          g.push_back(static_cast<float>((e * 5 + step * 3 + static_cast<std::int64_t>(i)) % 11) -
                      4.5f);
        const Tensor part = sum(items[i].value() * Tensor::from(g, items[i].shape(), device));
        loss = loss.defined() ? loss + part : part;
      }
      return loss;
    });
  }
  std::vector<Parameter> items;
};

struct FactoredJob {
  enum class Sharded : std::uint8_t { at_once, later };
  explicit FactoredJob(const World& world, Sharded when = Sharded::at_once) : world(world) {
    if (when == Sharded::at_once) shard();
    nn::init(model, {3}, world.device());
  }
  void shard() {
    fully_shard(model, {.mesh = DeviceMesh::flat(world),
                        .shard_placement_fn = [n = world.size()](const Parameter& p) {
                          return Shard{p.shape() == Shape{4, 12} && 12 % n == 0 ? 1 : 0};
                        }});
  }
  void step() {
    model(static_cast<int>(adafactor.steps()), world.device()).backward();
    adafactor.step();
    adafactor.zero_grad();
  }
  FactoredJob& steps_to(std::int64_t end) {
    while (adafactor.steps() < end) step();
    return *this;
  }
  // Whole values and state, on every rank.
  Values all() {
    Values values = full_values(model);
    for (const auto& [name, state] : adafactor.state_dict(model, {.form = StateForm::full}))
      if (state.values.dtype() == f32) values[name] = state.values.to_vector<float>();
    return values;
  }

  const World& world;
  FactoredModel model;
  Adafactor adafactor{model.parameters(), {.lr = kLr, .weight_decay = 0.1}};
};

Values of_one_rank(std::int64_t steps) {
  return on_ranks(1, [&](World& world) { return FactoredJob(world).steps_to(steps).all(); })[0];
}

void check_near(const Values& found, const Values& expected) {
  REQUIRE(found.size() == expected.size());
  for (const auto& [name, values] : expected) {
    INFO(name);
    const std::vector<float>& own = found.at(name);
    REQUIRE(own.size() == values.size());
    double worst = 0, largest = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      worst = std::max(worst, std::abs(static_cast<double>(own[i]) - values[i]));
      largest = std::max(largest, std::abs(static_cast<double>(values[i])));
    }
    CHECK(worst <= kBound * std::max(1., largest));
  }
}

}  // namespace

TEST_CASE("Adafactor on any number of ranks takes the steps of one", "[threads]") {
  const Values before = of_one_rank(0), after = of_one_rank(kSteps);
  CHECK(before.at("0") != after.at("0"));
  for (const auto& [name, values] : after)
    if (before.contains(name) && values.size() > 1)
      for (std::size_t i = 0; i < values.size(); ++i)
        if (name.size() == 1) CHECK(std::abs(values[i] - before.at(name)[i]) < kSteps);
  for (const int ranks : {2, 3, 4}) {
    INFO(ranks << " ranks");
    for (const Values& values :
         on_ranks(ranks, [](World& world) { return FactoredJob(world).steps_to(kSteps).all(); }))
      check_near(values, after);
  }
}

TEST_CASE("declared state is saved by N ranks and resumed by M to the bit", "[threads]") {
  const Values last = of_one_rank(kSteps);
  for (const int savers : {1, 3, 4}) {
    const TemporaryFolder folder;
    const std::string at = folder.path().string();
    const Values saved = on_ranks(savers, [&](World& world) {
      FactoredJob job(world);
      job.steps_to(2);
      checkpoint::save(
          at, 2,
          {checkpoint::part(job.model, world), checkpoint::part(job.adafactor, job.model, world)},
          {}, world);
      return job.all();
    })[0];
    for (const int loaders : {1, 2, 4}) {
      INFO("saved by " << savers << " ranks, loaded by " << loaders);
      struct Found {
        Values loaded, last;
      };
      const auto found = on_ranks(loaders, [&](World& world) {
        FactoredJob job(world);
        const checkpoint::Checkpoint from(at, 2);
        job.model.load(*from.part("model"));
        job.adafactor.load(job.model, *from.part("optimizer"));
        Found f{.loaded = job.all(), .last = {}};
        f.last = job.steps_to(kSteps).all();
        return f;
      });
      for (const Found& f : found) {
        CHECK(same_bits(f.loaded, saved));
        check_near(f.last, last);
      }
    }
  }
}

TEST_CASE("declared state of whole parameters goes along when they are sharded", "[threads]") {
  struct Found {
    Values before, after, last;
    Shape row;
  };
  const auto found = on_ranks(3, [](World& world) {
    FactoredJob job(world, FactoredJob::Sharded::later);
    Found f{.before = job.steps_to(2).all(), .after = {}, .last = {}, .row = {}};
    job.shard();
    f.after = job.all();
    f.row = job.adafactor.state(job.model.items[0], "row").shape();
    f.last = job.steps_to(kSteps).all();
    return f;
  });
  const Values last = of_one_rank(kSteps);
  for (const Found& f : found) {
    CHECK(same_bits(f.before, f.after));
    check_near(f.last, last);
  }
  CHECK(found[0].row == Shape{2, 1});
  CHECK(found[2].row == Shape{1, 1});
}

TEST_CASE("a reset takes declared state back with the step that never began", "[threads]") {
  const Values expected =
      on_ranks(2, [](World& world) { return FactoredJob(world).steps_to(kSteps).all(); })[0];
  for (const int failing : {0, 1}) {
    struct Found {
      bool is_consistent = false;
      std::int64_t steps = 0;
      Values all;
    };
    const auto found = on_ranks(2, [&](World& world) {
      FactoredJob job(world);
      job.steps_to(2);
      Found f;
      try {
        if (world.rank() == failing) throw std::runtime_error("a rank fails before its call");
        job.step();  // whose gathers wait for the other rank
        world.barrier();
      } catch (const std::exception&) {
        f.is_consistent = reset(job.model).parameters_are_consistent;
      }
      f.steps = job.adafactor.steps();
      f.all = job.steps_to(kSteps).all();
      return f;
    });
    for (const Found& f : found) {
      CHECK(f.is_consistent);
      CHECK(f.steps == 2);
      CHECK(same_bits(f.all, expected));
    }
  }
}

TEST_CASE("an update that is cut between two states says so, and goes on after a load",
          "[threads]") {
  const WorldOptions options{.executor = ExecutorKind::inlined, .threads = 1};
  const Values expected = on_ranks(
      2, options, [](World& world) { return FactoredJob(world).steps_to(kSteps).all(); })[0];
  struct Found {
    bool was_consistent = true;
    Values all;
  };
  const auto found = on_ranks(2, options, [&](World& world) {
    FactoredJob job(world);
    job.steps_to(2);
    const StateDict model = job.model.state_dict(), optimizer = job.adafactor.state_dict(job.model);
    if (world.rank() == 0)
      world.device().context().add_observer(std::make_shared<Cuts>(2, "where"));
    Found f;
    try {
      job.step();
      world.barrier();
    } catch (const std::exception&) {
      f.was_consistent = reset(job.model).parameters_are_consistent;
    }
    job.model.load(model);
    job.adafactor.load(job.model, optimizer);
    f.all = job.steps_to(kSteps).all();
    return f;
  });
  for (const Found& f : found) {
    CHECK(!f.was_consistent);
    CHECK(same_bits(f.all, expected));
  }
}
