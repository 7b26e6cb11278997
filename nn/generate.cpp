#include "tessera/nn/generate.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tessera/autograd/ops.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::nn {
namespace {

// Evaluation mode for a scope.
class EvaluationGuard {
 public:
  explicit EvaluationGuard(Module& module) : module_(module), was_training_(module.is_training()) {
    module_.eval();
  }
  ~EvaluationGuard() {
    if (was_training_) module_.train();
  }
  EvaluationGuard(const EvaluationGuard&) = delete;
  EvaluationGuard& operator=(const EvaluationGuard&) = delete;

 private:
  Module& module_;
  bool was_training_;
};

// A uniform double in [0, 1) for the i-th token drawn.
double uniform(std::uint64_t seed, std::uint64_t i) {
  const auto words = philox(fnv1a(seed, fnv1a("generate")), i);
  const std::uint64_t bits = (std::uint64_t{words[0]} << 32 | words[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

std::int32_t draw(const std::vector<float>& logits, const SampleOptions& options, double u) {
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  // The likeliest first; of equal ones the lower id, so that every rank has the same order.
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
  });
  if (options.temperature == 0) return order[0];
  if (options.top_k > 0)
    order.resize(std::min(order.size(), static_cast<std::size_t>(options.top_k)));
  const double highest = static_cast<double>(logits[static_cast<std::size_t>(order[0])]);
  std::vector<double> weights;
  weights.reserve(order.size());
  double total = 0;
  for (const std::int32_t id : order) {
    const double logit = static_cast<double>(logits[static_cast<std::size_t>(id)]);
    weights.push_back(std::exp((logit - highest) / options.temperature));
    total += weights.back();
  }
  double left = u * total;
  for (std::size_t i = 0; i < order.size(); ++i) {
    left -= weights[i];
    if (left < 0) return order[i];
  }
  return order[0];  // rounding left a rest
}

}  // namespace

std::vector<std::int32_t> generate(LanguageModel& model, std::span<const std::int32_t> prompt,
                                   std::int64_t count, const SampleOptions& options) {
  TESSERA_EXPECT(!prompt.empty(), "generate: the prompt is empty; give at least one token");
  TESSERA_EXPECT(count >= 0 && options.temperature >= 0 && std::isfinite(options.temperature) &&
                     options.top_k >= 0,
                 "generate: ", count, " tokens at temperature ", options.temperature,
                 " among the top ", options.top_k, "; none may be negative or infinite");
  for (const std::int32_t id : prompt)
    TESSERA_EXPECT(id >= 0 && id < model.vocab_size(), "generate: token ", id,
                   " of the prompt is outside the vocabulary of ", model.vocab_size());
  const EvaluationGuard evaluation(model);
  const NoGradGuard no_grad;
  const Device device = model.parameters()[0].device().main();
  std::vector<std::int32_t> tokens(prompt.begin(), prompt.end());
  for (std::int64_t i = 0; i < count; ++i) {
    const auto length = static_cast<std::int64_t>(tokens.size());
    const std::int64_t T = std::min(length, model.max_seq_len());
    const std::span<const std::int32_t> recent(tokens.data() + (length - T),
                                               static_cast<std::size_t>(T));
    const Tensor logits_1TV = model(Tensor::from(recent, {1, T}, device));
    const Tensor last = raw::cast(raw::slice(logits_1TV, 1, T - 1, T), f32);
    const std::vector<float> logits = last.to_vector<float>();
    TESSERA_EXPECT(std::all_of(logits.begin(), logits.end(), [](float x) { return x - x == 0; }),
                   "generate: the logits are not finite after ", i,
                   " tokens; has the training diverged?");
    tokens.push_back(draw(logits, options, uniform(options.seed, static_cast<std::uint64_t>(i))));
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()), tokens.end()};
}

}  // namespace tessera::nn
