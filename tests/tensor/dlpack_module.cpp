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
// What is done with an image: its rows backwards (op 0), a 255th of each byte as f32 (1), and where
// it is above `number` (2), as bytes of 0 and 1; of floats (3) the bytes that they become.
Managed* image(Managed* managed, int op, double number) try {
  const Tensor x = from_dlpack(dlpack::Owned<Managed>(managed), device());
  Tensor out;
  if (op == 0) {
    std::vector<std::int64_t> rows;
    for (std::int64_t row = x.size(0); row-- > 0;) rows.push_back(row);
    out = raw::index_select(x, 0,
                            Tensor::from(rows, {static_cast<std::int64_t>(rows.size())}, device()));
  } else if (op == 1) {
    out = raw::binary(raw::Binary::div, raw::cast(x, f32), 255);
  } else if (op == 2) {
    out = raw::cast(raw::binary(raw::Binary::gt, x, number), u8);
  } else {
    out = raw::cast(x, u8);
  }
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
