// The launches that AdamW and SGD have in common.
#pragma once

#include "runtime/tensor/launch.hpp"
#include "tessera/optim/optimizer.hpp"

namespace tessera::optim::detail {

// Writes the scalars by a kernel whose arguments hold them: no staging, and a replayed step reads
// what is there.
inline void put_scalars(const Tensor& to, const kernels::OptimScalars& scalars) {
  tessera::detail::launch(
      "optimizer_scalars", to.device(), tessera::detail::table(to.device()).put_scalars,
      kernels::PutScalarsArgs{reinterpret_cast<kernels::OptimScalars*>(to.data()), scalars},
      {tessera::detail::writes(to)});
}

// The part of an update's arguments that does not depend on the optimizer.
template <class Args>
Args common_args(const Optimizer::GroupState& state, const Tensor& scalars) {
  const FlatGroup& group = *state.group;
  Args args{};
  args.parameter = reinterpret_cast<float*>(group.values.data());
  args.gradient = reinterpret_cast<const float*>(group.gradient.data());
  args.segments = reinterpret_cast<const kernels::OptimSegment*>(state.segments.data());
  args.counts = reinterpret_cast<const float*>(group.counts().data());
  args.scalars = reinterpret_cast<const kernels::OptimScalars*>(scalars.data());
  args.segment_count = state.segment_count;
  return args;
}

}  // namespace tessera::optim::detail
