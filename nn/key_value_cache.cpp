#include "tessera/nn/key_value_cache.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "tessera/autograd/attention.hpp"
#include "tessera/autograd/node.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::nn {
namespace {
thread_local KeyValueCache* of_this_thread = nullptr;
}

KeyValueCache::KeyValueCache(std::vector<std::int64_t> lengths, std::int64_t capacity)
    : lengths_(std::move(lengths)),
      capacity_(capacity),
      longest_(lengths_.empty() ? 0 : *std::max_element(lengths_.begin(), lengths_.end())) {
  TESSERA_EXPECT(!lengths_.empty() && *std::min_element(lengths_.begin(), lengths_.end()) > 0,
                 "KeyValueCache: expected at least one sequence, and a token in each");
  TESSERA_EXPECT(capacity_ >= longest_, "KeyValueCache: the capacity is ", capacity_,
                 " slots, the longest sequence has ", longest_, " tokens; give a slot for each");
}

KeyValueCache* KeyValueCache::current() noexcept { return of_this_thread; }

std::int64_t KeyValueCache::end() const noexcept { return filled_ == 0 ? longest_ : filled_ + 1; }

KeyValueCache::Call::Call(KeyValueCache& cache, const Tensor& tokens_BT)
    : cache_(cache),
      around_(of_this_thread),
      count_(cache.filled_ == 0 ? cache.longest_ : 1),
      exceptions_(std::uncaught_exceptions()) {
  const auto rows = static_cast<std::int64_t>(cache.lengths_.size());
  TESSERA_EXPECT(
      !autograd::grad_enabled(),
      "KeyValueCache: a call with a cache can't record gradients; put a NoGradGuard around it");
  TESSERA_EXPECT(tokens_BT.shape() == Shape({rows, count_}), "KeyValueCache: tokens are ",
                 tokens_BT.shape(), "; expected ", Shape({rows, count_}),
                 cache.filled_ == 0 ? ", the first tokens of all sequences"
                                    : ", the next token of each sequence");
  TESSERA_EXPECT(cache.filled_ + count_ <= cache.capacity_, "KeyValueCache: all ", cache.capacity_,
                 " slots are taken; make it with a larger capacity");
  if (cache.filled_ > 0) {
    const std::int64_t behind = cache.filled_ - cache.longest_;
    std::vector<std::int32_t> at;
    for (const std::int64_t length : cache.lengths_)
      at.push_back(static_cast<std::int32_t>(length + behind));
    cache.positions_ = Tensor::from(at, {rows}, tokens_BT.device());
  }
  of_this_thread = &cache;
}

KeyValueCache::Call::~Call() {
  of_this_thread = around_;
  if (std::uncaught_exceptions() == exceptions_) cache_.filled_ += count_;
}

Tensor KeyValueCache::Call::last(const Tensor& x_BTC) const {
  const std::int64_t B = x_BTC.size(0), T = x_BTC.size(1), C = x_BTC.size(2);
  const Tensor rows = raw::reshape(x_BTC, {B * T, C});
  if (T == 1) return rows;
  std::vector<std::int32_t> last;
  for (std::int64_t b = 0; b < B; ++b)
    last.push_back(
        static_cast<std::int32_t>(b * T + cache_.lengths_[static_cast<std::size_t>(b)] - 1));
  return raw::index_select(rows, 0, Tensor::from(last, {B}, x_BTC.device()));
}

Tensor KeyValueCache::attend(const Module& layer, const Tensor& q, const Tensor& k,
                             const Tensor& v) {
  const std::int64_t B = k.size(0), T = k.size(1);
  TESSERA_EXPECT(B == static_cast<std::int64_t>(lengths_.size()) && filled_ + T == end(),
                 "KeyValueCache: keys are of ", B, " sequences and ", T,
                 " tokens, and the call has been made for ", lengths_.size(), " and ",
                 end() - filled_, "; give the model the tokens of the call");
  Layer& kept = layers_[&layer];
  if (!kept.keys.defined()) {
    const Shape shape{B, capacity_, k.size(2), k.size(3)};
    kept = {Tensor::empty(shape, k.dtype(), k.device()),
            Tensor::empty(shape, v.dtype(), v.device())};
  }
  const std::int64_t end = filled_ + T;
  raw::copy_into(raw::slice(kept.keys, 1, filled_, end), k);
  raw::copy_into(raw::slice(kept.values, 1, filled_, end), v);
  if (filled_ == 0) return causal_attention(q, k, v);

  const bool is_padded = std::any_of(lengths_.begin(), lengths_.end(),
                                     [&](std::int64_t length) { return length < longest_; });
  if (is_padded && !mask_.defined()) {
    std::vector<std::byte> takes_part;
    for (const std::int64_t length : lengths_)
      for (std::int64_t slot = 0; slot < capacity_; ++slot)
        takes_part.push_back(std::byte{slot < length || slot >= longest_});
    mask_ = Tensor::from_bytes(takes_part, {B, 1, 1, capacity_}, DType::boolean, k.device());
  }
  const auto heads_first = [](const Tensor& x) { return raw::transpose(x, 1, 2); };
  const Tensor out =
      scaled_dot_product_attention(heads_first(q), heads_first(raw::slice(kept.keys, 1, 0, end)),
                                   heads_first(raw::slice(kept.values, 1, 0, end)),
                                   {.mask = is_padded ? raw::slice(mask_, 3, 0, end) : Tensor()});
  return heads_first(out);
}

}  // namespace tessera::nn
