#include "tessera/nn/linear.hpp"

#include <algorithm>

#include "tessera/device/captured_work.hpp"

namespace tessera::nn {

Linear::Linear(std::int64_t in, std::int64_t out, const Device& device)
    : Linear(in, out, LinearOptions{}, device) {}

Linear::Linear(std::int64_t in, std::int64_t out, const LinearOptions& options,
               const Device& device)
    : weight({out, in}, Initializer::normal(0, kInitialDeviation)) {
  TESSERA_EXPECT(in > 0 && out > 0, "Linear: ", in, " inputs and ", out,
                 " outputs; expected at least one of each");
  TESSERA_EXPECT(!options.bias || !options.is_streamed,
                 "Linear: a streamed weight goes without bias");
  register_parameter("weight", weight);
  weight.set_row_parts(options.parts);
  if (options.is_streamed) stream_parameter(weight);
  if (options.bias) {
    bias = Parameter({out}, Initializer::constant(0));
    register_parameter("bias", bias);
    bias.set_row_parts(options.parts);
  }
  if (!device.is_meta()) materialize(device);
}

Linear::Linear(const Parameter& shared_weight) : weight(shared_weight) {
  TESSERA_EXPECT(weight.defined() && weight.shape().ndim() == 2,
                 "Linear: the shared weight must be a matrix [out, in]");
  register_parameter("weight", weight);
  stream_parameter(weight);
}

void Linear::set_fp8(std::optional<Fp8Recipe> recipe) {
  TESSERA_EXPECT(!recipe || (weight.defined() && !weight.is_streamed()),
                 "Linear::set_fp8: only a weight that is there as a whole is multiplied in 8 bits");
  TESSERA_EXPECT(!recipe || fits_fp8(weight.shape()[1], weight.shape()[0]),
                 "Linear::set_fp8: weight is ", weight.shape(), "; 16 must divide both sizes");
  fp8_ = recipe;
  ++decisions().count;
}

std::optional<Fp8Recipe> Linear::takes_rounded() const {
  return fp8_ && !is_hooked() && weight.trainable() ? fp8_ : std::nullopt;
}

Tensor Linear::multiply(const Tensor& x) {
  return fp8_ ? linear_fp8(x, weight, bias_value(), *fp8_) : linear(x, weight, bias_value());
}

Tensor Linear::operator()(const Tensor& x, Caller at) {
  const CallSite site(at);
  return call(
      [&](const Tensor& in) {
        if (!weight.is_streamed()) return multiply(in);
        SlicedLinear y(in);
        weight.for_each_slice(
            [&](const Tensor& slice, const SliceRows& rows) { y.add(slice, rows); });
        return y.finish();
      },
      x);
}

Activated Linear::gelu(const Tensor& x, Caller at) {
  const CallSite site(at);
  return call(
      [&](const Tensor& in) {
        if (!fp8_) return linear_gelu(in, weight, bias_value());
        const Tensor before = multiply(in);
        return Activated{before, raw::gelu(before)};
      },
      x);
}

Tensor Linear::operator()(const Activated& x, Caller at) {
  const CallSite site(at);
  return call(
      [&](const Activated& in) {
        if (!fp8_) return linear(in, weight, bias_value());
        const SharedFp8Input of_this_layer;
        return multiply(tessera::gelu(in.before));  // whose derivative is no product's here
      },
      x);
}

// A call is one product, of which nobody sees what it gives, and the residual is no larger or
// smaller.
bool Linear::adds_to(const Tensor& residual, const Tensor& x) const {
  return !is_hooked() && !fp8_ && !weight.is_streamed() && x.ndim() > 0 &&
         residual.shape() == x.shape().with(x.ndim() - 1, weight.shape()[0]);
}

Tensor Linear::add_to(const Tensor& residual, const Tensor& x, Caller at) {
  const CallSite site(at);
  return adds_to(residual, x) ? add_linear(residual, x, weight, bias_value())
                              : residual + (*this)(x);
}

Tensor Linear::add_to(const Tensor& residual, const Activated& x, Caller at) {
  const CallSite site(at);
  return adds_to(residual, x.value) ? add_linear(residual, x, weight, bias_value())
                                    : residual + (*this)(x);
}

Tensor Linear::cross_entropy(const Tensor& x, const Tensor& targets, std::int64_t most_logits,
                             std::optional<double> gradient, Caller at) {
  const CallSite site(at);
  detail::check_loss_gradient("Linear::cross_entropy", gradient);
  const auto loss_of = [&](const Tensor& in, const Tensor& wanted) {
    if (weight.slices() == 1) {
      Tensor loss;
      const auto chunk_rows = std::max<std::int64_t>(most_logits / weight.shape()[0], 1);
      const bool is_read_in_backward = !gradient;
      weight.for_each_slice(
          [&](const Tensor& whole, const SliceRows&) {
            loss = linear_cross_entropy(in, whole, bias_value(), wanted, chunk_rows, gradient);
          },
          is_read_in_backward);
      return loss;
    }
    SlicedCrossEntropy loss(in, wanted,
                            gradient ? wanted.numel() * weight.shape()[0] : most_logits);
    weight.for_each_slice(
        [&](const Tensor& slice, const SliceRows& rows) { loss.add(slice, rows); });
    return loss.finish();
  };
  return call(loss_of, x, targets);
}

}  // namespace tessera::nn
