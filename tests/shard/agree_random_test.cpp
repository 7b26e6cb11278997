// Trainings in which one rank, or one replica, does at one step something else than its peers: all
// ranks hear of it, or it changes nothing. Drawn afresh; a failure prints its seed.
#include <algorithm>
#include <iostream>
#include <iterator>
#include <random>

#include "tessera/shard/runtime_control.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// What the odd ones do at one step of the three.
enum class Odd : std::uint8_t {
  nothing,
  reshards,
  stays_open,
  reads_nothing,
  prefetches,
  prefetches_in_backward,
  syncs_later,
  sums_later,
  divides,
  freezes,
  lets_fly,
  opens,
  closes,
  leaves_out_unit,
  swaps_units,
  leaves_out_backward,
  evaluates,
  leaves_out_step,
  steps_twice,
  calls_other_model,
  mistakes_models,  // of two alike one for the other, from the first call on
  count
};

constexpr const char* kNames[] = {"nothing",        "reshards",
                                  "stays_open",     "reads_nothing",
                                  "prefetches",     "prefetches_in_backward",
                                  "syncs_later",    "sums_later",
                                  "divides",        "freezes",
                                  "lets_fly",       "opens",
                                  "closes",         "leaves_out_unit",
                                  "swaps_units",    "leaves_out_backward",
                                  "evaluates",      "leaves_out_step",
                                  "steps_twice",    "calls_other_model",
                                  "mistakes_models"};
static_assert(std::size(kNames) == static_cast<std::size_t>(Odd::count));

struct Trial {
  std::uint64_t seed;
  int ranks, replicas = 1, step, layer;
  Reshard reshard = Reshard::automatic;
  bool has_list = false;  // layers 0 and 1 are one unit
  Odd odd;
  int first_odd, odd_ranks = 1;  // of the world, one behind the other

  bool is_odd(int rank) const { return rank >= first_odd && rank < first_odd + odd_ranks; }
};

Trial draw(std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  const auto below = [&](int n) {
    return static_cast<int>(engine() % static_cast<std::uint64_t>(n));
  };
  Trial t{.seed = seed,
          .ranks = 2 + below(3),
          .step = below(3),
          .layer = below(3),
          .odd = static_cast<Odd>(below(static_cast<int>(Odd::count))),
          .first_odd = 0};
  t.reshard = kReshards[engine() % 3];
  t.has_list = below(3) == 0;
  if (t.ranks == 4 && below(4) > 0) t.replicas = below(2) ? 2 : 4;
  t.odd_ranks = below(2) ? t.ranks / t.replicas : 1;  // a replica
  if (t.odd_ranks == t.ranks) t.odd_ranks = 1;
  t.first_odd = t.odd_ranks * below(t.ranks / t.odd_ranks);
  // Which modules of a list are called is a replica's own affair, or a rank's where nothing is
  // gathered, as of what stays open behind the evaluation: what it leaves out gives nothing.
  if ((t.replicas > 1 || t.reshard == Reshard::never) &&
      (t.odd == Odd::leaves_out_unit || t.odd == Odd::swaps_units))
    t.has_list = false;
  // Of replicas the next backward tells.
  if (t.replicas > 1 && (t.odd == Odd::leaves_out_step || t.odd == Odd::steps_twice))
    t.step = below(2);
  return t;
}

// Of the same width, so that a program may leave one out.
constexpr std::int64_t kWidth = 5;

class Training {
 public:
  Training(const World& world, const Trial& trial, Odd odd)
      : world_(world), trial_(trial), odd_(odd) {
    const ShardOptions options{.mesh = mesh_of(world, trial.replicas),
                               .reshard_after_forward = trial.reshard};
    for (Stack* model : {&first_made_, &second_made_}) {
      if (!trial.has_list) {
        model->shard(options);
        continue;
      }
      fully_shard({&model->layers[0], &model->layers[1]}, options);
      shard_each({&model->layers[2], model}, options);
    }
    nn::init(first_made_, {trial.seed}, world.device());
    nn::init(second_made_, {trial.seed + 1}, world.device());
    const NoGradGuard none;
    model_(batch(0)), other_(batch(0));
  }
  // The whole values that it leaves.
  Values run() {
    optim::SGD optimizer(model_.parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      const Odd odd = step == trial_.step ? odd_ : Odd::nothing;
      decide(odd);
      if (odd == Odd::evaluates) {
        const NoGradGuard none;
        model_(batch(step));
      }
      const Tensor loss =
          mean_square(odd == Odd::calls_other_model ? other_(batch(step)) : forward(step, odd));
      if (odd != Odd::leaves_out_backward) loss.backward();
      const int steps = odd == Odd::leaves_out_step ? 0 : odd == Odd::steps_twice ? 2 : 1;
      for (int i = 0; i < steps; ++i) optimizer.step();
      optimizer.zero_grad();
    }
    return full_values(model_);
  }

 private:
  Tensor batch(int step) const {
    return rows_of(trial_.seed + static_cast<std::uint64_t>(step), 2 * world_.rank(), 2, kWidth,
                   world_.device());
  }
  void decide(Odd odd) {
    nn::Linear& layer = model_.layers[static_cast<std::size_t>(trial_.layer)];
    nn::Linear& next = model_.layers[static_cast<std::size_t>((trial_.layer + 1) % 3)];
    if (odd == Odd::reshards) set_reshard_after_forward(layer, Reshard::never);
    if (odd == Odd::stays_open) set_reshard_after_backward(layer, false);
    if (odd == Odd::reads_nothing) set_unshard_in_backward(layer, false);
    if (odd == Odd::prefetches) set_modules_to_forward_prefetch(layer, {&next});
    if (odd == Odd::prefetches_in_backward) set_modules_to_backward_prefetch(layer, {&next});
    if (odd == Odd::syncs_later) set_requires_gradient_sync(layer, false);
    if (odd == Odd::sums_later) set_requires_all_reduce(layer, false);
    if (odd == Odd::divides) set_gradient_divide_factor(layer, 3);
    if (odd == Odd::freezes) layer.set_trainable(false);
    if (odd == Odd::lets_fly) set_reductions_in_flight(layer, 3);
    if (odd == Odd::opens) unshard(layer);
    if (odd == Odd::closes) reshard(layer);
  }
  Tensor forward(int step, Odd odd) {
    return model_.call([&] {
      std::vector<std::size_t> order{0, 1, 2};
      const auto at = order.begin() + trial_.layer;
      if (odd == Odd::leaves_out_unit) order.erase(at);
      if (odd == Odd::swaps_units) std::rotate(order.begin(), order.begin() + 1, order.end());
      Tensor h = batch(step);
      for (const std::size_t i : order) h = tanh(model_.layers[i](h));
      return h * model_.scale.value() + model_.offset.value();
    });
  }

  const World& world_;
  const Trial& trial_;
  const Odd odd_;
  Stack first_made_{{kWidth, kWidth, kWidth, kWidth}},
      second_made_{{kWidth, kWidth, kWidth, kWidth}};
  Stack &model_ = odd_ == Odd::mistakes_models ? second_made_ : first_made_,
        &other_ = odd_ == Odd::mistakes_models ? first_made_ : second_made_;
};

struct Ended {
  std::string said;  // by what it throws
  Values values;
};

std::vector<Ended> train(const Trial& trial, bool is_disturbed) {
  std::vector<Ended> ended(static_cast<std::size_t>(trial.ranks));
  const WorldOptions options{.executor = testing::shuffled(trial.seed)};
  const auto body = [&](World& world) {
    Ended& mine = ended[static_cast<std::size_t>(world.rank())];
    try {
      const bool is_odd = is_disturbed && trial.is_odd(world.rank());
      mine.values = Training(world, trial, is_odd ? trial.odd : Odd::nothing).run();
      world.barrier();
    } catch (const std::exception& error) {
      mine.said = error.what();
      throw;
    }
  };
  thrown_by<std::exception>([&] { run_local(trial.ranks, options, body); });
  return ended;
}

// What is wrong with how a trial ended, empty for nothing.
std::string fault_of(const Trial& trial, const std::vector<Ended>& ended) {
  const auto has_heard = [](const Ended& rank) { return !rank.said.empty(); };
  if (std::ranges::all_of(ended, has_heard)) return "";
  if (std::ranges::any_of(ended, has_heard)) return "some ranks alone have heard of it";
  const std::vector<Ended> alone = train(trial, false);
  for (std::size_t r = 0; r < ended.size(); ++r) {
    if (has_heard(alone[r])) return "undisturbed it fails: " + alone[r].said;
    if (!same_bits(ended[r].values, alone[r].values)) return "nobody has heard of it";
  }
  return "";
}

}  // namespace

TEST_CASE("what one rank or one replica does otherwise is told to all, or changes nothing") {
  const int trials = GridShare::stride() > 1 ? 60 : 600;
  int told = 0;
  for (int i = 0; i < trials; ++i) {
    const Trial trial = draw(fresh_seed());
    const std::vector<Ended> ended = train(trial, true);
    INFO("seed " << trial.seed << ", " << trial.ranks << " ranks, " << trial.replicas
                 << " replicas, reshard " << trial.reshard << (trial.has_list ? ", a list: " : ": ")
                 << kNames[static_cast<std::size_t>(trial.odd)] << " at step " << trial.step
                 << " by layer " << trial.layer << ", on " << trial.odd_ranks << " ranks from "
                 << trial.first_odd);
    CHECK(fault_of(trial, ended) == "");
    told += ended[0].said.empty() ? 0 : 1;
  }
  // Of 21 ways five have no consequence, or not everywhere: `nothing`, `reshards` where nothing is
  // resharded, `sums_later` on one replica, `opens`, `closes`.
  CHECK(told >= trials / 2);
  std::cout << "disagreements: " << told << " of " << trials << " told\n";
}
