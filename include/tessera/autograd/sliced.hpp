// Operations on a matrix of which one slice at a time is in memory, as of a streamed parameter; see
// for_each_slice of param/parameter.hpp.
//
//   the matrix, in chunks of 3 rows     │ 0 1 2 │ 3 4 5 │ 6 7 8 │ 9     │
//   slice 0: begin 0, rows 2            │ 0 1   │ 3 4   │ 6 7   │ 9     │
//   slice 1: begin 2, rows 1            │     2 │     5 │     8 │       │
//
// A chunk is what one rank keeps. So a slice has the same part of every rank's rows, and one
// in-place all-gather brings it. Each of these classes is given every slice of one cut once, in the
// order of their begins. Then it is finished, once. All else is a ContractError. In backward the
// slices come in reverse, and each has its gradient when its node has run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/autograd/losses.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

// The rows of a matrix that a slice has: [begin, begin + rows) of every chunk, one chunk after the
// other, as far as they exist.
struct SliceRows {
  std::int64_t all = 0;    // rows of the matrix
  std::int64_t chunk = 0;  // of a chunk; the last one may be shorter
  std::int64_t begin = 0, rows = 0;

  static constexpr SliceRows whole(std::int64_t all) { return {all, all, 0, all}; }
  constexpr std::int64_t full_chunks() const { return chunk == 0 ? 0 : all / chunk; }
  // Rows of the slice in the last, shorter chunk.
  constexpr std::int64_t rest() const {
    return std::clamp<std::int64_t>(all - full_chunks() * chunk - begin, 0, rows);
  }
  constexpr std::int64_t count() const { return full_chunks() * rows + rest(); }
};

static_assert(SliceRows{10, 3, 0, 2}.count() == 7 && SliceRows{10, 3, 2, 1}.count() == 3);

namespace detail {

// Which slices of a cut an operation has been given.
class GivenSlices {
 public:
  // Throws: ContractError if `slice` is not the next, or not [rows.count(), C].
  void expect(const char* operation, const Tensor& slice, const SliceRows& rows) const;
  void take(const SliceRows& rows);
  // Throws: ContractError if a slice is missing, and the second time.
  void finish(const char* operation);

 private:
  std::int64_t all_ = -1, chunk_ = -1;  // -1: no slice yet
  std::int64_t next_ = 0;               // where it begins
  bool is_finished_ = false;
};

// Which rows of slices hold some rows of a matrix. It finds them for several slices together: those
// that follow in a cut of even slices, of which the last may be shorter.
class FoundRows {
 public:
  // An id that equals `ignored` stays so in every result.
  explicit FoundRows(std::int32_t ignored = -2) : ignored_(ignored) {}
  // Where in one part of a slice the rows `ids`, contiguous, lie: i32 of the ids' shape. -1: in
  // another part; -2: in none. The slice is walked in parts of `part_rows`, or all at once if it
  // has no more rows.
  Tensor in(const Tensor& ids, const SliceRows& rows, std::int64_t part, std::int64_t part_rows);

 private:
  std::int32_t ignored_;
  Tensor found_;  // [slices, parts, N], from this slice on:
  SliceRows first_;
};

}  // namespace detail

// embedding(matrix, ids), with the same bits: ids [...] -> [..., C]. An id outside [0, rows.all)
// gives a row of NaN, and no gradient.
class SlicedEmbedding {
 public:
  // Throws: ContractError for ids that are neither i32 nor i64.
  explicit SlicedEmbedding(const Tensor& ids);
  // slice [rows.count(), C], the same C and dtype each time.
  // Throws: ContractError for another shape, and for another device than that of the ids.
  void add(const Tensor& slice, const SliceRows& rows);
  Tensor finish();

 private:
  detail::GivenSlices given_;
  detail::FoundRows found_;
  Tensor ids_, y_;
  std::shared_ptr<Tensor> order_;  // in backward, for a GPU
};

// linear(x, matrix): x [..., C] -> [..., V]. The columns of V are in the order of the matrix's
// rows, whatever the cut.
class SlicedLinear {
 public:
  explicit SlicedLinear(Tensor x) : x_(std::move(x)) {}
  // slice [rows.count(), C], of x's dtype. Or codes, with `scales` [rows.all, 1] of the whole
  // matrix (autograd/rows_in_8_bits.hpp): then it is decoded for this product, and in backward.
  // Throws: ContractError for another shape or dtype.
  void add(const Tensor& slice, const SliceRows& rows, const Tensor& scales = {});
  Tensor finish();

 private:
  detail::GivenSlices given_;
  Tensor x_, y_;
};

// cross_entropy(linear(x, matrix), targets): x [..., C], targets [N], N rows of x -> f32 [] (f64
// for f64). It is the mean over `count`, if that is given (LossOrder). If all logits are no more
// than `most_logits`, they are kept for backward. Otherwise so many are made at a time, but at
// least 256 columns of a row, and once more in backward. The gradient of x is added up in f32. A
// target outside [0, rows.all) makes the loss NaN.
class SlicedCrossEntropy {
 public:
  // Throws: ContractError for targets that are not N of i32 or i64, and for most_logits below 1.
  SlicedCrossEntropy(const Tensor& x, const Tensor& targets, std::int64_t most_logits,
                     const TargetCount& count = {});
  // slice [rows.count(), C], or codes with scales, as above.  Throws: ContractError for another
  // shape or another dtype than x has, and for a matrix without rows.
  void add(const Tensor& slice, const SliceRows& rows, const Tensor& scales = {});
  Tensor finish();

 private:
  struct Shared;
  struct Slice;
  detail::GivenSlices given_;
  detail::FoundRows found_{kIgnoredTarget};
  std::shared_ptr<Shared> shared_;
  void reserve(std::int64_t parts, std::int64_t slices, DType dtype, const Device& device);

  Tensor x_, chain_;     // what the next slice's node follows
  Tensor losses_, lse_;  // [at least parts_, N]
  std::int64_t parts_ = 0;
};

}  // namespace tessera
