// The angles of rotary position embedding, shared by all blocks of a model.
// Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021; half
// rotation as in Hugging Face.
#pragma once

#include <optional>
#include <utility>

#include "tessera/autograd/ops.hpp"

namespace tessera::nn {

// Owns: the tables, f32 [positions, head_dim / 2]. They are made on a device at their first use
// there, and are no parameters.
class Rotary {
 public:
  Rotary(std::int64_t positions, std::int64_t head_dim, double theta)
      : positions_(positions), head_dim_(head_dim), theta_(theta) {
    TESSERA_EXPECT(positions > 0 && head_dim > 0 && head_dim % 2 == 0 && theta > 0,
                   "Rotary: ", positions, " positions, heads of ", head_dim, ", theta ", theta,
                   "; expected at least one position, an even head width and a positive theta");
  }

  // Rotates x [B, T, H, head_dim] by position, T at most `positions`; returns the same shape.
  // Throws: ContractError for another shape.
  Tensor operator()(const Tensor& x, Caller at = Caller::current()) {
    const CallSite site(at);
    return rope(x, tables_for(x));
  }
  // Rotates the first `heads` of the H heads only, in place if the caller moves x in.
  Tensor operator()(Tensor x, std::int64_t heads, Caller at = Caller::current()) {
    const CallSite site(at);
    const RopeTables& tables = tables_for(x);
    return rope(std::move(x), tables, heads);
  }
  // Rotates one token a row, x [B, 1, H, head_dim], by its position in `positions`, integers [B].
  Tensor at(const Tensor& x, const Tensor& positions, std::int64_t heads) {
    const RopeTables& all = tables_for(x);
    const RopeTables rows{raw::index_select(all.cos, 0, positions),
                          raw::index_select(all.sin, 0, positions)};
    return reshape(rope(reshape(x, {1, x.size(0), x.size(2), x.size(3)}), rows, heads), x.shape());
  }

 private:
  const RopeTables& tables_for(const Tensor& x) {
    TESSERA_EXPECT(x.ndim() == 4 && x.size(1) <= positions_, "Rotary: x is ", x.shape(),
                   ", expected [B, T, H, D] with T at most ", positions_,
                   "; raise the model's max_seq_len");
    const Device& device = x.device();
    if (!tables_ || tables_->cos.device() != device || made_after_ != device.recoveries()) {
      tables_.reset();
      tables_ = RopeTables::make(positions_, head_dim_, theta_, device);
      made_after_ = device.recoveries();
    }
    return *tables_;
  }

  std::int64_t positions_, head_dim_;
  double theta_;
  std::optional<RopeTables> tables_;
  std::uint64_t made_after_ = 0;  // recoveries of the device before the tables were made
};

}  // namespace tessera::nn
