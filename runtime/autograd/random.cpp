#include "tessera/autograd/random.hpp"

namespace tessera::autograd {

RandomState& random_state() noexcept {
  thread_local RandomState state;
  return state;
}

}  // namespace tessera::autograd
