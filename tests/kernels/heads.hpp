// What cases of attention share: how heads lie, and the memory that backward may use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/kernels/case.hpp"

namespace kernel_test {

struct Heads {
  std::int64_t batch, length, heads, kv_heads, dim;
  bool causal = true;
  bool fused = false;    // q, k and v, and their gradients, are views of one projection
  double range = 0;      // of q and k; 0: such that scores lie within 1
  bool shifted = false;  // all arrays lie off a 16-byte boundary

  std::int64_t q_row() const { return fused ? heads + 2 * kv_heads : heads; }
  std::int64_t kv_row() const { return fused ? heads + 2 * kv_heads : kv_heads; }
};

// [B, T, row, D], of which `first` is the first head.
struct HeadView {
  std::int64_t row, first, length, dim;

  std::int64_t at(std::int64_t b, std::int64_t t, std::int64_t h) const {
    return ((b * length + t) * row + first + h) * dim;
  }
  const double* operator()(const std::vector<double>& x, std::int64_t b, std::int64_t t,
                           std::int64_t h) const {
    return x.data() + at(b, t, h);
  }
};

// A device's memory while backward runs; null where it needs none.
class Workspace {
 public:
  Workspace(const Target& target, std::int64_t bytes) : target_(target) {
    if (bytes > 0 && (target.allocate(bytes, &data_) || !data_))
      throw CaseFailure("the device has no " + std::to_string(bytes) + " bytes of workspace");
  }
  ~Workspace() {
    if (data_) target_.release(data_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* at(Side side) const { return side == Side::device ? data_ : nullptr; }

 private:
  const Target& target_;
  void* data_ = nullptr;
};

inline std::uint16_t as_u16(std::int64_t x) { return static_cast<std::uint16_t>(x); }

}  // namespace kernel_test
