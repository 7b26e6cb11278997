// What Llama and GPT-2 have in common: logits, loss, and the parts that a program shards one by
// one.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/key_value_cache.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/nn/module_list.hpp"
#include "tessera/nn/product.hpp"

namespace tessera::nn {

// Which blocks backward computes once more from their input; of the others it keeps everything.
struct Recompute {
  std::int64_t every = 0;  // the last of every `every` blocks runs again; 1: each, 0: none
  Keep keep{};             // what these blocks keep besides their input
  bool operator==(const Recompute&) const = default;

  static const Recompute none, blocks;
};
inline constexpr Recompute Recompute::none{}, Recompute::blocks{.every = 1};

using tessera::LossOrder;  // for more logits than the loss holds at a time

// The most logits that the loss holds at a time; a fast loss on a GPU holds kFastLossChunk. A chunk
// reads and writes the head's f32 gradient once: 8 bytes a weight, for 2 flops a weight and row.
// 2^27 logits are 1,024 rows of Llama 3's vocabulary (128,256), so a chunk computes 256 flops a
// byte. An H200 needs 206 to be busy (989 Tflop/s over 4.8 TB/s, NVIDIA's data sheet).
inline constexpr std::int64_t kLossChunk = std::int64_t{1} << 27;
// The same for a fast loss on a GPU, where that traffic counts for more: 4,096 rows, and 1 GiB in
// 16 bits.
inline constexpr std::int64_t kFastLossChunk = std::int64_t{1} << 29;

class LanguageModel : public Module {
 public:
  // tokens [B, T], i32 or i64 in [0, vocab_size), T at most max_seq_len -> logits [B, T, V] of the
  // weights' dtype.
  Tensor operator()(const Tensor& tokens_BT, Caller at = Caller::current()) {
    const CallSite site(at);
    check_tokens(tokens_BT);
    return call([&](const Tensor& tokens) { return output()(forward(tokens)); }, tokens_BT);
  }
  // The mean cross-entropy over the targets [B, T] that are not kIgnoredTarget, -100, in nats: f32
  // []. Without any such target it is 0. Ranks or micro-batches may ignore different numbers of
  // targets; the mean of their means is then not the mean of all targets. To get that, count first.
  // The count is the whole step's, so losses of micro-batches are added up, not averaged.
  //
  //   model.loss(tokens, targets, {.gradient = 1.0 / k}) / k      fast, of k micro-batches
  //   model.loss(tokens, targets, {.count = dist::count_targets(targets, world)})
  //
  // Throws: ContractError for other shapes, and for a gradient that is 0 or not finite.
  Tensor loss(const Tensor& tokens_BT, const Tensor& targets_BT, const LossOrder& order = {},
              Caller at = Caller::current()) {
    const CallSite site(at);
    check_tokens(tokens_BT);
    TESSERA_EXPECT(targets_BT.shape() == tokens_BT.shape(), "loss: tokens are ", tokens_BT.shape(),
                   ", targets ", targets_BT.shape(), "; expected one shape");
    detail::check_loss_gradient("loss", order.gradient);
    const auto loss_of = [&](const Tensor& in_BT, const Tensor& wanted_BT) {
      const std::int64_t rows = in_BT.numel();
      const bool is_on_gpu = in_BT.device().kind() == DeviceKind::cuda;
      const std::int64_t chunk =
          loss_chunk_.value_or(order.gradient && is_on_gpu ? kFastLossChunk : kLossChunk);
      const Tensor h_BTC = forward(in_BT), targets = raw::reshape(wanted_BT, {rows});
      if (rows * vocab_size_ > chunk || output().weight().slices() > 1)
        return output().cross_entropy(h_BTC, targets, chunk, order);
      const Tensor logits = reshape(output()(h_BTC), {rows, vocab_size_});
      return detail::cross_entropy(logits, targets, order.count);
    };
    return call(loss_of, tokens_BT, targets_BT);
  }

  // hidden: what logits are made of, [B, T, C], for a head of one's own. logits: the logits of such
  // a tensor, [.., C] -> [.., V]. Each is a call of the model.
  Tensor hidden(const Tensor& tokens_BT, Caller at = Caller::current()) {
    const CallSite site(at);
    check_tokens(tokens_BT);
    return call([&](const Tensor& tokens) { return forward(tokens); }, tokens_BT);
  }
  Tensor logits(const Tensor& hidden, Caller at = Caller::current()) {
    const CallSite site(at);
    return call([&](const Tensor& h) { return output()(h); }, hidden);
  }
  // The logits of each sequence's last token, [B, V]; `cache` has the tokens before, see there.
  // Throws: ContractError as KeyValueCache::Call, and for a position beyond max_seq_len.
  Tensor next_logits(const Tensor& tokens_BT, KeyValueCache& cache, Caller at = Caller::current()) {
    const CallSite site(at);
    check_tokens(tokens_BT);
    TESSERA_EXPECT(cache.end() <= max_seq_len_, "language model: the sequence has ", cache.end(),
                   " tokens, max_seq_len is ", max_seq_len_,
                   "; shorten the one or raise the other");
    const KeyValueCache::Call step(cache, tokens_BT);
    return call([&](const Tensor& tokens) { return output()(step.last(forward(tokens))); },
                tokens_BT);
  }

  // The modules that make good units of their own, in the order in which forward uses them:
  // embedding, blocks, head. If embedding and head share their weight, they are left out, and the
  // weight belongs to the whole model's unit.
  virtual std::vector<Module*> parts() = 0;

  // Sets the most logits, in elements, that the loss holds at a time; at least a row is held.
  void set_loss_chunk(std::int64_t elements) noexcept { loss_chunk_ = elements; }
  std::int64_t vocab_size() const noexcept { return vocab_size_; }
  std::int64_t max_seq_len() const noexcept { return max_seq_len_; }

 protected:
  // Throws: ContractError where recompute.every is negative, more than the model's blocks, or 0
  // while something is to be kept.
  LanguageModel(std::int64_t vocab_size, std::int64_t max_seq_len, std::int64_t blocks,
                const Recompute& recompute)
      : vocab_size_(vocab_size), max_seq_len_(max_seq_len), recompute_(recompute) {
    TESSERA_EXPECT(recompute.every > 0 || recompute == Recompute::none,
                   "language model: recompute.every is ", recompute.every,
                   "; give 1 to recompute each block, or Recompute::none");
    TESSERA_EXPECT(recompute.every <= std::max<std::int64_t>(blocks, 0),
                   "language model: recompute.every is ", recompute.every, ", the model has ",
                   blocks, " blocks; choose at most that many, or Recompute::none");
  }

  // What `output` makes logits of, [B, T, C]; called within the scope of the model's call.
  virtual Tensor forward(const Tensor& tokens_BT) = 0;
  virtual Product& output() = 0;
  // Runs the blocks one after the other, as `recompute` says.
  template <class Block>
  Tensor run(ModuleList<Block>& blocks, Tensor x) const {
    std::int64_t number = 0;
    for (Block& block : blocks) {
      const BlockCall call{&block,
                           [](Module& b, const Tensor& in) { return static_cast<Block&>(b)(in); }};
      const bool runs_again = recompute_.every > 0 && ++number % recompute_.every == 0;
      x = runs_again ? recompute(call, x, recompute_.keep) : call(x);
    }
    return x;
  }

 private:
  // The call of a block, without its type, so that the code that recomputes it is compiled once.
  struct BlockCall {
    Module* block;
    Tensor (*run)(Module& block, const Tensor& x);
    Tensor operator()(const Tensor& x) const { return run(*block, x); }
  };
  void check_tokens(const Tensor& tokens) const {
    TESSERA_EXPECT(tokens.ndim() == 2 && (tokens.dtype() == i32 || tokens.dtype() == i64),
                   "language model: tokens are ", tokens.shape(), " of ", tokens.dtype(),
                   "; expected [B, T] of i32 or i64");
    TESSERA_EXPECT(tokens.size(1) <= max_seq_len_, "language model: the sequences have ",
                   tokens.size(1), " tokens, max_seq_len is ", max_seq_len_,
                   "; shorten the one or raise the other");
  }

  std::int64_t vocab_size_, max_seq_len_;
  Recompute recompute_;
  std::optional<std::int64_t> loss_chunk_{};
};

}  // namespace tessera::nn
