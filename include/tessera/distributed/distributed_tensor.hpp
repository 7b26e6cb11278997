// A tensor over the ranks of a mesh, of which each rank holds a part (PyTorch: DTensor).
//
//   DistributedTensor w = parameter.distributed();      of a parameter of a unit
//   std::cout << w;                                     f32 [10, 4], Shard(0) over dp_shard 4; ...
//   Tensor all = w.full();                              collective
//   Tensor mine = w.redistribute({Replicate{}}).local();
//   auto t = distribute(tensor, mesh, {Shard{0}});      this rank's rows of rank 0's tensor
//
//   global, Shard(0) over 2 ranks      Replicate           Partial(sum)
//   rank 0   a b │                     a b c d             a0 b0 c0 d0
//   rank 1       │ c d                 a b c d             a1 b1 c1 d1     a = a0 + a1
//
// Rows are cut as ShardSpec says: in chunks of ceil(d0 / N), the last shorter or empty, or raggedly
// by blocks of rows. Another dimension than 0 is cut evenly. To read a handle or print it never
// communicates. `full`, `redistribute` and `distribute` are collective over the mesh.
#pragma once

#include <iosfwd>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "tessera/comm/mesh.hpp"
#include "tessera/param/shard_spec.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

// What the ranks along one dimension of a mesh have of a tensor. Shard, RaggedShard: a part along
// one dimension. Replicate: the whole. Partial: terms, of which the tensor is the sum or the
// largest.

// Rows, dealt out by blocks (veScale: RaggedShard).
struct RaggedShard {
  std::int64_t block_rows = 1;
  int extra_from = 0;  // the first rank that gets a block that is left over
  bool operator==(const RaggedShard&) const = default;
};
struct Replicate {
  bool operator==(const Replicate&) const = default;
};
struct Partial {
  ReduceOp reduce = ReduceOp::sum;
  bool operator==(const Partial&) const = default;
};
using Placement = std::variant<Shard, RaggedShard, Replicate, Partial>;
// One for each dimension of a mesh, in its order. At most one of them shards.
using Placements = std::vector<Placement>;
// "Shard(0)", "RaggedShard(0, blocks of 4)", "Replicate", "Partial(sum)"
std::string to_string(const Placement& placement);

// A handle; copies mean the same part.
class DistributedTensor {
 public:
  DistributedTensor() = default;  // undefined, for example a gradient that nobody has made
  // Makes a handle from this rank's part of a tensor of global `shape` (PyTorch:
  // DTensor.from_local). Not collective. Throws: ContractError for placements that the mesh does
  // not have, for another shape than theirs, and on ranks that are not in the mesh.
  DistributedTensor(const Tensor& local, const Shape& shape, const DeviceMesh& mesh,
                    Placements placements);

  bool defined() const noexcept { return local_.defined(); }
  const Shape& shape() const { return spec_.shape; }  // global
  DType dtype() const { return local_.dtype(); }
  const DeviceMesh& mesh() const;
  const Placements& placements() const noexcept { return placements_; }
  // This rank's range along the dimension that is cut, which is rows for dimension 0. All of them
  // if it is not sharded.
  RowRange rows() const { return spec_.owned(); }
  // This rank's part: rows [rows, ...], the whole, or a term. A parameter's part is for reading. If
  // another dimension than 0 is cut, it is a view with that dimension outermost.
  const Tensor& local() const noexcept { return local_; }

  // The whole tensor; a partial one is reduced.
  Tensor full() const;
  // The same tensor with other placements. Throws: ContractError as the constructor, and for
  // Partial unless it is partial now.
  DistributedTensor redistribute(const Placements& placements) const;

  // "f32 [10, 4], Shard(0) over dp_shard 4; rows 3 to 5 here"
  std::string to_string() const;

 private:
  Tensor local_;
  ShardSpec spec_;
  std::shared_ptr<const DeviceMesh> mesh_;
  Placements placements_;
};
std::ostream& operator<<(std::ostream& out, const DistributedTensor& tensor);

// Distributes the tensor of the mesh's first rank, by these placements. Others give a tensor of the
// same shape and dtype, whose values are ignored. Collective (PyTorch: distribute_tensor).
// Throws: ContractError for Partial, and as the constructor.
DistributedTensor distribute(const Tensor& tensor, const DeviceMesh& mesh,
                             const Placements& placements);

}  // namespace tessera
