// What the modules of random programs compute, of rows kWidth wide: few numbers, many uses of
// weights, and gradients of weights whose sums are exact. `programs` holds several ranks to the
// bits of one with them.
#pragma once

#include <cmath>
#include <type_traits>

#include "tessera/autograd/custom_op.hpp"
#include "tessera/autograd/ops.hpp"

namespace tessera::testing {

inline constexpr int kWidth = 3;

// A tensor, all are f32, of f(i, inputs...) for each element i: one launch for whatever f computes.
// Where ranks have so little to compute, what launches cost the host is what a program costs.
template <class F, class... X>
Tensor filled(const CustomOp& op, const Shape& shape, F f, const X&... inputs) {
  return op.run(
      shape, 1,
      [f, n = shape.numel()]<class T>(std::int64_t, T* to, const auto*... from) {
        if constexpr (std::is_same_v<T, float>)
          for (std::int64_t i = 0; i < n; ++i) to[i] = f(i, from...);
      },
      inputs...);
}

// tanh, rounded to a multiple of 2^-12: see Note [Exact sums].
inline float rounded(float v) { return std::tanh(v) + 3072 - 3072; }

// The sum of rounded(f(at)) over the elements `at` of column i in `rows` rows.
template <class F>
float column(std::int64_t i, std::int64_t rows, F f) {
  float sum = 0;
  for (std::int64_t r = 0; r < rows; ++r) sum += rounded(f(r * kWidth + i));
  return sum;
}

// What a module's statements end with: tanh(v + 1/8), so that nothing grows however often parts are
// called. Its derivative is made of it.
inline float bent(float v) { return std::tanh(v + 0.125f); }
inline float slope(float y) { return 1 - y * y; }
inline Tensor before_bent(const CustomOp& op, const Tensor& y, const Tensor& g) {
  const auto f = [](std::int64_t i, const float* to, const float* d) {
    return d[i] * slope(to[i]);
  };
  return filled(op, g.shape(), f, y, g);
}

inline Tensor bent(const Tensor& h) {
  const CustomOp op("bent");
  const auto f = [](std::int64_t i, const float* from) { return bent(from[i]); };
  const Tensor y = filled(op, h.shape(), f, h);
  return op.record({h}, y, [op, y = autograd::Saved(y)](const Tensor& g, autograd::Gradients& out) {
    out.set(0, before_bent(op, y.get(), g));
  });
}
inline Tensor joined(const Tensor& h, const Tensor& other) {
  const CustomOp op("joined");
  const auto f = [](std::int64_t i, const float* a, const float* b) { return bent(a[i] + b[i]); };
  const Tensor y = filled(op, h.shape(), f, h, other);
  return op.record({h, other}, y,
                   [op, y = autograd::Saved(y)](const Tensor& g, autograd::Gradients& out) {
                     const Tensor d = before_bent(op, y.get(), g);
                     if (out.wants(0)) out.set(0, d);
                     if (out.wants(1)) out.set(1, d);
                   });
}

// The columns of x [N, kWidth] in another order, by a product: exact, and so is its gradient.
inline Tensor turned(const Tensor& x) {
  return matmul(x, Tensor::from({0, 1, 0, 0, 0, 1, 1, 0, 0}, {kWidth, kWidth}, x.device()));
}

// x * w, bent, for rows of x. `rows` counts those that have given w a gradient.
//
// Note [Exact sums]
// What w gets in backward is not the gradient but numbers made of it, one a row: tanh of it, which
// is at most 1, rounded to a multiple of 2^-12. 3072 + t has an ulp of 2^-12 for all such t, so
// that adding it and taking it away again rounds. Of at most 2^12 such numbers, which `on_one_rank`
// checks, every sum fits the 24 bits of an f32. There are 1, 2 or 4 ranks, so that dividing by
// their number is exact too.
inline Tensor used(const Tensor& x, const Tensor& w, std::int64_t& rows) {
  const CustomOp op("used");
  const auto f = [](std::int64_t i, const float* from, const float* by) {
    return bent(from[i] * by[i % kWidth]);
  };
  return op.record(
      {x, w}, filled(op, x.shape(), f, x, w),
      [op, f, x = autograd::Saved(x), w = autograd::Saved(w), &rows](const Tensor& g,
                                                                     autograd::Gradients& out) {
        const auto of_x = [f](std::int64_t i, const float* d, const float* from, const float* by) {
          return d[i] * slope(f(i, from, by)) * by[i % kWidth];
        };
        const auto of_w = [f, n = g.size(0)](std::int64_t i, const float* d, const float* from,
                                             const float* by) {
          return column(i, n,
                        [=](std::int64_t at) { return d[at] * slope(f(at, from, by)) * from[at]; });
        };
        if (out.wants(0)) out.set(0, filled(op, g.shape(), of_x, g, x.get(), w.get()));
        if (out.wants(1)) out.set(1, filled(op, {kWidth}, of_w, g, x.get(), w.get()));
        rows += g.size(0);
      });
}
inline constexpr std::int64_t kMostRows = 1 << 12;

// x + w, bent, of a weight that may be closed again when backward comes: it is not read there.
inline Tensor added(const Tensor& x, const Tensor& w, std::int64_t& rows) {
  const CustomOp op("added");
  const auto f = [](std::int64_t i, const float* to, const float* what) {
    return bent(to[i] + what[i % kWidth]);
  };
  const Tensor y = filled(op, x.shape(), f, x, w);
  return op.record({x, w}, y,
                   [op, y = autograd::Saved(y), &rows](const Tensor& g, autograd::Gradients& out) {
                     const Tensor d = before_bent(op, y.get(), g);
                     if (out.wants(0)) out.set(0, d);
                     const auto of_w = [n = g.size(0)](std::int64_t i, const float* from) {
                       return column(i, n, [from](std::int64_t at) { return from[at]; });
                     };
                     if (out.wants(1)) out.set(1, filled(op, {kWidth}, of_w, d));
                     rows += g.size(0);
                   });
}

// What a call makes of a buffer [kWidth] and the first row of x, and x with it added, bent; neither
// has a gradient of it.
inline Tensor moved(const Tensor& buffer, const Tensor& x) {
  return filled(
      CustomOp("moved"), {kWidth},
      [](std::int64_t i, const float* old, const float* by) { return bent(old[i] / 2 + by[i]); },
      buffer, x);
}
inline Tensor shifted(const Tensor& x, const Tensor& buffer) {
  const CustomOp op("shifted");
  const auto f = [](std::int64_t i, const float* to, const float* by) {
    return bent(to[i] + by[i % kWidth]);
  };
  const Tensor y = filled(op, x.shape(), f, x, buffer);
  return op.record({x}, y, [op, y = autograd::Saved(y)](const Tensor& g, autograd::Gradients& out) {
    out.set(0, before_bent(op, y.get(), g));
  });
}

// A sum over the rows of a slice, and so over those of the table, whichever slices it has: the
// terms are rounded as in Note [Exact sums]. x gets no gradient of it.
inline Tensor streamed(const Tensor& x, const Tensor& slice, std::int64_t& rows) {
  const CustomOp op("streamed");
  const auto sum = [n = slice.size(0)](std::int64_t i, const float* from, const float* table) {
    return column(i % kWidth, n, [=](std::int64_t at) { return from[i] * table[at]; });
  };
  return op.record({x, slice}, filled(op, x.shape(), sum, x, slice),
                   [op, x = autograd::Saved(x), slice = autograd::Saved(slice), &rows](
                       const Tensor& g, autograd::Gradients& out) {
                     const Tensor table = slice.get();
                     const auto sum_of = [n = g.size(0)](std::int64_t i, const float* d,
                                                         const float* from, const float* by) {
                       return column(i % kWidth, n, [=](std::int64_t at) {
                         return from[at] * by[i] * by[i] * d[at];
                       });
                     };
                     if (out.wants(1))
                       out.set(1, filled(op, table.shape(), sum_of, g, x.get(), table));
                     rows += g.size(0);
                   });
}

}  // namespace tessera::testing
