// The stages of a gather or a reduction, in the order of their places.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace tessera::shard {

template <typename Stage>
using Stages = std::vector<std::unique_ptr<Stage>>;

template <typename Stage>
void remove_stage(Stages<Stage>& stages, typename Stage::Place place) {
  std::erase_if(stages, [&](const auto& stage) { return stage->place() == place; });
}

// In the place of the one that was there.
template <typename Stage>
void put_stage(Stages<Stage>& stages, std::unique_ptr<Stage> stage) {
  remove_stage(stages, stage->place());
  const auto behind = std::ranges::find_if(
      stages, [&](const auto& other) { return other->place() > stage->place(); });
  stages.insert(behind, std::move(stage));
}

}  // namespace tessera::shard
