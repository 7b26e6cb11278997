// The angles of rotary position embedding, shared by all blocks of a model.
// Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021; half
// rotation as in Hugging Face.
#pragma once

#include <optional>

#include "tessera/autograd/ops.hpp"

namespace tessera::nn {

// Owns: the tables, f32 [positions, head_dim / 2], made on a device at their first use there. They
// are no parameters.
class Rotary {
 public:
  Rotary(std::int64_t positions, std::int64_t head_dim, double theta);

  // x [B, T, H, head_dim], T at most `positions` -> the same shape, rotated by position.
  Tensor operator()(const Tensor& x, Caller at = Caller::current());
  // The same of the first `heads` of the H heads alone, over x where the caller gives it away.
  Tensor operator()(Tensor x, std::int64_t heads, Caller at = Caller::current());

 private:
  const RopeTables& tables_for(const Tensor& x);

  std::int64_t positions_, head_dim_;
  double theta_;
  std::optional<RopeTables> tables_;
  std::uint64_t made_after_ = 0;  // so many failures of the device
};

}  // namespace tessera::nn
