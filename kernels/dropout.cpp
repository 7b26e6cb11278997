#include "kernels/dropout.hpp"

#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/simd.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::kernels::cpu {

using namespace host;

void dropout(const DropoutArgs& a, Exec& exec) {
  const std::uint64_t key = a.device_key == nullptr ? a.key : *a.device_key;
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const C factor = a.p < 1 ? C(1) / (C(1) - static_cast<C>(a.p)) : C(0);
    const T* x = static_cast<const T*>(a.x);
    T* y = static_cast<T*>(a.y);
    for_ranges(exec, a.count, kGrain / 4, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t e = begin; e < end; e += 4) {
        const auto words = philox(key, static_cast<std::uint64_t>(e / 4 + a.offset));
        const std::int64_t n = std::min<std::int64_t>(4, end - e);
        for (std::int64_t i = 0; i < n; ++i) {
          const bool keep = unit_float(words[static_cast<std::size_t>(i)]) >= a.p;
          y[e + i] = T(keep ? static_cast<C>(x[e + i]) * factor : C(0));
        }
      }
    });
  });
}

}  // namespace tessera::kernels::cpu
