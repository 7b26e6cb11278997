// Which dimensions an operation goes over: one, several, or all.
#pragma once

#include "tessera/tensor/shape.hpp"

namespace tessera {

// Dimensions by number; negative ones count from the back. Without any: all dimensions.
//   sum(x)   sum(x, -1)   sum(x, {0, 2})
class Dims {
 public:
  constexpr Dims() = default;
  constexpr Dims(int dim) : Dims({dim}) {}
  Dims(bool) = delete;  // sum(x, true): KeepDim::yes comes behind the dimensions
  constexpr Dims(std::initializer_list<int> dims) {
    for (const int dim : dims) list_.push_back(dim);
  }

  // Bit d says whether dimension d of `ndim` is meant. A tensor of shape [] is seen as one element
  // along its dimension 0. Throws: ContractError for a dimension that is out of range or named
  // twice.
  constexpr unsigned mask(int ndim) const {
    if (list_.ndim() == 0) return (1u << ndim) - 1;
    unsigned mask = 0;
    for (const std::int64_t dim : list_) {
      const int d = normalize_dim(static_cast<int>(dim), ndim == 0 ? 1 : ndim);
      TESSERA_EXPECT((mask >> d & 1u) == 0, "dimension ", d, " is named twice; name it once");
      mask |= 1u << d;
    }
    return ndim == 0 ? 0 : mask;
  }

 private:
  Shape list_;
};

// `shape` with size 1 where `mask` has a bit, and without those dimensions.
constexpr Shape kept_shape(const Shape& shape, unsigned mask) {
  Shape out = shape;
  for (int d = 0; d < shape.ndim(); ++d)
    if ((mask >> d & 1u) != 0) out[d] = 1;
  return out;
}
constexpr Shape dropped_shape(const Shape& shape, unsigned mask) {
  Shape out;
  for (int d = 0; d < shape.ndim(); ++d)
    if ((mask >> d & 1u) == 0) out.push_back(shape[d]);
  return out;
}

static_assert(Dims({0, -1}).mask(3) == 0b101 && Dims().mask(2) == 0b11);

}  // namespace tessera
