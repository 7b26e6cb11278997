// What ranks hear that do otherwise than their peers.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/shard/support.hpp"

namespace tessera::testing {

// What each of two ranks hears where `f` is run with a model of several, and CommError ends it.
inline std::vector<std::string> heard_of_models(
    std::size_t count,
    const std::function<void(nn::ModuleList<Stack>&, World&, const Tensor&)>& f) {
  return on_ranks(2, [&](World& world) {
    nn::ModuleList<Stack> models;
    for (std::size_t i = 0; i < count; ++i)
      models.emplace_back(std::vector<std::int64_t>{5, 7, 5})
          .shard({.mesh = DeviceMesh::flat(world)});
    nn::init(models, {5}, world.device());
    for (Stack& model : models) shard_plan(model);
    std::string heard;
    try {
      f(models, world, rows_of(1, 0, 2, 5, world.device()));
      world.device().synchronize();
    } catch (const CommError& error) {
      heard = error.what();
      reset(models);
    }
    return heard;
  });
}

}  // namespace tessera::testing
