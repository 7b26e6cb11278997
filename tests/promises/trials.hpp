// Steps that fail, on one rank or on all, and what a reset makes of them. The places of a step are
// counted in a dry one first, then each is tried: the step fails, every rank resets, nothing has
// leaked, and the next step gives the bits of a run that nothing disturbed.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/param/group_part.hpp"
#include "tests/promises/traps.hpp"

namespace tessera::testing {

// What one rank says of one trial.
struct Heard {
  bool failed = false, is_typed = false, is_whole = false, has_updated = false, is_same = false;
  std::string what, cause;
  std::int64_t leaked_bytes = 0, steps = 0;
};

// One rank's model in training, and its trials. Collective throughout.
class Subject {
 public:
  // `step(k)` is a whole step, and returns this rank's loss; `first` is an optimizer with state.
  // `most_kept_bytes`: what else of a failed step may be there until the next one.
  Subject(World& world, nn::Module& model, optim::Optimizer& optimizer, Trapper& trapper,
          std::function<Tensor(int)> step, std::int64_t most_kept_bytes = 0)
      : world_(world),
        model_(model),
        optimizer_(optimizer),
        trapper_(trapper),
        step_(std::move(step)),
        most_kept_bytes_(most_kept_bytes) {
    one_step(0);
    states_.push_back(state());
    for (const int k : {1, 2}) {
      losses_.push_back(one_step(k));
      states_.push_back(state());
    }
    restore(states_[0]);
  }

  // The places of step 1.
  std::uint64_t count(Trap trap, bool only_collectives = false) {
    trapper_.arm(Trap::none, 0, only_collectives);
    one_step(1);
    trapper_.disarm();
    restore(states_[0]);
    return trapper_.count(trap);
  }

  // Step 1 with a trap on this rank where `is_mine`; then a reset, and the step after it.
  Heard try_at(Trap trap, std::uint64_t place, bool is_mine, bool only_collectives = false) {
    Heard heard;
    optimizer_.zero_grad();
    // Without the slots of units that were left open, which a reset closes.
    const std::int64_t live_bytes = ledger().live_bytes() - ledger().live_bytes("gather slots") -
                                    ledger().live_bytes("gradient slots");
    trapper_.arm(Trap::none, 0, only_collectives);
    try {
      world_.barrier();  // over messages a rank may hear in here of one that is through already
      trapper_.arm(is_mine ? trap : Trap::none, place, only_collectives);
      one_step(1);
      world_.device().synchronize();  // the last bodies have met the trap, too
      trapper_.disarm();
      // A rank that has failed since its last collective is heard of here: where it could not throw
      // there, the first call throws on that rank, the second on its peers.
      world_.barrier();
      world_.barrier();
    } catch (const std::exception& error) {
      trapper_.disarm();
      heard.failed = true;
      heard.what = error.what();
      heard.is_typed = dynamic_cast<const Error*>(&error) || dynamic_cast<const Sprung*>(&error);
      const ShardReset reset = tessera::reset(model_);
      heard.cause = reset.cause;
      heard.is_whole = reset.parameters_are_consistent;
    }
    heard.has_updated = trapper_.has_updated();
    const std::int64_t more_bytes = ledger().live_bytes() - live_bytes;
    if (more_bytes < 0 || more_bytes > most_kept_bytes_) heard.leaked_bytes = more_bytes;
    if (heard.failed && !heard.is_whole) restore(states_[0]);
    heard.steps = optimizer_.steps();
    if (heard.failed) heard.is_same = next_is_same();
    restore(states_[0]);
    return heard;
  }

 private:
  struct State {
    std::vector<std::vector<float>> arrays;  // values and moments of each group
    std::int64_t steps = 0;

    bool operator==(const State& other) const {
      if (arrays.size() != other.arrays.size() || steps != other.steps) return false;
      for (std::size_t i = 0; i < arrays.size(); ++i)
        if (!same_bits(arrays[i], other.arrays[i])) return false;
      return true;
    }
  };

  Ledger& ledger() const { return Memory::of(world_.device()).ledger(); }

  double one_step(int k) { return world_.sum(step_(k).item()); }

  // From the parameters that the reset has kept: those before step 1 or after it.
  bool next_is_same() {
    const auto done = static_cast<std::size_t>(optimizer_.steps() - states_[0].steps);
    if (done > 1 || !(state() == states_[done])) return false;
    const double loss = one_step(static_cast<int>(done) + 1);
    return loss == losses_[done] && state() == states_[done + 1];
  }

  std::vector<Tensor> arrays() const {
    std::vector<Tensor> all;
    for (const auto& state : optimizer_.states()) {
      all.push_back(state.group->values);
      all.insert(all.end(), state.moments.begin(), state.moments.end());
    }
    return all;
  }
  State state() const {
    State state{{}, optimizer_.steps()};
    for (const Tensor& array : arrays())
      state.arrays.push_back(raw::cast(array, f32).to_vector<float>());
    return state;
  }
  void restore(const State& state) {
    std::size_t i = 0;
    for (const Tensor& array : arrays()) {
      const std::vector<float>& values = state.arrays[i++];
      if (!values.empty())
        raw::copy_into(array, Tensor::from(values, array.shape(), world_.device()));
    }
    for (const auto& s : optimizer_.states()) s.group->mark_updated();
    optimizer_.set_steps(state.steps);
    world_.device().synchronize();
  }

  World& world_;
  nn::Module& model_;
  optim::Optimizer& optimizer_;
  Trapper& trapper_;
  std::function<Tensor(int)> step_;
  std::int64_t most_kept_bytes_;
  std::vector<State> states_;  // before steps 1 and 2, and after
  std::vector<double> losses_;
};

// What is wrong with a trial as `rank` has heard it; empty for nothing. `trapped` is the rank with
// the trap, -1 for all; `any_updated`: on some rank an update has begun.
inline std::string complaint(const Heard& h, int rank, int trapped, const char* cause,
                             bool any_updated) {
  const auto says = [&](const auto&... parts) { return concat("rank ", rank, ' ', parts...); };
  const auto names = [&](const std::string& text) {
    return text.find(cause) != std::string::npos &&
           (trapped < 0 || text.find(concat("rank ", trapped)) != std::string::npos);
  };
  if (!h.failed) return says("has not failed");
  if (!h.is_typed) return says("got an exception of no type of ours: ", h.what);
  if (h.what.find(cause) == std::string::npos) return says("does not hear the cause: ", h.what);
  if (trapped >= 0 && rank != trapped && !names(h.what))
    return says("does not hear who has failed: ", h.what);
  if (!names(h.cause)) return says("has another cause: ", h.cause);
  if (h.leaked_bytes != 0) return says("has ", h.leaked_bytes, " bytes more than before");
  if (!h.is_whole && !any_updated) return says("has no whole parameters, but nothing wrote them");
  if (!h.is_same) return says("has other bits after the reset");
  return "";
}
// As all ranks have.
inline std::string complaint(const std::vector<Heard>& ranks, int trapped, const char* cause) {
  const bool any_updated =
      std::any_of(ranks.begin(), ranks.end(), [](const Heard& h) { return h.has_updated; });
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const Heard& h = ranks[r];
    if (const auto text = complaint(h, static_cast<int>(r), trapped, cause, any_updated);
        !text.empty())
      return text;
    if (h.cause != ranks[0].cause || h.is_whole != ranks[0].is_whole || h.steps != ranks[0].steps)
      return concat("ranks 0 and ", r, " do not agree: ", h.cause, " and ", ranks[0].cause);
  }
  return "";
}
inline const char* cause_of(Trap trap) {
  return trap == Trap::allocation ? "allocate: no " : "a trap has sprung";
}

// All places of `trap` in a step, with a trap on each rank in turn and then on all.
struct Trials {
  int ranks = 1;
  WorldOptions options{.threads = 1};
  Trap trap = Trap::launch;
  bool only_collectives = false;
  std::uint64_t stride = testing::stride();
};
// Calls its last argument with a model in training.
using WithSubject = std::function<void(World&, Trapper&, const std::function<void(Subject&)>&)>;

// Returns how many places were tried.
inline std::uint64_t try_all(const Trials& trials, const WithSubject& with_subject) {
  struct Trial {
    int trapped;
    std::uint64_t place;
  };
  std::vector<std::vector<Heard>> heard(static_cast<std::size_t>(trials.ranks));
  std::vector<Trial> done;
  run_checked(trials.ranks, trials.options, [&](World& world) {
    Trapper& trapper = Trapper::on(world);
    with_subject(world, trapper, [&](Subject& subject) {
      const std::uint64_t places = subject.count(trials.trap, trials.only_collectives);
      // Ranks differ by a few where shards are empty.
      const auto last = static_cast<std::uint64_t>(-world.max(-static_cast<double>(places)));
      for (std::uint64_t k = first_place(last); k <= last; k += trials.stride) {
        const int n = trials.ranks;
        const int turn = static_cast<int>(k / trials.stride % static_cast<std::uint64_t>(n));
        for (const int trapped : {turn, -1}) {
          if (n == 1 && trapped < 0) continue;
          const bool is_mine = trapped < 0 || trapped == world.rank();
          heard[static_cast<std::size_t>(world.rank())].push_back(
              subject.try_at(trials.trap, k, is_mine, trials.only_collectives));
          if (world.rank() == 0) done.push_back({trapped, k});
        }
      }
    });
  });
  std::uint64_t whole = 0;
  for (std::size_t t = 0; t < done.size(); ++t) {
    std::vector<Heard> ranks;
    for (const auto& of_rank : heard) ranks.push_back(of_rank[t]);
    whole += ranks[0].is_whole;
    INFO(trials.ranks << " ranks on " << name(trials.options.executor) << ", " << name(trials.trap)
                      << ' ' << done[t].place << ", trap on rank " << done[t].trapped
                      << " (-1: all)");
    CHECK(complaint(ranks, done[t].trapped, cause_of(trials.trap)) == "");
  }
  INFO(trials.ranks << " ranks on " << name(trials.options.executor) << ", " << name(trials.trap)
                    << ": " << done.size() << " trials");
  // A share, and places as few as a rank's alone, may be of an update alone.
  CHECK((whole > 0 || stride() > 1 || done.size() < 4));
  return done.size();
}

// The same with a tiny Llama.
inline std::uint64_t try_all(const Trials& trials, const Cell& cell) {
  return try_all(trials,
                 [&](World& world, Trapper& trapper, const std::function<void(Subject&)>& f) {
                   Trainee trainee(world, cell, 5);
                   Subject subject(world, trainee.model(), trainee.optimizer(), trapper,
                                   [&](int k) { return trainee.step(k).loss; });
                   f(subject);
                 });
}

}  // namespace tessera::testing
