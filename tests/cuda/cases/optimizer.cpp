#include <cmath>
#include <limits>

#include "tests/cuda/case.hpp"

namespace cuda_test {
namespace {

constexpr std::int64_t kSize = 3000;

// Structs live in operands of i64, so that both sides have them.
template <class T>
void put(Operand& where, std::int64_t i, const T& value) {
  std::memcpy(where.at<T>(Side::reference) + i, &value, sizeof value);
}

// Segments that share groups of four, that are empty, that leave padding between them, that are
// longer than a chunk, that are skipped.
struct Layout {
  Operand *segments, *counts, *scalars;
  std::int32_t count;
  std::vector<char> steps;  // whether an element is covered and not skipped

  Layout(Case& c, std::int32_t segment_count) : count(segment_count), steps(kSize, 0) {
    segments = &c.input(i64, 3 * count);
    counts = &c.input(f32, 8);
    scalars = &c.input(i64, 4);
    for (std::int64_t i = 0; i < 8; ++i) counts->set(i, static_cast<double>(i % 2));
    std::int64_t begin = c.integer(0, 5);
    for (std::int32_t s = 0; s < count; ++s) {
      const std::int64_t length = s == 3 ? 1500 : c.integer(0, 6);
      const FlatSegment segment{begin, begin + length, static_cast<std::int32_t>(s % 9) - 1,
                                s % 3 == 0 ? 0.1f : 0.0f};
      put(*segments, s, segment);
      const bool skipped = s % 9 > 0 && (s % 9 - 1) % 2 == 0;
      for (std::int64_t i = begin; i < begin + length; ++i)
        steps[static_cast<std::size_t>(i)] = !skipped;
      begin += length + (s % 4 == 0 ? c.integer(0, 3) : 0);
    }
    if (begin > kSize) throw CaseFailure("the layout is longer than its array");
    put(*scalars, 0, UpdateScalars{1e-2f, 0.9f, 0.99f, 1e-6f, 0.271f, 0.0297f, 0.5f, 0.9f});
  }

  // Elements that no step may touch.
  void untouched(Case& c, const Operand& operand, const std::vector<double>& before) const {
    for (std::int64_t i = 0; i < kSize; ++i)
      if (!steps[static_cast<std::size_t>(i)] &&
          c.on_device(operand, i) != before[static_cast<std::size_t>(i)])
        c.fail(concat("element ", i, " belongs to no segment with a gradient and has changed"));
  }
};

std::vector<double> values(const Operand& operand) {
  std::vector<double> all;
  for (std::int64_t i = 0; i < operand.size(); ++i) all.push_back(operand.get(i));
  return all;
}

}  // namespace

TESSERA_CASE("optimizer", "AdamW over segments, skipping what has no gradient") {
  for (const std::int64_t shift : {0, 4})
    for (const bool clipped : {false, true}) {
      const Layout layout(c, clipped && shift == 0 ? 300 : 20);  // a block has 256 threads
      Operand &p = c.updated(f32, kSize, -1, 1, shift), &m = c.updated(f32, kSize, -1, 1, shift),
              &v = c.updated(f32, kSize, 0, 1, shift), &g = c.input(f32, kSize, -2, 2, shift),
              &clip = c.input(f32, 1, 0.2, 1);
      const std::vector<double> before = values(p);
      c.run([&](const Kernels& k, Side side, Exec& exec) {
        k.update({.values = p.at<float>(side),
                  .moments = {m.at<float>(side), v.at<float>(side)},
                  .gradient = g.at<float>(side),
                  .segments = layout.segments->at<FlatSegment>(side),
                  .counts = clipped ? layout.counts->at<float>(side) : nullptr,
                  .scalars = layout.scalars->at<UpdateScalars>(side),
                  .clip = clipped ? clip.at<float>(side) : nullptr,
                  .segment_count = layout.count,
                  .op = UpdateOp::adamw},
                 exec);
      });
      if (clipped) layout.untouched(c, p, before);
      // The moments are sums of two terms below 1, each of two or three roundings. The step is lr /
      // bias_correction1 m / (sqrt(v / bias_correction2) + eps): its relative error is that of m,
      // absolute 6 epsilon over a denominator of at least sqrt(v) / 0.173; where v is small the
      // step is large, and its error with it: 6 epsilon |step / m| + 10 epsilon |step|.
      const double e = epsilon(f32);
      c.close(m, 0, 6 * e);
      c.close(v, 6 * e, 0);
      for (std::int64_t i = 0; i < kSize; ++i) {
        const double rate = 1e-2 / 0.271, slope = rate / (std::sqrt(v.get(i) / 0.0297) + 1e-6),
                     bound = 2 * e * std::abs(p.get(i)) +
                             2 * e * std::abs(before[static_cast<std::size_t>(i)]) +
                             slope * (6 + 20 * std::abs(m.get(i))) * e;
        if (!(std::abs(c.on_device(p, i) - p.get(i)) <= bound))
          c.fail(concat("parameter ", i, " is ", c.on_device(p, i), " instead of ", p.get(i)));
      }
      c.next();
    }
}

TESSERA_CASE("optimizer", "SGD over segments, with and without momentum") {
  for (const std::int64_t shift : {0, 4})
    for (const bool momentum : {false, true}) {
      const Layout layout(c, 20);
      Operand &p = c.updated(f32, kSize, -1, 1, shift), &b = c.updated(f32, kSize, -1, 1, shift),
              &g = c.input(f32, kSize, -2, 2, shift);
      const std::vector<double> before = values(p), buffer = values(b);
      c.run([&](const Kernels& k, Side side, Exec& exec) {
        k.update({.values = p.at<float>(side),
                  .moments = {momentum ? b.at<float>(side) : nullptr},
                  .gradient = g.at<float>(side),
                  .segments = layout.segments->at<FlatSegment>(side),
                  .counts = layout.counts->at<float>(side),
                  .scalars = layout.scalars->at<UpdateScalars>(side),
                  .clip = nullptr,
                  .segment_count = layout.count,
                  .op = UpdateOp::sgd},
                 exec);
      });
      layout.untouched(c, p, before);
      layout.untouched(c, b, buffer);
      // Sums of terms below 2 of which each side rounds at most six.
      c.close(p, 0, 2 * 6 * epsilon(f32));
      c.close(b, 0, 2 * 6 * epsilon(f32));
      c.next();
    }
}

TESSERA_CASE("optimizer", "clip, scale and the scalars of a step") {
  const double inf = std::numeric_limits<double>::infinity();
  for (const DType dtype : {f32, f64})
    for (const double sum : {c.uniform(0, 1), c.uniform(2, 100), 0.0, inf, inf - inf}) {
      Operand &sumsq = c.input(dtype, 1), &factor = c.output(f32, 1), &norm = c.output(f32, 1),
              &data = c.updated(f32, 1027), &moved = c.updated(f32, 1027, -2, 2, 4),
              &one = c.input(f32, 1, 1, 1);
      sumsq.set(0, sum);
      c.run([&](const Kernels& k, Side side, Exec& exec) {
        k.clip({.coefficient = factor.at<float>(side),
                .norm = norm.at<float>(side),
                .sumsq = sumsq.at(side),
                .max_norm = 1,
                .dtype = dtype},
               exec);
        k.scale_flat(
            {.data = data.at<float>(side), .factor = factor.at<float>(side), .count = 1027}, exec);
        k.scale_flat(
            {.data = moved.at<float>(side), .factor = factor.at<float>(side), .count = 1027}, exec);
        k.scale_flat({.data = data.at<float>(side), .factor = one.at<float>(side), .count = 1027},
                     exec);
      });
      for (const Operand* operand : {&factor, &norm, &data, &moved}) c.equal(*operand);
      c.next();
    }
  Operand& scalars = c.output(i64, 4);
  const UpdateScalars drawn{static_cast<float>(c.uniform(0, 1)), 0.9f, 0.95f, 1e-8f, 0.1f, 0.2f,
                            static_cast<float>(c.uniform(0, 1)), 0.7f};
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    PutScalarsArgs args{.out = scalars.at(side), .count = sizeof drawn / 4, .values = {}};
    std::memcpy(args.values, &drawn, sizeof drawn);
    k.put_scalars(args, exec);
  });
  c.equal(scalars);
}

}  // namespace cuda_test
