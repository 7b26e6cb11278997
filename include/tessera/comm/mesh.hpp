// A DeviceMesh says which ranks do what together. Today one dimension: all ranks shard.
#pragma once

#include "tessera/comm/world.hpp"

namespace tessera {

// A small value; the world must outlive it.
class DeviceMesh {
 public:
  // All ranks of the world in one dimension, over which parameters are sharded.
  static DeviceMesh flat(const World& world) { return DeviceMesh(world); }

  const World& world() const noexcept { return *world_; }
  int shard_rank() const noexcept { return world_->rank(); }
  int shard_size() const noexcept { return world_->size(); }

 private:
  explicit DeviceMesh(const World& world) : world_(&world) {}
  const World* world_;
};

}  // namespace tessera
