#include "tessera/nn/product.hpp"

#include <algorithm>

#include "tessera/autograd/rows_in_8_bits.hpp"
#include "tessera/autograd/sliced.hpp"
#include "tessera/detail/device/captured_work.hpp"

namespace tessera::nn {

const Parameter Product::kNone;

void Product::set_fp8(std::optional<Fp8Recipe> recipe) {
  TESSERA_EXPECT(!recipe || (weight_.defined() && !weight_.is_streamed()),
                 "Product::set_fp8: the weight is undefined or streamed; only a whole weight can "
                 "be multiplied in 8 bits");
  TESSERA_EXPECT(!recipe || !is_in_8_bits(),
                 "Product::set_fp8: the weight is stored in 8 bits, and its values are multiplied "
                 "in the dtype of x; choose one of the two");
  TESSERA_EXPECT(!recipe || fits_fp8(weight_.shape()[1], weight_.shape()[0]),
                 "Product::set_fp8: weight is ", weight_.shape(), "; 16 must divide both sizes");
  fp8_ = recipe;
  ++decisions().count;
}

InputForm Product::input_form() const {
  return fp8_ && !layer_.is_hooked() && weight_.trainable() ? InputForm(fp8_) : InputForm();
}

Tensor Product::multiply(const Tensor& x) const {
  if (is_in_8_bits()) return linear_in_8_bits(x, weight_, scales_, bias());
  return fp8_ ? linear_fp8(x, weight_, bias(), *fp8_) : linear(x, weight_, bias());
}

Tensor Product::operator()(const Tensor& x, Caller at) {
  const CallSite site(at);
  return layer_.call(
      [&](const Tensor& in) {
        if (!weight_.is_streamed()) return multiply(in);
        SlicedLinear y(in);
        const Tensor scales = this->scales();
        weight_.for_each_slice(
            [&](const Tensor& slice, const SliceRows& rows) { y.add(slice, rows, scales); });
        return y.finish();
      },
      x);
}

Activated Product::gelu(const Tensor& x, Caller at) {
  const CallSite site(at);
  return layer_.call(
      [&](const Tensor& in) {
        if (is_plain()) return linear_gelu(in, weight_, bias());
        const Tensor before = multiply(in);
        return Activated{before, raw::gelu(before)};
      },
      x);
}

Tensor Product::operator()(const Activated& x, Caller at) {
  const CallSite site(at);
  return layer_.call(
      [&](const Activated& in) {
        if (is_plain()) return linear(in, weight_, bias());
        const SharedInput of_this_layer;
        return multiply(tessera::gelu(in.before));  // whose derivative is no product's here
      },
      x);
}

// A call is one product, of which nobody sees what it gives, and the residual is no larger or
// smaller.
bool Product::adds_to(const Tensor& residual, const Tensor& x) const {
  return !layer_.is_hooked() && is_plain() && !weight_.is_streamed() && x.ndim() > 0 &&
         residual.shape() == x.shape().with(x.ndim() - 1, weight_.shape()[0]);
}

Tensor Product::add_to(const Tensor& residual, const Tensor& x, Caller at) {
  const CallSite site(at);
  return adds_to(residual, x) ? add_linear(residual, x, weight_, bias()) : residual + (*this)(x);
}

Tensor Product::add_to(const Tensor& residual, const Activated& x, Caller at) {
  const CallSite site(at);
  return adds_to(residual, x.value) ? add_linear(residual, x, weight_, bias())
                                    : residual + (*this)(x);
}

Tensor Product::cross_entropy(const Tensor& x, const Tensor& targets, std::int64_t most_logits,
                              const LossOrder& order, Caller at) {
  const CallSite site(at);
  detail::check_loss_gradient("Product::cross_entropy", order.gradient);
  const auto loss_of = [&](const Tensor& in, const Tensor& wanted) {
    if (weight_.slices() == 1) {
      Tensor loss;
      const auto chunk_rows = std::max<std::int64_t>(most_logits / weight_.shape()[0], 1);
      const bool is_read_in_backward = !order.gradient;
      weight_.for_each_slice(
          [&](const Tensor& whole, const SliceRows&) {
            const Tensor w = is_in_8_bits() ? decode_rows(whole, scales_, in.dtype()) : whole;
            loss = linear_cross_entropy(in, w, bias(), wanted, chunk_rows, order);
          },
          is_read_in_backward);
      return loss;
    }
    SlicedCrossEntropy loss(in, wanted,
                            order.gradient ? wanted.numel() * weight_.shape()[0] : most_logits,
                            order.count);
    const Tensor scales = this->scales();
    weight_.for_each_slice(
        [&](const Tensor& slice, const SliceRows& rows) { loss.add(slice, rows, scales); });
    return loss.finish();
  };
  return layer_.call(loss_of, x, targets);
}

}  // namespace tessera::nn
