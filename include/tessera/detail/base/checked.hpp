// Checked arithmetic on sizes: every product of dimensions and every byte offset goes through here.
#pragma once

#include <cstdint>
#include <limits>

#include "tessera/base/error.hpp"

namespace tessera {

namespace detail {
// Apart, so that what is checked everywhere stays small enough to be inlined everywhere.
[[noreturn]] void fail_size(std::int64_t a, char operation, std::int64_t b);
}  // namespace detail

// a * b and a + b of non-negative sizes.  Throws: ContractError on overflow or a negative operand.
constexpr std::int64_t checked_mul(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product)) [[unlikely]]
    detail::fail_size(a, '*', b);
  return product;
}
constexpr std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  if (a < 0 || b < 0 || __builtin_add_overflow(a, b, &sum)) [[unlikely]]
    detail::fail_size(a, '+', b);
  return sum;
}

// a / b rounded up, for a >= 0 and b > 0.
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }

// a rounded up to a multiple of b.
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) {
  return checked_mul(ceil_div(a, b), b);
}

static_assert(ceil_div(10, 4) == 3 && ceil_div(0, 4) == 0 && round_up(257, 256) == 512);

}  // namespace tessera
