// Products of linear layers in 8-bit floats. A GPU of sm_90 makes up to twice as many a second as
// in bf16.
//
//              y = x W^T            dx = dy W             dW = dy^T x
//   rounded    x, W                 dy, W                 dy, x           in the step, from f32 or
//   16 bits sums       f32, over all of each, then once to the dtype of x, or to the gradient sink
//
// Weights stay as they are, in shards and in units. Scales are found anew in each call.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

namespace detail {
class SharedFp8;
}

// tensorwise  One scale for each operand; dy in e5m2, which reaches further, all else in e4m3.
//             torchao 0.14's recipe of that name, but that scales are powers of two.
// blockwise   One scale for 128 neighbours along a product's sum, of W for 128 by 128; all in e4m3.
//             A GPU has it on sm_90 alone. Source: DeepSeek-AI, "DeepSeek-V3 technical report",
//             2024.
enum class Fp8Recipe : std::uint8_t { tensorwise, blockwise };

// linear(x, weight, bias) with these products. x [..., in] and weight [out, in] have one dtype:
// f32, bf16 or f16. Throws: ContractError if 16 does not divide `in` and `out`. If the weight's
// gradient is wanted, 16 must divide the rows of x, too, because that gradient is a sum over them.
Tensor linear_fp8(const Tensor& x, const Tensor& weight, const Tensor& bias, Fp8Recipe recipe,
                  Caller at = Caller::current());
// In its scope on this thread, calls of linear_fp8 with one x, one after another, round it once,
// and keep it once for backward. It is for layers that read one input, as those to queries, keys
// and values. Norms and SwiGLU may round what they make themselves, and write nothing else. They do
// so if they are told the recipe of the layers that read it:
//
//   const SharedFp8Input shared;
//   const Tensor h = rms_norm(x, w, eps, Fp8Recipe::tensorwise);   // codes, in e4m3
//   const Tensor q = linear_fp8(h, w_q, {}, Fp8Recipe::tensorwise), k = ...
//
// The bits are those of norm and linear_fp8 without a scope. linear_fp8 finds the scales of h in
// the scope, or in one around it. They stay until the scope rounds something else, as linear_fp8 of
// another x does. So a layer that rounds more than its input has a scope of its own, as those of nn
// have. Any other operation that reads h throws ContractError, since its codes are no values.
class SharedFp8Input {
 public:
  SharedFp8Input() noexcept;
  ~SharedFp8Input();
  SharedFp8Input(const SharedFp8Input&) = delete;
  SharedFp8Input& operator=(const SharedFp8Input&) = delete;

  struct Rounded;  // what the last call has made

 private:
  friend class detail::SharedFp8;
  std::unique_ptr<Rounded> rounded_;
  SharedFp8Input* around_;
};
// Whether 16 divides both, as these products need.
constexpr bool fits_fp8(std::int64_t in, std::int64_t out) { return in % 16 == 0 && out % 16 == 0; }

}  // namespace tessera
