// What a piece of a test throws.
#pragma once

#include <string>

#include "tessera/base/error.hpp"

namespace tessera::testing {

// The message of the E that `f` throws, empty for none.
template <class E = ContractError, class F>
std::string thrown_by(const F& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

}  // namespace tessera::testing
