// parallelism.strategy: names of the field for what the section's other keys say; see config.hpp.
#include <algorithm>
#include <iterator>

#include "tessera/base/error.hpp"
#include "tools/train/config.hpp"
#include "tools/train/schema.hpp"

namespace tessera::train {
namespace {

constexpr const char* kStrategy = "parallelism.strategy";
constexpr const char* kStandsFor[] = {
    "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree",
    "parallelism.fsdp_reshard_after_forward", "parallelism.fsdp_reshard_after_backward",
    "parallelism.fsdp_gradient_sync"};

std::string shown(const char* name, const Config& config) {
  const Key& key = *find_key(name);
  return shown_value(key, key.get(config));
}

// Without a look at what was given.
Config::Parallelism set_by(const Config& config, int world_size) {
  Config::Parallelism p = config.parallelism;
  const Strategy strategy = p.strategy;
  const std::int64_t replicas = p.data_parallel_replicate_degree;
  p = Config::Parallelism();
  p.strategy = strategy;
  if (strategy == Strategy::ddp)
    p.data_parallel_replicate_degree = world_size;
  else if (strategy == Strategy::hybrid)
    p.data_parallel_replicate_degree = replicas;
  p.data_parallel_shard_degree = world_size / p.data_parallel_replicate_degree;
  const bool is_whole = strategy == Strategy::zero1 || strategy == Strategy::zero2;
  if (is_whole) p.fsdp_reshard_after_forward = Reshard::never;
  if (strategy == Strategy::zero1) p.fsdp_reshard_after_backward = false;
  if (strategy == Strategy::zero1 && split_batch(config, world_size).micro_batches > 1)
    p.fsdp_gradient_sync = GradientSync::last;
  return p;
}

}  // namespace

Config apply_strategy(const Config& config, int world_size) {
  if (config.parallelism.strategy == Strategy::none) return config;
  const std::string strategy = concat(kStrategy, '=', shown(kStrategy, config));
  const std::int64_t replicas = config.parallelism.data_parallel_replicate_degree;
  if (config.parallelism.strategy == Strategy::hybrid &&
      (replicas < 2 || replicas >= world_size || world_size % replicas != 0))
    throw DataError(concat(strategy,
                           ": needs two replicas or more of two ranks or more; give "
                           "parallelism.data_parallel_replicate_degree a divisor of ",
                           world_size, world_size == 1 ? " rank" : " ranks", " between 1 and ",
                           world_size));
  Config applied = config;
  applied.parallelism = set_by(config, world_size);
  for (const char* const name : kStandsFor) {
    const std::string given = shown(name, config), stands_for = shown(name, applied);
    if (config.given.contains(name) && given != stands_for)
      throw DataError(concat(name, '=', given, ": contradicts ", strategy, ", where it is ",
                             stands_for, "; leave one of them out"));
  }
  return applied;
}

bool is_left_to_strategy(const std::string& key, const Config& config) {
  return config.parallelism.strategy != Strategy::none && !config.given.contains(key) &&
         std::ranges::find(kStandsFor, key) != std::end(kStandsFor) &&
         shown(key.c_str(), config) == shown(key.c_str(), Config());
}

std::string describe_strategy(const Config& config, int world_size) {
  if (config.parallelism.strategy == Strategy::none) return "";
  const Config applied = apply_strategy(config, world_size);
  std::string text = concat("strategy ", shown(kStrategy, config), ':');
  for (const char* const name : kStandsFor)
    text +=
        concat(name == kStandsFor[0] ? " " : ", ", find_key(name)->name, '=', shown(name, applied));
  return text;
}

}  // namespace tessera::train
