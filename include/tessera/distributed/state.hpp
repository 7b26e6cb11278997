// State by name, whole: it gathers sharded dicts, and sends whole ones from rank 0, one tensor at a
// time. Modules and optimizers make and load their state dicts through here.
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
// when its turn comes. f may read it until it returns. Collective if an entry is sharded; a replica
// may call it alone.
//   Throws: ContractError for rows without their mesh or on the host, and for a tensor that is used
// later. ContractError on every rank if optimizers of ranks that share rows have made different
// numbers of steps. What f throws; the peers' calls then end with a CommError.
void for_each_full(const StateDict& of,
                   const std::function<void(const std::string& name, const Tensor& whole)>& f);

// The state dict of `views` by these options.
// Throws: ContractError for options that do not go together; as for_each_full.
StateDict make_state_dict(const StateDict& views, const StateDictOptions& options);

// Loads by these options. `source` is called where values come from: on every rank, or on rank 0 of
// LoadOptions::from_rank_0.
// Throws: on ranks that have the values, what StateMatching and `source` throw; on the others a
// ContractError that says the same. Then nothing has changed, on any rank.
LoadReport load_state(const std::vector<StateTarget>& targets,
                      const std::function<std::shared_ptr<const StateSource>()>& source,
                      const StateHolder& holder, const LoadOptions& options);

}  // namespace tessera
