#include "kernels/cumsum.hpp"

#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/simd.hpp"

namespace tessera::kernels::cpu {

using namespace host;

void cumsum(const CumsumArgs& a, Exec& exec) {
  visit_computed(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr bool kWhole = std::is_integral_v<T>;
    using Sum = std::conditional_t<kWhole, std::uint64_t, double>;
    using Out = std::conditional_t<kWhole, std::int64_t, T>;
    for_ranges(exec, a.outer * a.inner, row_grain(2 * a.n),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t column = begin; column < end; ++column) {
                   const std::int64_t from = column / a.inner * a.n * a.inner + column % a.inner;
                   Sum sum = 0;
                   for (std::int64_t k = 0; k < a.n; ++k) {
                     const std::int64_t at = from + (a.reversed ? a.n - 1 - k : k) * a.inner;
                     const auto x = static_cast<Compute<T>>(static_cast<const T*>(a.in)[at]);
                     sum += static_cast<Sum>(x);
                     if constexpr (kWhole)
                       static_cast<Out*>(a.out)[at] = static_cast<Out>(sum);
                     else
                       static_cast<Out*>(a.out)[at] = Out(static_cast<Compute<T>>(sum));
                   }
                 }
               });
  });
}

}  // namespace tessera::kernels::cpu
