// Losses of classes with options. Logits are seen as rows [R, C] whose targets lie in [R].
#include "runtime/autograd/logits.hpp"
#include "tessera/autograd/losses.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::record;
using autograd::Saved;
using autograd::statistics_dtype;
using raw::Binary;
using raw::binary;

namespace {

// [N, C, ...] -> [N, ..., C] and back; [C] stays as it is.
Tensor classes_last(const Tensor& x) {
  std::array<int, kMaxDims> order{};
  const int n = x.ndim();
  for (int d = 0; d < n; ++d) order[d] = d == n - 1 ? 1 : d + (d > 0 ? 1 : 0);
  return n <= 2 ? x : raw::permute(x, {order.data(), static_cast<std::size_t>(n)});
}
Tensor classes_second(const Tensor& x) {
  std::array<int, kMaxDims> order{};
  const int n = x.ndim();
  for (int d = 0; d < n; ++d) order[d] = d == 1 ? n - 1 : d - (d > 1 ? 1 : 0);
  return n <= 2 ? x : raw::permute(x, {order.data(), static_cast<std::size_t>(n)});
}
Tensor column(const Tensor& x) { return raw::reshape(x, {x.numel(), 1}); }

// What a row's loss is made of, beside its logits.
struct Targets {
  Tensor index;          // [R]
  Tensor counts;         // boolean [R]: it is not ignored
  Tensor class_weight;   // [C], undefined for ones
  Tensor weight;         // f32 or f64 [R], 0 where ignored
  Tensor sum_of_weight;  // [], the divisor of a mean
  LossReduction reduction;

  Tensor zero() const { return Tensor::zeros({}, weight.dtype(), weight.device()); }
  Tensor counted(const Tensor& x) const { return raw::where(counts, x, zero()); }
  Tensor reduced(const Tensor& losses, const Shape& shape) const {
    if (reduction == LossReduction::none) return raw::reshape(losses, shape);
    const Tensor total = raw::reduce_all(raw::Reduction::sum, losses);
    return reduction == LossReduction::sum ? total : binary(Binary::div, total, sum_of_weight);
  }
  // The gradient of each row's loss [R] for that of the result.
  Tensor spread(const Tensor& g) const {
    if (reduction == LossReduction::none) return raw::reshape(g, index.shape());
    return raw::expand(reduction == LossReduction::sum ? g : binary(Binary::div, g, sum_of_weight),
                       index.shape());
  }
};

// Checks what both losses are given.
Targets targets_of(const char* name, const Tensor& x, const Tensor& target,
                   const ClassLossOptions& options) {
  const int class_dim = x.ndim() == 1 ? 0 : 1;
  TESSERA_EXPECT(x.ndim() >= 1 && is_floating(x.dtype()) && x.shape()[class_dim] > 0, name,
                 ": the input is ", x.shape(), " of ", x.dtype(),
                 "; expected a floating [N, C], [N, C, ...] or [C] with at least one class");
  const Shape expected = x.shape().without(class_dim);
  TESSERA_EXPECT(target.shape() == expected && (target.dtype() == i32 || target.dtype() == i64),
                 name, ": targets are ", target.shape(), " of ", target.dtype(), ", expected ",
                 expected, " of i32 or i64");
  const std::int64_t ignored = options.ignore_index, classes = x.shape()[class_dim];
  TESSERA_EXPECT(ignored == static_cast<std::int32_t>(ignored), name, ": ignore_index is ", ignored,
                 ", expected a number of 32 bits");
  TESSERA_EXPECT(options.reduction != LossReduction::batchmean, name,
                 ": only kl_div takes the reduction batchmean; take mean or sum");
  detail::common_device(name, x, target);
  const Tensor& w = options.weight;
  TESSERA_EXPECT(!w.defined() || (w.ndim() == 1 && w.size(0) == classes && w.dtype() == x.dtype()),
                 name, ": weight is ", w.shape(), " of ", w.dtype(), ", expected [", classes,
                 "] of ", x.dtype());

  const DType dtype = statistics_dtype(x.dtype());
  Targets t{.index = raw::contiguous(raw::reshape(target, {target.numel()})),
            .counts = {},
            .class_weight = w.defined() ? w.detach() : w,
            .weight = {},
            .sum_of_weight = {},
            .reduction = options.reduction};
  t.counts = binary(Binary::ne, t.index, static_cast<double>(ignored));
  t.weight = raw::cast(t.counts, dtype);
  if (w.defined())
    t.weight = raw::where(t.counts, raw::index_select(raw::cast(w, dtype), 0, t.index),
                          Tensor::zeros({}, dtype, x.device()));
  if (t.reduction == LossReduction::mean)
    t.sum_of_weight = raw::reduce_all(raw::Reduction::sum, t.weight);
  return t;
}

// The same, kept for backward.
struct KeptTargets {
  Saved index, counts, class_weight, weight, sum_of_weight;
  LossReduction reduction;

  explicit KeptTargets(const Targets& t)
      : index(t.index),
        counts(t.counts),
        class_weight(t.class_weight),
        weight(t.weight),
        sum_of_weight(t.sum_of_weight),
        reduction(t.reduction) {}
  Targets get() const {
    return {index.get(),  counts.get(),        class_weight.get(),
            weight.get(), sum_of_weight.get(), reduction};
  }
};

Tensor class_rows(const Tensor& x) {
  const std::int64_t classes = x.shape()[x.ndim() == 1 ? 0 : 1];
  return raw::contiguous(raw::reshape(classes_last(x), {x.numel() / classes, classes}));
}
// The gradient of x [...] for that of its rows.
Tensor from_rows(const Tensor& rows, const Shape& last) {
  return classes_second(raw::reshape(rows, last));
}

// The classes' weights as a column in the dtype of x.
Tensor weight_column(const Targets& t, const Tensor& x) {
  return t.class_weight.defined() ? column(raw::contiguous(t.class_weight))
                                  : Tensor::ones({x.size(1), 1}, x.dtype(), x.device());
}
// Their sum [], in the dtype of the losses.
Tensor sum_of_classes(const Targets& t, const Tensor& x) {
  return raw::reduce_all(raw::Reduction::sum, raw::cast(weight_column(t, x), t.weight.dtype()));
}

}  // namespace

// With smoothing s, weights w of C classes and target t, a row's loss is
//   (1 - s) w[t] (lse - x[t]) + s / C sum_c w[c] (lse - x[c]),
// and with a = (1 - s) w[t], b = s / C, its derivative by x[c]
//   (softmax(x)[c] - [c = t]) (a + b sum w) + [c = t] b sum w - b w[c]:
// the kernel's for its factor, and two terms that smoothing adds.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const ClassLossOptions& options,
                     Caller at) {
  const CallSite site("cross_entropy", at);
  constexpr const char* kName = "cross_entropy";
  const double smoothing = options.label_smoothing;
  TESSERA_EXPECT(smoothing >= 0 && smoothing <= 1, kName, ": label_smoothing is ", smoothing,
                 ", expected 0 to 1");
  const Targets t = targets_of(kName, logits, targets, options);
  const auto ignored = static_cast<std::int32_t>(options.ignore_index);
  const Tensor x = class_rows(logits);
  const double share = smoothing / static_cast<double>(x.size(1));
  const auto empty = [&](const Shape& shape) {
    return Tensor::empty(shape, t.weight.dtype(), x.device());
  };
  Tensor loss = empty({x.size(0)});
  const Tensor lse = empty({x.size(0)});
  if (x.numel() > 0) autograd::logits::losses(loss, lse, x, t.index, false, ignored);
  if (t.class_weight.defined()) loss = raw::mul(loss, t.weight);
  if (smoothing > 0) {
    const Tensor of_logits = empty({x.size(0), 1});  // sum_c w[c] x[c]
    raw::matmul_into(of_logits, x, weight_column(t, x), raw::Transpose::no, raw::Transpose::no, 1,
                     0);
    const Tensor spread = binary(Binary::sub, raw::mul(lse, sum_of_classes(t, x)),
                                 raw::reshape(of_logits, lse.shape()));
    loss = t.counted(raw::add(raw::mul(loss, 1 - smoothing), raw::mul(spread, share)));
  }
  return record(
      kName, {logits}, t.reduced(loss, targets.shape()),
      [x = Saved(x), lse = Saved(lse), kept = KeptTargets(t), last = classes_last(logits).shape(),
       smoothing, share, ignored](const Tensor& g, Gradients& out) {
        const Targets t = kept.get();
        const Tensor& rows = x.get();
        const Tensor each = t.counted(t.spread(g));
        Tensor scale = raw::mul(t.counted(raw::mul(each, t.weight)), 1 - smoothing), evenly;
        if (smoothing > 0) {
          evenly = raw::mul(raw::mul(each, sum_of_classes(t, rows)), share);
          scale = raw::add(scale, evenly);
        }
        // Their gradient overwrites the logits unless somebody else holds them, or they are needed
        // again.
        const Tensor dx = rows.storage().use_count() == 1 && !out.graph_is_retained()
                              ? rows
                              : Tensor::empty(rows.shape(), rows.dtype(), rows.device());
        if (rows.numel() > 0)
          autograd::logits::logit_gradients(dx, rows, t.index, lse.get(), raw::contiguous(scale),
                                            false, ignored);
        if (smoothing > 0 && rows.numel() > 0) {
          raw::scatter_add_into(dx, 1, column(t.index), column(raw::cast(evenly, dx.dtype())));
          raw::matmul_into(dx, column(raw::cast(each, dx.dtype())), weight_column(t, dx),
                           raw::Transpose::no, raw::Transpose::yes, -share, 1);
        }
        out.set(0, from_rows(dx, last));
      });
}

Tensor nll_loss(const Tensor& log_probabilities, const Tensor& targets,
                const ClassLossOptions& options, Caller at) {
  const CallSite site("nll_loss", at);
  constexpr const char* kName = "nll_loss";
  TESSERA_EXPECT(options.label_smoothing == 0, kName,
                 ": only cross_entropy takes label_smoothing; leave it out");
  const Targets t = targets_of(kName, log_probabilities, targets, options);
  const Tensor x = class_rows(log_probabilities);
  const Tensor picked = raw::reshape(raw::gather(x, 1, column(t.index)), t.index.shape());
  const Tensor loss = t.counted(raw::mul(raw::neg(raw::cast(picked, t.weight.dtype())), t.weight));
  return record(kName, {log_probabilities}, t.reduced(loss, targets.shape()),
                [kept = KeptTargets(t), rows = x.shape(), dtype = x.dtype(),
                 last = classes_last(log_probabilities).shape()](const Tensor& g, Gradients& out) {
                  const Targets t = kept.get();
                  const Tensor each = raw::neg(t.counted(raw::mul(t.spread(g), t.weight)));
                  const Tensor dx = Tensor::zeros(rows, dtype, g.device());
                  raw::scatter_add_into(dx, 1, column(t.index), column(raw::cast(each, dtype)));
                  out.set(0, from_rows(dx, last));
                });
}

}  // namespace tessera
