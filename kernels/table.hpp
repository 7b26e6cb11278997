// All kernels of one device kind: plain structs of function pointers, filled once per backend.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/cross_entropy.hpp"
#include "kernels/dropout.hpp"
#include "kernels/elementwise.hpp"
#include "kernels/embedding.hpp"
#include "kernels/flat.hpp"
#include "kernels/gemm.hpp"
#include "kernels/index.hpp"
#include "kernels/norm.hpp"
#include "kernels/optimizer.hpp"
#include "kernels/peers.hpp"
#include "kernels/random.hpp"
#include "kernels/reduce.hpp"
#include "kernels/rope.hpp"
#include "kernels/softmax.hpp"
#include "tessera/device/driver.hpp"

namespace tessera::kernels {

struct Kernels {
  Elementwise elementwise;
  Reduce reduce;
  Gemm gemm;
  Softmax softmax;
  CrossEntropy cross_entropy;
  Attention attention;
  Rope rope;
  Norm norm;
  Embedding embedding;
  Index index;
  Dropout dropout;
  Optimizer optimizer;
  Random random;
  Flat flat;
  Peers peers;
};

// The CPU's. Constant data: nothing runs before main.
const Kernels& cpu_kernels();
// Those of a device: of the module behind it, or the CPU's where `driver` is null.
inline const Kernels& kernels_of(const Driver* driver) {
  return driver ? *driver->kernels : cpu_kernels();
}

}  // namespace tessera::kernels
