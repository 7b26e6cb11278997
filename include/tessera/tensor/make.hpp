// Tensors from numbers, and random ones. Tensor itself makes more: empty, full, zeros, ones,
// arange, from, normal, uniform. Random values depend on (key, position) only, as all of the
// library's.
#pragma once

#include "tessera/tensor/tensor.hpp"

namespace tessera {

// arange: from, from + step, .. before `to`. linspace: `count` numbers from `first` to `last` at
// equal distances. Throws: ContractError if `step` does not lead from `from` to `to`; for fractions
// in an integer dtype; for numbers that the dtype, or f64, which counts, does not have.
Tensor arange(double from, double to, double step, DType dtype, const Device& device,
              Caller at = Caller::current());
Tensor linspace(double first, double last, std::int64_t count, DType dtype, const Device& device,
                Caller at = Caller::current());
// [rows, cols], 1 on the diagonal, 0 elsewhere; cols is rows unless given.
Tensor eye(std::int64_t rows, DType dtype, const Device& device, Caller at = Caller::current());
Tensor eye(std::int64_t rows, std::int64_t cols, DType dtype, const Device& device,
           Caller at = Caller::current());
// index [...] of i32 or i64 -> [..., classes], 1 at each index, 0 elsewhere. An index out of range
// gives zeros only.
Tensor one_hot(const Tensor& index, std::int64_t classes, DType dtype = i64,
               Caller at = Caller::current());

// Tensor::normal with mean 0 and deviation 1, f32. Different keys give different values, so put
// seed, step and rank into the key.
Tensor randn(const Shape& shape, std::uint64_t key, const Device& device,
             Caller at = Caller::current());
// Whole numbers in [low, high). Throws: ContractError for an empty range, for one of more than 2^48
// numbers, and for numbers that the dtype or f64 does not have.
Tensor randint(std::int64_t low, std::int64_t high, const Shape& shape, std::uint64_t key,
               DType dtype, const Device& device, Caller at = Caller::current());
// 1 with probability p, else 0. A tensor p has a probability for each element, and gives the dtype.
// Throws: ContractError for a p outside [0, 1]; a tensor's elements are not checked.
Tensor bernoulli(double p, const Shape& shape, std::uint64_t key, DType dtype, const Device& device,
                 Caller at = Caller::current());
Tensor bernoulli(const Tensor& p, std::uint64_t key, Caller at = Caller::current());
// 0, 1, .. n - 1 in random order: i64 [n].
Tensor randperm(std::int64_t n, std::uint64_t key, const Device& device,
                Caller at = Caller::current());
// Draws `count` positions of each row of weights [..., n] -> i64 [..., count]. The probability of a
// position is in proportion to its weight, which is not negative. Without replacement no position
// comes twice, so a row has at least `count` positive weights. Source: Efraimidis and Spirakis,
// "Weighted random sampling with a reservoir", 2006.
enum class Replacement { no, yes };
Tensor multinomial(const Tensor& weights, std::int64_t count, Replacement replacement,
                   std::uint64_t key, Caller at = Caller::current());

}  // namespace tessera
