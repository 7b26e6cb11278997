// What a parameter's shards become on their way to the other ranks: encoded before the all-gather,
// in dtypes and arrays of the transform's own, and decoded behind it into the full tensor.
//
//   gather    encode │ all_gather of each part │ decode │ record ┐
//   compute                                                      └ wait │ kernels read it
//
// What is offloaded is encoded on the host, and its parts travel to the device in one copy a unit.
//
//   for (const Parameter& p : model.parameters())
//     if (p.shape().ndim() > 1) p.set_gather_transform(gather_in_e4m3());
//
// Gradients are those of the full tensor, as if nothing had been rounded. On one rank a unit
// encodes and decodes as well, so that any number of ranks computes with the same values where the
// scales are the same. PyTorch FSDP2: fsdp_pre_all_gather and fsdp_post_all_gather of a tensor
// subclass.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/param/shard_spec.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

// One serves any number of parameters and ranks: it keeps no state, and several threads call it.
class GatherTransform {
 public:
  // An array that every rank sends: of its chunk, so many elements.
  struct Part {
    DType dtype;
    std::int64_t numel;
  };

  virtual ~GatherTransform() = default;
  // Of a static lifetime: plans and errors name it, and all ranks give a parameter the same.
  virtual const char* name() const noexcept = 0;
  // Of a parameter of `spec`, a pure function. `spec.world`: the ranks that shard it, without
  // replicas. Throws: ContractError for a shape that it is not made for.
  virtual std::vector<Part> parts(const ShardSpec& spec) const = 0;
  // Writes all of each part, [numel], from this rank's chunk: [chunk_rows, ...] of f32, the rows
  // behind its own 0. Operations on these tensors run on the gather stream, or on the host's where
  // the chunk lies there, and what they make should be of the size of a chunk.
  virtual void encode(std::span<const Tensor> parts, const Tensor& chunk) const = 0;
  // Writes `full`, [ranks chunk_rows, ...] in the dtype of compute, from the parts of all ranks,
  // [ranks, numel] each. Every rank gets the same.
  virtual void decode(const Tensor& full, std::span<const Tensor> parts) const = 0;
};

// Rows, all but the first dimension, in e4m3 with one f32 scale each: a quarter of the bytes of f32
// and 4 more a row. A scale is a power of two and the row's own, and no row is cut: the values are
// the same for any number of ranks. Of a row with the largest |x| in (224 s, 448 s] an element is
// off by at most max(2^-4 |x|, 2^-10 s); kernels/e4m3_rows.hpp has the formulas. For two dimensions
// and more.
std::shared_ptr<const GatherTransform> gather_in_e4m3();

}  // namespace tessera
