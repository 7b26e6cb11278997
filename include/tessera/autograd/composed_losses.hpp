// Losses of elements, with PyTorch's names, options and values. They are compositions of public
// operations, to be copied and changed. Each computes its elements' losses without history, in f32
// or f64, and gives its derivative by x and by the target. losses.hpp has the losses of classes,
// and what all have in common.
//
// Throws, for all of them: ContractError for shapes, dtypes and options that do not fit.
#pragma once

#include "tessera/autograd/losses.hpp"
#include "tessera/autograd/node.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

struct LossOptions {
  LossReduction reduction = LossReduction::mean;
};
struct HuberOptions {
  double delta = 1;
  LossReduction reduction = LossReduction::mean;
};
struct SmoothL1Options {
  double beta = 1;
  LossReduction reduction = LossReduction::mean;
};
// weight and pos_weight broadcast to x, have its dtype and get no gradient.
struct BinaryCrossEntropyOptions {
  Tensor weight{};      // multiplies each element's loss
  Tensor pos_weight{};  // multiplies the term of the positive class; with logits only
  LossReduction reduction = LossReduction::mean;
};
struct KlDivOptions {
  LossReduction reduction = LossReduction::mean;  // over all elements; batchmean is the divergence
  bool log_target = false;
};

namespace composed {

using raw::Binary;
using raw::binary;

// What a loss is made of, in f32 or f64. Backward keeps it.
struct Terms {
  Tensor x{}, target{}, weight{}, positive{};  // undefined where a loss does without
  double width = 0, factor = 1;
  bool is_log = false;
};
// The derivative of each element's loss by x (i = 0) or target (1).
using Slope = Tensor (*)(const Terms& of, int i);

inline Tensor widened(const Tensor& x) { return raw::cast(x, x.dtype() == f64 ? f64 : f32); }
inline Tensor minus(const Tensor& a, const Tensor& b) { return binary(Binary::sub, a, b); }
inline Tensor one_less(const Tensor& x) { return binary(Binary::sub, 1, x); }
inline Tensor weighted(const Tensor& x, const Tensor& weight) {
  return weight.defined() ? raw::mul(x, weight) : x;
}
// log(1 + x) for x >= -1, exact for small x, too: log(u) x / (u - 1) with u = 1 + x rounded.
// Source: Kahan, "Interval arithmetic options in the proposed IEEE standard", 1980.
inline Tensor log_one_plus(const Tensor& x) {
  const Tensor u = binary(Binary::add, x, 1);
  const Tensor step = binary(Binary::sub, u, 1);
  const Tensor ratio = binary(Binary::div, raw::mul(raw::log(u), x), step);
  return raw::where(binary(Binary::eq, step, 0), x, ratio);
}
// The losses of a logit z for the two classes: log(1 + e^z) and log(1 + e^-z).
struct LogitLosses {
  Tensor negative, positive;
  explicit LogitLosses(const Tensor& z) {
    const Tensor rest = log_one_plus(raw::exp(raw::neg(raw::abs(z))));
    negative = raw::add(binary(Binary::max, z, 0), rest);
    positive = raw::add(binary(Binary::max, raw::neg(z), 0), rest);
  }
};

inline void check_pair(const char* name, const Tensor& x, const Tensor& target,
                       LossReduction reduction, bool has_batch = false) {
  TESSERA_EXPECT(
      x.shape() == target.shape() && x.dtype() == target.dtype() && is_floating(x.dtype()), name,
      ": x is ", x.shape(), " of ", x.dtype(), ", target ", target.shape(), " of ", target.dtype(),
      "; expected one shape and one floating dtype");
  TESSERA_EXPECT(
      reduction != LossReduction::batchmean || (has_batch && x.ndim() > 0), name,
      ": only kl_div takes the reduction batchmean, of tensors with a dimension; take mean or sum");
  TESSERA_EXPECT(x.device() == target.device(), name,
                 ": operands lie on different devices; move them to one");
}

// An option that scales elements, widened as x is; undefined if it was not given.
inline Tensor factor(const char* name, const char* what, const Tensor& given, const Tensor& x) {
  if (!given.defined()) return {};
  TESSERA_EXPECT(given.dtype() == x.dtype() && broadcasts_to(given.shape(), x.shape()), name, ": ",
                 what, " is ", given.shape(), " of ", given.dtype(),
                 ", expected what broadcasts to ", x.shape(), " of ", x.dtype());
  return widened(given);
}

// The elements' losses reduced.
inline Tensor reduced(const char* name, const Tensor& x, const Tensor& target, const Tensor& losses,
                      LossReduction reduction, const Terms& terms, Slope slope) {
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
  return autograd::record(
      name, {x, target}, total,
      [kept_x = autograd::Saved(terms.x), kept_t = autograd::Saved(terms.target),
       kept_w = autograd::Saved(terms.weight), kept_p = autograd::Saved(terms.positive),
       width = terms.width, by = terms.factor, is_log = terms.is_log, slope, share,
       dtype = x.dtype()](const Tensor& g, autograd::Gradients& out) {
        const Terms of{kept_x.get(), kept_t.get(), kept_w.get(), kept_p.get(), width, by, is_log};
        const Tensor each = share == 1 ? g : raw::mul(g, share);
        for (const int i : {0, 1})
          if (out.wants(i)) out.set(i, raw::cast(raw::mul(slope(of, i), each), dtype));
      });
}

// A loss of d = x - target. The terms' x is d, and `slope` is the derivative by d.
inline Tensor of_difference(const char* name, const Tensor& x, const Tensor& target,
                            LossReduction reduction, Terms terms, Tensor (*loss)(const Terms&),
                            Slope slope) {
  check_pair(name, x, target, reduction);
  terms.x = minus(widened(x), widened(target));
  return reduced(name, x, target, loss(terms), reduction, terms, slope);
}
inline Tensor signed_by(int i, const Tensor& slope) { return i == 0 ? slope : raw::neg(slope); }

// The factor times c (d - c / 2), where c is d clamped to the width.
inline Tensor clamped(const Terms& of) {
  return binary(Binary::min, binary(Binary::max, of.x, -of.width), of.width);
}
inline Tensor clamped_loss(const char* name, const Tensor& x, const Tensor& target, double width,
                           double times, LossReduction reduction) {
  return of_difference(
      name, x, target, reduction, {.width = width, .factor = times},
      [](const Terms& of) {
        const Tensor c = clamped(of);
        return raw::mul(raw::mul(c, minus(of.x, raw::mul(c, 0.5))), of.factor);
      },
      [](const Terms& of, int i) { return signed_by(i, raw::mul(clamped(of), of.factor)); });
}

}  // namespace composed

// --- of differences d = x - target, with gradients for both ---
// d^2.
inline Tensor mse_loss(const Tensor& x, const Tensor& target, const LossOptions& options = {},
                       Caller at = Caller::current()) {
  const CallSite site("mse_loss", at);
  using composed::Terms;
  return composed::of_difference(
      "mse_loss", x, target, options.reduction, {},
      [](const Terms& of) { return raw::mul(of.x, of.x); },
      [](const Terms& of, int i) { return composed::signed_by(i, raw::mul(of.x, 2)); });
}

// |d|.
inline Tensor l1_loss(const Tensor& x, const Tensor& target, const LossOptions& options = {},
                      Caller at = Caller::current()) {
  const CallSite site("l1_loss", at);
  using composed::Terms;
  return composed::of_difference(
      "l1_loss", x, target, options.reduction, {}, [](const Terms& of) { return raw::abs(of.x); },
      [](const Terms& of, int i) {
        const auto is = [&of](raw::Binary op) {
          return raw::cast(raw::binary(op, of.x, 0), of.x.dtype());
        };
        return composed::signed_by(i, composed::minus(is(raw::Binary::gt), is(raw::Binary::lt)));
      });
}

// d^2 / 2 where |d| < delta, else delta (|d| - delta / 2).  Requires: delta > 0.
inline Tensor huber_loss(const Tensor& x, const Tensor& target, const HuberOptions& options = {},
                         Caller at = Caller::current()) {
  const CallSite site("huber_loss", at);
  TESSERA_EXPECT(options.delta > 0, "huber_loss: delta is ", options.delta, ", expected above 0");
  return composed::clamped_loss("huber_loss", x, target, options.delta, 1, options.reduction);
}

// huber_loss over delta: d^2 / (2 beta) where |d| < beta, else |d| - beta / 2; l1_loss for beta 0.
inline Tensor smooth_l1_loss(const Tensor& x, const Tensor& target,
                             const SmoothL1Options& options = {}, Caller at = Caller::current()) {
  const CallSite site("smooth_l1_loss", at);
  TESSERA_EXPECT(options.beta >= 0, "smooth_l1_loss: beta is ", options.beta,
                 ", expected at least 0");
  if (options.beta == 0) return l1_loss(x, target, {options.reduction}, at);
  return composed::clamped_loss("smooth_l1_loss", x, target, options.beta, 1 / options.beta,
                                options.reduction);
}

// --- of probabilities, with gradients for both ---
// -weight (t log x + (1 - t) log(1 - x)), with logarithms cut off at -100. It is NaN for x outside
// [0, 1], where PyTorch throws.
inline Tensor binary_cross_entropy(const Tensor& x, const Tensor& target,
                                   const BinaryCrossEntropyOptions& options = {},
                                   Caller at = Caller::current()) {
  using namespace composed;
  constexpr const char* kName = "binary_cross_entropy";
  const CallSite site(kName, at);
  check_pair(kName, x, target, options.reduction);
  TESSERA_EXPECT(!options.pos_weight.defined(), kName,
                 ": only binary_cross_entropy_with_logits takes pos_weight; leave it out");
  Terms of{.weight = factor(kName, "weight", options.weight, x)};
  of.x = widened(x);
  of.target = widened(target);
  const auto log_of = [](const Tensor& p) { return binary(Binary::max, raw::log(p), -100); };
  const auto log_rest = [](const Tensor& p) {
    return binary(Binary::max, log_one_plus(raw::neg(p)), -100);
  };
  const Tensor rest = one_less(of.target);
  const Tensor losses =
      raw::neg(raw::add(raw::mul(of.target, log_of(of.x)), raw::mul(rest, log_rest(of.x))));
  return reduced(kName, x, target, weighted(losses, of.weight), options.reduction, of,
                 [](const Terms& terms, int i) {
                   const Tensor& p = terms.x;
                   if (i == 1)
                     return weighted(minus(log_one_plus(raw::neg(p)), raw::log(p)), terms.weight);
                   const Tensor spread = binary(Binary::max, raw::mul(p, one_less(p)), 1e-12);
                   return weighted(binary(Binary::div, minus(p, terms.target), spread),
                                   terms.weight);
                 });
}

// -weight (pos_weight t log p + (1 - t) log(1 - p)), with p = sigmoid(x), without overflow.
inline Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& target,
                                               const BinaryCrossEntropyOptions& options = {},
                                               Caller at = Caller::current()) {
  using namespace composed;
  constexpr const char* kName = "binary_cross_entropy_with_logits";
  const CallSite site(kName, at);
  check_pair(kName, x, target, options.reduction);
  Terms of{.weight = factor(kName, "weight", options.weight, x)};
  of.positive = factor(kName, "pos_weight", options.pos_weight, x);
  of.x = widened(x);
  of.target = widened(target);
  const LogitLosses both(of.x);
  const Tensor losses = raw::add(raw::mul(one_less(of.target), both.negative),
                                 raw::mul(weighted(of.target, of.positive), both.positive));
  return reduced(kName, x, target, weighted(losses, of.weight), options.reduction, of,
                 [](const Terms& terms, int i) {
                   const Tensor &z = terms.x, &t = terms.target;
                   if (i == 1) {
                     const LogitLosses of_z(z);
                     return weighted(minus(weighted(of_z.positive, terms.positive), of_z.negative),
                                     terms.weight);
                   }
                   const Tensor rest = one_less(t);
                   return weighted(
                       minus(raw::mul(rest, raw::sigmoid(z)),
                             raw::mul(weighted(t, terms.positive), raw::sigmoid(raw::neg(z)))),
                       terms.weight);
                 });
}

// target (log target - x), and 0 where target is 0. For x = log p this is Kullback and Leibler's
// divergence of p from the target. With log_target the target is a logarithm, too.
inline Tensor kl_div(const Tensor& x, const Tensor& target, const KlDivOptions& options = {},
                     Caller at = Caller::current()) {
  using namespace composed;
  const CallSite site("kl_div", at);
  check_pair("kl_div", x, target, options.reduction, true);
  const Terms of{.x = widened(x), .target = widened(target), .is_log = options.log_target};
  const Tensor &z = of.x, &t = of.target;
  Tensor losses;
  if (of.is_log) {
    losses = raw::mul(raw::exp(t), minus(t, z));
  } else {
    const Tensor zero = Tensor::full({}, 0, t.dtype(), t.device());
    losses =
        minus(raw::where(binary(Binary::eq, t, 0), zero, raw::mul(t, raw::log(t))), raw::mul(t, z));
  }
  return reduced("kl_div", x, target, losses, options.reduction, of, [](const Terms& kept, int i) {
    const Tensor p = kept.is_log ? raw::exp(kept.target) : kept.target;
    if (i == 0) return raw::neg(p);
    const Tensor distance =
        binary(Binary::add, minus(kept.is_log ? kept.target : raw::log(kept.target), kept.x), 1);
    return kept.is_log ? raw::mul(p, distance) : distance;
  });
}

}  // namespace tessera
