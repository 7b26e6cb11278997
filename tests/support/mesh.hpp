// The meshes of tests, with and without replicas.
#pragma once

#include <numeric>
#include <vector>

#include "tessera/comm/mesh.hpp"
#include "tessera/shard/fully_shard.hpp"

namespace tessera::testing {

// All ranks of the world, in so many replicas where that divides them; or the last one first.
inline DeviceMesh mesh_of(const World& world, int replicas, bool backwards = false) {
  if (world.size() % replicas != 0) replicas = 1;
  const HybridSizes sizes{.replicate = replicas, .shard = world.size() / replicas};
  if (!backwards) return replicas == 1 ? DeviceMesh::flat(world) : DeviceMesh::hybrid(world, sizes);
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.rbegin(), ranks.rend(), 0);
  return DeviceMesh::grid(
      world,
      {{.name = "dp_replicate", .size = replicas, .streams = {.reduce = StreamId::replicate}},
       {.name = "dp_shard", .size = sizes.shard}},
      ranks);
}

// What all sizes of a mesh can do: `always` where k neighbours are no proper part of the ranks.
inline Reshard reshard_on(const DeviceMesh& mesh, Reshard reshard) {
  const int k = reshard.ranks(), ranks = mesh.shard_size();
  return k == 0 || (k < ranks && ranks % k == 0) ? reshard : Reshard::always;
}

}  // namespace tessera::testing
