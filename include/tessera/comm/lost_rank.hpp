// The error of a rank whose peer is lost: its process has died or has stopped, or it does not come
// to a collective in time.
#pragma once

#include "tessera/base/error.hpp"

namespace tessera {

// A CommError that no other rank can explain better. A lost rank says nothing any more, and a late
// one perhaps never, so the rank that catches this speaks. The message names the ranks, and the
// collectives that they were last in.
class LostRank : public CommError {
  using CommError::CommError;
};

}  // namespace tessera
