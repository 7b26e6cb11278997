// Whether a backward function is the derivative of its forward function. Tests of operations ask
// here, ours and those of anyone who writes one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/autograd/node.hpp"

namespace tessera {

struct GradcheckOptions {
  std::uint64_t seed = 1;  // of the random projection p
};

struct GradcheckReport {
  bool passed = true;
  // Empty, or the worst element: operation, input, element, both values and what was allowed.
  std::string message;
};

// Note [What gradcheck allows]
// Let L = sum(p y), y = f(inputs), p random, and D(h) = (L(x + h) - L(x - h)) / 2h. The slope is
// taken as D(h) + (D(h) - D(2h)) / 3 with h = eps^(1/3) max(1, |x|). It may differ from backward's
// by 100 eps^(2/3) (S + |gradient|), where S = 1 + sum|p y| + sum|x dL/dx|. It differs for two
// reasons.
//
// Curvature: D(h) = L' + a h^2 + b h^4 + ... The slope is rid of a, and 4 b h^4 is left. If L is at
// most M within r of x, b is at most M / r^5 (Cauchy). So the rest is below eps^(2/3) M for every x
// that is 0.006 max(1, |x|) away from a pole.
//
// Rounding: y is off by some eps, and so are the inputs of which it is the value. Then L is off by
// n eps S, and the slope by 1.5 n eps S / h. The factor 100 leaves room for n = 66 roundings.
//
// Compares backward's gradient with that slope, for every element of every f64 input. Inputs of
// other dtypes are handed on as they are. A second backward pass must add the same once more.
//
// Requires: a device that runs bodies; y is f64 and the same each time; no kink of f within
// 2h of the inputs. Each input becomes a contiguous leaf: take views inside f. Throws:
// ContractError.
GradcheckReport gradcheck(const std::function<Tensor(const std::vector<Tensor>&)>& f,
                          const std::vector<Tensor>& inputs, const GradcheckOptions& options = {});

}  // namespace tessera
