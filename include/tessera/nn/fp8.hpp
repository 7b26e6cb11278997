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
  // Layers stay as they are whose dotted name has one of these in it.
  std::vector<std::string> skip{};
};

// Product::set_fp8 of all linear layers below `module` but those, the ones whose sizes 16 does not
// divide, and those with a streamed weight, as heads of language models have. Returns the names of
// the layers that it set; torchtitan 0.2.2's filter_fqns.
// Throws: ContractError for an element of `skip` that is empty, or in no linear layer's name.
std::vector<std::string> set_fp8(Module& module, Fp8Recipe recipe, const Fp8Options& options = {});

}  // namespace tessera::nn
