// Which of a model's linear layers multiply in 8-bit floats.
//
//   nn::set_fp8(model, Fp8Recipe::tensorwise, {.skip = {"down_proj"}});   // before or after
//   fully_shard
//
// Parameters, their gradients, files and initial values stay what they are.
#pragma once

#include <string>
#include <vector>

#include "tessera/autograd/fp8.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::nn {

struct Fp8Options {
  // Layers whose dotted name contains one of these texts stay as they are.
  std::vector<std::string> skip{};
};

// Calls Product::set_fp8 for all linear layers below `module`, except: layers in `skip`, layers
// whose sizes 16 does not divide, and layers with a streamed weight, as heads of language models
// have. Returns the names of the layers that it set. Source: torchtitan 0.2.2's filter_fqns.
// Throws: ContractError for a text in `skip` that is empty, or in no linear layer's name.
std::vector<std::string> set_fp8(Module& module, Fp8Recipe recipe, const Fp8Options& options = {});

}  // namespace tessera::nn
