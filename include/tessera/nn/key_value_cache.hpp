// What a decoder keeps of the tokens that it has seen, so that it computes each of them once.
//
//   KeyValueCache cache({3, 5}, 8);                       // two sequences of 3 and 5 tokens
//   model.next_logits(prompts_BT, cache);                 // [2, 5], the shorter one padded behind
//   model.next_logits(tokens_B1, cache);                  // [2, 1], each behind its sequence
//
//   slots of row 0   p p p . . n n n      p prompt   n new   . padding, which no query reads
//   slots of row 1   p p p p p n n n      positions of n: 3, 4, 5 in row 0, and 5, 6, 7 in row 1
//
// Layers find the cache of the call that runs on their thread; nn::generate is a loop around it.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "tessera/tensor/tensor.hpp"

namespace tessera::nn {

class Module;

class KeyValueCache {
 public:
  // For sequences that begin with so many tokens each, and have at most `capacity` slots: those of
  // the longest beginning, and one for each further call. Keys and values of all slots are
  // allocated when a layer first has some. Throws: ContractError for no sequence, an empty one, and
  // a capacity below the longest.
  KeyValueCache(std::vector<std::int64_t> lengths, std::int64_t capacity);

  // A call of the model runs in this scope: the first has all beginnings, [B, T] with T the
  // longest, and each further one a token of each row, [B, 1]. Its end, but by an exception, moves
  // the slots on. Throws: ContractError for other shapes, for a full cache, and where gradients are
  // enabled.
  class Call {
   public:
    Call(KeyValueCache& cache, const Tensor& tokens_BT);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // Rows of x_BTC that belong to the last token of each sequence -> [B, C].
    Tensor last(const Tensor& x_BTC) const;

   private:
    KeyValueCache& cache_;
    KeyValueCache* around_;
    std::int64_t count_;
    int exceptions_;
  };

  // That of the call that runs on this thread; null without one.
  static KeyValueCache* current() noexcept;
  // i32 [B]: at which position each row's token lies; undefined in the first call, where they count
  // from 0.
  const Tensor& positions() const noexcept { return positions_; }
  // How many tokens the longest sequence has with the next call, or with the one that runs.
  std::int64_t end() const noexcept;
  // causal_attention of `layer`'s queries over what its keys and values were and are: q [B, T, H,
  // D], k and v [B, T, K, D], rotated -> [B, T, H, D].
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
