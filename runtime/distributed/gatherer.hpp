// Whole tensors of sharded ones, one at a time, through one piece of symmetric memory.
//
//   compute   copy own rows │            │ who reads the whole │ copy own rows │
//   control                 │ all_gather │                     │               │ all_gather
//
// Control is compute unless GroupStreams say otherwise. The next gather comes after what reads the
// last whole tensor.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.hpp"
#include "tessera/comm/group.hpp"
#include "tessera/param/parameter.hpp"
#include "tessera/param/shard_spec.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

// Collective in all that it does, over the ranks of its group.
class Gatherer {
 public:
  // `bytes`: of the largest tensor, padding included. No memory for a group of one rank. `purpose`:
  // the program's call.
  Gatherer(const RankGroup& group, std::int64_t bytes, std::string_view purpose);
  // Queued collectives outlive an exception of who reads: the device keeps their memory.
  ~Gatherer();
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  const RankGroup& group() const noexcept { return *group_; }
  // The tensor of which `rows` are this rank's by `spec`: in the symmetric memory, with the
  // dimension that is cut outermost, until the next call; with one rank `rows` themselves. `name`
  // has static lifetime.
  Tensor gather(const char* name, const Tensor& rows, const ShardSpec& spec);
  // What the group's first rank gives, of that shape and dtype; likewise.
  Tensor broadcast(const char* name, const Tensor& whole, const Shape& shape, DType dtype);
  // The sum, or the largest, of the ranks' tensors: a new tensor.
  Tensor all_reduce(const char* name, const Tensor& term, ReduceOp reduce);

 private:
  Tensor all(const Shape& shape, DType dtype);
  void submit(const Collective& collective, const char* name, std::span<const Access> accesses);

  const RankGroup* group_;
  std::shared_ptr<SymmetricMemory> memory_;
  std::shared_ptr<LastUse> use_ = std::make_shared<LastUse>();
};

// Of tensors that each of the ranks has whole, by name: all have the same bits, or what keeps those
// of one would lose the others'. Where a rank has other tensors, nothing is compared. `groups` make
// a grid; null ones do not count. Collective. Throws: ContractError on every rank, naming the first
// that differs.
void expect_same_values(std::string_view function, std::initializer_list<const RankGroup*> groups,
                        const std::vector<std::pair<std::string, Tensor>>& tensors);
// The index of that one, the same on every rank.
std::optional<std::size_t> first_unlike(std::initializer_list<const RankGroup*> groups,
                                        const std::vector<std::pair<std::string, Tensor>>& tensors);
// What tells the bits of a tensor from others.
double number_of_bits(const Tensor& tensor);

// By optimizers. Throws: ContractError for a parameter without memory.
std::uint64_t updates_of(const Parameter& parameter);
// Before what optimizers have updated so often is put together: of ranks at different steps it
// would be of none. Collective. Throws: ContractError on every rank.
void expect_same_steps(std::string_view function, const RankGroup& group, std::uint64_t steps);

// The bytes of a tensor, padding included, that is gathered to be whole.
std::int64_t gathered_bytes(const ShardSpec& spec, DType dtype);

}  // namespace tessera
