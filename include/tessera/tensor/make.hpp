// Tensors from numbers, and random ones. Those that Tensor makes itself: empty, full, zeros, ones,
// arange, from, normal, uniform. Random values depend on (key, position) only, as the library's do.
#pragma once

#include "tessera/tensor/tensor.hpp"

namespace tessera {

// from, from + step, .. before `to`; and `count` numbers from `first` to `last` at equal distances.
// Throws: ContractError for no step from `from` to `to`; of an integer dtype for fractions, and for
// numbers that it or f64, which counts, does not have.
Tensor arange(double from, double to, double step, DType dtype, const Device& device,
              Caller at = Caller::current());
Tensor linspace(double first, double last, std::int64_t count, DType dtype, const Device& device,
                Caller at = Caller::current());
// [rows, cols], 1 on the diagonal; cols is rows unless given.
Tensor eye(std::int64_t rows, DType dtype, const Device& device, Caller at = Caller::current());
Tensor eye(std::int64_t rows, std::int64_t cols, DType dtype, const Device& device,
           Caller at = Caller::current());
// index [...] -> [..., classes], 1 at each index; one out of range gives 0 everywhere.
Tensor one_hot(const Tensor& index, std::int64_t classes, DType dtype = i64,
               Caller at = Caller::current());

// Tensor::normal with mean 0 and deviation 1, f32. Keys that differ give other values: seed, step
// and rank belong in them.
Tensor randn(const Shape& shape, std::uint64_t key, const Device& device,
             Caller at = Caller::current());
// Whole numbers in [low, high).  Throws: ContractError for none, for more than 2^48, and for those
// that the dtype or f64 does not have.
Tensor randint(std::int64_t low, std::int64_t high, const Shape& shape, std::uint64_t key,
               DType dtype, const Device& device, Caller at = Caller::current());
// 1 with probability p, else 0; of a tensor for each of its elements, in its dtype.
Tensor bernoulli(double p, const Shape& shape, std::uint64_t key, DType dtype, const Device& device,
                 Caller at = Caller::current());
Tensor bernoulli(const Tensor& p, std::uint64_t key, Caller at = Caller::current());
// 0, 1, .. n - 1 in random order, i64.
Tensor randperm(std::int64_t n, std::uint64_t key, const Device& device,
                Caller at = Caller::current());
// `count` positions of each row of weights [..., n] -> i64 [..., count], each with a probability in
// proportion to its weight, which is not negative. Without replacement no position comes twice, so
// a row has at least `count` positive weights. Source: Efraimidis and Spirakis, "Weighted random
// sampling with a reservoir", 2006.
enum class Replacement { no, yes };
Tensor multinomial(const Tensor& weights, std::int64_t count, Replacement replacement,
                   std::uint64_t key, Caller at = Caller::current());

}  // namespace tessera
