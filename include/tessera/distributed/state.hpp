// State by name, whole: sharded dicts gathered, and whole ones sent from rank 0, one tensor at a
// time. Modules and optimizers give their state dicts through here.
//
//   const StateDict all = model.state_dict({.form = StateForm::full});            every rank
//   optimizer.state_dict(model, {StateForm::full, StateRanks::rank_0, StateMemory::host});
//   for_each_full(model.state_dict({.form = StateForm::view}),                    streamed
//                 [](const std::string& name, const Tensor& whole) { ... });
//   model.load(all, {.from_rank_0 = &world});                                     a broadcast
//
// Memory beside the result: one piece of symmetric memory of the size of the largest tensor.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "tessera/param/load_state.hpp"

namespace tessera {

// Calls f(name, whole tensor) for each entry, by name. Each is gathered over the mesh of its dict
// when its turn comes, and f may read it until it returns. Collective where an entry is sharded; a
// replica may call this alone.
//   Throws: ContractError for rows without their mesh or on the host, for a tensor that is used
// later, and on every rank where optimizers of ranks that share rows have made different numbers of
// steps; what f throws, after which the peers' calls end with a CommError.
void for_each_full(const StateDict& of,
                   const std::function<void(const std::string& name, const Tensor& whole)>& f);

// What a state_dict with these options is, of what lies in `views`.
// Throws: ContractError for options that say nothing together; as for_each_full.
StateDict make_state_dict(const StateDict& views, const StateDictOptions& options);

// What a load is with these options. `source` is called where values come from: on every rank, or
// on rank 0 of LoadOptions::from_rank_0.
// Throws: on the ranks that have the values what StateMatching and `source` throw; on the others
// then a ContractError that says the same. Nothing has changed then, on any rank.
LoadReport load_state(const std::vector<StateTarget>& targets,
                      const std::function<std::shared_ptr<const StateSource>()>& source,
                      const StateHolder& holder, const LoadOptions& options);

}  // namespace tessera
