// The meshes of tests, with and without replicas.
#pragma once

#include "tessera/comm/mesh.hpp"

namespace tessera::testing {

// All ranks of the world, in so many replicas where that divides them.
inline DeviceMesh mesh_of(const World& world, int replicas) {
  if (replicas == 1 || world.size() % replicas != 0) return DeviceMesh::flat(world);
  return DeviceMesh::hybrid(world, {.replicate = replicas, .shard = world.size() / replicas});
}

}  // namespace tessera::testing
