// A DeviceMesh says which ranks do what together. Today one dimension: all ranks shard.
#pragma once

#include "tessera/comm/world.hpp"

namespace tessera {

// A small value. After its world has ended, what is left of it says so: see World.
class DeviceMesh {
 public:
  // All ranks of the world in one dimension, over which parameters are sharded.
  static DeviceMesh flat(const World& world) { return DeviceMesh(world.share()); }

  const World& world() const noexcept { return *world_; }
  int shard_rank() const noexcept { return world_->rank(); }
  int shard_size() const noexcept { return world_->size(); }

 private:
  explicit DeviceMesh(std::shared_ptr<const World> world) : world_(std::move(world)) {}
  std::shared_ptr<const World> world_;
};

}  // namespace tessera
