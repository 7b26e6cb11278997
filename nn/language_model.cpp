#include "tessera/nn/language_model.hpp"

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

Tensor LanguageModel::operator()(const Tensor& tokens_BT) {
  check_tokens(tokens_BT, max_seq_len_);
  return call([&] { return forward(tokens_BT); });
}

Tensor LanguageModel::loss(const Tensor& tokens_BT, const Tensor& targets_BT) {
  check_tokens(tokens_BT, max_seq_len_);
  TESSERA_EXPECT(targets_BT.shape() == tokens_BT.shape(), "loss: tokens are ", tokens_BT.shape(),
                 ", targets ", targets_BT.shape(), "; expected one shape");
  return call([&] {
    return cross_entropy(reshape(forward(tokens_BT), {tokens_BT.numel(), vocab_size_}),
                         raw::reshape(targets_BT, {tokens_BT.numel()}));
  });
}

bool LanguageModel::saves_transposed(std::string_view) const { return false; }

}  // namespace tessera::nn
