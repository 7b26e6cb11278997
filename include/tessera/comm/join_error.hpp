// The error of a rank whose job has not come together.
#pragma once

#include "tessera/base/error.hpp"

namespace tessera {

// A CommError from before all ranks have met: they were not all there in time, or this one had no
// place among them. A rank knows by itself what it says here. If `rank` is another one's, that rank
// says the same.
class JoinError : public CommError {
  using CommError::CommError;
};

}  // namespace tessera
