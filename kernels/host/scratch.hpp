// The large arrays of a task: they lie in the thread's scratch, never on its stack.
#pragma once

#include <new>
#include <type_traits>
#include <utility>

#include "tessera/device/workers.hpp"

namespace tessera::kernels::host {

// A T in the thread's scratch, in place of the one that was there. Without arguments its arrays are
// left uninitialised.
template <class T, class... Arguments>
T& in_scratch(Arguments&&... arguments) {
  static_assert(sizeof(T) <= kScratchBytes && alignof(T) <= 64);
  static_assert(std::is_trivially_destructible_v<T>);
  if constexpr (sizeof...(Arguments) == 0)
    return *::new (static_cast<void*>(thread_scratch())) T;
  else
    return *::new (static_cast<void*>(thread_scratch())) T(std::forward<Arguments>(arguments)...);
}

}  // namespace tessera::kernels::host
