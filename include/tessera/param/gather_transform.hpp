// Gather transforms: what a parameter's shards become on their way to the other ranks. A shard is
// encoded before the all-gather, in dtypes and arrays of the transform's own. Behind the all-gather
// it is decoded into the full tensor.
//
//   gather    encode │ all_gather of each part │ decode │ record ┐
//   compute                                                      └ wait │ kernels read it
//
// An offloaded shard is encoded on the host. Its parts travel to the device, those of a unit in one
// copy.
//
//   for (const Parameter& p : model.parameters())
//     if (p.shape().ndim() > 1) p.set_gather_transform(gather_in_e4m3());
//
// Gradients are those of the full tensor, as if nothing had been rounded. On one rank a unit
// encodes and decodes, too. So any number of ranks computes with the same values, if the scales are
// the same. PyTorch FSDP2: fsdp_pre_all_gather and fsdp_post_all_gather of a tensor subclass.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/param/shard_spec.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

// One object serves any number of parameters and ranks. It keeps no state, so several threads may
// call it.
class GatherTransform {
 public:
  // One array that every rank sends for its chunk: `numel` elements of `dtype`.
  struct Part {
    DType dtype;
    std::int64_t numel;
  };

  virtual ~GatherTransform() = default;
  // The name in plans and errors, of static lifetime. All ranks give a parameter the same one.
  virtual const char* name() const noexcept = 0;
  // The arrays that a parameter of `spec` travels as; a pure function. `spec.world` is the ranks
  // that shard it, without replicas. Throws: ContractError for a shape that the transform is not
  // made for.
  virtual std::vector<Part> parts(const ShardSpec& spec) const = 0;
  // Writes all of each part, [numel], from this rank's chunk, [chunk_rows, ...] of f32; padding
  // rows behind the rank's own are 0. Operations on these tensors run on the gather stream, or on
  // the host's if the chunk lies there. What they allocate should be no larger than a chunk.
  virtual void encode(std::span<const Tensor> parts, const Tensor& chunk) const = 0;
  // Writes `full`, [ranks chunk_rows, ...] in the dtype of compute, from the parts of all ranks,
  // [ranks, numel] each. Every rank gets the same parts.
  virtual void decode(const Tensor& full, std::span<const Tensor> parts) const = 0;
};

// Sends rows in e4m3, with one f32 scale each. That is a quarter of the bytes of f32, and 4 bytes
// more a row. A row is all dimensions but the first. Its scale is a power of two and its own, and
// no row is cut, so the values are the same for any number of ranks. Error: in a row with the
// largest |x| in (224 s, 448 s], an element is off by at most max(2^-4 |x|, 2^-10 s). Source:
// kernels/e4m3_rows.hpp has the formulas. Throws: ContractError, by `parts`, for fewer than two
// dimensions.
std::shared_ptr<const GatherTransform> gather_in_e4m3();

}  // namespace tessera
