// Which of a model's linear layers multiply in 8-bit floats, or have frozen weights in 8 bits.
//
//   nn::set_fp8(model, Fp8Recipe::tensorwise, {.skip = {"down_proj"}});   // before or after
//   fully_shard
//   nn::store_in_8_bits(model, {.skip = {"lm_head"}});                    // before fully_shard
//   model.embedding.store_in_8_bits();                                    // likewise
//   model.load("base.safetensors");                                       // encodes what it reads
//
// With a recipe parameters, their gradients, files and initial values stay what they are. What is
// stored in 8 bits is multiplied in the dtype of x, and trains what lies beside it: adapters.
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
// Linear::store_in_8_bits of all linear layers below `module` but those, and those that share their
// weight, as tied heads do. Returns their names.  Throws: as it, and for `skip` as set_fp8.
std::vector<std::string> store_in_8_bits(Module& module, const Fp8Options& options = {});

// What layers do for it: freezes `weight` [rows, ...] of `layer`, stores it in e4m3, and registers
// the scales "weight_scale" [rows, 1, ...], which it returns.  Throws: ContractError for a weight
// that other modules have, too, that belongs to a unit, has memory or a gather transform. Then it
// is as it was.
Parameter store_rows_in_8_bits(Module& layer, const Parameter& weight);

}  // namespace tessera::nn
