// A module for tests/tensor/dlpack_peers: tensors that come from Python's libraries and go back, as
// plain C functions.
#include "tessera/tensor/dlpack.hpp"
#include "tessera/tensor/ops.hpp"

using namespace tessera;
using Managed = dlpack::DLManagedTensorVersioned;

namespace {

Device& device() {
  static Device cpu = Device::cpu();
  return cpu;
}

// The last message is kept for `error`.
std::string& message() {
  static std::string text;
  return text;
}

}  // namespace

extern "C" {

const char* error() { return message().c_str(); }
// 2 x, lent to write; null where the tensor is refused. Takes over `managed`.
Managed* doubled(Managed* managed) try {
  const Tensor x = from_dlpack(dlpack::Owned<Managed>(managed), device());
  Tensor out = raw::add(x, x);
  device().synchronize();
  return to_dlpack(out, AccessMode::write).release();
} catch (const std::exception& failure) {
  message() = failure.what();
  return nullptr;
}
// 0 .. n - 1 as f32 in the older struct.
dlpack::DLManagedTensor* counted(std::int64_t n) {
  return to_dlpack<dlpack::DLManagedTensor>(Tensor::arange(n, f32, device()), AccessMode::write)
      .release();
}
std::int64_t live_bytes() { return Memory::of(device()).ledger().live_bytes(); }

}  // extern "C"
