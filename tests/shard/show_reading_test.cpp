// Reading changes nothing: state, plans, texts, gradients and norms are looked at between any two
// acts of a step, and the training that follows has the same bits and collectives.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/distributed/state.hpp"
#include "tessera/optim/clip.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Training {
  Training(const World& world, optim::Clip clip) : model({5, 6, 4}), how(clip) {
    make_positive(model);
    start(model, world, 11);
  }
  Stack model;
  optim::AdamW optimizer{model.parameters(), {.lr = 0.1}};
  optim::Clip how;
  Tensor loss;
};

using Act = std::function<void(Training&, const World&)>;

void go_forward(Training& t, const World& world) {
  t.loss = mean_square(t.model(positive_rows(3, world.rank() * 3, 3, 5, world.device())));
}
void go_back(Training& t, const World&) { std::exchange(t.loss, {}).backward(); }
void take_step(Training& t, const World&) { t.optimizer.step(); }
void drop(Training& t, const World&) { t.optimizer.zero_grad(); }
void turn(Training& t, bool is_trainable) {
  t.model.layers[0].weight.set_trainable(is_trainable);
  t.model.scale.set_trainable(is_trainable);
}

// Three steps; what is frozen is thawed before a step, and behind one.
const std::vector<Act> kActs = {
    go_forward,
    go_back,
    take_step,
    drop,
    [](Training& t, const World&) { turn(t, false); },
    [](Training& t, const World&) { turn(t, true); },
    go_forward,
    go_back,
    [](Training& t, const World&) {
      optim::clip_grad_norm(t.model.parameters(), 1e-3, optim::NormType::l2, t.how);
    },
    take_step,
    [](Training& t, const World&) { turn(t, false); },
    drop,
    go_forward,
    go_back,
    take_step,
    [](Training& t, const World&) { turn(t, true); },
    go_forward,
    go_back,
    take_step,
};

const std::vector<std::pair<const char*, Act>> kReaders = {
    {"state_dict",
     [](Training& t, const World&) {
       static_cast<void>(t.model.state_dict());
       static_cast<void>(t.model.state_dict({.form = StateForm::full}));
     }},
    {"state_dict of the optimizer",
     [](Training& t, const World&) {
       static_cast<void>(t.optimizer.state_dict(t.model));
       static_cast<void>(t.optimizer.state_dict(t.model, {.form = StateForm::full}));
     }},
    {"moments",
     [](Training& t, const World&) {
       for (const Parameter& p : t.model.parameters())
         for (const Tensor& moment : t.optimizer.moments(p))
           static_cast<void>(moment.to_vector<float>());
       static_cast<void>(t.optimizer.steps());
     }},
    {"plan", [](Training& t, const World&) { static_cast<void>(shard_plan(t.model).to_string()); }},
    {"text", [](Training& t, const World&) { static_cast<void>(t.model.to_string()); }},
    {"gradients",
     [](Training& t, const World&) {
       for (const Parameter& p : t.model.parameters())
         if (p.grad().defined()) static_cast<void>(p.distributed_grad().full().to_vector<float>());
     }},
    {"values", [](Training& t, const World&) { static_cast<void>(full_values(t.model)); }},
    {"norm",
     [](Training& t, const World&) {
       static_cast<void>(optim::clip_grad_norm(t.model.parameters(), 0));
     }},
};

}  // namespace

TEST_CASE("what is read between any two acts of a step changes nothing of what follows",
          "[threads]") {
  const optim::Clip how = GENERATE(optim::Clip::in_place, optim::Clip::in_optimizer);
  const int ranks = GENERATE(1, 2);
  struct Result {
    Values values, moments;
    std::uint64_t gathers = 0, reductions = 0;
    bool operator==(const Result& other) const {
      return same_bits(values, other.values) && same_bits(moments, other.moments) &&
             gathers == other.gathers && reductions == other.reductions;
    }
  };
  const auto train = [&](const Act* reader, std::size_t at) {
    return on_ranks(ranks, [&](World& world) {
      Training t(world, how);
      for (std::size_t i = 0; i < kActs.size(); ++i) {
        if (reader && (i == at || at == kActs.size())) (*reader)(t, world);
        kActs[i](t, world);
      }
      const ShardCounters counters = shard_counters(t.model);
      Result result{full_values(t.model), {}, counters.gathers, counters.reductions};
      for (const auto& [name, p] : t.model.named_parameters())
        for (const Tensor& moment : t.optimizer.moments(p))
          for (const float each : moment.to_vector<float>()) result.moments[name].push_back(each);
      return result;
    });
  };
  const auto expected = train(nullptr, 0);
  GridShare share;
  for (const auto& [name, reader] : kReaders)
    for (std::size_t at = 0; at <= kActs.size(); ++at) {  // the last: before each of them
      if (!share.takes()) continue;
      INFO(name << " before act " << at << ", " << ranks << " ranks");
      CHECK(train(&reader, at) == expected);
    }
}
