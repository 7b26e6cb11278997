// Every collective on tensors, of every dtype and of layouts and sizes that matter, held against
// what the ranks' inputs give. Any world or group of ranks can run it.
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/world.hpp"

namespace exchange {

// Empty when every value is right. Does not assert, because it runs on threads.
std::vector<std::string> errors(const tessera::RankGroup& group);
// The same of tensors that do not fit the workspace.
std::vector<std::string> errors_of_pieces(const tessera::RankGroup& group);

}  // namespace exchange
