// Losses of elements: each is a composition without history, in f32 or f64, and its derivative.
#include "tessera/autograd/losses.hpp"

#include "runtime/autograd/operands.hpp"
#include "runtime/tensor/launch.hpp"

namespace tessera {

using autograd::broadcasts_to;
using autograd::Gradients;
using autograd::record;
using autograd::Saved;
using autograd::widened;
using raw::Binary;
using raw::binary;

namespace {

Tensor minus(const Tensor& a, const Tensor& b) { return binary(Binary::sub, a, b); }
Tensor clipped(const Tensor& x, double low, double high) {
  return binary(Binary::min, binary(Binary::max, x, low), high);
}
Tensor or_else(const Tensor& condition, double value, const Tensor& x) {
  return raw::where(condition, Tensor::full({}, value, x.dtype(), x.device()), x);
}
// log(1 + x) for x >= -1, as exact for small x: log(u) x / (u - 1) with u = 1 + x rounded.
// Source: Kahan, "Interval arithmetic options in the proposed IEEE standard", 1980.
Tensor log_one_plus(const Tensor& x) {
  const Tensor u = binary(Binary::add, x, 1);
  const Tensor step = binary(Binary::sub, u, 1);
  const Tensor ratio = binary(Binary::div, raw::mul(raw::log(u), x), step);
  return raw::where(binary(Binary::eq, step, 0), x, ratio);
}
// Of z, log(1 + e^z) and log(1 + e^-z), the losses of a logit for the two classes.
struct LogitLosses {
  Tensor negative, positive;
  explicit LogitLosses(const Tensor& z) {
    const Tensor rest = log_one_plus(raw::exp(raw::neg(raw::abs(z))));
    negative = raw::add(binary(Binary::max, z, 0), rest);
    positive = raw::add(binary(Binary::max, raw::neg(z), 0), rest);
  }
};

void check_pair(const char* name, const Tensor& x, const Tensor& target, LossReduction reduction,
                bool has_batch = false) {
  TESSERA_EXPECT(
      x.shape() == target.shape() && x.dtype() == target.dtype() && is_floating(x.dtype()), name,
      ": x is ", x.shape(), " of ", x.dtype(), ", target ", target.shape(), " of ", target.dtype(),
      "; expected one shape and one floating dtype");
  TESSERA_EXPECT(reduction != LossReduction::batchmean || (has_batch && x.ndim() > 0), name,
                 ": batchmean is kl_div's alone, of tensors with a dimension; take mean or sum");
  detail::common_device(name, x, target);
}

// An option that scales elements, as wide as x; undefined where it was not given.
Tensor factor(const char* name, const char* what, const Tensor& factor, const Tensor& x) {
  if (!factor.defined()) return {};
  TESSERA_EXPECT(factor.dtype() == x.dtype() && broadcasts_to(factor.shape(), x.shape()), name,
                 ": ", what, " is ", factor.shape(), " of ", factor.dtype(),
                 ", expected what broadcasts to ", x.shape(), " of ", x.dtype());
  return widened(factor);
}
Tensor weighted(const Tensor& x, const Tensor& weight) {
  return weight.defined() ? raw::mul(x, weight) : x;
}

// The elements' losses reduced; `slope(i)` is the derivative of each by x (i = 0) or target (1).
template <class F>
Tensor reduced(const char* name, const Tensor& x, const Tensor& target, const Tensor& losses,
               LossReduction reduction, const F& slope) {
  using enum LossReduction;
  Tensor total = losses;
  double share = 1;
  if (reduction == mean) {
    share = 1 / static_cast<double>(losses.numel());
    total = raw::reduce_all(raw::Reduction::mean, losses);
  } else if (reduction != none) {
    if (reduction == batchmean) share = 1 / static_cast<double>(losses.size(0));
    total = raw::reduce_all(raw::Reduction::sum, losses);
    if (share != 1) total = raw::mul(total, share);
  }
  return record(name, {x, target}, total,
                [slope, share, dtype = x.dtype()](const Tensor& g, Gradients& out) {
                  const Tensor each = share == 1 ? g : raw::mul(g, share);
                  for (const int i : {0, 1})
                    if (out.wants(i)) out.set(i, raw::cast(raw::mul(slope(i), each), dtype));
                });
}

// A loss of d = x - target, of which `slope(d)` is the derivative.
template <class F, class S>
Tensor of_difference(const char* name, const Tensor& x, const Tensor& target,
                     LossReduction reduction, F f, S slope) {
  check_pair(name, x, target, reduction);
  const Tensor d = minus(widened(x), widened(target));
  return reduced(name, x, target, f(d), reduction, [d = Saved(d), slope](int i) {
    const Tensor s = slope(d.get());
    return i == 0 ? s : raw::neg(s);
  });
}

}  // namespace

Tensor mse_loss(const Tensor& x, const Tensor& target, const LossOptions& options, Caller at) {
  const CallSite site("mse_loss", at);
  return of_difference(
      "mse_loss", x, target, options.reduction, [](const Tensor& d) { return raw::mul(d, d); },
      [](const Tensor& d) { return raw::mul(d, 2); });
}

Tensor l1_loss(const Tensor& x, const Tensor& target, const LossOptions& options, Caller at) {
  const CallSite site("l1_loss", at);
  return of_difference("l1_loss", x, target, options.reduction, raw::abs, [](const Tensor& d) {
    return minus(raw::cast(binary(Binary::gt, d, 0), d.dtype()),
                 raw::cast(binary(Binary::lt, d, 0), d.dtype()));
  });
}

namespace {

// c (d - c / 2) of c = d clamped to the width, times `factor`.
Tensor clamped_loss(const char* name, const Tensor& x, const Tensor& target, double width,
                    double factor, LossReduction reduction) {
  const auto clamped = [width](const Tensor& d) { return clipped(d, -width, width); };
  return of_difference(
      name, x, target, reduction,
      [=](const Tensor& d) {
        const Tensor c = clamped(d);
        return raw::mul(raw::mul(c, minus(d, raw::mul(c, 0.5))), factor);
      },
      [=](const Tensor& d) { return raw::mul(clamped(d), factor); });
}

}  // namespace

Tensor huber_loss(const Tensor& x, const Tensor& target, const HuberOptions& options, Caller at) {
  const CallSite site("huber_loss", at);
  TESSERA_EXPECT(options.delta > 0, "huber_loss: delta is ", options.delta, ", expected above 0");
  return clamped_loss("huber_loss", x, target, options.delta, 1, options.reduction);
}

Tensor smooth_l1_loss(const Tensor& x, const Tensor& target, const SmoothL1Options& options,
                      Caller at) {
  const CallSite site("smooth_l1_loss", at);
  TESSERA_EXPECT(options.beta >= 0, "smooth_l1_loss: beta is ", options.beta,
                 ", expected at least 0");
  if (options.beta == 0) return l1_loss(x, target, {options.reduction}, at);
  return clamped_loss("smooth_l1_loss", x, target, options.beta, 1 / options.beta,
                      options.reduction);
}

Tensor binary_cross_entropy(const Tensor& x, const Tensor& target,
                            const BinaryCrossEntropyOptions& options, Caller at) {
  const CallSite site("binary_cross_entropy", at);
  constexpr const char* kName = "binary_cross_entropy";
  check_pair(kName, x, target, options.reduction);
  TESSERA_EXPECT(!options.pos_weight.defined(), kName,
                 ": pos_weight is binary_cross_entropy_with_logits' alone");
  const Tensor weight = factor(kName, "weight", options.weight, x);
  const auto log_of = [](const Tensor& p) { return binary(Binary::max, raw::log(p), -100); };
  const auto log_rest = [](const Tensor& p) {
    return binary(Binary::max, log_one_plus(raw::neg(p)), -100);
  };
  const Tensor p = widened(x), t = widened(target);
  const Tensor one_less = binary(Binary::sub, 1, t);
  const Tensor losses = raw::neg(raw::add(raw::mul(t, log_of(p)), raw::mul(one_less, log_rest(p))));
  return reduced(kName, x, target, weighted(losses, weight), options.reduction,
                 [p = Saved(p), t = Saved(t), w = Saved(weight)](int i) {
                   const Tensor& v = p.get();
                   if (i == 1)
                     return weighted(minus(log_one_plus(raw::neg(v)), raw::log(v)), w.get());
                   const Tensor spread = raw::mul(v, binary(Binary::sub, 1, v));
                   return weighted(
                       binary(Binary::div, minus(v, t.get()), binary(Binary::max, spread, 1e-12)),
                       w.get());
                 });
}

Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& target,
                                        const BinaryCrossEntropyOptions& options, Caller at) {
  const CallSite site("binary_cross_entropy_with_logits", at);
  constexpr const char* kName = "binary_cross_entropy_with_logits";
  check_pair(kName, x, target, options.reduction);
  const Tensor weight = factor(kName, "weight", options.weight, x);
  const Tensor positive = factor(kName, "pos_weight", options.pos_weight, x);
  const Tensor z = widened(x), t = widened(target);
  const LogitLosses of(z);
  const Tensor losses = raw::add(raw::mul(binary(Binary::sub, 1, t), of.negative),
                                 raw::mul(weighted(t, positive), of.positive));
  return reduced(kName, x, target, weighted(losses, weight), options.reduction,
                 [z = Saved(z), t = Saved(t), p = Saved(positive), w = Saved(weight)](int i) {
                   if (i == 1) {
                     const LogitLosses of(z.get());
                     return weighted(minus(weighted(of.positive, p.get()), of.negative), w.get());
                   }
                   const Tensor rest = binary(Binary::sub, 1, t.get());
                   return weighted(
                       minus(raw::mul(rest, raw::sigmoid(z.get())),
                             raw::mul(weighted(t.get(), p.get()), raw::sigmoid(raw::neg(z.get())))),
                       w.get());
                 });
}

Tensor kl_div(const Tensor& x, const Tensor& target, const KlDivOptions& options, Caller at) {
  const CallSite site("kl_div", at);
  check_pair("kl_div", x, target, options.reduction, true);
  const Tensor z = widened(x), t = widened(target);
  const bool is_log = options.log_target;
  Tensor losses;
  if (is_log)
    losses = raw::mul(raw::exp(t), minus(t, z));
  else
    losses = minus(or_else(binary(Binary::eq, t, 0), 0, raw::mul(t, raw::log(t))), raw::mul(t, z));
  return reduced("kl_div", x, target, losses, options.reduction,
                 [z = Saved(z), t = Saved(t), is_log](int i) {
                   const Tensor& target = t.get();
                   const Tensor p = is_log ? raw::exp(target) : target;
                   if (i == 0) return raw::neg(p);
                   const Tensor distance =
                       binary(Binary::add, minus(is_log ? target : raw::log(target), z.get()), 1);
                   return is_log ? raw::mul(p, distance) : distance;
                 });
}

}  // namespace tessera
