// What a rank throws because the process of another one has died or has stopped, or because others
// do not come to a collective in time.
#pragma once

#include "tessera/base/error.hpp"

namespace tessera {

// A CommError that no other rank can explain better: the lost one says nothing any more, and a late
// one perhaps never, so whoever catches this speaks. The message names the ranks and the
// collectives they were last in.
class LostRank : public CommError {
  using CommError::CommError;
};

}  // namespace tessera
