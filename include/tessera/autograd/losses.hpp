// Losses of classes, and what all losses have in common; those of elements stand in
// composed_losses.hpp. With PyTorch's names, options and values. They are f32 for inputs of 16 bits
// and f32, which are computed in f32, and f64 for f64; PyTorch's have the inputs' dtype. Inputs and
// targets have one shape, where PyTorch broadcasts with a warning.
//
// Throws, all of them: ContractError for shapes, dtypes and options that do not fit.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

// What becomes of the elements' losses. Of no element the mean is NaN and the sum 0. batchmean, the
// sum over size(0), is kl_div's alone.
enum class LossReduction : std::uint8_t { none, mean, sum, batchmean };

// --- of classes ---
// logits [N, C], [N, C, ...] or [C], targets i32 or i64 [N], [N, ...] or [] -> [], or the targets'
// shape without reduction. A target outside [0, C) makes its loss NaN, but for one that is ignored.
// For probabilities as targets: kl_div(log_softmax(logits, 1), probabilities).

// What a target is that has neither loss nor gradient, unless options say so.
inline constexpr std::int32_t kIgnoredTarget = -100;

// The mean over the targets that are not kIgnoredTarget of -log softmax(logits)[target], in nats,
// in one kernel: logits [N, C] only. Without such a target it is 0, and so is its gradient.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, Caller at = Caller::current());

struct ClassLossOptions {
  Tensor weight{};  // of each class, [C] of the logits' dtype; without gradient
  std::int64_t ignore_index = kIgnoredTarget;  // targets without loss and gradient; fits 32 bits
  // The mean is over the weights of the targets that are not ignored.
  LossReduction reduction = LossReduction::mean;
  double label_smoothing = 0;  // 0 to 1: this part of each target is spread evenly over all classes
};
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const ClassLossOptions& options,
                     Caller at = Caller::current());
// The same of logarithms of probabilities: -weight[target] log_probabilities[target].
// label_smoothing is cross_entropy's alone.
Tensor nll_loss(const Tensor& log_probabilities, const Tensor& targets,
                const ClassLossOptions& options = {}, Caller at = Caller::current());

// How many targets are not ignored on all ranks that average their gradients: dist::count_targets.
struct TargetCount {
  Tensor all{};   // f32 [], exact below 2^24
  int ranks = 1;  // that have them
};

// How the loss behind a last product is computed, and over what it is the mean.
//
//   lean   three products and one again: logits are made in forward, and once more in backward
//   fast   three: forward makes the gradients, too, and backward hands them on. It keeps that of
//          the whole product in f32, 4 V C bytes, and of what it is given, 4 N C, from forward to
//          backward; or the logits, V N, of a weight that is there in several slices
//
// Fast is for who knows the loss's own gradient, and so never for a loss that a GradScaler scales.
struct LossOrder {
  std::optional<double> gradient{};  // 1 / micro_batches, or 1; unset: lean
  // The loss is the mean over these, times the ranks: the mean of all ranks' losses, and of their
  // gradients, is then that of all targets, also where ranks ignore unlike many. Unset: the mean
  // over the targets of the call.
  TargetCount count{};
};

// cross_entropy(linear(x, weight, bias), targets) of x [..., in] and targets [N], N rows of x,
// without all logits: they are made for chunk_rows at a time, and once more in backward. Its values
// are the same but for the order in which the gradients of weight and bias are summed;
// where these are written in 16 bits, each chunk rounds.
//
// `order.gradient`: that of the loss is known beforehand, as 1 or 1 / micro_batches, and the logits
// are made only once, three products in place of four. Forward makes all gradients, for a loss of
// this gradient, in memory that the graph keeps: of x, weight and bias, whole, in f32 (f64 for
// f64). Backward hands them on; where the loss has another gradient than was said, it multiplies
// them first, which costs a pass over them and a rounding; it reads neither x nor weight, so that
// these may have been written since. Where no gradient is recorded, none is made.
// Not for small f16 gradients, as of a loss that a GradScaler scales.  Throws: ContractError where
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
