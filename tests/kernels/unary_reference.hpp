// What the rows of unary.def compute, in double precision and by other formulas: the values, and
// the slopes that are a kernel.
#pragma once

#include <cmath>
#include <limits>

#include "tests/kernels/bounded.hpp"

namespace kernel_test {

inline double unary_in_f64(UnaryOp op, double x) {
  const double infinity = std::numeric_limits<double>::infinity();
  switch (op) {
    case UnaryOp::neg:
      return -x;
    case UnaryOp::exp:
      return std::exp(x);
    case UnaryOp::log:
      return std::log(x);
    case UnaryOp::sqrt:
      return std::sqrt(x);
    case UnaryOp::rsqrt:
      return 1 / std::sqrt(x);
    case UnaryOp::tanh:
      return std::tanh(x);
    case UnaryOp::relu:
      return x < 0 ? 0 : x;
    case UnaryOp::gelu:
      return gelu_of(x);
    case UnaryOp::silu:
      return x * (1 / (1 + std::exp(-x)));
    case UnaryOp::abs:
      return std::abs(x);
    case UnaryOp::sigmoid:
      return 1 / (1 + std::exp(-x));
    case UnaryOp::sin:
      return std::sin(x);
    case UnaryOp::cos:
      return std::cos(x);
    case UnaryOp::erf:
      return std::erf(x);
    case UnaryOp::log1p:
      return std::log1p(x);
    case UnaryOp::expm1:
      return std::expm1(x);
    case UnaryOp::softplus:
      return x > 30 ? x + std::exp(-x) : std::log1p(std::exp(x));
    case UnaryOp::mish:
      return x * std::tanh(unary_in_f64(UnaryOp::softplus, x));
    case UnaryOp::gelu_exact:
      return x * (0.5 + 0.5 * std::erf(x * std::sqrt(0.5)));
    case UnaryOp::floor:
      return std::floor(x);
    case UnaryOp::round:
      return std::nearbyint(x);
    case UnaryOp::sign:
      return static_cast<double>((x > 0) - (x < 0));
    case UnaryOp::logical_not:
      return x == 0;
    case UnaryOp::isfinite:
      return std::abs(x) < infinity;
    case UnaryOp::copy:
      return x;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

// `g` times the slope at x, which for tanh and sigmoid is the result.
inline double slope_in_f64(BinaryOp op, double x, double g) {
  const double s = 1 / (1 + std::exp(-x));
  switch (op) {
    case BinaryOp::gelu_backward:
      return g * slope_of_gelu(x);
    case BinaryOp::silu_backward:
      return g * (s + x * s * (1 - s));
    case BinaryOp::relu_backward:
      return x > 0 ? g : 0;
    case BinaryOp::tanh_backward:
      return g * (1 - x * x);
    case BinaryOp::sigmoid_backward:
      return g * (x * (1 - x));
    case BinaryOp::mish_backward: {
      const double soft = unary_in_f64(UnaryOp::softplus, x), cosh = std::cosh(soft);
      return g * (std::tanh(soft) + x * s / (cosh * cosh));
    }
    case BinaryOp::gelu_exact_backward:
      return g * (0.5 + 0.5 * std::erf(x * std::sqrt(0.5)) +
                  x * std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI));
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

}  // namespace kernel_test
