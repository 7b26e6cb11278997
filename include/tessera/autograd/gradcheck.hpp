// Is a backward function the derivative of its forward function? Tests of operations ask here, ours
// and those of whoever writes one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/autograd/node.hpp"

namespace tessera {

struct GradcheckOptions {
  std::uint64_t seed = 1;  // of the projection
  double slack = 1;        // factor on the allowed difference
};

struct GradcheckReport {
  bool passed = true;
  // Empty, or the worst element: operation, input, element, both values and what was allowed.
  std::string message;
};

// Compares, for every element of every f64 input, what backward gives with the central difference
// (L(x + h) - L(x - h)) / 2h of L = sum(p y), y = f(inputs), p random. Inputs of other dtypes are
// handed on as they are. A second backward pass must add the same once more.
//
// With h = eps^(1/3) max(1, |x|) the truncation error h^2 |L'''| / 6 and the rounding error
// eps sum|p y| / h are both of the order of eps^(2/3); allowed are
// 100 eps^(2/3) (1 + |gradient| + sum|p y|), which bounds |L'''| by 600 times that sum.
//
// Requires: a device that runs bodies; y is f64 and the same each time; no kink of f within h of
// the inputs. Each input becomes a contiguous leaf: take views inside f. Throws: ContractError.
GradcheckReport gradcheck(const std::function<Tensor(const std::vector<Tensor>&)>& f,
                          const std::vector<Tensor>& inputs, const GradcheckOptions& options = {});

}  // namespace tessera
