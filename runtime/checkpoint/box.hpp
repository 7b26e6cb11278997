// Boxes of tensors, as files hold them: arithmetic. A whole tensor is the box at the origin.
//
//   [4, 3]   a a a      two boxes: a at [0, 0] of sizes [2, 3], b at [2, 0] likewise
//            a a a
//            b b b
//            b b b
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::checkpoint {

using Sizes = std::vector<std::int64_t>;

struct Box {
  Sizes begin, sizes;  // one of each for each dimension

  std::int64_t end(std::size_t d) const { return begin[d] + sizes[d]; }
  bool operator==(const Box&) const = default;
};

// The product of sizes; 1 of a scalar's.  Requires: it fits 64 bits.
std::int64_t numel_of(const Sizes& sizes);
// Of a row-major array of these sizes, in elements; and where an element lies that is `index` of an
// array with such strides.
Sizes strides_of(const Sizes& sizes);
std::int64_t element_of(const Sizes& index, const Sizes& strides);
// What two boxes have in common; sizes are 0 where that is nothing.
Box common(const Box& a, const Box& b);
// "rows 2 to 3", "[2 to 3, 0 to 7]": the last index, not the end.
std::string text_of(const Box& box, const Sizes& whole);
std::string text_of(const Sizes& sizes);  // "[2, 3]"

// What is wrong with boxes that are to hold each element of a tensor of these sizes once: the first
// that is outside of it, doubled, overlapped or a hole, with its rows; empty for nothing. n log n
// steps for n boxes that cut two dimensions at most, and for those of a grid.
// Requires: no box is empty, unless the tensor is.
std::string fault_of_cover(const Sizes& whole, std::vector<Box> boxes);

// How elements of a box come to lie in another array: dimensions that follow each other in both are
// one.
struct Stretch {
  std::int64_t count, from, to;  // elements; their distance in either
};
// Of the region `of`, a part of `box`, whose element `of.begin` lies at 0 of the target. Row-major
// in the box; the last stretch is the innermost, whose elements follow each other there.
std::vector<Stretch> stretches(const Box& of, const Box& box, const Sizes& to_strides);

// Elements `begin` to `end` of a row-major array, as boxes: 2 n - 1 at most for n dimensions.
std::vector<Box> boxes_of_run(const Sizes& sizes, std::int64_t begin, std::int64_t end);

}  // namespace tessera::checkpoint
