// Muon on one rank: whole steps against double precision, and what it shares with the other
// optimizers. Its parts: newton_schulz_test. Over ranks: tests/shard/optim_muon_test.
#include "tessera/optim/muon.hpp"

#include <algorithm>

#include "tessera/optim/adamw.hpp"
#include "tests/optim/newton_schulz64.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// Two matrices, one of them tall, and others: a vector, a scalar.
const std::vector<Shape> kMuonShapes{{4, 6}, {5}, {7, 3}, {}};

struct MuonFixture {
  explicit MuonFixture(const optim::MuonOptions& options = {}) {
    bag.materialize(device);
    for (const Parameter& p : bag.items) set(p, draw.values(p.shape().numel(), 0.1f, 1));
    optimizer.emplace(matrices(), others(), options);
  }
  std::vector<Parameter> matrices() const { return {bag.items[0], bag.items[2]}; }
  std::vector<Parameter> others() const { return {bag.items[1], bag.items[3]}; }
  std::map<std::size_t, Values> gradients(const std::vector<std::size_t>& of = {0, 1, 2, 3}) {
    std::map<std::size_t, Values> all;
    for (const std::size_t i : of) all[i] = draw.values(bag.items[i].shape().numel(), 0.2f, 1);
    return all;
  }
  void step(const std::map<std::size_t, Values>& given) {
    give_gradients(bag, given);
    optimizer->step();
    optimizer->zero_grad();
  }
  std::vector<Values> values() const {
    std::vector<Values> all;
    for (const Parameter& p : bag.items) all.push_back(get(p));
    return all;
  }
  Values momentum(std::size_t i) const {
    return optimizer->moments(bag.items[i])[0].to_vector<float>();
  }

  Draw draw;
  Device device = Device::cpu();
  Bag bag{kMuonShapes};
  std::optional<optim::Muon> optimizer;
};

}  // namespace

TEST_CASE("Muon follows its formula on matrices, and AdamW's on the others", "[optim]") {
  const bool nesterov = GENERATE(true, false);
  const int ns_steps = GENERATE(2, 5);
  const auto adjust = GENERATE(optim::MuonRate::original, optim::MuonRate::match_rms_adamw);
  const optim::MuonOptions options{.lr = 0.02,
                                   .momentum = 0.95,
                                   .nesterov = nesterov,
                                   .weight_decay = 0.1,
                                   .ns_steps = ns_steps,
                                   .adjust_lr = adjust,
                                   .others = {.lr_factor = 0.5, .weight_decay = 0.2}};
  MuonFixture f(options);
  INFO("seed " << f.draw.seed << ", nesterov " << nesterov << ", ns_steps " << ns_steps);
  Bag plain({{5}, {}});
  plain.materialize(f.device);
  set(plain.items[0], get(f.bag.items[1]));
  set(plain.items[1], get(f.bag.items[3]));
  optim::AdamW adamw(plain.parameters(), {.lr = 0.01, .weight_decay = 0.2});
  struct Reference {
    std::vector<double> p, m;
    double allowed = 0;
  };
  std::map<std::size_t, Reference> references;
  for (const std::size_t i : {0u, 2u}) {
    const Values start = get(f.bag.items[i]);
    references[i] = {{start.begin(), start.end()}, std::vector<double>(start.size())};
  }
  const double mu = static_cast<double>(0.95f);  // as the device has it; 1 - mu is exact there
  for (int t = 1; t <= 5; ++t) {
    const auto gradients = f.gradients();
    f.step(gradients);
    give_gradients(plain, {{0, gradients.at(1)}, {1, gradients.at(3)}});
    adamw.step();
    adamw.zero_grad();
    for (auto& [i, r] : references) {
      const Shape& shape = kMuonShapes[i];
      const Values& g = gradients.at(i);
      std::vector<double> d(g.size());
      double of_gradients = 0;
      for (std::size_t e = 0; e < g.size(); ++e) {
        r.m[e] = mu * r.m[e] + (1 - mu) * g[e];
        d[e] = nesterov ? mu * r.m[e] + (1 - mu) * g[e] : r.m[e];
        of_gradients = std::sqrt(static_cast<double>(g.size()));  // |g| is at most 1 each
      }
      const Matrix64 direction{shape[0], shape[1], d}, o = orthogonalised64(direction, ns_steps);
      const auto rows = static_cast<double>(shape[0]), columns = static_cast<double>(shape[1]);
      const double rate =
          0.02 * (adjust == optim::MuonRate::original ? std::sqrt(std::max(1.0, rows / columns))
                                                      : 0.2 * std::sqrt(std::max(rows, columns)));
      // m is a sum of gradients with weights that sum up to less than 1; each step rounds it twice,
      // a direction twice more: 2 t + 2 roundings of at most |gradients|.
      const double input = (2 * t + 2) * kHalfUlp * of_gradients / direction.norm();
      // p is below 2 and its root of squares below 2 sqrt(n): factor, product and difference round
      // it; rate and its product round 4 times what is below 1.21 an element.
      const double n = std::sqrt(rows * columns);
      r.allowed += rate * allowed_error(shape[0], shape[1], ns_steps, input) +
                   kHalfUlp * n * (3 * 2 + 4 * rate * 1.21);
      for (std::size_t e = 0; e < d.size(); ++e)
        r.p[e] = r.p[e] * (1 - 0.02 * 0.1) - rate * o.at[e];
    }
  }
  for (const auto& [i, r] : references) {
    INFO("parameter " << i << ", allowed " << r.allowed);
    CHECK(distance(get(f.bag.items[i]), r.p) <= r.allowed);
  }
  CHECK(get(f.bag.items[1]) == get(plain.items[0]));  // lr_factor 0.5 changes no bit
  CHECK(get(f.bag.items[3]) == get(plain.items[1]));
}

TEST_CASE("a matrix without a gradient stays, and so does its momentum", "[optim]") {
  MuonFixture f;
  INFO("seed " << f.draw.seed);
  f.step(f.gradients());
  const auto before = f.values();
  const Values momentum = f.momentum(2);
  f.step(f.gradients({0, 1}));
  CHECK(f.values()[2] == before[2]);
  CHECK(f.momentum(2) == momentum);
  CHECK(f.values()[0] != before[0]);
  const auto after = f.values();
  f.optimizer->step();  // no gradient at all
  CHECK(f.values() == after);
  CHECK(f.optimizer->steps() == 3);
}

TEST_CASE("a step of Muon whose condition does not hold changes nothing", "[optim]") {
  MuonFixture f;
  INFO("seed " << f.draw.seed);
  f.step(f.gradients());
  const auto before = f.values();
  const Values momentum = f.momentum(0);
  auto bad = f.gradients();
  bad.at(0)[0] = INFINITY;
  give_gradients(f.bag, bad);
  f.optimizer->step_if(Tensor::full({}, 0, boolean, f.device));
  f.optimizer->zero_grad();
  CHECK(f.values() == before);
  CHECK(f.momentum(0) == momentum);
  CHECK(f.optimizer->steps() == 1);
  give_gradients(f.bag, f.gradients());
  f.optimizer->step_if(Tensor::full({}, 1, boolean, f.device));
  CHECK(f.values()[0] != before[0]);
  CHECK(f.optimizer->steps() == 2);
}

TEST_CASE("a frozen matrix is left alone, and begins anew when it is thawed", "[optim]") {
  MuonFixture f;
  INFO("seed " << f.draw.seed);
  f.step(f.gradients());
  const Values kept = get(f.bag.items[0]), momentum = f.momentum(2);
  CHECK(f.optimizer->owner_rank(f.bag.items[0]) == 0);
  f.bag.items[0].freeze();
  f.optimizer->prepare();
  CHECK(f.optimizer->owner_rank(f.bag.items[0]) == -1);
  CHECK(f.optimizer->moments(f.bag.items[0]).empty());
  CHECK(f.momentum(2) == momentum);
  f.step(f.gradients({1, 2, 3}));
  CHECK(get(f.bag.items[0]) == kept);
  CHECK(f.momentum(2) != momentum);
  f.bag.items[0].set_trainable(true);
  f.bag.items[0].value();  // the group follows
  f.optimizer->prepare();
  CHECK(f.momentum(0) == Values(24, 0));
  f.step(f.gradients());
  CHECK(get(f.bag.items[0]) != kept);
}

TEST_CASE("matrices have one moment, others two, in one group and one dict", "[optim]") {
  MuonFixture f({.others = {.lr_factor = 0.25}});
  INFO("seed " << f.draw.seed);
  f.optimizer->prepare();
  // Multiples of 64 elements each: 24 and 21 once, 5 and 1 twice.
  CHECK(Memory::of(f.device).ledger().live_bytes("moments") == 4 * (2 * 64 + 2 * 2 * 64));
  f.step(f.gradients());
  const StateDict state = f.optimizer->state_dict(f.bag);
  std::vector<std::string> names;
  for (const auto& [name, entry] : state) names.push_back(name);
  CHECK(names == std::vector<std::string>{"0.lr_factor", "0.momentum_buffer", "0.weight_decay",
                                          "1.exp_avg", "1.exp_avg_sq", "1.lr_factor",
                                          "1.weight_decay", "2.lr_factor", "2.momentum_buffer",
                                          "2.weight_decay", "3.exp_avg", "3.exp_avg_sq",
                                          "3.lr_factor", "3.weight_decay", "lr", "steps"});
  CHECK(state.at("1.lr_factor").values.item() == 0.25);
  CHECK(state.at("0.lr_factor").values.item() == 1);
  MuonFixture other;
  for (std::size_t i = 0; i < kMuonShapes.size(); ++i) set(other.bag.items[i], get(f.bag.items[i]));
  other.optimizer->load(other.bag, state);
  const auto gradients = f.gradients();
  f.step(gradients);
  other.step(gradients);
  CHECK(other.values() == f.values());
  CHECK(other.momentum(0) == f.momentum(0));
}

TEST_CASE("rates of single matrices and one rate for all move what they should", "[optim]") {
  MuonFixture f({.lr = 0.5, .weight_decay = 0.5});
  INFO("seed " << f.draw.seed);
  f.optimizer->set_lr_factor({f.bag.items[0]}, 0);
  f.optimizer->set_weight_decay({f.bag.items[2]}, 0);
  auto before = f.values();
  auto gradients = f.gradients();
  std::ranges::fill(gradients.at(2), 0.0f);  // O(0) is 0
  f.step(gradients);
  CHECK(f.values()[0] == before[0]);
  CHECK(f.values()[2] == before[2]);
  CHECK(f.values()[1] != before[1]);
  before = f.values();
  f.optimizer->set_lr(0);
  f.step(f.gradients());
  CHECK(f.values() == before);
}

TEST_CASE("Muon refuses what it could only guess", "[optim]") {
  Bag bag(kMuonShapes);
  bag.materialize(Device::cpu());
  const std::vector<Parameter> matrices{bag.items[0], bag.items[2]},
      others{bag.items[1], bag.items[3]};
  CHECK_THROWS_WITH(optim::Muon({}, others), Contains("no matrices are given"));
  CHECK_THROWS_WITH(optim::Muon({bag.items[1]}, {}),
                    Contains("parameter '1' of [5] is no matrix; give it among the others"));
  CHECK_THROWS_WITH(optim::Muon({Parameter()}, {}), Contains("is no matrix"));
  CHECK_THROWS_WITH(optim::Muon(matrices, {bag.items[2]}),
                    Contains("parameter '2' is given as a hidden matrix and among the others"));
  const auto refused = [&](const optim::MuonOptions& options, const char* said) {
    CHECK_THROWS_WITH(optim::Muon(matrices, others, options), Contains(said));
  };
  refused({.lr = -1}, "lr is -1");
  refused({.momentum = 1}, "momentum is 1, expected 0 to below 1");
  refused({.weight_decay = NAN}, "weight_decay is nan");
  refused({.ns_coefficients = {1, INFINITY, 1}}, "ns_coefficients are 1, inf and 1");
  refused({.ns_eps = 0}, "ns_eps is 0");
  refused({.ns_steps = 0}, "ns_steps is 0, expected 1 to 99");
  refused({.ns_dtype = i32}, "ns_dtype is i32");
  refused({.others = {.lr_factor = -1}}, "lr_factor is -1");
  refused({.others = {.beta2 = 1}}, "Muon: others: lr");
  refused({.turn_bytes = 0}, "turn_bytes is 0");
  optim::Muon muon({bag.items[0]}, {bag.items[1]});
  CHECK_THROWS_WITH(muon.add_matrices({bag.items[1]}), Contains("is no matrix"));
  CHECK_THROWS_WITH(muon.owner_rank(bag.items[1]), Contains("is not one of its matrices"));
  muon.add_parameters({bag.items[3]});
  muon.add_matrices({bag.items[2], bag.items[0]});
  muon.prepare();
  CHECK(muon.moments(bag.items[2]).size() == 1);
  CHECK(muon.moments(bag.items[3]).size() == 2);
  CHECK(muon.owner_rank(bag.items[2]) == 0);
}
