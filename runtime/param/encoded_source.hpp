// A source of values for parameters that are stored in 8 bits with a scale a row
// (autograd/rows_in_8_bits.hpp): where it has such values in another floating dtype and no scales,
// it gives their codes and scales.
#pragma once

#include <memory>
#include <vector>

#include "tessera/param/load_state.hpp"

namespace tessera {

// `source`, or one around it where a target is of scales. Each of the two reads all values.
std::shared_ptr<const StateSource> encoded(std::shared_ptr<const StateSource> source,
                                           const std::vector<StateTarget>& targets,
                                           const StateHolder& holder);

}  // namespace tessera
