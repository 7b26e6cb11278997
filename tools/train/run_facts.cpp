#include "tools/train/run_facts.hpp"

#include <cstdlib>
#include <string_view>
#include <variant>

#include "tools/train/agreement.hpp"
#include "tools/train/schema.hpp"

namespace tessera::train {
namespace {

constexpr std::string_view kConfig = "config.", kData = "the contents of data.path";

// What is told of a run: all that has a part in its values and is the same on each machine.
bool is_told(const Key& key) {
  const std::string_view section = key.section;
  const bool is_in = section == "training" || section == "optimizer" || section == "lr_scheduler" ||
                     section == "parallelism" || section == "model" ||
                     section == "activation_checkpoint" || section == "quantize.linear.float8" ||
                     section == "data" || section == "debug";
  return is_in && key.full_name() != "data.path" && key.full_name() != "debug.executor";
}

bool is_zero(const std::string& number) { return std::strtod(number.c_str(), nullptr) == 0; }

// What another value of `key` makes; projections are stored otherwise, and mean the same.
Makes made_by(std::string_view key, const std::string& then, const std::string& now, bool is_sgd) {
  if (key == kData || key == "training.seq_len" || key == "data.order" || key == "data.heldout")
    return Makes::other_samples;
  if (key == "optimizer.name") return Makes::other_state;
  // Without momentum SGD keeps no moments.
  if (key == "optimizer.momentum" && is_sgd && is_zero(then) != is_zero(now))
    return Makes::other_state;
  const bool is_fixed =
      (key.starts_with("model.") && key != "model.projections") || key == "debug.seed";
  return is_fixed ? Makes::other_run : Makes::same_run;
}

}  // namespace

// A default and its value, when it is given, are one.
checkpoint::Scalars run_facts(const Config& given, const Inputs& inputs) {
  Config config = given;
  config.model.n_kv_heads = config.model.kv_heads();
  config.model.ffn_dim = config.model.ffn();
  config.model.tie_embeddings = config.model.tied();
  config.optimizer.nesterov = config.optimizer.has_nesterov();
  checkpoint::Scalars facts{{std::string(kData), data_fingerprint(inputs)}};
  for (const Key& key : schema())
    if (is_told(key))
      facts.emplace(concat(kConfig, key.full_name()), shown_value(key, key.get(config)));
  return facts;
}

std::vector<ChangedFact> changed_facts(const checkpoint::Checkpoint& from,
                                       const checkpoint::Scalars& now) {
  const bool is_sgd = now.at(concat(kConfig, "optimizer.name")) == checkpoint::Scalar("SGD");
  std::vector<ChangedFact> changed;
  for (const auto& [name, value] : now) {
    if (!from.scalars().contains(name)) continue;
    const std::string &then = from.text(name), &own = std::get<std::string>(value);
    if (then == own) continue;
    const std::string key = name.starts_with(kConfig) ? name.substr(kConfig.size()) : name;
    const auto shown = [](const std::string& text) { return text.empty() ? "unset" : text; };
    changed.push_back({key, shown(then), shown(own), made_by(key, then, own, is_sgd)});
  }
  return changed;
}

}  // namespace tessera::train
