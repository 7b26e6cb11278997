// What sums of rows by id go along on a GPU, as operands of a case.
#pragma once

#include "tests/kernels/bounded.hpp"

namespace kernel_test {

struct ById {
  Operand &order, &scratch, &workspace;

  ById(Case& c, std::int64_t count, std::int64_t sums_bytes)
      : order(c.output(i32, count)),
        scratch(c.output(i32, order_workspace_bytes(count) / 4)),
        workspace(c.output(f32, sums_bytes / 4)) {}

  void find_order(const Kernels& k, Side side, Exec& exec, const Operand& ids,
                  std::int64_t n) const {
    k.order_by_id({.order = order.at<std::int32_t>(side),
                   .ids = ids.at(side),
                   .workspace = scratch.at(side),
                   .count = ids.size(),
                   .n = n,
                   .id_dtype = ids.dtype()},
                  exec);
  }
};

}  // namespace kernel_test
