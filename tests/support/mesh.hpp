// The meshes of tests, with and without replicas.
#pragma once

#include "tessera/comm/mesh.hpp"
#include "tessera/shard/fully_shard.hpp"

namespace tessera::testing {

// All ranks of the world, in so many replicas where that divides them.
inline DeviceMesh mesh_of(const World& world, int replicas) {
  if (replicas == 1 || world.size() % replicas != 0) return DeviceMesh::flat(world);
  return DeviceMesh::hybrid(world, {.replicate = replicas, .shard = world.size() / replicas});
}

// What all sizes of a mesh can do: `always` where k neighbours are no proper part of the ranks.
inline Reshard reshard_on(const DeviceMesh& mesh, Reshard reshard) {
  const int k = reshard.ranks(), ranks = mesh.shard_size();
  return k == 0 || (k < ranks && ranks % k == 0) ? reshard : Reshard::always;
}

}  // namespace tessera::testing
