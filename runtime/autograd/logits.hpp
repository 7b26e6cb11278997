// What losses of logits have in common, whole or in parts: the kernels of the rows, and a gradient
// that arrives in parts. For the .cpp files of operations.
#pragma once

#include <optional>

#include "runtime/autograd/gradient_sink.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/autograd/losses.hpp"

namespace tessera::autograd::logits {

inline void check_targets(const char* name, const Tensor& target, std::int64_t rows,
                          std::int64_t vocab) {
  TESSERA_EXPECT(target.ndim() == 1 && target.size(0) == rows &&
                     (target.dtype() == i32 || target.dtype() == i64),
                 name, ": targets are ", target.shape(), " of ", target.dtype(), ", expected [",
                 rows, "] of i32 or i64");
  TESSERA_EXPECT(rows > 0 && vocab > 0, name, ": logits are [", rows, ", ", vocab,
                 "]; the mean of nothing is undefined");
}

// What the mean divides by, [] of `dtype`: how many of the contiguous targets are not ignored, or
// each rank's share of `count`; of none as of one.
inline Tensor divisor_of(const char* name, const Tensor& targets, const TargetCount& count,
                         DType dtype) {
  if (!count.all.defined()) return tessera::detail::count_targets(targets, 1, dtype);
  TESSERA_EXPECT(count.all.ndim() == 0 && count.all.dtype() == f32 && count.ranks > 0, name,
                 ": the count of targets is ", count.all.shape(), " of ", count.all.dtype(),
                 ", of ", count.ranks, " ranks; expected [] of f32, as dist::count_targets gives");
  tessera::detail::common_device(name, targets, count.all);
  const Tensor all = raw::binary(raw::Binary::max, raw::cast(count.all, dtype), 1);
  return raw::mul(all, 1.0 / count.ranks);
}
inline Tensor mean_of(const Tensor& loss, const Tensor& divisor) {
  return raw::binary(raw::Binary::div, raw::reduce_all(raw::Reduction::sum, loss), divisor);
}

// loss and lse of rows of contiguous logits. `is_part`: where a target is -1, it lies in another
// part of the vocabulary. Where it is `ignored`, the row has neither loss nor gradient.
inline void losses(const Tensor& loss, const Tensor& lse, const Tensor& logits,
                   const Tensor& targets, bool is_part = false,
                   std::int32_t ignored = kIgnoredTarget) {
  using namespace detail;
  const Device& device = logits.device();
  if (device.is_meta()) return;
  launch("cross_entropy", device, table(device).cross_entropy,
         kernels::CrossEntropyArgs{loss.data(), lse.data(), logits.data(), targets.data(),
                                   logits.size(0), logits.size(1), logits.size(1), ignored,
                                   logits.dtype(), targets.dtype(), is_part},
         {reads(logits), reads(targets), writes(loss), writes(lse)});
}

// The gradient of the losses' sum, whose own is `gradient`: [], or [rows of logits], one for each.
// `out` may be logits.
inline void logit_gradients(const Tensor& out, const Tensor& logits, const Tensor& targets,
                            const Tensor& lse, const Tensor& gradient, bool is_part = false,
                            std::int32_t ignored = kIgnoredTarget) {
  using namespace detail;
  const Device& device = logits.device();
  if (device.is_meta()) return;
  const std::int64_t vocab = logits.size(1);
  launch("cross_entropy_backward", device, table(device).cross_entropy_backward,
         kernels::CrossEntropyBackwardArgs{out.data(), logits.data(), targets.data(), lse.data(),
                                           gradient.data(), 1.0, logits.size(0), vocab, vocab,
                                           vocab, ignored, gradient.ndim(), logits.dtype(),
                                           targets.dtype(), is_part},
         {reads(logits), reads(targets), reads(lse), reads(gradient), writes(out)});
}

// Both, in one pass over contiguous logits, which their gradient overwrites: `gradient`, [], is
// that of the losses' sum.
inline void losses_and_gradients(const Tensor& loss, const Tensor& logits, const Tensor& targets,
                                 const Tensor& gradient) {
  using namespace detail;
  const Device& device = logits.device();
  if (device.is_meta()) return;
  launch("cross_entropy_with_gradient", device, table(device).cross_entropy_with_gradient,
         kernels::CrossEntropyWithGradientArgs{
             loss.data(), logits.data(), targets.data(), gradient.data(), 1.0, logits.size(0),
             logits.size(1), logits.size(1), kIgnoredTarget, logits.dtype(), targets.dtype()},
         {reads(targets), reads(gradient), updates(logits), writes(loss)});
}

// A gradient that arrives in parts: added up where the leaf wants it if a kernel that computes in
// `dtype` may write there, else in the wider dtype aside.
class Sum {
 public:
  Sum(Gradients& out, int input, const Tensor& of)
      : out_(out), input_(input), dtype_(of.dtype()), sink_(out.sink(input)) {
    is_direct_ = sink_ && can_write(*sink_, dtype_);
    next_ = is_direct_
                ? *sink_
                : GradientSink{Tensor::empty(of.shape(), statistics_dtype(dtype_), of.device()), 1,
                               false};
  }
  // Of the next part.
  GradientSink next() {
    const GradientSink now = next_;
    next_.accumulate = true;
    return now;
  }
  void finish() {
    if (!is_direct_) write_or_set(out_, input_, sink_, next_.tensor, dtype_);
  }

 private:
  Gradients& out_;
  int input_;
  DType dtype_;
  bool is_direct_ = false;
  std::optional<GradientSink> sink_;
  GradientSink next_;
};

}  // namespace tessera::autograd::logits
