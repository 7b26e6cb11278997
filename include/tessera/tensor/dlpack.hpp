// Tensors lent to other libraries, and memory borrowed from them, without a copy, by DLPack. NumPy,
// PyTorch, JAX and others exchange tensors so. Host memory only.
//
//   auto lent = to_dlpack(x);                             // x's bytes stay until `lent` ends
//   give_to_c(lent.release());                            // ... or until its taker ends it
//   Tensor y = from_dlpack(dlpack::Owned<dlpack::DLManagedTensor>(taken), device);
//
// The structs are those of the public C header of DLPack 1.x, member by member. So pointers to
// either may be cast to the other. Source: https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/tensor/tensor.hpp"

namespace tessera {
namespace dlpack {

struct DLPackVersion {
  std::uint32_t major, minor;
};
struct DLDevice {
  std::int32_t device_type;  // 1: host memory
  std::int32_t device_id;
};
struct DLDataType {
  std::uint8_t code;  // 0 integer, 1 unsigned, 2 floating, 4 bfloat, 6 boolean
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: row-major
  std::uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};
inline constexpr std::uint64_t kReadOnly = 1;  // a bit of `flags`
struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned* self);
  std::uint64_t flags;
  DLTensor dl_tensor;
};

struct Delete {
  template <class Managed>
  void operator()(Managed* managed) const {
    if (managed->deleter) managed->deleter(managed);
  }
};
// Owns a managed tensor, and calls its deleter once.
template <class Managed>
using Owned = std::unique_ptr<Managed, Delete>;

}  // namespace dlpack

// Lends x's memory. The host blocks until its values are there. The bytes stay until the deleter is
// called, on the host thread of x's rank. They are lent to be read, unless `write` is asked for.
// Managed is DLManagedTensorVersioned (what `__dlpack__(max_version=(1, 0))` returns) or
// DLManagedTensor. The latter has no flag for read-only, so it is lent only with `write`.
// Throws: ContractError for a tensor that requires a gradient, is not on a CPU or holds no values.
// With `write`, ContractError for a parameter and for memory lent read-only. For DLManagedTensor,
// ContractError without `write`.
template <class Managed = dlpack::DLManagedTensorVersioned>
dlpack::Owned<Managed> to_dlpack(const Tensor& x, AccessMode mode = AccessMode::read);

// A tensor on memory that `managed` lends. Its deleter is called once, on `device`'s host thread.
// This happens when the last tensor that sees the memory is gone, and the host knows that the work
// submitted on it has run. If this call throws, it happens at once. Operations never write into
// memory that was lent read-only. Memory that this device lent itself becomes a view of the same
// tensor again.
// Requires: `device` is a CPU; nobody else writes the memory while operations use it.
// Throws: ContractError that names what does not fit: version, device, dtype, lanes, shape,
// strides, address.
template <class Managed>
Tensor from_dlpack(dlpack::Owned<Managed> managed, const Device& device);

}  // namespace tessera
