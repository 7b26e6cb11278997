#include "kernels/rows_by_id.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/host/cpu.hpp"

namespace tessera::kernels::cpu {

void order_by_id(const OrderByIdArgs& a, Exec&) {
  const auto key = [&](std::int32_t i) {
    const std::int64_t id = a.id_dtype == DType::i32 ? static_cast<const std::int32_t*>(a.ids)[i]
                                                     : static_cast<const std::int64_t*>(a.ids)[i];
    return std::pair(id >= 0 && id < a.n ? id : a.n, i);
  };
  std::iota(a.order, a.order + a.count, 0);
  std::sort(a.order, a.order + a.count,
            [&](std::int32_t i, std::int32_t j) { return key(i) < key(j); });
}

}  // namespace tessera::kernels::cpu
