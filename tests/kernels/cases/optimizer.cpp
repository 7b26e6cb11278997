// Every update of an optimizer over segments, and clipping.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tessera/kernels/update_formulas.hpp"
#include "tests/kernels/bounded.hpp"

namespace kernel_test {
namespace {

// Updates compute in f32.
using Number = Bounded<float>;

// Structs live in operands of i64, so that both sides have them.
template <class T>
void put(Operand& where, std::int64_t i, const T& value) {
  std::memcpy(where.at<T>(Side::reference) + i, &value, sizeof value);
}

// Segments that share groups of four, that are empty, that leave padding between them, that are
// longer than a chunk of a block and than a task of a thread, that are skipped.
struct Layout {
  Operand *segments, *counts, *scalars;
  std::int32_t count;
  std::int64_t size = 0;
  std::vector<FlatSegment> table;

  Layout(Case& c, std::int32_t segment_count, std::int64_t longest, bool nesterov)
      : count(segment_count) {
    segments = &c.input(i64, 6 * count);
    counts = &c.input(f32, 8);
    scalars = &c.input(i64, 5);
    for (std::int64_t i = 0; i < 8; ++i) counts->set(i, static_cast<double>(i % 2));
    size = c.integer(0, 5);
    for (std::int32_t s = 0; s < count; ++s) {
      const std::int64_t length = s == 2 ? longest : c.integer(0, 6);
      // Gradients and moments are further on, by more and more.
      table.push_back({.begin = size,
                       .end = size + length,
                       .gradient_shift = s / 3 * 4,
                       .moment_shift = s / 2 * 4,
                       .count_index = static_cast<std::int32_t>(s % 9) - 1,
                       .lr_factor = s % 5 == 0 ? 0.5f : 1.0f,
                       .weight_decay = s % 3 == 0 ? 0.1f : 0.0f,
                       .unused = 0});
      put(*segments, s, table.back());
      size += length + (s % 4 == 0 ? c.integer(0, 3) : 0);
    }
    put(*scalars, 0,
        UpdateScalars{1e-2f, 0.9f, 0.99f, 1e-6f, 0.271f, 0.0297f, 0.5f, 0.9f,
                      nesterov ? 0.0f : 0.25f, nesterov ? 1.0f : 0.0f});
  }
  std::int64_t gradient_size() const { return size + table.back().gradient_shift; }
  std::int64_t moment_size() const { return size + table.back().moment_shift; }
  // Whether an update touches segment s.
  bool is_updated(std::size_t s, bool with_counts) const {
    return !with_counts || table[s].count_index < 0 || counts->get(table[s].count_index) != 0;
  }
};

template <class Tag>
void check(Case& c, const Layout& layout, bool keeps, bool with_counts, bool clipped,
           std::int64_t shift) {
  Operand &p = c.updated(f32, layout.size, -1, 1, shift),
          &g = c.input(f32, layout.gradient_size(), -2, 2, shift), &clip = c.input(f32, 1, 0.2, 1);
  Operand* moments[kMostMoments] = {};
  for (int k = 0; k < (keeps ? Tag::moments : 0); ++k)
    moments[k] = &c.updated(f32, layout.moment_size(), k == 0 ? -1 : 0, 1, shift);
  c.compute([&](const Kernels& kernels, Side side, Exec& exec) {
    UpdateArgs args{};
    args.values = p.at<float>(side);
    for (int k = 0; k < kMostMoments; ++k)
      args.moments[k] = moments[k] ? moments[k]->at<float>(side) : nullptr;
    args.gradient = g.at<float>(side);
    args.segments = layout.segments->at<FlatSegment>(side);
    args.counts = with_counts ? layout.counts->at<float>(side) : nullptr;
    args.scalars = layout.scalars->at<UpdateScalars>(side);
    args.clip = clipped ? clip.at<float>(side) : nullptr;
    args.segment_count = layout.count;
    args.op = Tag::op;
    kernels.update(args, exec);
  });

  const UpdateScalars& s = *layout.scalars->at<UpdateScalars>(Side::reference);
  const Number factor =
      clipped ? Number::given(static_cast<double>(s.grad_scale)) * Number::given(clip.get(0))
              : Number::given(static_cast<double>(s.grad_scale));
  const int kept_count = keeps ? Tag::moments : 0;
  std::vector<bool> has_changed(static_cast<std::size_t>(layout.size)),
      have_changed(static_cast<std::size_t>(layout.moment_size()));
  for (std::size_t n = 0; n < layout.table.size(); ++n) {
    const FlatSegment& segment = layout.table[n];
    if (!layout.is_updated(n, with_counts)) continue;
    const Update<Tag::op, Number> update(s, segment);
    for (std::int64_t i = segment.begin; i < segment.end; ++i) {
      const std::int64_t moment = i + segment.moment_shift;
      has_changed[static_cast<std::size_t>(i)] = true;
      have_changed[static_cast<std::size_t>(moment)] = true;
      Number kept[Tag::moments];
      for (int k = 0; k < kept_count; ++k) kept[k] = Number::given(moments[k]->get(moment));
      const Number gradient = Number::given(g.get(i + segment.gradient_shift)) * factor,
                   after = update(Number::given(p.get(i)), gradient, keeps ? kept : nullptr);
      c.near(p, i, after.v, after.error);
      for (int k = 0; k < kept_count; ++k) c.near(*moments[k], moment, kept[k].v, kept[k].error);
    }
  }
  for (std::int64_t i = 0; i < layout.size; ++i)
    if (!has_changed[static_cast<std::size_t>(i)]) c.near(p, i, p.get(i), 0);
  for (std::int64_t i = 0; i < layout.moment_size(); ++i)
    for (int k = 0; k < kept_count && !have_changed[static_cast<std::size_t>(i)]; ++k)
      c.near(*moments[k], i, moments[k]->get(i), 0);
}

}  // namespace

TESSERA_CASE("optimizer", "every update over segments, skipping what has no gradient") {
  for (const UpdateOp op : kUpdates)
    visit_update(op, [&](auto tag) {
      using Tag = decltype(tag);
      for (const bool keeps : {true, false})
        for (const std::int64_t shift : {0, 4})
          for (const bool clipped : {false, true}) {
            if (!keeps && Tag::fewest > 0) continue;
            // A block has 256 threads, each of which looks at a segment first.
            const Layout layout(c, clipped && shift == 0 ? 300 : 20, clipped ? 1500 : 40000,
                                shift == 4);
            check<Tag>(c, layout, keeps, clipped || shift == 0, clipped, shift);
            c.next();
          }
    });
}

TESSERA_CASE("optimizer", "clip: the norm, and a coefficient of at most 1") {
  const double inf = std::numeric_limits<double>::infinity();
  for (const DType dtype : {f32, f64})
    for (const double sum : {c.uniform(0, 1), c.uniform(2, 100), 0.0, 1.0, 1600.0, inf, inf - inf})
      for (const int wanted : {1, 2, 3}) {
        Operand &sumsq = c.input(dtype, 1), &factor = c.output(f32, 1), &norm = c.output(f32, 1);
        sumsq.set(0, sum);
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          k.clip({.coefficient = (wanted & 1) != 0 ? factor.at<float>(side) : nullptr,
                  .norm = (wanted & 2) != 0 ? norm.at<float>(side) : nullptr,
                  .sumsq = sumsq.at(side),
                  .max_norm = 1,
                  .dtype = dtype},
                 exec);
        });
        // In double precision, rounded to f32 once.
        const double root = std::sqrt(sumsq.get(0)), ratio = 1 / (root + 1e-6);
        const double coefficient = ratio > 1 ? 1 : ratio;
        if ((wanted & 1) != 0) c.near(factor, 0, coefficient, 1.001 * 0x1p-24 * coefficient);
        if ((wanted & 2) != 0) c.near(norm, 0, root, 1.001 * 0x1p-24 * root);
        c.next();
      }
}

TESSERA_CASE("optimizer", "scale: every element, on and off 16-byte boundaries; a factor of 1") {
  for (const std::int64_t size : {1027, 33333})
    for (const std::int64_t shift : {0, 4})
      for (const double by : {1.0, c.uniform(0, 1), std::numeric_limits<double>::quiet_NaN()}) {
        Operand &data = c.updated(f32, size, -2, 2, shift), &factor = c.input(f32, 1);
        factor.set(0, by);
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          k.scale_flat(
              {.data = data.at<float>(side), .factor = factor.at<float>(side), .count = size},
              exec);
        });
        for (std::int64_t i = 0; i < size; ++i) {
          const double product = data.get(i) * factor.get(0);
          c.near(data, i, product, 0x1p-24 * std::abs(product));
        }
        c.next();
      }
}

TESSERA_CASE("optimizer", "the scalars of a step reach the device") {
  for (const std::int32_t count : {1, 3, 8, kMostScalarBytes / 4}) {
    Operand &drawn = c.input(f32, kMostScalarBytes / 4), &out = c.updated(f32, drawn.size());
    c.compute([&](const Kernels& k, Side side, Exec& exec) {
      PutScalarsArgs args{.out = out.at(side), .count = count, .values = {}};
      std::memcpy(args.values, drawn.at(Side::reference), sizeof args.values);
      k.put_scalars(args, exec);
    });
    for (std::int32_t i = 0; i < out.size(); ++i)
      c.near(out, i, i < count ? drawn.get(i) : out.get(i), 0);
    c.next();
  }
}

}  // namespace kernel_test
