// What the tests of sharding and of its promises share: ranks whose results come back to the test's
// thread, inputs, and whole values put together from shards. Models are in modules.hpp.
//
// Assertions belong outside of `on_ranks`: Catch's are not made for several threads.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "runtime/param/group_part.hpp"
#include "runtime/param/parameter_state.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/optim/sgd.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/reset.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tests/shard/modules.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/race_check.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/thrown.hpp"

namespace tessera::testing {

// What each rank's f(world) returned, in rank order. Under the race checker. Compiled once for what
// tests return, not for every function of theirs.
template <class R>
std::vector<R> results_of(int ranks, const WorldOptions& options,
                          const std::function<R(World&)>& f) {
  std::vector<std::optional<R>> found(
      static_cast<std::size_t>(ranks));  // no bits of a vector<bool>
  run_checked(ranks, options,
              [&](World& world) { found[static_cast<std::size_t>(world.rank())] = f(world); });
  std::vector<R> results;
  for (auto& result : found) results.push_back(std::move(*result));
  return results;
}
template <class F>
auto on_ranks(int ranks, const WorldOptions& options, const F& f) {
  return results_of<std::invoke_result_t<F, World&>>(ranks, options, f);
}
template <class F>
auto on_ranks(int ranks, const F& f) {
  return on_ranks(ranks, WorldOptions{.threads = 1}, f);
}

// --- values ---

using Values = std::map<std::string, std::vector<float>>;

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}
inline bool same_bits(const Values& a, const Values& b) {
  if (a.size() != b.size()) return false;
  for (auto i = a.begin(), j = b.begin(); i != a.end(); ++i, ++j)
    if (i->first != j->first || !same_bits(i->second, j->second)) return false;
  return true;
}

// The whole parameters, gathered, as f32. Collective.
inline Values full_values(nn::Module& module) {
  Values values;
  for_each_full_parameter(module, [&](const std::string& name, const Tensor& full) {
    values[name] = raw::cast(full, f32).to_vector<float>();
  });
  return values;
}

// This rank's rows of all gradients; parameters without one are absent.
inline Values shard_gradients(const nn::Module& module) {
  Values values;
  for (const auto& [name, p] : module.named_parameters())
    if (const Tensor g = p.grad(); g.defined()) values[name] = g.to_vector<float>();
  return values;
}
// The arrival count of each parameter, summed over the ranks; -1 where its unit has no gradient.
inline std::map<std::string, float> arrival_counts(const nn::Module& module) {
  std::map<std::string, float> counts;
  for (const auto& [name, p] : module.named_parameters()) {
    FlatGroup& group = *state_of(p)->group;
    const int i = group.entries[static_cast<std::size_t>(state_of(p)->entry)].trainable;
    counts[name] = i >= 0 && group.await_gradient().defined()
                       ? group.counts().to_vector<float>()[static_cast<std::size_t>(i)]
                       : -1.f;
  }
  return counts;
}
// Writes `value` over the first element of this rank's gradients, if it has any.
inline void spoil_gradient(const nn::Module& module, double value) {
  for (const Parameter& p : module.parameters()) {
    if (p.spec().owned().size() == 0) continue;
    FlatGroup& group = *state_of(p)->group;
    const FlatEntry& entry = group.entries[static_cast<std::size_t>(state_of(p)->entry)];
    return raw::fill(group.await_gradient().view({1}, {1}, entry.gradient_offset), value);
  }
}
// Rank after rank: the rows of dimension 0 in order.
inline Values assemble(const std::vector<Values>& shards) {
  Values whole;
  for (const Values& shard : shards)
    for (const auto& [name, rows] : shard)
      whole[name].insert(whole[name].end(), rows.begin(), rows.end());
  return whole;
}

// The mean over ranks of what each has alone; what some lack, or all but `whole`, counts as zeros.
inline Values mean_of(const std::vector<Values>& alone, const Values& whole) {
  const float part = 1.f / static_cast<float>(alone.size());
  Values mean;
  for (const Values& each : alone)
    for (const auto& [name, values] : each) {
      std::vector<float>& sum = mean[name];
      sum.resize(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) sum[i] += part * values[i];
    }
  for (const auto& [name, values] : whole) mean.try_emplace(name, values.size());
  return mean;
}

inline double largest(const std::vector<float>& values) {
  double most = 0;
  for (const float v : values) most = std::max(most, std::abs(static_cast<double>(v)));
  return most;
}
// The largest |a - b| of a parameter, relative to its largest |a|, over all parameters.
inline double distance(const Values& a, const Values& b) {
  double worst = a.size() == b.size() ? 0 : INFINITY;
  for (const auto& [name, x] : a) {
    const auto found = b.find(name);
    if (found == b.end() || found->second.size() != x.size()) return INFINITY;
    std::vector<float> difference(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) difference[i] = x[i] - found->second[i];
    const double scale = largest(x), off = largest(difference);
    if (!(off <= 1e30)) return INFINITY;
    worst = std::max(worst, off == 0 ? 0 : off / scale);
  }
  return worst;
}

// Rows [first, first + rows) of a table of normal values that depend on (seed, row, column) only.
inline Tensor rows_of(std::uint64_t seed, std::int64_t first, std::int64_t rows, std::int64_t width,
                      const Device& device, DType dtype = f32) {
  std::vector<float> values;
  for (std::int64_t r = first; r < first + rows; ++r) {
    std::mt19937_64 engine(seed * 1000003 + static_cast<std::uint64_t>(r));
    std::normal_distribution<float> normal;
    for (std::int64_t c = 0; c < width; ++c) values.push_back(normal(engine));
  }
  return raw::cast(Tensor::from(values, {rows, width}, device), dtype);
}

inline Tensor mean_square(const Tensor& y) { return mean(y * y); }

// A step that runs f in the middle of a call of the model, and again in its backward pass.
inline void run_within_step(Stack& model, const Tensor& x, const std::function<void()>& f) {
  const Tensor h = model.call([&] {
    f();
    const Tensor y = model.layers[0](x);
    return autograd::record("within", {y}, y.detach(),
                            [&](const Tensor& g, autograd::Gradients& out) {
                              f();
                              out.set(0, g);
                            });
  });
  mean_square(h).backward();
}

// --- gradients that are compared within rounding ---
//
// Parameters, inputs and outputs are positive, so no sum cancels and every result is within a
// number of roundings, u = 2^-24 each, of its exact value, whatever the seed.
//   Normal values of Philox's 32 bits stay within sqrt(2 ln 2^33) = 6.8 deviations, so parameters
// lie between 0.0009 and 0.04. With layers at most 7 wide and a bias, a tanh sees at most 8 * 0.04
// and is at most 0.31; its derivative 1 - y^2 takes 2 y^2 / (1 - y^2) < 0.25 of y's relative error.
//   The deepest model has 9 layers. A layer adds to an output's error at most 12 u, 8 of a product
// of 7 terms and a bias and 4 of tanh: 108 u in all. On the way back each adds 8 u of a product, 4
// u of 1 - y^2 and its product, and 0.25 of the error of its own output: 9 * 12 + 0.25 * 12 * 36 =
// 216 u. A gradient of a weight starts with the error of the loss's derivative, 112 u, takes in
// that of an activation, 108 u, sums at most 24 rows and then ranks, passes and uses, 40 u: fewer
// than 480 u in all, on either side of a comparison. Missing or doubled, one of 24 rows is off by
// 1e-3 and more.
constexpr double kRounding = 2 * 480 * 0x1p-24;

// As rows_of, between 0 and 1.
inline Tensor positive_rows(std::uint64_t seed, std::int64_t first, std::int64_t rows,
                            std::int64_t width, const Device& device, DType dtype = f32) {
  return raw::cast(raw::sigmoid(rows_of(seed, first, rows, width, device)), dtype);
}
// Of these the rows of a rank of which each has so many.
inline Tensor own_rows(const World& world, std::uint64_t seed, std::int64_t rows = 4,
                       std::int64_t width = 5) {
  return positive_rows(seed, world.rank() * rows, rows, width, world.device());
}

}  // namespace tessera::testing
