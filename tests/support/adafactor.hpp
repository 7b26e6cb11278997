// Adafactor, written outside of the library from its public headers: an optimizer whose state has
// other shapes than its parameters.
//
//   of a matrix  row [n, 1] = lerp(row, mean of g^2 over columns, 1 - beta2)   cut as the rows are
//                col [1, m] = lerp(col, mean of g^2 over rows, 1 - beta2)      whole on every rank
//                v = row col / max(mean of row, eps1)
//   of others    v = lerp(v, g^2, 1 - beta2)
//   update       u = g / sqrt(max(v, eps1^2)),  u = u / max(1, rms(u) / d)
//                p = p (1 - lr weight_decay) - min(lr, 1 / sqrt(t)) max(eps2, rms(p)) u
//   1 - beta2    t^beta2_decay
//
// Source: Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost", 2018,
// as torch.optim.Adafactor of PyTorch 2.9 has it.
//
// What is a mean or a norm over all of a parameter is a sum over the ranks that shard it, so that a
// step is collective. Shards lie where the mesh communicates: Offload::none.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "tessera/comm/mesh.hpp"
#include "tessera/distributed/collectives.hpp"
#include "tessera/optim/optimizer.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::testing {

struct AdafactorOptions {
  double lr = 1e-2, beta2_decay = -0.8;
  double eps1 = 0x1p-23, eps2 = 1e-3;  // the first is the spacing of f32 at 1
  double d = 1, weight_decay = 0;
};

class Adafactor final : public optim::Optimizer {
 public:
  Adafactor(const std::vector<Parameter>& parameters, const AdafactorOptions& options = {})
      : Optimizer(parameters, options.lr, options.weight_decay, {.scalar_bytes = sizeof(Scalars)}),
        options_(options) {}

 private:
  struct Scalars {
    float rate, one_minus_beta2, lr;
  };
  void write_scalars(const Tensor& scalars, std::int64_t step) const override {
    const auto t = static_cast<double>(step);
    put_scalars(scalars, Scalars{static_cast<float>(std::min(lr(), 1 / std::sqrt(t))),
                                 static_cast<float>(std::pow(t, options_.beta2_decay)),
                                 static_cast<float>(lr())});
  }
  void update(const GroupState&, const Tensor&) const override {}  // all is done together

  std::vector<optim::StateShape> states_of(const Parameter& of) const override {
    const Shape& shape = of.shape();
    const int n = shape.ndim();
    if (n < 2) return {{"variance", shape}};
    const auto without = [&](std::string name, int d) {
      return optim::StateShape{
          std::move(name), shape.with(d, 1),
          d == of.spec().dim ? optim::StateShape::Cut::whole : optim::StateShape::Cut::rows};
    };
    return {without("row", n - 1), without("col", n - 2)};
  }

  void update_together(const Tensor& scalars) override {
    for (const Own& one : own())
      if (const auto u = begin_update(one)) update_one(one, *u, scalars);
  }

  void update_one(const Own& one, const Update& u, const Tensor& scalars) {
    using raw::Binary, raw::Reduction;
    const Parameter& p = one.parameter;
    const int n = p.shape().ndim(), cut = p.spec().dim;
    const bool is_sharded = p.spec().world > 1;
    const auto scalar = [&](std::int64_t i) { return scalars.view({}, {}, i); };
    const auto over_ranks = [&](const Tensor& term) {
      return is_sharded ? dist::all_reduce(term, p.mesh()->shard_group()) : term;
    };
    const auto mean_over = [&](int d, const Tensor& x) {  // [..., 1, ...] of the global size
      const Tensor sum = raw::reduce(Reduction::sum, x, {d}, raw::KeepDim::yes);
      return raw::mul(d == cut ? over_ranks(sum) : sum, 1 / static_cast<double>(p.shape()[d]));
    };
    const auto rms = [&](const Tensor& x) {
      const Tensor squares = over_ranks(raw::reduce_all(Reduction::sumsq, x));
      return raw::sqrt(raw::mul(squares, 1 / static_cast<double>(p.shape().numel())));
    };
    const auto at_least = [](const Tensor& x, double low) {
      return raw::binary(Binary::max, x, low);
    };
    const Tensor has_gradient = raw::binary(Binary::gt, u.arrivals, 0);
    const auto set = [&](const Tensor& to, const Tensor& value) {
      raw::copy_into(to, raw::where(has_gradient, value, to));
    };
    const auto mixed = [&](const char* name, const Tensor& now) {
      const Tensor kept = state(p, name);
      const Tensor step = raw::mul(raw::binary(Binary::sub, now, kept), scalar(1));
      set(kept, raw::add(kept, step));
      return kept;
    };

    const Tensor squares = raw::mul(u.gradient, u.gradient);
    Tensor v;
    if (n < 2) {
      v = mixed("variance", squares);
    } else {
      const Tensor row = mixed("row", mean_over(n - 1, squares));
      const Tensor col = mixed("col", mean_over(n - 2, squares));
      v = raw::binary(Binary::div, raw::mul(row, col),
                      at_least(mean_over(n - 2, row), options_.eps1));
    }
    const Tensor step =
        raw::mul(raw::rsqrt(at_least(v, options_.eps1 * options_.eps1)), u.gradient);
    const Tensor clipped = at_least(raw::mul(rms(step), 1 / options_.d), 1);
    const Tensor rate = raw::mul(raw::mul(at_least(rms(u.values), options_.eps2), scalar(0)),
                                 static_cast<double>(one.lr_factor));
    const Tensor decay = raw::mul(scalar(2), static_cast<double>(one.lr_factor) * one.weight_decay);
    const Tensor kept = raw::binary(Binary::sub, u.values, raw::mul(u.values, decay));
    set(u.values,
        raw::binary(Binary::sub, kept, raw::mul(step, raw::binary(Binary::div, rate, clipped))));
  }

  AdafactorOptions options_;  // but lr, which changes
};

}  // namespace tessera::testing
