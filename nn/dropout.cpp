#include "tessera/nn/dropout.hpp"

#include "tessera/autograd/ops.hpp"
#include "tessera/autograd/random.hpp"

namespace tessera::nn {

Dropout::Dropout(double p) : p_(p) {
  TESSERA_EXPECT(p >= 0 && p < 1, "Dropout: p is ", p, ", expected at least 0 and less than 1");
}

Tensor Dropout::operator()(const Tensor& x, Caller at) {
  const CallSite site(at);
  const auto forward = [&](const Tensor& in) {
    if (p_ == 0 || !is_training()) return in;
    const std::int64_t row = in.ndim() > 0 && in.size(0) > 0 ? in.numel() / in.size(0) : 0;
    const std::int64_t first = checked_mul(autograd::random_state().first_row, row);
    return dropout(in, p_, autograd::next_dropout_key(in.device()), first / 4);  // 4 a counter
  };
  return call(forward, x);
}

}  // namespace tessera::nn
