// The state of a model by name, parameters and persistent buffers, taken out and put back.
//
//   const StateDict best = model.state_dict();               this rank's rows, copied
//   model.load(best);                                        on a world of the same size
//   model.load({{"up.weight", whole}}, {.strict = false});   whole tensors, any number of ranks
//   model.load("model.safetensors");                         files: see checkpoint/model.hpp
//
// A load looks at everything first, and changes nothing when it refuses. StateForm::full and
// LoadOptions::from_rank_0 make these calls collective; otherwise none is.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tessera/param/load_state.hpp"

namespace tessera::nn {

class Module;

using tessera::LoadOptions;
using tessera::LoadReport;
using tessera::StateSource;

// The targets of `module`: its parameters and persistent buffers, under each of their names.
std::vector<StateTarget> state_targets(const Module& module);
StateHolder state_holder(const Module& module);

// Loads what `source()` has. It is called on each rank, or only on rank 0 of
// LoadOptions::from_rank_0.
//   Throws: what the source refuses with. It names what is missing, unexpected, of another shape or
// of a dtype that cannot be loaded. If rank 0 sends, the other ranks get a ContractError that says
// so. ContractError for a model without memory, unless rank 0 sends.
LoadReport load(Module& model, const std::function<std::shared_ptr<const StateSource>()>& source,
                const LoadOptions& options = {});
// Loads a source that exists on this rank.
LoadReport load(Module& model, const StateSource& source, const LoadOptions& options = {});
// Reports or refuses as `load` would; the model needs no memory yet.
LoadReport check_load(const Module& model, const StateSource& source,
                      const LoadOptions& options = {});

}  // namespace tessera::nn
