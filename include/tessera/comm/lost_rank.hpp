// What a rank throws because the process of another one has died or has stopped.
#pragma once

#include "tessera/base/error.hpp"

namespace tessera {

// A CommError that no other rank can explain better: the lost one says nothing any more, so whoever
// catches this speaks. The message names the rank and the collective it was last in.
class LostRank : public CommError {
  using CommError::CommError;
};

}  // namespace tessera
