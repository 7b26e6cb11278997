// Losses of classes, and what all losses have in common. Losses of elements stand in
// composed_losses.hpp. Names, options and values are PyTorch's. For inputs of 16 bits and f32 a
// loss is computed in f32 and is f32; for f64 it is f64. PyTorch's have the inputs' dtype. Inputs
// and targets have one shape, where PyTorch broadcasts with a warning.
//
// Throws, for all of them: ContractError for shapes, dtypes and options that do not fit.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

// How the elements' losses are reduced. Of no element the mean is NaN and the sum 0. batchmean is
// the sum over size(0), and kl_div's alone.
enum class LossReduction : std::uint8_t { none, mean, sum, batchmean };

// --- of classes ---
// logits [N, C], [N, C, ...] or [C], targets i32 or i64 [N], [N, ...] or [] -> []. Without
// reduction the result has the targets' shape. A target outside [0, C) makes its loss NaN, unless
// it is ignored. For probabilities as targets: kl_div(log_softmax(logits, 1), probabilities).

// A target of this value has neither loss nor gradient; options may name another value.
inline constexpr std::int32_t kIgnoredTarget = -100;

// -log softmax(logits)[target], in nats, in one kernel: the mean over the targets that are not
// kIgnoredTarget, for logits [N, C] only. Without any such target it is 0, and so is its gradient.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, Caller at = Caller::current());

struct ClassLossOptions {
  Tensor weight{};  // one for each class, [C] of the logits' dtype; without gradient
  std::int64_t ignore_index = kIgnoredTarget;  // targets without loss and gradient; fits 32 bits
  // The mean is over the weights of the targets that are not ignored.
  LossReduction reduction = LossReduction::mean;
  double label_smoothing = 0;  // 0 to 1: the part of each target that all classes share evenly
};
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const ClassLossOptions& options,
                     Caller at = Caller::current());
// -weight[target] log_probabilities[target], reduced as cross_entropy. label_smoothing is
// cross_entropy's alone.
Tensor nll_loss(const Tensor& log_probabilities, const Tensor& targets,
                const ClassLossOptions& options = {}, Caller at = Caller::current());

// How many targets are not ignored, on all ranks that average their gradients; see
// dist::count_targets.
struct TargetCount {
  Tensor all{};   // f32 [], exact below 2^24
  int ranks = 1;  // that have these targets
};

// How a loss behind a last product is computed, and over which targets it is the mean.
//
//   lean   three products and one again: logits are made in forward, and once more in backward
//   fast   three: forward makes the gradients, too, and backward hands them on. It keeps that of
//          the whole product in f32, 4 V C bytes, and of what it is given, 4 N C, from forward to
//          backward; or the logits, V N, of a weight that is there in several slices
//
// Fast needs the loss's own gradient beforehand, so it is never for a loss that a GradScaler
// scales.
struct LossOrder {
  std::optional<double> gradient{};  // set, as 1 or 1 / micro_batches: fast; unset: lean
  // The loss is the sum over the call's targets, divided by this count, times the ranks. So the
  // mean of all ranks' losses, and of their gradients, is the mean over all targets, even if ranks
  // ignore different numbers. Unset: the mean over the targets of the call.
  TargetCount count{};
};

// cross_entropy(linear(x, weight, bias), targets), for x [..., in] and targets [N], N rows of x. It
// never holds all logits: they are made for chunk_rows at a time, and once more in backward. Only
// the order of summing the gradients of weight and bias differs. If these are written in 16 bits,
// each chunk rounds.
//
// `order.gradient`: the gradient of the loss is known beforehand, as 1 or 1 / micro_batches. Then
// the logits are made only once: three products instead of four. Forward makes all gradients, for a
// loss of this gradient, in memory that the graph keeps: of x, weight and bias, whole, in f32 (f64
// for f64). Backward hands them on. If the loss has another gradient than was said, backward
// multiplies them first, which costs a pass over them and a rounding. It reads neither x nor
// weight, so these may have been written since. Without gradients enabled none is made. It is not
// for small f16 gradients, as those of a loss that a GradScaler scales. Throws: ContractError where
// it is 0 or not finite.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& bias,
                            const Tensor& targets, std::int64_t chunk_rows,
                            const LossOrder& order = {}, Caller at = Caller::current());
namespace detail {
// Throws: ContractError naming `function` for a gradient of its loss that is 0 or not finite.
void check_loss_gradient(const char* function, std::optional<double> gradient);
// [] of f32 or f64: how many of the contiguous targets are not kIgnoredTarget, or `least`.
Tensor count_targets(const Tensor& targets, std::int32_t least, DType dtype);
// cross_entropy's short form, over a count.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const TargetCount& count);
}  // namespace detail

}  // namespace tessera
