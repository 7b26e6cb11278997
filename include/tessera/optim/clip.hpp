// Clipping by the global norm of all gradients, over all ranks' shards, without a host sync.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/param/parameter.hpp"

namespace tessera::optim {

// Of all gradients as one vector: the sum of magnitudes, the root of the sum of squares, the
// largest magnitude (PyTorch: norm_type 1, 2, inf).
enum class NormType : std::uint8_t { l1, l2, inf };

// Who multiplies the gradients.
//
//   in_place       this call, in a pass of its own over them (PyTorch's clip_grad_norm_)
//   in_optimizer   the steps of the library's optimizers, on their way: 8 bytes of traffic an
//                  element and a kernel a unit less. In memory the gradients stay as they were
//                  until somebody else asks for them or adds to them: grad(), a backward, another
//                  clipping, GradScaler::unscale, Muon's Nesterov momentum, an optimizer from
//                  outside, zero_grad of a part, a change of what is trained. That makes the pass
//                  first, so all see what in_place gives them, to the bit. Only a tensor that
//                  grad() gave before this call shows them unscaled until then. Of a unit of whose
//                  trainable parameters not all are given, it is in place.
enum class Clip : std::uint8_t { in_place, in_optimizer };

// Scales the gradients of `parameters`, and no others, by min(1, max_norm / (norm + 1e-6)), where
// norm is theirs over all ranks (an all-reduce over each group's `sums`). Every rank and replica
// calls this with the same arguments: where they differ nobody need be told, and replicas part for
// good. Gradients that are not given, such as those of a pipeline's other stages, take no part. A
// max_norm of 0 or less, or infinity, only computes the norm. Returns the norm before clipping, f32
// [], where the gradients are: of offloaded units a tensor of the host, which raw::moved brings to
// the device. Reading it blocks the host. A norm that is not finite makes the gradients NaN, as in
// PyTorch. Throws: ContractError for no parameters, for one without memory, for gradients on
// several devices, and for a max_norm of NaN.
Tensor clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm,
                      NormType type = NormType::l2, Clip how = Clip::in_place);

// The same by a norm that is given, f32 [], where the gradients are: of a pipeline's stages, say,
// each of which has computed its own (PyTorch: clip_grads_with_norm_).
//
//   const Tensor own = optim::clip_grad_norm(stage.parameters(), 0);  // computes it, and no more
//   const Tensor all = raw::sqrt(dist::all_reduce(own * own, stages));
//   optim::clip_grads_with_norm(stage.parameters(), 1, all);
//
// Ranks that share gradients give the same norm. Throws: ContractError as clip_grad_norm, and for a
// norm of another dtype, size or device.
void clip_grads_with_norm(const std::vector<Parameter>& parameters, double max_norm,
                          const Tensor& norm, Clip how = Clip::in_place);

}  // namespace tessera::optim
