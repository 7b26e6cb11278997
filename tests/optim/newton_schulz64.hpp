// Muon's iteration in double precision, and how far one in f32 may be from it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tests/optim/helpers.hpp"

namespace tessera::testing {

inline constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315, kHalfUlp = 0x1p-24;

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

inline Matrix64 product(const Matrix64& a, const Matrix64& b) {
  Matrix64 out{a.rows, b.columns,
               std::vector<double>(static_cast<std::size_t>(a.rows * b.columns))};
  for (std::int64_t i = 0; i < a.rows; ++i)
    for (std::int64_t j = 0; j < b.columns; ++j)
      for (std::int64_t k = 0; k < a.columns; ++k) out(i, j) += a(i, k) * b(k, j);
  return out;
}

// As the definition says, with A = X X^T whatever the shape.
inline Matrix64 orthogonalised64(Matrix64 x, int steps) {
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
inline double allowed_error(std::int64_t rows, std::int64_t columns, int steps, double input = 0) {
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

inline Matrix64 widened(const Values& values, std::int64_t rows, std::int64_t columns) {
  return {rows, columns, {values.begin(), values.end()}};
}

inline double distance(const Values& got, const std::vector<double>& expected) {
  double squares = 0;
  for (std::size_t i = 0; i < got.size(); ++i)
    squares += std::pow(static_cast<double>(got[i]) - expected[i], 2);
  return std::sqrt(squares);
}

}  // namespace tessera::testing
