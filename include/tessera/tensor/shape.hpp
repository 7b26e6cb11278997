// Shapes and strides: small lists of sizes with a fixed capacity, and the arithmetic of views and
// broadcasting.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"

namespace tessera {

inline constexpr int kMaxDims = 6;

// `d` counted from the front for d >= 0, from the back for d < 0.
// Throws: ContractError when out of range.
constexpr int normalize_dim(int d, int ndim) {
  TESSERA_EXPECT(d >= -ndim && d < ndim, "dimension ", d, " is out of range for ", ndim,
                 " dimensions");
  return d < 0 ? d + ndim : d;
}

// Up to kMaxDims sizes, outermost first. Also used for strides, which count elements.
class Shape {
 public:
  constexpr Shape() = default;
  constexpr Shape(std::initializer_list<std::int64_t> sizes)
      : Shape(std::span<const std::int64_t>(sizes.begin(), sizes.size())) {}
  constexpr explicit Shape(std::span<const std::int64_t> sizes) {
    for (const std::int64_t size : sizes) push_back(size);
  }

  constexpr int ndim() const noexcept { return ndim_; }
  // Size of dimension d. Negative d count from the end: shape[-1] is the last size.
  // Throws: ContractError when out of range.
  constexpr std::int64_t operator[](int d) const {
    return sizes_[static_cast<std::size_t>(normalize_dim(d, ndim_))];
  }
  constexpr std::int64_t& operator[](int d) {
    return sizes_[static_cast<std::size_t>(normalize_dim(d, ndim_))];
  }
  constexpr const std::int64_t* begin() const noexcept { return sizes_.data(); }
  constexpr const std::int64_t* end() const noexcept { return sizes_.data() + ndim_; }
  constexpr std::int64_t back() const { return (*this)[-1]; }

  // Throws: ContractError beyond kMaxDims.
  constexpr void push_back(std::int64_t size) {
    TESSERA_EXPECT(ndim_ < kMaxDims, "a tensor has at most ", kMaxDims, " dimensions");
    sizes_[static_cast<std::size_t>(ndim_++)] = size;
  }
  // This shape without dimension d, and this shape with another size there. Throws: as operator[].
  constexpr Shape without(int d) const {
    const int dropped = normalize_dim(d, ndim_);
    Shape out;
    for (int i = 0; i < ndim_; ++i)
      if (i != dropped) out.push_back((*this)[i]);
    return out;
  }
  constexpr Shape with(int d, std::int64_t size) const {
    Shape out = *this;
    out[d] = size;
    return out;
  }

  // The product of the sizes; 1 without dimensions.
  // Throws: ContractError on overflow or a negative size.
  constexpr std::int64_t numel() const {
    std::int64_t n = 1;
    for (const std::int64_t size : *this) n = checked_mul(n, size);
    return n;
  }
  // Row-major strides, in elements.
  constexpr Shape strides() const {
    Shape out = *this;
    std::int64_t step = 1;
    for (auto d = static_cast<std::size_t>(ndim_); d-- > 0;) {
      out.sizes_[d] = step;
      step *= sizes_[d] > 0 ? sizes_[d] : 1;
    }
    return out;
  }
  constexpr bool operator==(const Shape& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }

 private:
  std::array<std::int64_t, kMaxDims> sizes_{};
  int ndim_ = 0;
};

std::ostream& operator<<(std::ostream& out, const Shape& shape);  // [2, 3]

// The shape of the result of an elementwise operation, by NumPy's rule.
// Throws: ContractError naming both shapes.
constexpr Shape broadcast(const Shape& a, const Shape& b) {
  const int ndim = a.ndim() > b.ndim() ? a.ndim() : b.ndim();
  Shape out;
  for (int d = 0; d < ndim; ++d) {
    const int i = d - (ndim - a.ndim()), j = d - (ndim - b.ndim());
    const std::int64_t x = i < 0 ? 1 : a[i], y = j < 0 ? 1 : b[j];
    TESSERA_EXPECT(x == y || x == 1 || y == 1, "shapes ", a, " and ", b, " do not broadcast");
    out.push_back(x == 1 ? y : x);
  }
  return out;
}

// Whether `from` can be expanded to `to`.
constexpr bool broadcasts_to(const Shape& from, const Shape& to) {
  const int added = to.ndim() - from.ndim();
  for (int d = 0; d < from.ndim(); ++d)
    if (added < 0 || (from[d] != 1 && from[d] != to[added + d])) return false;
  return true;
}

static_assert(Shape{2, 3, 4}.numel() == 24 && Shape{2, 3, 4}.strides() == Shape{12, 4, 1});
static_assert(Shape{2, 3, 4}[-1] == 4 && Shape{2, 3, 4}.without(-2) == Shape{2, 4});
static_assert(broadcast(Shape{3, 1}, Shape{4}) == Shape{3, 4});
static_assert(broadcasts_to({1, 3}, {2, 4, 3}) && !broadcasts_to({2, 1, 1}, {4, 3}));

}  // namespace tessera
