// The loss of logits, and of logits that are never all there: those of a chunk of rows are made in
// one buffer, in forward for the losses and again in backward, where their gradient overwrites
// them.
//
//   forward    logits 0 | losses | logits 1 | losses | ...     kept: x, lse [N]
//   backward   logits 0 | d_logits | dx, dW = | logits 1 | d_logits | dx, dW += | ...
//
// Where the loss's own gradient is known, all of it happens in forward:
//
//   forward    logits 0 | losses, d_logits | dx, dW = | logits 1 | ...      kept: dx, dW in f32
//   backward   dx, dW handed on
#include <cmath>

#include "runtime/autograd/logits.hpp"
#include "runtime/autograd/operands.hpp"
#include "runtime/tensor/expect_operand.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera {

using namespace autograd::logits;
using autograd::Gradients;
using autograd::GradientSink;
using autograd::record;
using autograd::Saved;
using autograd::statistics_dtype;
using raw::Transpose;

namespace {

// The gradients that forward has made, [N, in], [V, in] and [V], undefined where nobody wants one,
// of a loss whose gradient is `of`.
struct MadeGradients {
  Tensor x, weight, bias;
  double of = 0;

  // Those of a loss of gradient `g`, in place where nobody needs them again.
  Tensor scaled(const Tensor& made, const Tensor& factor, bool are_kept) const {
    if (!made.defined()) return made;
    if (are_kept || made.dtype() != f32) return raw::mul(made, factor);
    detail::multiply("scale_gradient", made, factor);
    return made;
  }
  void hand_on(const Tensor& g, const Shape& x_shape, DType dtype, Gradients& out) const {
    const Tensor factor = raw::binary(raw::Binary::div, g, of);
    const bool are_kept = out.graph_is_retained();
    if (x.defined())
      out.set(0, raw::reshape(raw::cast(scaled(x, factor, are_kept), dtype), x_shape));
    if (weight.defined())
      autograd::write_or_set(out, 1, out.sink(1), scaled(weight, factor, are_kept), dtype);
    if (bias.defined())
      autograd::write_or_set(out, 2, out.sink(2), scaled(bias, factor, are_kept), dtype);
  }
};

// What the chunks of one linear_cross_entropy share.
struct Chunked {
  Saved x, weight, bias, targets, lse, divisor;  // x [N, in]
  Shape x_shape;                                 // as it was given
  std::int64_t chunk_rows;

  std::int64_t rows() const { return targets.get().size(0); }
  Tensor buffer() const {
    const Tensor& w = weight.get();
    return Tensor::empty({std::min(chunk_rows, rows()), w.size(0)}, w.dtype(), w.device());
  }
  // Calls f(begin, end, logits) for every chunk; the logits lie in `buffer`.
  template <class F>
  void for_each(const Tensor& buffer, const F& f) const {
    for (std::int64_t begin = 0; begin < rows(); begin += chunk_rows) {
      const std::int64_t end = std::min(begin + chunk_rows, rows());
      const Tensor logits = raw::slice(buffer, 0, 0, end - begin);
      raw::matmul_into(logits, raw::slice(x.get(), 0, begin, end), weight.get(), Transpose::no,
                       Transpose::yes, 1, 0, bias.get());
      f(begin, end, logits);
    }
  }
  void backward(const Tensor& gradient, Gradients& out) const;
  void add(const MadeGradients& to, const Tensor& scale, std::int64_t begin, std::int64_t end,
           const Tensor& logits, const Tensor& loss) const;
};

// The losses and gradients of a chunk, for a sum of gradient `scale`: those of the logits overwrite
// them.
void Chunked::add(const MadeGradients& to, const Tensor& scale, std::int64_t begin,
                  std::int64_t end, const Tensor& logits, const Tensor& loss) const {
  const double beta = begin == 0 ? 0 : 1;
  losses_and_gradients(loss, logits, raw::slice(targets.get(), 0, begin, end), scale);
  if (to.x.defined())
    raw::matmul_into(raw::slice(to.x, 0, begin, end), logits, weight.get(), Transpose::no,
                     Transpose::no, 1, 0);
  if (to.weight.defined())
    raw::matmul_into(to.weight, logits, raw::slice(x.get(), 0, begin, end), Transpose::yes,
                     Transpose::no, 1, beta);
  if (to.bias.defined()) raw::axpby(to.bias, raw::reduce(raw::Reduction::sum, logits, 0), 1, beta);
}

void Chunked::backward(const Tensor& gradient, Gradients& out) const {
  const Tensor dx =
      out.wants(0) ? Tensor::empty(x.get().shape(), x.get().dtype(), x.get().device()) : Tensor();
  std::optional<Sum> d_weight, d_bias;
  if (out.wants(1)) d_weight.emplace(out, 1, weight.get());
  if (out.wants(2)) d_bias.emplace(out, 2, bias.get());
  {
    const Tensor chunk = buffer(), scale = raw::binary(raw::Binary::div, gradient, divisor.get());
    for_each(chunk, [&](std::int64_t begin, std::int64_t end, const Tensor& logits) {
      logit_gradients(logits, logits, raw::slice(targets.get(), 0, begin, end),
                      raw::slice(lse.get(), 0, begin, end), scale);
      if (dx.defined())
        raw::matmul_into(raw::slice(dx, 0, begin, end), logits, weight.get(), Transpose::no,
                         Transpose::no, 1, 0);
      if (d_weight) {
        const GradientSink to = d_weight->next();
        raw::matmul_into(to.tensor, logits, raw::slice(x.get(), 0, begin, end), Transpose::yes,
                         Transpose::no, to.scale, beta(to));
      }
      if (d_bias) write(d_bias->next(), raw::reduce(raw::Reduction::sum, logits, 0));
    });
  }
  if (d_weight) d_weight->finish();
  if (d_bias) d_bias->finish();
  if (dx.defined()) out.set(0, raw::reshape(dx, x_shape));
}

}  // namespace

Tensor detail::count_targets(const Tensor& targets, std::int32_t least, DType dtype) {
  const Device& device = targets.device();
  const Tensor count = Tensor::empty({}, dtype, device);
  if (device.is_meta()) return count;
  launch("count_targets", device, table(device).count_targets,
         kernels::CountTargetsArgs{count.data(), targets.data(), targets.numel(), kIgnoredTarget,
                                   least, dtype, targets.dtype()},
         {reads(targets), writes(count)});
  return count;
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, Caller at) {
  const CallSite site("cross_entropy", at);
  return detail::cross_entropy(input, target, {});
}

Tensor detail::cross_entropy(const Tensor& input, const Tensor& target, const TargetCount& count) {
  const CallSite site("cross_entropy");
  autograd::expect_floating(input);
  TESSERA_EXPECT(input.ndim() == 2, "cross_entropy: logits are ", input.shape(),
                 "; expected [N, V]");
  check_targets("cross_entropy", target, input.size(0), input.size(1));
  const Device& device = detail::common_device("cross_entropy", input, target);
  const Tensor logits = raw::contiguous(input), targets = raw::contiguous(target);
  const DType dtype = statistics_dtype(logits.dtype());
  const std::int64_t rows = logits.size(0);
  Tensor loss = Tensor::empty({rows}, dtype, device), lse = Tensor::empty({rows}, dtype, device);
  losses(loss, lse, logits, targets);
  const Tensor divisor = divisor_of("cross_entropy", targets, count, dtype);
  return record("cross_entropy", {input}, mean_of(loss, divisor),
                [logits = Saved(logits), targets = Saved(targets), lse = Saved(lse),
                 divisor = Saved(divisor)](const Tensor& g, Gradients& out) {
                  const Tensor& x = logits.get();
                  // Their gradient overwrites the logits unless somebody else holds them, or they
                  // are needed again.
                  Tensor dx = x.storage().use_count() == 1 && !out.graph_is_retained()
                                  ? x
                                  : Tensor::empty(x.shape(), x.dtype(), x.device());
                  logit_gradients(dx, x, targets.get(), lse.get(),
                                  raw::binary(raw::Binary::div, g, divisor.get()));
                  out.set(0, dx);
                });
}

void detail::check_loss_gradient(const char* function, std::optional<double> gradient) {
  TESSERA_EXPECT(!gradient || (std::isfinite(*gradient) && *gradient != 0), function,
                 ": the given gradient of the loss is ", gradient.value_or(0),
                 "; expected a finite number other than 0");
}

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& bias,
                            const Tensor& target, std::int64_t chunk_rows, const LossOrder& order,
                            Caller at) {
  const CallSite site("linear_cross_entropy", at);
  autograd::expect_floating(x);
  TESSERA_EXPECT(weight.ndim() == 2 && x.ndim() >= 1 && x.size(-1) == weight.size(1) &&
                     x.dtype() == weight.dtype(),
                 "linear_cross_entropy: x is ", x.shape(), " of ", x.dtype(), ", weight is ",
                 weight.shape(), " of ", weight.dtype(),
                 "; expected [..., in] and [V, in] of one dtype");
  detail::expect_bias("linear_cross_entropy", bias, weight.size(0), x.dtype());
  TESSERA_EXPECT(chunk_rows > 0, "linear_cross_entropy: chunks of ", chunk_rows,
                 " rows; expected at least 1");
  const std::optional<double> gradient = order.gradient;
  detail::check_loss_gradient("linear_cross_entropy", gradient);
  const std::int64_t rows =
      Shape(std::span(x.shape().begin(), static_cast<std::size_t>(x.ndim() - 1))).numel();
  check_targets("linear_cross_entropy", target, rows, weight.size(0));
  const Device& device = detail::common_device("linear_cross_entropy", weight, target);
  const DType dtype = statistics_dtype(x.dtype());
  const Tensor loss = Tensor::empty({rows}, dtype, device), targets = raw::contiguous(target),
               divisor = divisor_of("linear_cross_entropy", targets, order.count, dtype);
  Chunked chunks{Saved(raw::contiguous(raw::reshape(x, {rows, weight.size(1)}))),
                 Saved(weight),
                 Saved(bias),
                 Saved(targets),
                 {},
                 Saved(divisor),
                 x.shape(),
                 chunk_rows};
  MadeGradients made;
  Tensor scale;
  if (gradient && autograd::grad_enabled()) {
    const OwnerGuard owner(device, "gradients of the loss");
    const auto make = [&](const Tensor& of, const Shape& shape) {
      return of.defined() && of.requires_grad() ? Tensor::empty(shape, dtype, device) : Tensor();
    };
    made = {make(x, {rows, weight.size(1)}), make(weight, weight.shape()),
            make(bias, {weight.size(0)}), *gradient};
    scale = raw::binary(raw::Binary::div, *gradient, divisor);
  }
  const bool are_made = scale.defined();
  const Tensor lse = are_made ? Tensor() : Tensor::empty({rows}, dtype, device);
  {
    const Tensor chunk = chunks.buffer();
    chunks.for_each(chunk, [&](std::int64_t begin, std::int64_t end, const Tensor& logits) {
      const Tensor some = raw::slice(loss, 0, begin, end);
      if (are_made)
        chunks.add(made, scale, begin, end, logits, some);
      else
        losses(some, raw::slice(lse, 0, begin, end), logits,
               raw::slice(chunks.targets.get(), 0, begin, end));
    });
  }
  const Tensor mean = mean_of(loss, divisor);
  chunks.lse = Saved(lse);
  if (!are_made)
    return record("linear_cross_entropy", {x, weight, bias}, mean,
                  [chunks](const Tensor& g, Gradients& out) { chunks.backward(g, out); });
  // Saved behind the chunks: the second run of a recomputed function makes what is saved.
  return record(
      "linear_cross_entropy", {x, weight, bias}, mean,
      [d_x = Saved(made.x), d_weight = Saved(made.weight), d_bias = Saved(made.bias), of = made.of,
       shape = x.shape(), dtype = x.dtype()](const Tensor& g, Gradients& out) {
        MadeGradients{d_x.get(), d_weight.get(), d_bias.get(), of}.hand_on(g, shape, dtype, out);
      });
}

}  // namespace tessera
