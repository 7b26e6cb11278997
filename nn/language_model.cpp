#include "tessera/nn/language_model.hpp"

#include <algorithm>

#include "tessera/autograd/ops.hpp"

namespace tessera::nn {
namespace {

void check_tokens(const Tensor& tokens, std::int64_t max_seq_len) {
  TESSERA_EXPECT(tokens.ndim() == 2 && (tokens.dtype() == i32 || tokens.dtype() == i64),
                 "language model: tokens are ", tokens.shape(), " of ", tokens.dtype(),
                 "; expected [B, T] of i32 or i64");
  TESSERA_EXPECT(tokens.size(1) <= max_seq_len, "language model: sequences of ", tokens.size(1),
                 " tokens; max_seq_len is ", max_seq_len);
}

}  // namespace

LanguageModel::LanguageModel(std::int64_t vocab_size, std::int64_t max_seq_len, std::int64_t blocks,
                             const Recompute& recompute)
    : vocab_size_(vocab_size), max_seq_len_(max_seq_len), recompute_(recompute) {
  TESSERA_EXPECT(recompute.every > 0 || recompute == Recompute::none,
                 "language model: recompute.every is ", recompute.every,
                 "; 1 recomputes each block, 0 none, of which nothing can be kept");
  TESSERA_EXPECT(recompute.every <= std::max<std::int64_t>(blocks, 0),
                 "language model: recompute.every is ", recompute.every, ", of ", blocks,
                 " blocks; choose at most that many, or Recompute::none");
}

Tensor LanguageModel::operator()(const Tensor& tokens_BT, Caller at) {
  const CallSite site(at);
  check_tokens(tokens_BT, max_seq_len_);
  return call([&](const Tensor& tokens) { return output()(forward(tokens)); }, tokens_BT);
}

Tensor LanguageModel::loss(const Tensor& tokens_BT, const Tensor& targets_BT,
                           const LossOrder& order, Caller at) {
  const CallSite site(at);
  check_tokens(tokens_BT, max_seq_len_);
  TESSERA_EXPECT(targets_BT.shape() == tokens_BT.shape(), "loss: tokens are ", tokens_BT.shape(),
                 ", targets ", targets_BT.shape(), "; expected one shape");
  detail::check_loss_gradient("loss", order.gradient);
  const auto loss_of = [&](const Tensor& in_BT, const Tensor& wanted_BT) {
    const std::int64_t rows = in_BT.numel();
    const bool is_on_gpu = in_BT.device().kind() == DeviceKind::cuda;
    const std::int64_t chunk =
        loss_chunk_.value_or(order.gradient && is_on_gpu ? kFastLossChunk : kLossChunk);
    const Tensor h_BTC = forward(in_BT), targets = raw::reshape(wanted_BT, {rows});
    if (rows * vocab_size_ > chunk || output().weight.slices() > 1)
      return output().cross_entropy(h_BTC, targets, chunk, order.gradient);
    return cross_entropy(reshape(output()(h_BTC), {rows, vocab_size_}), targets);
  };
  return call(loss_of, tokens_BT, targets_BT);
}

}  // namespace tessera::nn
