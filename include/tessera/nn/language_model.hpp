// What Llama and GPT-2 have in common: logits, loss, and the parts that a program shards one by
// one.
#pragma once

#include <optional>
#include <vector>

#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/nn/module_list.hpp"

namespace tessera::nn {

// Of which blocks backward has everything, and which it computes once more from their input.
struct Recompute {
  std::int64_t every = 0;  // the last of every so many blocks runs again; 1: each, 0: none
  Keep keep{};             // what of those is kept besides their input
  bool operator==(const Recompute&) const = default;

  static const Recompute none, blocks;
};
inline constexpr Recompute Recompute::none{}, Recompute::blocks{.every = 1};

// How a model's last product and its loss are computed, where there are more logits than the loss
// holds at a time.
//
//   lean   three products and one again: logits are made in forward, and once more in backward
//   fast   three: forward makes the gradients, too, and backward hands them on. It keeps that of
//          the whole head in f32, 4 V C bytes, and of what it is given, 4 B T C, from forward to
//          backward; or the logits, V B T, of a head that is there in several slices
//
// Fast is for who knows the loss's own gradient, and so never for a loss that a GradScaler scales.
struct LossOrder {
  std::optional<double> gradient{};  // 1 / micro_batches, or 1; unset: lean
};

// The most logits that the loss holds at a time, but for more on a GPU where it is fast. A chunk
// reads and writes the head's f32 gradient once: 8 bytes a weight, for 2 flops a weight and row.
// 2^27 logits are 1,024 rows of Llama 3's vocabulary (128,256), so a chunk computes 256 flops a
// byte. An H200 needs 206 to be busy (989 Tflop/s over 4.8 TB/s, NVIDIA's data sheet).
inline constexpr std::int64_t kLossChunk = std::int64_t{1} << 27;
// Of a fast one on a GPU, where that traffic counts for more: 4,096 rows, and 1 GiB in 16 bits.
inline constexpr std::int64_t kFastLossChunk = std::int64_t{1} << 29;

class LanguageModel : public Module {
 public:
  // tokens [B, T], i32 or i64 in [0, vocab_size), T at most max_seq_len -> logits [B, T, V] of the
  // weights' dtype.
  Tensor operator()(const Tensor& tokens_BT, Caller at = Caller::current());
  // The mean over B T of the cross-entropy with targets [B, T], in nats: f32 [].
  //
  //   model.loss(tokens, targets, {.gradient = 1.0 / k}) / k      fast, of k micro-batches
  //
  // Throws: ContractError for other shapes, and for a gradient that is 0 or not finite.
  Tensor loss(const Tensor& tokens_BT, const Tensor& targets_BT, const LossOrder& order = {},
              Caller at = Caller::current());

  // The modules that make good units of their own, in the order in which forward uses them:
  // embedding, blocks, head; without embedding and head when these share their weight, which then
  // belongs to the whole model's unit.
  virtual std::vector<Module*> parts() = 0;

  // Elements of the logits that the loss makes at a time at most; but at least a row.
  void set_loss_chunk(std::int64_t elements) noexcept { loss_chunk_ = elements; }
  std::int64_t vocab_size() const noexcept { return vocab_size_; }
  std::int64_t max_seq_len() const noexcept { return max_seq_len_; }

 protected:
  // Throws: ContractError where recompute.every is negative, more than the model's blocks, or 0
  // while something is to be kept.
  LanguageModel(std::int64_t vocab_size, std::int64_t max_seq_len, std::int64_t blocks,
                const Recompute& recompute);

  // What `output` makes logits of: [B, T, C], within the scope of the model's call.
  virtual Tensor forward(const Tensor& tokens_BT) = 0;
  virtual Linear& output() = 0;
  // The blocks one after the other, as `recompute` says.
  template <class Block>
  Tensor run(ModuleList<Block>& blocks, Tensor x) const {
    std::int64_t number = 0;
    for (Block& block : blocks) {
      const bool runs_again = recompute_.every > 0 && ++number % recompute_.every == 0;
      x = runs_again
              ? recompute([&block](const Tensor& in) { return block(in); }, x, recompute_.keep)
              : block(x);
    }
    return x;
  }

 private:
  std::int64_t vocab_size_, max_seq_len_;
  Recompute recompute_;
  std::optional<std::int64_t> loss_chunk_{};
};

}  // namespace tessera::nn
