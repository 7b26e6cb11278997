// All kernels of one kind of device: a plain struct with one function pointer for each line of
// kernels.def.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/cross_entropy.hpp"
#include "kernels/cumsum.hpp"
#include "kernels/dropout.hpp"
#include "kernels/e4m3_rows.hpp"
#include "kernels/elementwise.hpp"
#include "kernels/embedding.hpp"
#include "kernels/flat_arrays.hpp"
#include "kernels/gemm.hpp"
#include "kernels/gemm_fp8.hpp"
#include "kernels/index.hpp"
#include "kernels/norm.hpp"
#include "kernels/optimizer.hpp"
#include "kernels/peer_memory.hpp"
#include "kernels/quantize.hpp"
#include "kernels/random.hpp"
#include "kernels/reduce.hpp"
#include "kernels/rope.hpp"
#include "kernels/rows_by_id.hpp"
#include "kernels/softmax.hpp"
#include "kernels/sort.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/detail/device/driver.hpp"

namespace tessera::kernels {

struct Kernels {
#define TESSERA_KERNEL(name, Args) Kernel<Args> name;
#include "kernels/kernels.def"

  // For benchmarks: `gemm` by number `choice` of the library's algorithms, its best guess first;
  // false where it has fewer. Null where the product is our own.
  bool (*gemm_choice)(const GemmArgs& args, int choice, Exec& exec) = nullptr;
};

// Another number for another list, other names or arguments of another size: a driver module that
// was built from one of those is refused.
inline constexpr std::uint64_t kKernelsLayout = [] {
  std::uint64_t hash = sizeof(Kernels);
#define TESSERA_KERNEL(name, Args) hash = fnv1a(sizeof(Args), fnv1a(#name, hash));
#include "kernels/kernels.def"
  return hash;
}();

// The CPU's. Constant data: nothing runs before main.
const Kernels& cpu_kernels();
// Those of a device: of the module behind it, or the CPU's where `driver` is null.
inline const Kernels& kernels_of(const Driver* driver) {
  return driver ? *static_cast<const Kernels*>(driver->kernels) : cpu_kernels();
}

}  // namespace tessera::kernels
