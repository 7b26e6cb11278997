#include "tessera/nn/dropout.hpp"

#include "tessera/autograd/ops.hpp"
#include "tessera/autograd/random.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::nn {

Dropout::Dropout(double p) : p_(p) {
  TESSERA_EXPECT(p >= 0 && p < 1, "Dropout: p is ", p, ", expected at least 0 and less than 1");
}

Tensor Dropout::operator()(const Tensor& x, Caller at) {
  const CallSite site(at);
  const auto forward = [&](const Tensor& in) {
    if (p_ == 0 || !is_training()) return in;
    autograd::RandomState& state = autograd::random_state();
    const std::uint64_t key = fnv1a(state.draws++, fnv1a(state.seed, fnv1a("dropout")));
    const std::int64_t row = in.ndim() > 0 && in.size(0) > 0 ? in.numel() / in.size(0) : 0;
    return dropout(in, p_, key, checked_mul(state.first_row, row) / 4);  // one counter: 4 elements
  };
  return call(forward, x);
}

}  // namespace tessera::nn
