#include "tessera/autograd/gradcheck.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace tessera {
namespace {

using Function = std::function<Tensor(const std::vector<Tensor>&)>;

// Large and random enough that no two elements cancel: in [0.5, 1.5) with alternating sign.
Tensor projection(const Tensor& y, std::uint64_t seed) {
  std::vector<double> p =
      Tensor::uniform(y.shape(), 0.5, 1.5, seed, f64, y.device()).to_vector<double>();
  for (std::size_t i = 1; i < p.size(); i += 2) p[i] = -p[i];
  return Tensor::from(p, y.shape(), y.device());
}

Shape position(std::int64_t element, const Shape& shape) {
  Shape at = shape;
  for (int d = shape.ndim() - 1; d >= 0; --d) {
    at[d] = element % shape[d];
    element /= shape[d];
  }
  return at;
}

// The inputs as leaves, with values that can be moved one at a time.
struct Leaves {
  std::vector<Tensor> tensors;
  std::vector<std::vector<double>> values;  // empty for inputs that are handed on

  explicit Leaves(const std::vector<Tensor>& inputs) : tensors(inputs), values(inputs.size()) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].dtype() != f64) continue;
      values[i] = inputs[i].to_vector<double>();
      tensors[i] = Tensor::from(values[i], inputs[i].shape(), inputs[i].device()).require_grad();
    }
  }
  // f of the inputs with one element replaced, without history.
  std::vector<double> evaluate(const Function& f, std::size_t input, std::size_t element,
                               double value) const {
    const NoGradGuard no_history;
    std::vector<Tensor> moved = tensors;
    std::vector<double> v = values[input];
    v[element] = value;
    moved[input] = Tensor::from(v, tensors[input].shape(), tensors[input].device());
    return f(moved).to_vector<double>();
  }
};

std::vector<double> gradient_of(const Tensor& leaf) {
  if (const Tensor g = leaf.grad(); g.defined()) return g.to_vector<double>();
  return std::vector<double>(static_cast<std::size_t>(leaf.numel()));  // none is zero
}

void expect_same(const std::vector<double>& a, const std::vector<double>& b) {
  TESSERA_EXPECT(
      a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 8) == 0),
      "gradcheck: the function gives other values when it is called again; fix its random draws");
}

}  // namespace

GradcheckReport gradcheck(const Function& f, const std::vector<Tensor>& inputs,
                          const GradcheckOptions& options) {
  const double eps = std::numeric_limits<double>::epsilon();
  Leaves leaves(inputs);
  const Tensor y = f(leaves.tensors);
  TESSERA_EXPECT(y.dtype() == f64, "gradcheck: the function gives ", y.dtype(),
                 ", expected f64; differences of less precise values say nothing");
  const std::vector<double> at = y.to_vector<double>();
  const Tensor p = projection(y, options.seed);
  const std::vector<double> weights = p.to_vector<double>();
  double scale = 1;  // of the roundings in L
  for (std::size_t j = 0; j < at.size(); ++j) scale += std::abs(weights[j] * at[j]);
  const bool history = y.requires_grad() && y.history().node;
  const std::string name = history ? y.history().node->name : "a function without history";

  if (y.requires_grad()) y.backward(p);
  std::vector<std::vector<double>> once;
  for (const Tensor& leaf : leaves.tensors)
    once.push_back(leaf.dtype() == f64 ? gradient_of(leaf) : std::vector<double>());
  for (std::size_t i = 0; i < once.size(); ++i)
    for (std::size_t e = 0; e < once[i].size(); ++e)
      if (const double moved = std::abs(once[i][e] * leaves.values[i][e]); std::isfinite(moved))
        scale += moved;
  const Tensor again = f(leaves.tensors);
  expect_same(at, again.to_vector<double>());
  if (again.requires_grad()) again.backward(p);

  GradcheckReport report;
  double worst = 1;  // error / allowed
  const auto compare = [&](std::size_t i, std::size_t element, double got, double expected,
                           const char* what) {
    const double allowed = 100 * std::pow(eps, 2.0 / 3) * (scale + std::abs(expected));
    const double error = std::abs(got - expected) / allowed;
    if (error <= worst) return;  // a NaN goes on
    worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
    report = {false, concat("gradcheck: '", name, "', input ", i, ", element ",
                            position(static_cast<std::int64_t>(element), leaves.tensors[i].shape()),
                            ": ", what, got, ", expected ", expected, " within ", allowed)};
  };
  // (L(x + h) - L(x - h)) / 2h
  const auto difference = [&](std::size_t i, std::size_t e, double h) {
    const double x = leaves.values[i][e];
    const std::vector<double> above = leaves.evaluate(f, i, e, x + h),
                              below = leaves.evaluate(f, i, e, x - h);
    long double sum = 0;
    for (std::size_t j = 0; j < weights.size(); ++j)
      sum += static_cast<long double>(weights[j]) *
             (static_cast<long double>(above[j]) - static_cast<long double>(below[j]));
    return static_cast<double>(sum / ((x + h) - (x - h)));
  };
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].dtype() != f64) continue;
    const std::vector<double> twice = gradient_of(leaves.tensors[i]);
    for (std::size_t e = 0; e < leaves.values[i].size(); ++e) {
      const double h = std::cbrt(eps) * std::max(1.0, std::abs(leaves.values[i][e]));
      const double near = difference(i, e, h), far = difference(i, e, 2 * h);
      const double numeric = near + (near - far) / 3;
      compare(i, e, once[i][e], numeric, "backward gives ");
      compare(i, e, twice[e] - once[i][e], once[i][e], "a second backward adds ");
    }
  }
  return report;
}

}  // namespace tessera
