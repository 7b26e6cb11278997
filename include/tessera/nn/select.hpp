// Parameters by patterns of their names, for options that only some parameters have.
//
//   optimizer.set_weight_decay(nn::select(model, {"*.bias", "*norm*"}), 0);
//   for (const Parameter& p : nn::select(model, {"model.layers.[0-3].*"})) p.set_trainable(false);
#pragma once

#include <string>
#include <vector>

#include "tessera/nn/module.hpp"

namespace tessera::nn {

// The parameters below `module` whose dotted name fits one of `patterns` as a whole, each once, in
// order of registration. In a pattern * stands for any text, dots too, ? for any character, and
// [ab] or [0-3] for one of these (fnmatch of POSIX). A tied parameter has its first name. Throws:
// ContractError that names a pattern that fits no name, and a name that exists.
std::vector<Parameter> select(const Module& module, const std::vector<std::string>& patterns);

}  // namespace tessera::nn
