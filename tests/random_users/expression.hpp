// Random expressions: some leaves and a few operations, each on results of earlier ones, as the
// library computes them and as numbers with bounds, forward and backward.
//
//   leaf f32 [3, 1]          the library runs every line and goes backward from the last ones;
//   transpose 0 1   of 0     the numbers do the same, line by line, with adjoints of their own
//   mul             of 1, 0
//
// An operation that is not defined, or hardly known, for the values that it would get is not taken:
// so every value that is compared has a bound that says something.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/tensor/tensor.hpp"
#include "tests/random_users/draw.hpp"
#include "tests/random_users/number.hpp"

namespace tessera::testing {

using Run = std::function<Tensor(std::span<const Tensor> operands)>;
using Numbers = std::vector<Number>;

constexpr std::int64_t kMostElements = 400;  // of a line

struct Line {
  std::string text;
  std::vector<std::size_t> operands;  // lines above
  Run run;                            // none for a leaf
  Shape shape;
  DType dtype = f64;
  Numbers values{};
  // Adds what the gradient of the result gives to each operand's elements; none where there is no
  // derivative.
  std::function<void(const Numbers& gradient, std::span<std::vector<Sum>> to)> adjoint{};
  bool rounds_parts = false;  // see Sum::get
  bool has_gradient = false;  // a leaf that requires it, or what comes of one
};

// Thrown where an operation does not fit; the expression goes on without it.
struct NotTaken {};
inline void need(bool condition) {
  if (!condition) throw NotTaken();
}

struct Expression {
  std::vector<Line> lines;
  std::vector<std::size_t> roots;  // where backward begins

  const Line& operator[](std::size_t i) const { return lines[i]; }
  // Throws: NotTaken for results that are large or hardly known.
  std::size_t add(Line line);
  std::size_t leaf(Draw& draw, const Shape& shape, DType dtype,
                   const std::function<double()>& value);
  std::string to_string() const;
};

// Calls f(place) for every element, in row-major order.
template <class F>
void for_each_place(const Shape& shape, F f) {
  const std::int64_t n = shape.numel();
  Shape place = shape;
  for (int d = 0; d < shape.ndim(); ++d) place[d] = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    f(place);
    for (int d = shape.ndim() - 1; d >= 0 && ++place[d] == shape[d]; --d) place[d] = 0;
  }
}
inline std::size_t index_of(const Shape& shape, const Shape& place) {
  std::int64_t i = 0;
  for (int d = 0; d < shape.ndim(); ++d) i = i * shape[d] + place[d];
  return static_cast<std::size_t>(i);
}
// The element that broadcasting puts at `place` of a larger shape.
inline std::size_t spread_index(const Shape& shape, const Shape& place) {
  Shape own = shape;
  for (int d = 0; d < shape.ndim(); ++d)
    own[d] = shape[d] == 1 ? 0 : place[place.ndim() - shape.ndim() + d];
  return index_of(shape, own);
}

inline Shape inserted(const Shape& shape, int d, std::int64_t size) {
  Shape out;
  for (int i = 0; i <= shape.ndim(); ++i) {
    if (i == d) out.push_back(size);
    if (i < shape.ndim()) out.push_back(shape[i]);
  }
  return out;
}

// Operations of one kind: each takes the line `x` and adds one that uses it.  Throws: NotTaken.
using Operation = std::size_t (*)(Draw& draw, Expression& e, std::size_t x);
std::size_t add_unary(Draw& draw, Expression& e, std::size_t x);
std::size_t add_binary(Draw& draw, Expression& e, std::size_t x);
std::size_t add_cast(Draw& draw, Expression& e, std::size_t x);
std::size_t add_matmul(Draw& draw, Expression& e, std::size_t x);
std::size_t add_over_slices(Draw& draw, Expression& e, std::size_t x);
std::size_t add_movement(Draw& draw, Expression& e, std::size_t x);
std::size_t add_indexing(Draw& draw, Expression& e, std::size_t x);

// An element of an operand.
struct Term {
  std::size_t operand, element;
};
// A line whose elements are elements of its operands, or sums of some: `terms` of the one at a
// place; of none it is `fill`.
std::size_t add_linear(Expression& e, std::string text, std::vector<std::size_t> operands, Run run,
                       const Shape& shape,
                       const std::function<std::vector<Term>(const Shape& place)>& terms,
                       double fill = 0);

// A leaf of that shape whose values suit many operations, in a random layout.
std::size_t add_input(Draw& draw, Expression& e, const Shape& shape, DType dtype);

Expression make_expression(std::uint64_t seed);

// What is wrong with what the library gives, empty for nothing. The reference goes backward through
// operations named `wrong` with a gradient that is an eighth too large.
struct Comparison {
  std::string complaint{};
  std::int64_t compared = 0;  // numbers
  std::int64_t sharp = 0;     // of these, known to 1 % of them or of 1
};
Comparison compare(const Expression& e, std::uint64_t seed, const std::string& wrong = "");

}  // namespace tessera::testing
