// A DeviceMesh lays ranks out along named dimensions, and says who communicates with whom.
//
//   auto mesh = DeviceMesh::grid(world, {{"dp_replicate", 2}, {"dp_shard", 4}});
//
//                    dp_shard
//                     0 1 2 3      rank 5 is at (1, 1): along dp_shard it is in a group with
//      dp_replicate   4 5 6 7      4, 6 and 7, along dp_replicate in one with 1
//
// Ranks are laid out row by row. So those of the last dimension are neighbours, which lie on one
// machine if any do (PyTorch: init_device_mesh). To make a mesh is collective over the world: every
// rank of it calls, with the same arguments.
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/world.hpp"

namespace tessera {

// One dimension: its name, its number of ranks, and the streams on which its groups communicate.
struct MeshDim {
  std::string name;
  int size = 1;
  GroupStreams streams{};
};

// The sizes of a hybrid mesh. Parameters are sharded over `shard` ranks, and `replicate` such
// groups hold the same. Their product is the number of ranks.
struct HybridSizes {
  int replicate = 1;
  int shard = 1;
};

// A small value. It may outlive its world, but then its collectives throw; see World.
class DeviceMesh {
 public:
  static constexpr int kMaxDims = 5;

  // All ranks of the world in one dimension, "dp_shard", over which parameters are sharded.
  static DeviceMesh flat(const World& world);
  // All ranks of the world, along 1 to kMaxDims dimensions. One dimension has the world's own
  // communicators.  Throws: ContractError, on every rank, for sizes whose product is not the number
  // of ranks, and for names that are empty or come twice.
  static DeviceMesh grid(const World& world, std::vector<MeshDim> dims);
  // The same with these ranks alone, in this order. The others of the world call, too, and get a
  // mesh that they are not in.
  static DeviceMesh grid(const World& world, std::vector<MeshDim> dims, std::span<const int> ranks);
  // A grid of "dp_replicate" by "dp_shard". Sums over replicas run on the replicate stream.
  static DeviceMesh hybrid(const World& world, HybridSizes sizes);

  const World& world() const noexcept { return *world_; }
  int ndim() const noexcept { return static_cast<int>(layout_->dims.size()); }
  int size() const noexcept { return static_cast<int>(layout_->ranks.size()); }
  std::span<const MeshDim> dims() const noexcept { return layout_->dims; }
  std::span<const int> ranks() const noexcept { return layout_->ranks; }  // row by row
  bool is_member() const noexcept { return !layout_->groups.empty(); }    // this rank

  // This rank's group along one dimension. Throws: ContractError for a name that the mesh does not
  // have, and on ranks that are not in the mesh.
  const RankGroup& group(std::string_view name) const;
  // Its group along the only dimension. Throws: ContractError for another number of dimensions.
  const RankGroup& group() const {
    return ndim() == 1 && is_member() ? *layout_->groups[0] : refuse_group();
  }

  // The part of the mesh along these dimensions, in this order, that this rank is in.
  DeviceMesh operator[](std::string_view name) const { return select({name}); }
  DeviceMesh select(std::initializer_list<std::string_view> names) const;
  // This mesh with neighbouring dimensions as one, which has the ranks of all of them in their
  // order. The others keep their groups. For example, parameters are sharded over data and context
  // ranks together:
  //
  //   const DeviceMesh mesh = DeviceMesh::grid(world, {{"pp", 2}, {"dp", 4}, {"cp", 2}});
  //   fully_shard(model, {.mesh = mesh.flatten({"dp", "cp"}, "dp_cp")["dp_cp"]});
  //
  // Collective over the world, as all that makes a mesh; for a part of a mesh, too, every rank
  // calls (PyTorch: _flatten). Throws: ContractError for dimensions that are no neighbours in this
  // order, and for a name that is taken.
  DeviceMesh flatten(std::initializer_list<std::string_view> names, std::string name,
                     const GroupStreams& streams = {}) const;

  // How fully_shard takes a mesh: its last dimension shards, and one before it replicates. The
  // second group is null without such a dimension, or with one rank along it. Throws: ContractError
  // for a mesh of three dimensions and more, and on ranks that are not in it.
  const RankGroup& shard_group() const {
    return ndim() <= 2 && is_member() ? *layout_->groups.back() : refuse_shards();
  }
  const RankGroup* replicate_group() const {
    const RankGroup* const first =
        &shard_group() == layout_->groups[0] ? nullptr : layout_->groups[0];
    return first && first->size() > 1 ? first : nullptr;
  }
  int shard_rank() const { return shard_group().rank(); }
  int shard_size() const { return shard_group().size(); }
  int replicas() const { return replicate_group() ? replicate_group()->size() : 1; }

  // "dp_replicate 2 x dp_shard 4", then a line of ranks for each row.
  std::string to_string() const;

 private:
  struct Layout {
    std::vector<MeshDim> dims;
    std::vector<int> ranks;
    std::vector<const RankGroup*> groups;  // by dimension; none on ranks that are not in the mesh
  };

  static DeviceMesh make(const World& world, Layout layout);
  // The group of this rank's line along dimension d; null on ranks that are not in the mesh.
  static const RankGroup* make_group(const World& world, const Layout& layout, std::size_t d);
  std::size_t index_of(std::string_view name) const;  // throws for an unknown name
  DeviceMesh(std::shared_ptr<const World> world, Layout layout)
      : world_(std::move(world)), layout_(std::make_shared<const Layout>(std::move(layout))) {}
  std::size_t find(std::string_view name) const;
  const RankGroup& refuse_group() const;   // throws
  const RankGroup& refuse_shards() const;  // throws

  std::shared_ptr<const World> world_;
  std::shared_ptr<const Layout> layout_;
};

}  // namespace tessera
