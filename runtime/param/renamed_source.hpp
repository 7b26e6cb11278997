// A source of values under other names: LoadOptions::rename. What loads state wraps its source so,
// and knows of no other names then.
#pragma once

#include <memory>

#include "tessera/param/load_state.hpp"

namespace tessera {

// `source` under the names that the rules make, or itself where there are none.
// Throws: ContractError for a rule whose two sides have other numbers of *, for rules that fit no
// name, each of which it lists, and for two names that become one.
std::shared_ptr<const StateSource> renamed(std::shared_ptr<const StateSource> source,
                                           const LoadOptions& options);

}  // namespace tessera
