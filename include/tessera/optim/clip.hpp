// Clipping by the global norm of all gradients, over all ranks' shards, without a host sync.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/param/parameter.hpp"

namespace tessera::optim {

// The norm of all gradients as one vector: l1 is the sum of magnitudes, l2 the root of the sum of
// squares, inf the largest magnitude (PyTorch: norm_type 1, 2, inf).
enum class NormType : std::uint8_t { l1, l2, inf };

// Who multiplies the gradients.
//
//   in_place       this call, in a pass of its own over them (PyTorch's clip_grad_norm_)
//   in_optimizer   the steps of the library's optimizers, while they read the gradients. This saves
//                  8 bytes of traffic an element, and a kernel a unit. In memory the gradients stay
//                  unscaled until somebody else asks for them or adds to them: grad(), a backward,
//                  another clipping, GradScaler::unscale, Muon's Nesterov momentum, an optimizer
//                  from outside, zero_grad of a part, a change of what is trained. Such a call
//                  first makes the pass, so it sees what in_place gives, to the bit. Only a tensor
//                  that grad() gave before this call shows them unscaled until then. A unit of
//                  which not all trainable parameters are given is clipped in place.
enum class Clip : std::uint8_t { in_place, in_optimizer };

// Scales the gradients of `parameters`, and no others, by min(1, max_norm / (norm + 1e-6)). The
// norm is theirs over all ranks, by an all-reduce over each group's `sums`. A max_norm of 0 or
// less, or infinity, scales nothing: the call only computes the norm.
//   Returns the norm before clipping, f32 [], on the gradients' device. That is the host for
// offloaded units; raw::moved brings it to the device. Reading it blocks the host. A norm that is
// not finite makes the gradients NaN, as in PyTorch.
//   Every rank and replica calls this with the same arguments. Nobody may notice if they differ,
// and replicas then drift apart for good. Gradients that are not given, such as those of a
// pipeline's other stages, take no part.
//   Throws: ContractError for no parameters, for one without memory, for gradients that wait
// unreduced, for gradients on several devices, and for a max_norm of NaN.
Tensor clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm,
                      NormType type = NormType::l2, Clip how = Clip::in_place);

// Scales by a given norm, f32 [], on the gradients' device (PyTorch: clip_grads_with_norm_). For
// example each stage of a pipeline has computed its own norm, and all sum the squares:
//
//   const Tensor own = optim::clip_grad_norm(stage.parameters(), 0);  // computes it, and no more
//   const Tensor all = raw::sqrt(dist::all_reduce(own * own, stages));
//   optim::clip_grads_with_norm(stage.parameters(), 1, all);
//
// Ranks that share gradients give the same norm.
//   Throws: ContractError as clip_grad_norm, and for a norm of another dtype, size or device.
void clip_grads_with_norm(const std::vector<Parameter>& parameters, double max_norm,
                          const Tensor& norm, Clip how = Clip::in_place);

}  // namespace tessera::optim
