#include "tessera/nn/generate.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "tessera/autograd/ops.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::nn {
namespace {

// Evaluation mode for a scope. Behind it each module is in the mode that it was in.
class EvaluationGuard {
 public:
  explicit EvaluationGuard(Module& module) {
    for (const auto& [name, each] : module.named_modules())
      before_.emplace_back(each, each->is_training());
    module.eval();
  }
  ~EvaluationGuard() {  // parents first: a module's mode is given to all below it
    for (const auto& [module, was_training] : before_)
      was_training ? module->train() : module->eval();
  }
  EvaluationGuard(const EvaluationGuard&) = delete;
  EvaluationGuard& operator=(const EvaluationGuard&) = delete;

 private:
  std::vector<std::pair<Module*, bool>> before_;
};

std::uint64_t random_word(std::uint64_t key, std::uint64_t counter) {
  const auto words = philox(key, counter);
  return std::uint64_t{words[0]} << 32 | words[1];
}
// Each pair of seeds has draws of its own.
std::uint64_t stream_of(std::uint64_t seed, std::uint64_t of_prompt) {
  return random_word(fnv1a(seed, fnv1a("generate")), of_prompt);
}
// A uniform double in [0, 1) for the i-th token drawn.
double uniform(std::uint64_t stream, std::uint64_t i) {
  return static_cast<double>(random_word(stream, i) >> 11) * 0x1p-53;
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
  TESSERA_EXPECT(count >= 0, "generate: count is ", count, ", expected 0 or more");
  TESSERA_EXPECT(options.temperature >= 0 && std::isfinite(options.temperature),
                 "generate: temperature is ", options.temperature, ", expected 0 or more");
  TESSERA_EXPECT(options.top_k >= 0, "generate: top_k is ", options.top_k,
                 ", expected 0, for all tokens, or more");
  TESSERA_EXPECT(options.top_p > 0 && options.top_p <= 1, "generate: top_p is ", options.top_p,
                 ", expected more than 0 and at most 1");
  for (std::size_t b = 0; b < prompts.size(); ++b) {
    const Prompt& prompt = prompts[b];
    const auto length = static_cast<std::int64_t>(prompt.tokens.size());
    TESSERA_EXPECT(length > 0, "generate: prompt ", b, " is empty; give at least one token");
    TESSERA_EXPECT(length + std::max<std::int64_t>(count - 1, 0) <= model.max_seq_len(),
                   "generate: ", count, " tokens after prompt ", b, ", which has ", length,
                   ", do not fit into max_seq_len, ", model.max_seq_len(), "; ask for fewer");
    for (const std::int32_t id : prompt.tokens)
      TESSERA_EXPECT(id >= 0 && id < model.vocab_size(), "generate: token ", id, " of prompt ", b,
                     " is outside the vocabulary of ", model.vocab_size(),
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

std::vector<Continuation> generate(LanguageModel& model, std::span<const Prompt> given,
                                   std::int64_t count, const SampleOptions& options, Caller at) {
  const CallSite site("generate", at);
  // A rank without prompts continues one for nobody: the others need its calls.
  const Prompt any{{0}};
  const std::span<const Prompt> prompts = given.empty() ? std::span(&any, 1) : given;
  check(model, prompts, count, options);
  const EvaluationGuard evaluation(model);
  const NoGradGuard no_grad;
  const Device device = model.parameters()[0].device().main();
  // A plan has no values: it assumes the longest continuations.
  const bool is_plan = !device.runs_bodies();
  std::vector<std::int64_t> lengths;
  for (const Prompt& prompt : prompts)
    lengths.push_back(static_cast<std::int64_t>(prompt.tokens.size()));
  const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  KeyValueCache cache(lengths, longest + std::max<std::int64_t>(count - 1, 0));
  const auto next_logits = [&](const Tensor& tokens) {
    const auto step = [&] { return model.next_logits(tokens, cache); };
    return options.root ? options.root->call(step) : step();
  };

  const auto B = static_cast<std::int64_t>(prompts.size());
  const auto V = static_cast<std::size_t>(model.vocab_size());
  std::vector<Continuation> continuations(prompts.size());
  std::vector<char> has_ended(prompts.size(), given.empty());
  Tensor tokens = padded(prompts, longest, device);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::vector<float> all =
        raw::cast(next_logits(tokens), f32)
            .to_vector<float>(is_plan ? std::optional(0.0) : std::nullopt);
    std::vector<std::int32_t> next(prompts.size());  // 0 where a sequence has ended
    bool going = given.empty() && !options.goes_on;
    for (std::size_t b = 0; b < prompts.size(); ++b) {
      const auto logits = std::span(all).subspan(b * V, V);
      TESSERA_EXPECT(std::ranges::all_of(logits, [](float x) { return x - x == 0; }),
                     "generate: the logits of prompt ", b, " are not finite after ", i,
                     " tokens; has the training diverged?");
      if (has_ended[b]) continue;
      const std::uint64_t stream = stream_of(options.seed, prompts[b].seed);
      const Drawn drawn = draw(logits, options, uniform(stream, static_cast<std::uint64_t>(i)));
      next[b] = drawn.token;
      continuations[b].tokens.push_back(drawn.token);
      continuations[b].log_probabilities.push_back(drawn.log_probability);
      has_ended[b] = !is_plan && std::ranges::find(options.stop_tokens, drawn.token) !=
                                     options.stop_tokens.end();
      going = going || !has_ended[b];
    }
    if (!is_plan && !(options.goes_on ? options.goes_on(going) : going)) break;
    tokens = Tensor::from(next, {B, 1}, device);
  }
  continuations.resize(given.size());
  return continuations;
}

std::vector<std::int32_t> generate(LanguageModel& model, std::span<const std::int32_t> prompt,
                                   std::int64_t count, const SampleOptions& options, Caller at) {
  const Prompt one{{prompt.begin(), prompt.end()}};
  return generate(model, std::span(&one, 1), count, options, at)[0].tokens;
}

}  // namespace tessera::nn
