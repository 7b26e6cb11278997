// Calls a function of every observer. Out of line, so that a program that nobody watches pays for
// one comparison, and keeps its values in registers; `call` therefore captures by value what is
// small.
#pragma once

#include "tessera/device/observer.hpp"

namespace tessera {

template <class F>
[[gnu::noinline, gnu::cold]] void tell_each(const Observers& observers, F call) {
  for (Observer* o : observers) call(*o);
}

template <class F>
void tell_observers(const Observers& observers, const F& call) {
  if (!observers.empty()) [[unlikely]]
    tell_each(observers, call);
}

}  // namespace tessera
