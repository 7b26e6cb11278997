// The mean over all ranks of the gradients that no unit reduces, by every collective on tensors.
#pragma once

#include <vector>

#include "tessera/comm/world.hpp"
#include "tessera/distributed/collectives.hpp"
#include "tessera/param/parameter.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::testing {

// What all_reduce gives, to the bit where it sums in rank order, by all the other collectives on
// tensors: each rank adds its part to what the one before has sent.  x: [n, ...], on every rank.
inline Tensor sum_along_ranks(const Tensor& x, const RankGroup& group) {
  const Tensor all = dist::all_gather(x, group);
  const Tensor own = dist::reduce_scatter(all, group, ReduceOp::max);  // the same on every rank
  Tensor total = raw::slice(dist::all_to_all(all, group), 0, 0, x.size(0));  // of size copies one
  for (int r = 1; r < group.size(); ++r) {
    const Tensor sent = dist::send_recv(total, r - 1, r, group);
    if (r == group.rank()) total = raw::add(sent, own);
  }
  return dist::broadcast(total, group.size() - 1, group);
}

// The gradients of what units leave alone become the mean over all ranks.
inline void average(const std::vector<Parameter>& ignored, const World& world) {
  if (world.size() == 1) return;
  for (const Parameter& p : ignored) {
    const bool is_first = &p == ignored.data();
    const Tensor sum =
        is_first ? dist::all_reduce(p.grad(), world) : sum_along_ranks(p.grad(), world);
    raw::copy_into(p.grad(), raw::mul(sum, 1. / world.size()));
  }
}

}  // namespace tessera::testing
