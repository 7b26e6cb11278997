// What clipping and loss scaling do with the gradients of some parameters as one vector. Over the
// ranks: one small all-reduce for each communicator.
#pragma once

#include <vector>

#include "runtime/param/group_part.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera::optim {

// Those that `of` reaches, FlatGroup::sums or replicas, null for one rank's own: in order of first
// mention, the same on every rank.
using CommunicatorOf = std::shared_ptr<Communicator> FlatGroup::*;
std::vector<Communicator*> communicators_of(const std::vector<GroupPart>& parts, CommunicatorOf of);

// `value`, a small contiguous tensor, over the ranks of `comm`, in place; nothing for null.
void all_reduce(const char* name, const Tensor& value, Communicator* comm, ReduceOp op);

// f(gradient [n], f32) for every stretch of those that are there, padding included.
template <class F>
void for_each_gradient(const std::vector<GroupPart>& parts, const F& f) {
  for (const GroupPart& part : parts) {
    if (!part.group->gradient.defined()) continue;
    for (const GroupPart::Stretch& stretch : part.stretches) f(part.gradient(stretch));
  }
}

}  // namespace tessera::optim
