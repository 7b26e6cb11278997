// Muon on one rank: the iteration and whole steps against double precision, who orthogonalises
// what, and what it shares with the other optimizers. Over ranks: tests/shard/muon_test.
#include "tessera/optim/muon.hpp"

#include <algorithm>
#include <numeric>

#include "runtime/optim/matrix_owners.hpp"
#include "runtime/optim/newton_schulz.hpp"
#include "tessera/optim/adamw.hpp"
#include "tests/optim/helpers.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315, kHalfUlp = 0x1p-24;

struct Matrix64 {
  std::int64_t rows, columns;
  std::vector<double> at;

  double& operator()(std::int64_t i, std::int64_t j) {
    return at[static_cast<std::size_t>(i * columns + j)];
  }
  double operator()(std::int64_t i, std::int64_t j) const {
    return at[static_cast<std::size_t>(i * columns + j)];
  }
  double norm() const {
    return std::sqrt(std::inner_product(at.begin(), at.end(), at.begin(), 0.0));
  }
  Matrix64 transposed() const {
    Matrix64 t{columns, rows, at};
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) t(j, i) = (*this)(i, j);
    return t;
  }
};

Matrix64 product(const Matrix64& a, const Matrix64& b) {
  Matrix64 out{a.rows, b.columns,
               std::vector<double>(static_cast<std::size_t>(a.rows * b.columns))};
  for (std::int64_t i = 0; i < a.rows; ++i)
    for (std::int64_t j = 0; j < b.columns; ++j)
      for (std::int64_t k = 0; k < a.columns; ++k) out(i, j) += a(i, k) * b(k, j);
  return out;
}

// As the definition says, with A = X X^T whatever the shape.
Matrix64 orthogonalised64(Matrix64 x, int steps) {
  const double norm = std::max(x.norm(), 1e-7);
  for (double& v : x.at) v /= norm;
  for (int step = 0; step < steps; ++step) {
    const Matrix64 gram = product(x, x.transposed()), square = product(gram, gram);
    Matrix64 factor = gram;
    for (std::size_t i = 0; i < factor.at.size(); ++i)
      factor.at[i] = kB * gram.at[i] + kC * square.at[i];
    const Matrix64 moved = product(factor, x);
    for (std::size_t i = 0; i < x.at.size(); ++i) x.at[i] = kA * x.at[i] + moved.at[i];
  }
  return x;
}

// How far f32 may be from the exact result, in the Frobenius norm, where the input is off by
// `input` relative to its norm. k is the smaller dimension, l the larger, u = 2^-24.
//
// Singular values stay below 1.21: the polynomial is at most 1.2024 on [0, 1.21]. So |X| <= 1.21
// sqrt(k), |G| <= 1.4641 sqrt(k) and, as b g + c g^2 is within 2.81 of 0 there, |B| <= 2.81
// sqrt(k). A sum of n products is off by at most n u of the sum of magnitudes, of which the
// Frobenius norm is at most the product of the norms; numbers of the formula add 4 u at most.
//   G     (l + 1) u |X|^2, which moves B by (|b| + 2 |c| 1.4641) = 10.73 times as much
//   B     (k + 4) u (|c| |G|^2 + |b| |G|)
//   X     (k + 4) u (|B| |X| + a |X|), and 1.21 times what B is off by
// A step takes an error that is there by at most 4.3 further, the largest derivative of the
// polynomial on [0, 1.21]; it is also no less than its quotients between two singular values.
double allowed_error(std::int64_t rows, std::int64_t columns, int steps, double input = 0) {
  const auto k = static_cast<double>(std::min(rows, columns)),
             l = static_cast<double>(std::max(rows, columns));
  const double x = 1.21 * std::sqrt(k), gram = 1.4641 * std::sqrt(k), factor = 2.81 * std::sqrt(k);
  const double of_gram = (l + 1) * x * x;
  const double of_factor = 10.73 * of_gram + (k + 4) * (2.0315 * gram * gram + 4.775 * gram);
  const double of_step = ((k + 4) * (factor * x + kA * x) + 1.21 * of_factor) * kHalfUlp;
  double error = input + 3 * kHalfUlp;  // the norm, as f32, and the quotient
  for (int step = 0; step < steps; ++step) error = 4.3 * error + of_step;
  return error;
}

Matrix64 widened(const Values& values, std::int64_t rows, std::int64_t columns) {
  return {rows, columns, {values.begin(), values.end()}};
}

double distance(const Values& got, const std::vector<double>& expected) {
  double squares = 0;
  for (std::size_t i = 0; i < got.size(); ++i)
    squares += std::pow(static_cast<double>(got[i]) - expected[i], 2);
  return std::sqrt(squares);
}

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

TEST_CASE("the iteration of Newton and Schulz is that of double precision, to rounding",
          "[optim]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Device device = Device::cpu();
  for (const int steps : {1, 2, 5})
    for (const auto& [rows, columns] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {4, 6}, {6, 4}, {3, 3}, {1, 9}, {9, 1}, {2, 40}}) {
      INFO(steps << " steps of " << rows << " x " << columns);
      const Values x = draw.values(rows * columns, 0.1f, 3);
      const optim::NewtonSchulz how{.coefficients = {kA, kB, kC}, .steps = steps, .eps = 1e-7};
      const Tensor got = optim::orthogonalised(Tensor::from(x, {rows, columns}, device), how);
      const Matrix64 expected = orthogonalised64(widened(x, rows, columns), steps);
      CHECK(distance(got.to_vector<float>(), expected.at) <= allowed_error(rows, columns, steps));
    }
}

TEST_CASE("what is orthogonalised may be huge, tiny or 0", "[optim]") {
  const Device device = Device::cpu();
  const optim::NewtonSchulz how{.coefficients = {kA, kB, kC}, .steps = 5, .eps = 1e-7};
  const Values ones{1, 2, 3, -1, 1, 2};
  const auto of = [&](float scale) {
    Values x = ones;
    for (float& v : x) v *= scale;
    return optim::orthogonalised(Tensor::from(x, {2, 3}, device), how).to_vector<float>();
  };
  // A power of two changes no bit of the norm or the quotient. No square of 3 * 2^100 is an f32.
  CHECK(of(0x1p100f) == of(1));
  CHECK(of(0x1p-20f) == of(1));  // a norm of 4e-6
  CHECK(of(0) == Values(6, 0));
  // Below eps it is a sixth and less of a unit matrix: not blown up to one.
  for (const float v : of(0x1p-60f)) CHECK(std::abs(v) < 1e-6f);
}

TEST_CASE("in bf16 the iteration rounds to bf16, and sums in f32", "[optim]") {
  const Device device = Device::cpu();
  const optim::NewtonSchulz how{
      .coefficients = {kA, kB, kC}, .steps = 5, .eps = 1e-7, .dtype = bf16};
  // 4 on the diagonal of 4 x 4: of norm 8, so that X is s I, and all is arithmetic on s.
  Values x(16, 0);
  for (std::size_t i = 0; i < 4; ++i) x[5 * i] = 4;
  const Tensor got = optim::orthogonalised(Tensor::from(x, {4, 4}, device), how);
  CHECK(got.dtype() == bf16);
  const auto rounded = [](float v) { return static_cast<float>(BFloat16(v)); };
  float s = 0.5f;
  for (int step = 0; step < 5; ++step) {
    const float gram = rounded(s * s);
    const float factor =
        rounded(std::fma(static_cast<float>(kB), gram, static_cast<float>(kC) * gram * gram));
    s = rounded(std::fma(static_cast<float>(kA), s, factor * s));
  }
  const Values found = raw::cast(got, f32).to_vector<float>();
  for (std::size_t i = 0; i < 16; ++i) CHECK(found[i] == (i % 5 == 0 ? s : 0));
}

TEST_CASE("matrices are dealt by work, and travel in turns of bounded size", "[optim]") {
  Draw draw;
  INFO("seed " << draw.seed);
  for (const int ranks : {1, 2, 3, 8}) {
    std::vector<optim::MatrixSize> sizes;
    for (int i = 0; i < 40; ++i)
      sizes.push_back({1 + static_cast<std::int64_t>(draw.engine() % 300),
                       1 + static_cast<std::int64_t>(draw.engine() % 300)});
    constexpr std::int64_t kMost = 1 << 19;
    const optim::MatrixPlan plan = optim::plan_matrices(sizes, ranks, kMost);
    std::vector<double> work(static_cast<std::size_t>(ranks));
    double most = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      work[static_cast<std::size_t>(plan.positions[i].owner)] +=
          optim::orthogonalisation_work(sizes[i]);
      most = std::max(most, optim::orthogonalisation_work(sizes[i]));
    }
    // Who got the last matrix had least before it.
    const auto [least, largest] = std::ranges::minmax(work);
    CHECK(largest - least <= most);
    CHECK(plan.order.size() == sizes.size());
    CHECK(optim::plan_matrices(sizes, ranks, kMost).order == plan.order);

    std::vector<std::vector<int>> in_turn(plan.widths.size(),
                                          std::vector<int>(static_cast<std::size_t>(ranks)));
    const auto chunk = [&](std::size_t i) {
      return round_up(ceil_div(sizes[i].rows, ranks) * sizes[i].columns, 64);
    };
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto& position = plan.positions[i];
      ++in_turn.at(position.turn)[static_cast<std::size_t>(position.owner)];
      CHECK(position.offset % 64 == 0);
      CHECK(position.offset + chunk(i) <= plan.widths[position.turn]);
      for (std::size_t j = 0; j < i; ++j) {
        const auto& other = plan.positions[j];
        if (other.owner != position.owner || other.turn != position.turn) continue;
        CHECK((other.offset + chunk(j) <= position.offset ||
               position.offset + chunk(i) <= other.offset));
      }
    }
    for (std::size_t t = 0; t < plan.widths.size(); ++t)
      if (plan.widths[t] * ranks * 4 > kMost)  // a matrix alone is more
        CHECK(std::ranges::max(in_turn[t]) >= 1);
    std::size_t counted = 0;
    for (int rank = 0; rank < ranks; ++rank)
      counted += optim::matrices_of(plan, sizes, rank).size();
    CHECK(counted == sizes.size());
  }
  // One that is larger than a turn has one of its own.
  const std::vector<optim::MatrixSize> large{{64, 64}, {64, 64}, {8, 8}};
  const optim::MatrixPlan plan = optim::plan_matrices(large, 1, 1);
  CHECK(plan.widths == std::vector<std::int64_t>{4096, 4096, 64});
}

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
  CHECK(f.optimizer->owner(f.bag.items[0]) == 0);
  f.bag.items[0].freeze();
  f.optimizer->prepare();
  CHECK(f.optimizer->owner(f.bag.items[0]) == -1);
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
  CHECK_THROWS_WITH(optim::Muon({}, others), Contains("no matrices given"));
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
  CHECK_THROWS_WITH(muon.owner(bag.items[1]), Contains("is none of its matrices"));
  muon.add_parameters({bag.items[3]});
  muon.add_matrices({bag.items[2], bag.items[0]});
  muon.prepare();
  CHECK(muon.moments(bag.items[2]).size() == 1);
  CHECK(muon.moments(bag.items[3]).size() == 2);
  CHECK(muon.owner(bag.items[2]) == 0);
}
