// Losses, with PyTorch's names, options and values. They are f32 for inputs of 16 bits and f32,
// which are computed in f32, and f64 for f64; PyTorch's have the inputs' dtype. Inputs and targets
// have one shape, where PyTorch broadcasts with a warning.
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
// shape without reduction. A target outside [0, C) makes its loss NaN. For probabilities as
// targets: kl_div(log_softmax(logits, 1), probabilities).

// The mean over rows of -log softmax(logits)[target], in nats, in one kernel: logits [N, C] only,
// and no target is ignored.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, Caller at = Caller::current());

struct ClassLossOptions {
  Tensor weight{};                   // of each class, [C] of the logits' dtype; without gradient
  std::int64_t ignore_index = -100;  // targets without loss and gradient; fits 32 bits
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

// cross_entropy(linear(x, weight, bias), targets) of x [..., in] and targets [N], N rows of x,
// without all logits: they are made for chunk_rows at a time, and once more in backward. Its values
// are the same but for the order in which the gradients of weight and bias are summed;
// where these are written in 16 bits, each chunk rounds. It has no options: no target is ignored.
//
// `gradient`: that of the loss is known beforehand, as 1 or 1 / micro_batches, and the logits are
// made only once, three products in place of four. Forward makes all gradients, for a loss of this
// gradient, in memory that the graph keeps: of x, weight and bias, whole, in f32 (f64 for f64).
// Backward hands them on; where the loss has another gradient than was said, it multiplies them
// first, which costs a pass over them and a rounding; it reads neither x nor weight, so that these
// may have been written since. Where no gradient is recorded, none is made.
// Not for small f16 gradients, as of a loss that a GradScaler scales.  Throws: ContractError where
// it is 0 or not finite.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& bias,
                            const Tensor& targets, std::int64_t chunk_rows,
                            std::optional<double> gradient = {}, Caller at = Caller::current());
namespace detail {
// Throws: ContractError naming `function` for a gradient of its loss that is 0 or not finite.
void check_loss_gradient(const char* function, std::optional<double> gradient);
}  // namespace detail

// --- of differences d = x - target, with gradients for both ---
struct LossOptions {
  LossReduction reduction = LossReduction::mean;
};
Tensor mse_loss(const Tensor& x, const Tensor& target, const LossOptions& options = {},
                Caller at = Caller::current());  // d^2
Tensor l1_loss(const Tensor& x, const Tensor& target, const LossOptions& options = {},
               Caller at = Caller::current());  // |d|
// d^2 / 2 where |d| < delta, else delta (|d| - delta / 2).  Requires: delta > 0.
struct HuberOptions {
  double delta = 1;
  LossReduction reduction = LossReduction::mean;
};
Tensor huber_loss(const Tensor& x, const Tensor& target, const HuberOptions& options = {},
                  Caller at = Caller::current());
// huber_loss over delta: d^2 / (2 beta) where |d| < beta, else |d| - beta / 2; l1_loss for beta 0.
struct SmoothL1Options {
  double beta = 1;
  LossReduction reduction = LossReduction::mean;
};
Tensor smooth_l1_loss(const Tensor& x, const Tensor& target, const SmoothL1Options& options = {},
                      Caller at = Caller::current());

// --- of probabilities, with gradients for both ---
// weight and pos_weight broadcast to x, have its dtype and get no gradient.
struct BinaryCrossEntropyOptions {
  Tensor weight{};      // of each element's loss
  Tensor pos_weight{};  // of the term of the positive class; with logits only
  LossReduction reduction = LossReduction::mean;
};
// -weight (t log x + (1 - t) log(1 - x)), logarithms cut off at -100; NaN for x outside [0, 1],
// where PyTorch throws.
Tensor binary_cross_entropy(const Tensor& x, const Tensor& target,
                            const BinaryCrossEntropyOptions& options = {},
                            Caller at = Caller::current());
// -weight (pos_weight t log p + (1 - t) log(1 - p)) of p = sigmoid(x), without overflow.
Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& target,
                                        const BinaryCrossEntropyOptions& options = {},
                                        Caller at = Caller::current());
// target (log target - x), 0 where target is 0; of x = log p, Kullback and Leibler's divergence of
// p from the target. With log_target the target is a logarithm, too.
struct KlDivOptions {
  LossReduction reduction = LossReduction::mean;  // over all elements; batchmean is the divergence
  bool log_target = false;
};
Tensor kl_div(const Tensor& x, const Tensor& target, const KlDivOptions& options = {},
              Caller at = Caller::current());

}  // namespace tessera
