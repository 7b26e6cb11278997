// The keys and values of the tokens that a decoder has seen, so that it computes each of them once.
//
//   KeyValueCache cache({3, 5}, 8);                       // two sequences of 3 and 5 tokens
//   model.next_logits(prompts_BT, cache);                 // [2, 5], the shorter one padded behind
//   model.next_logits(tokens_B1, cache);                  // [2, 1], each behind its sequence
//
//   slots of row 0   p p p . . n n n      p prompt   n new   . padding, which no query reads
//   slots of row 1   p p p p p n n n      positions of n: 3, 4, 5 in row 0, and 5, 6, 7 in row 1
//
// Layers find the cache of the call that runs on their thread. nn::generate is a loop around such
// calls.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "tessera/tensor/tensor.hpp"

namespace tessera::nn {

class Module;

class KeyValueCache {
 public:
  // For sequences that begin with `lengths` tokens. Each gets `capacity` slots: as many as the
  // longest beginning, and one for each further call. Keys and values of all slots are allocated
  // when a layer first has some. Throws: ContractError for no sequence, an empty one, and a
  // capacity below the longest.
  KeyValueCache(std::vector<std::int64_t> lengths, std::int64_t capacity);

  // The scope of one call of the model. The first call has all beginnings, [B, T] with T the
  // longest. Each further call has one token of each row, [B, 1]. The end of the scope moves the
  // slots on, except by an exception. Throws: ContractError for other shapes, for a full cache, and
  // if gradients are enabled.
  class Call {
   public:
    Call(KeyValueCache& cache, const Tensor& tokens_BT);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // The rows of x_BTC that belong to the last token of each sequence: [B, C].
    Tensor last(const Tensor& x_BTC) const;

   private:
    KeyValueCache& cache_;
    KeyValueCache* around_;
    std::int64_t count_;
    int exceptions_;
  };

  // The cache of the call that runs on this thread; null without one.
  static KeyValueCache* current() noexcept;
  // The position of each row's token, i32 [B]. Undefined in the first call, where positions count
  // from 0.
  const Tensor& positions() const noexcept { return positions_; }
  // Tokens of the longest sequence, those of the next call, or of the one that runs, included.
  std::int64_t end() const noexcept;
  // Attends causally, by the queries of `layer`, to its keys and values of all calls so far:
  // q [B, T, H, D], k and v [B, T, K, D], rotated -> [B, T, H, D].
  Tensor attend(const Module& layer, const Tensor& q, const Tensor& k, const Tensor& v);

 private:
  struct Layer {
    Tensor keys{}, values{};  // [B, capacity, K, D]
  };
  std::vector<std::int64_t> lengths_;
  std::int64_t capacity_, longest_, filled_ = 0;
  std::map<const Module*, Layer> layers_{};
  Tensor positions_{};
  Tensor mask_{};  // boolean [B, 1, 1, capacity]: no padding; undefined where there is none
};

}  // namespace tessera::nn
