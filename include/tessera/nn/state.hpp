// The state of a model by name, parameters and persistent buffers, taken out and put back.
//
//   const StateDict best = model.state_dict();               this rank's rows, copied
//   model.load(best);                                        on a world of the same size
//   model.load({{"up.weight", whole}}, {.strict = false});   whole tensors, any number of ranks
//   model.load("model.safetensors");                         files: see checkpoint/model.hpp
//
// None of it is collective. A load looks at everything first and changes nothing when it refuses.
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

// What of `module` takes values: parameters and persistent buffers, under each of their names.
std::vector<StateTarget> state_targets(const Module& module);
StateHolder state_holder(const Module& module);

// Loads what `source()` has; it is called on each rank, or, with LoadOptions::from_rank_0, there.
// Throws: what the source refuses with, naming what is missing, unexpected, of another shape or of
// a dtype that cannot be loaded, and, where it is sent from rank 0, a ContractError that says so on
// the other ranks; ContractError for a model without memory, unless it is sent.
LoadReport load(Module& model, const std::function<std::shared_ptr<const StateSource>()>& source,
                const LoadOptions& options = {});
// The same of a source that is there.
LoadReport load(Module& model, const StateSource& source, const LoadOptions& options = {});
// What `load` would report or refuse; the model needs no memory yet.
LoadReport check_load(const Module& model, const StateSource& source,
                      const LoadOptions& options = {});

}  // namespace tessera::nn
