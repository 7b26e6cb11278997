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

struct Drawn {
  std::int32_t token;
  float log_probability;
};

Drawn draw(std::span<const float> logits, const SampleOptions& options, double u) {
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto logit = [&](std::int32_t id) {
    return static_cast<double>(logits[static_cast<std::size_t>(id)]);
  };
  // The likeliest first; of equal ones the lower id, so that every rank has the same order.
  const auto is_likelier = [&](std::int32_t a, std::int32_t b) {
    return logit(a) > logit(b) || (logit(a) == logit(b) && a < b);
  };
  const std::int32_t best = *std::min_element(ids.begin(), ids.end(), is_likelier);
  const double temperature = options.temperature > 0 ? options.temperature : 1;
  const auto weight = [&](std::int32_t id) {
    return std::exp((logit(id) - logit(best)) / temperature);
  };
  const auto total_of = [&](std::span<const std::int32_t> some) {
    return std::accumulate(some.begin(), some.end(), 0.0,
                           [&](double sum, std::int32_t id) { return sum + weight(id); });
  };
  const double total = total_of(ids);
  const auto drawn = [&](std::int32_t id) {
    return Drawn{id, static_cast<float>((logit(id) - logit(best)) / temperature - std::log(total))};
  };
  if (options.temperature == 0) return drawn(best);

  if (options.top_k > 0 || options.top_p < 1) {
    const std::size_t k = options.top_k > 0
                              ? std::min(ids.size(), static_cast<std::size_t>(options.top_k))
                              : ids.size();
    std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(k), ids.end(),
                      is_likelier);
    ids.resize(k);
    const double wanted = options.top_p * total_of(ids);
    double sum = 0;
    std::size_t n = 0;
    while (n < k && sum < wanted) sum += weight(ids[n++]);
    if (options.top_p < 1) ids.resize(n);
  }
  double left = u * total_of(ids);
  for (const std::int32_t id : ids) {
    left -= weight(id);
    if (left < 0) return drawn(id);
  }
  return drawn(best);  // rounding left a rest
}

void check(const LanguageModel& model, std::span<const Prompt> prompts, std::int64_t count,
           const SampleOptions& options) {
  TESSERA_EXPECT(count >= 0 && options.temperature >= 0 && std::isfinite(options.temperature) &&
                     options.top_k >= 0,
                 "generate: ", count, " tokens at temperature ", options.temperature,
                 " among the top ", options.top_k, "; none may be negative or infinite");
  TESSERA_EXPECT(options.top_p > 0 && options.top_p <= 1, "generate: top_p is ", options.top_p,
                 ", expected more than 0 and at most 1");
  TESSERA_EXPECT(!prompts.empty(), "generate: no prompt is given; give at least one");
  for (const Prompt& prompt : prompts) {
    const auto length = static_cast<std::int64_t>(prompt.tokens.size());
    TESSERA_EXPECT(length > 0, "generate: the prompt is empty; give at least one token");
    TESSERA_EXPECT(length + std::max<std::int64_t>(count - 1, 0) <= model.max_seq_len(),
                   "generate: ", count, " tokens after a prompt of ", length,
                   " do not fit into max_seq_len, ", model.max_seq_len(), "; ask for fewer");
    for (const std::int32_t id : prompt.tokens)
      TESSERA_EXPECT(id >= 0 && id < model.vocab_size(), "generate: token ", id,
                     " of the prompt is outside the vocabulary of ", model.vocab_size(),
                     "; use the tokenizer of the model");
  }
}

// [B, T], shorter prompts with zeros behind.
Tensor padded(std::span<const Prompt> prompts, std::int64_t longest, const Device& device) {
  std::vector<std::int32_t> tokens;
  for (const Prompt& prompt : prompts) {
    tokens.insert(tokens.end(), prompt.tokens.begin(), prompt.tokens.end());
    tokens.resize(tokens.size() + static_cast<std::size_t>(longest) - prompt.tokens.size());
  }
  return Tensor::from(tokens, {static_cast<std::int64_t>(prompts.size()), longest}, device);
}

}  // namespace

std::vector<Continuation> generate(LanguageModel& model, std::span<const Prompt> prompts,
                                   std::int64_t count, const SampleOptions& options, Caller at) {
  const CallSite site("generate", at);
  check(model, prompts, count, options);
  const EvaluationGuard evaluation(model);
  const NoGradGuard no_grad;
  const Device device = model.parameters()[0].device().main();
  std::vector<std::int64_t> lengths;
  for (const Prompt& prompt : prompts)
    lengths.push_back(static_cast<std::int64_t>(prompt.tokens.size()));
  const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  KeyValueCache cache(lengths, longest + std::max<std::int64_t>(count - 1, 0));
  const auto next_logits = [&](const Tensor& tokens) {
    const auto step = [&] { return model.next_logits(tokens, cache); };
    return options.root ? options.root->call(step) : step();
  };

  const auto B = static_cast<std::int64_t>(prompts.size()), V = model.vocab_size();
  std::vector<Continuation> continuations(prompts.size());
  std::vector<char> has_ended(prompts.size());
  Tensor tokens = padded(prompts, longest, device);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::vector<float> logits = raw::cast(next_logits(tokens), f32).to_vector<float>();
    TESSERA_EXPECT(std::all_of(logits.begin(), logits.end(), [](float x) { return x - x == 0; }),
                   "generate: the logits are not finite after ", i,
                   " tokens; has the training diverged?");
    std::vector<std::int32_t> next(prompts.size());  // 0 where a sequence has ended
    bool going = false;
    for (std::size_t b = 0; b < prompts.size(); ++b) {
      if (has_ended[b]) continue;
      const std::uint64_t seed = fnv1a(options.seed, prompts[b].seed);
      const Drawn drawn = draw(
          std::span(logits).subspan(b * static_cast<std::size_t>(V), static_cast<std::size_t>(V)),
          options, uniform(seed, static_cast<std::uint64_t>(i)));
      next[b] = drawn.token;
      continuations[b].tokens.push_back(drawn.token);
      continuations[b].log_probabilities.push_back(drawn.log_probability);
      has_ended[b] =
          std::ranges::find(options.stop_tokens, drawn.token) != options.stop_tokens.end();
      going = going || !has_ended[b];
    }
    if (options.goes_on ? !options.goes_on(going) : !going) break;
    tokens = Tensor::from(next, {B, 1}, device);
  }
  return continuations;
}

std::vector<std::int32_t> generate(LanguageModel& model, std::span<const std::int32_t> prompt,
                                   std::int64_t count, const SampleOptions& options, Caller at) {
  const Prompt one{{prompt.begin(), prompt.end()}};
  return generate(model, std::span(&one, 1), count, options, at)[0].tokens;
}

}  // namespace tessera::nn
