#include "kernels/reduce.hpp"

#include <cmath>
#include <limits>

#include "kernels/host/convert.hpp"
#include "kernels/host/cpu.hpp"
#include "kernels/host/loops.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/rows.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

// Columns of a task when the reduced dimension is not the last.
constexpr std::int64_t kColumns = 64;
constexpr std::int64_t kRowBlock = 32;  // rows that are added one after the other

// Integers and boolean add up in i64.
template <class T>
using Accumulator = std::conditional_t<std::is_integral_v<T>, std::int64_t, Compute<T>>;

template <class A, class T>
inline A term(T x, bool squared) {
  const A value = static_cast<A>(x);
  return squared ? value * value : value;
}

// acc[c] = sum of n rows, by halves down to kRowBlock rows.
template <class T>
void sum_columns(Accumulator<T>* acc, const T* in, std::int64_t n, std::int64_t stride,
                 std::int64_t cols, bool squared) {
  using A = Accumulator<T>;
  if (n > kRowBlock) {
    A rest[kColumns];
    const std::int64_t half = n / 2;
    sum_columns(acc, in, half, stride, cols, squared);
    sum_columns(rest, in + half * stride, n - half, stride, cols, squared);
    for (std::int64_t c = 0; c < cols; ++c) acc[c] += rest[c];
    return;
  }
  for (std::int64_t c = 0; c < cols; ++c) acc[c] = 0;
  for (std::int64_t j = 0; j < n; ++j, in += stride) {
    if constexpr (std::is_floating_point_v<A>) {
      map(acc, cols, [squared](Vec<A> a, Vec<A> x) { return a + (squared ? x * x : x); }, acc, in);
    } else {
      for (std::int64_t c = 0; c < cols; ++c) acc[c] += term<A>(in[c], squared);
    }
  }
}

template <class T>
Accumulator<T> sum_row(const T* in, std::int64_t n, bool squared) {
  if constexpr (std::is_floating_point_v<Accumulator<T>>) {
    return squared ? dot_of(in, in, n) : sum_of(in, n);
  } else {
    std::int64_t total = 0;
    for (std::int64_t j = 0; j < n; ++j) total += term<std::int64_t>(in[j], squared);
    return total;
  }
}

template <class T>
void sums(const ReduceArgs& a, Exec& exec) {
  using A = Accumulator<T>;
  const bool squared = a.op == ReduceOp::sumsq;
  const Converter narrow = converter(a.out_dtype, dtype_of<A>()),
                  widen = converter(dtype_of<A>(), a.out_dtype);
  const std::int64_t size = static_cast<std::int64_t>(size_bytes(a.out_dtype));
  const auto finish = [&](std::int64_t at, A* values, std::int64_t count) {
    if (a.op == ReduceOp::mean)
      for (std::int64_t i = 0; i < count; ++i)
        values[i] = static_cast<A>(values[i] / static_cast<A>(a.n));
    if constexpr (std::is_floating_point_v<A>) {
      A held[kColumns] = {};
      if (a.accumulate) widen(held, static_cast<std::byte*>(a.out) + at * size, count);
      for (std::int64_t i = 0; i < count; ++i)
        values[i] = static_cast<A>(a.scale) * values[i] + held[i];
    }
    narrow(static_cast<std::byte*>(a.out) + at * size, values, count);
  };
  const T* in = static_cast<const T*>(a.in);
  if (a.inner == 1) {
    for_ranges(exec, a.outer, row_grain(a.n), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t o = begin; o < end; ++o) {
        A total = sum_row(in + o * a.n, a.n, squared);
        finish(o, &total, 1);
      }
    });
    return;
  }
  const std::int64_t chunks = (a.inner + kColumns - 1) / kColumns;
  for_ranges(exec, a.outer * chunks, row_grain(a.n * kColumns),
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t task = begin; task < end; ++task) {
                 const std::int64_t o = task / chunks, first = task % chunks * kColumns;
                 const std::int64_t cols = std::min(kColumns, a.inner - first);
                 A acc[kColumns];
                 const T* const from = a.n > 0 ? in + o * a.n * a.inner + first : in;  // or null
                 sum_columns(acc, from, a.n, a.inner, cols, squared);
                 finish(o * a.inner + first, acc, cols);
               }
             });
}

// Index of the best element of a strided row; the first NaN beats everything.
template <class T>
std::int64_t best_of(const T* in, std::int64_t n, std::int64_t stride, bool largest) {
  using C = Compute<T>;
  std::int64_t best = 0;
  C value = static_cast<C>(in[0]);
  for (std::int64_t j = 1; j < n && value == value; ++j) {
    const C x = static_cast<C>(in[j * stride]);
    if (x != x || (largest ? x > value : x < value)) {
      best = j;
      value = x;
    }
  }
  return best;
}

template <class T>
T extreme(bool largest) {
  if constexpr (std::is_integral_v<T>) {
    return largest ? std::numeric_limits<T>::lowest() : std::numeric_limits<T>::max();
  } else {
    const Compute<T> infinity = std::numeric_limits<Compute<T>>::infinity();
    return T(largest ? -infinity : infinity);
  }
}

template <class T>
void choices(const ReduceArgs& a, Exec& exec) {
  const bool wants_index = a.op == ReduceOp::argmax || a.op == ReduceOp::argmin,
             largest = a.op == ReduceOp::argmax || a.op == ReduceOp::max;
  const T* in = static_cast<const T*>(a.in);
  for_ranges(exec, a.outer * a.inner, row_grain(4 * a.n),
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t i = begin; i < end; ++i) {
                 std::int64_t best = 0;
                 T value = extreme<T>(largest);
                 if (a.n > 0) {
                   const T* row = in + i / a.inner * a.n * a.inner + i % a.inner;
                   best = best_of(row, a.n, a.inner, largest);
                   value = row[best * a.inner];
                 }
                 if (wants_index)
                   static_cast<std::int64_t*>(a.out)[i] = best;
                 else
                   static_cast<T*>(a.out)[i] = value;
               }
             });
}

// Squares in f64, sixteen sums side by side.
double sumsq(const float* in, std::int64_t n) {
  double lanes[16] = {};
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j)
      lanes[j] += static_cast<double>(in[i + j]) * static_cast<double>(in[i + j]);
  for (int j = 0; i + j < n; ++j)
    lanes[j] += static_cast<double>(in[i + j]) * static_cast<double>(in[i + j]);
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

}  // namespace

void reduce(const ReduceArgs& a, Exec& exec) {
  if (a.outer == 0 || a.inner == 0) return;
  visit_computed(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.op == ReduceOp::sum || a.op == ReduceOp::mean || a.op == ReduceOp::sumsq)
      sums<T>(a, exec);
    else
      choices<T>(a, exec);
  });
}

void sumsq_flat(const SumsqFlatArgs& a, Exec& exec) {
  constexpr std::int64_t max_parts = 256;
  const bool is_wide = a.out_dtype == DType::f64;
  double sum = 0;
  if (a.accumulate)
    sum = is_wide ? *static_cast<double*>(a.out) : static_cast<double>(*static_cast<float*>(a.out));
  for (std::int32_t i = 0; i < a.arrays; ++i) {
    double parts[max_parts] = {};
    const std::int64_t grain =
        std::max<std::int64_t>(65536, (a.count[i] / max_parts / 16 + 1) * 16);
    for_ranges(exec, a.count[i], grain, [&](std::int64_t begin, std::int64_t end) {
      parts[begin / grain] = sumsq(a.in[i] + begin, end - begin);
    });
    double total = 0;
    for (const double part : parts) total += part;
    sum += total;
  }
  if (is_wide)
    *static_cast<double*>(a.out) = sum;
  else
    *static_cast<float*>(a.out) = static_cast<float>(sum);
}

}  // namespace tessera::kernels::cpu
