// The elementwise operations and reductions by name. One list serves the kernels, the tensor
// operations over them, and their names in messages and traces.
#pragma once

#include <cstdint>

namespace tessera::kernels {

// The dtype of an operation's result: its operands', or boolean.
enum class OpResult : std::uint8_t { same, boolean };

//   copy                           casts from any dtype to any other; floating to integer truncates
//                                  and saturates, anything to boolean is x != 0
//   abs, neg, sign, floor, round   take every dtype but boolean, and give it
//   logical_not                    takes any dtype, and gives boolean
//   isfinite                       takes a floating dtype, and gives boolean
//   the others                     take a floating dtype, and give it
enum class UnaryOp : std::uint8_t {
#define TESSERA_UNARY(name, ...) name,
#include "tessera/kernels/unary.def"
};

// Arithmetic gives the operands' dtype; comparisons and logical operations give boolean. They take
// every dtype, with two exceptions. pow and the slopes are floating. Boolean operands have only
// comparisons, logical operations, min and max. max and min return NaN if either operand is NaN. A
// slope, name_backward(x, g), takes what forward keeps, as its row in unary.def says, and the
// gradient.
enum class BinaryOp : std::uint8_t {
#define TESSERA_BINARY(name, ...) name,
#include "tessera/kernels/binary.def"
};

// Slopes come last.
constexpr bool is_slope(BinaryOp op) { return op > BinaryOp::logical_or; }

// A bit for each operation that gives boolean. They are numbers, so that a GPU knows them, too.
inline constexpr std::uint32_t kBooleanUnary = 0
#define TESSERA_UNARY(name, theirs, result, ...) \
  | std::uint32_t{OpResult::result == OpResult::boolean} << static_cast<int>(UnaryOp::name)
#include "tessera/kernels/unary.def"
    ;
inline constexpr std::uint32_t kBooleanBinary = 0
#define TESSERA_BINARY(name, result, ...) \
  | std::uint32_t{OpResult::result == OpResult::boolean} << static_cast<int>(BinaryOp::name)
#include "tessera/kernels/binary.def"
    ;
constexpr bool gives_boolean(UnaryOp op) {
  return (kBooleanUnary >> static_cast<int>(op) & 1u) != 0;
}
constexpr bool gives_boolean(BinaryOp op) {
  return (kBooleanBinary >> static_cast<int>(op) & 1u) != 0;
}

constexpr const char* name(UnaryOp op) {
  constexpr const char* names[] = {
#define TESSERA_UNARY(name, ...) #name,
#include "tessera/kernels/unary.def"
  };
  return names[static_cast<int>(op)];
}
constexpr const char* name(BinaryOp op) {
  constexpr const char* names[] = {
#define TESSERA_BINARY(name, ...) #name,
#include "tessera/kernels/binary.def"
  };
  return names[static_cast<int>(op)];
}

// sum, sumsq and mean of 16-bit inputs are f32 or the input's dtype, as the caller asks. A sum of
// integers or booleans is i64. max and min have the input's dtype, and NaN wins. argmax and argmin
// are i64, the first of equal ones; the first NaN wins.
enum class ReduceOp : std::uint8_t { sum, mean, max, min, argmax, argmin, sumsq };

constexpr const char* name(ReduceOp op) {
  constexpr const char* names[] = {"sum", "mean", "max", "min", "argmax", "argmin", "sumsq"};
  return names[static_cast<int>(op)];
}

}  // namespace tessera::kernels
