// Clipping by the global norm of all gradients, over all ranks' shards, without a host sync.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/param/parameter.hpp"

namespace tessera::optim {

// Of all gradients as one vector: the sum of magnitudes, the root of the sum of squares, the
// largest magnitude (PyTorch: norm_type 1, 2, inf).
enum class NormType : std::uint8_t { l1, l2, inf };

// Scales the gradients of `parameters`, and no others, in place by min(1, max_norm / (norm +
// 1e-6)), where norm is theirs over all ranks (an all-reduce over each group's `sums`: every
// rank calls this). A max_norm of 0 or less, or infinity, only computes the norm. Returns the norm
// before clipping, f32 [], where the gradients are: of offloaded units a tensor of the host, which
// raw::moved brings to the device. Reading it blocks the host. A norm that is not finite makes the
// gradients NaN, as in PyTorch. Throws: ContractError for no parameters, for one without memory,
// for gradients on several devices, and for a max_norm of NaN.
Tensor clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm,
                      NormType type = NormType::l2);

}  // namespace tessera::optim
