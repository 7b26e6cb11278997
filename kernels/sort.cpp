#include "kernels/sort.hpp"

#include <algorithm>
#include <bit>
#include <numeric>

#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/simd.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

// Places decide between equal elements, so that no two compare equal and any sort is stable.
template <class T>
void sort_row(std::int64_t* order, const T* in, std::int64_t n, bool descending) {
  const auto less = [](Compute<T> a, Compute<T> b) { return a < b || (a == a && b != b); };
  std::iota(order, order + n, 0);
  std::sort(order, order + n, [=](std::int64_t i, std::int64_t j) {
    const auto a = static_cast<Compute<T>>(in[i]), b = static_cast<Compute<T>>(in[j]);
    const bool is_before = descending ? less(b, a) : less(a, b),
               is_behind = descending ? less(a, b) : less(b, a);
    return is_before || (!is_behind && i < j);
  });
}

}  // namespace

void sort(const SortArgs& a, Exec& exec) {
  const std::int64_t steps = std::bit_width(static_cast<std::uint64_t>(a.cols));
  visit_computed(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_ranges(exec, a.rows, row_grain(8 * a.cols * steps),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row)
                   sort_row(a.order + row * a.cols, static_cast<const T*>(a.in) + row * a.cols,
                            a.cols, a.descending);
               });
  });
}

}  // namespace tessera::kernels::cpu
