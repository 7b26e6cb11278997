// Operations on a matrix that is there one slice at a time, as a streamed parameter is; see
// for_each_slice of param/parameter.hpp.
//
//   the matrix, in chunks of 3 rows     │ 0 1 2 │ 3 4 5 │ 6 7 8 │ 9     │
//   slice 0: begin 0, rows 2            │ 0 1   │ 3 4   │ 6 7   │ 9     │
//   slice 1: begin 2, rows 1            │     2 │     5 │     8 │       │
//
// A chunk is what one rank keeps, so a slice has the same part of every rank's rows, and one
// in-place all-gather brings it. Each of the classes is given every slice of one cut once, in the
// order of their begins, and then finished, once; all else is a ContractError. In backward the
// slices come in reverse, and each has its gradient when its node has run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/autograd/losses.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

// Which rows of a matrix a slice has: [begin, begin + rows) of every chunk, one chunk after the
// other, as far as they exist.
struct SliceRows {
  std::int64_t all = 0;    // rows of the matrix
  std::int64_t chunk = 0;  // of a chunk; the last one may be shorter
  std::int64_t begin = 0, rows = 0;

  static constexpr SliceRows whole(std::int64_t all) { return {all, all, 0, all}; }
  constexpr std::int64_t full_chunks() const { return chunk == 0 ? 0 : all / chunk; }
  // Rows of the chunk behind these.
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
  // Throws: ContractError where `slice` is not the next, or not [rows.count(), C].
  void expect(const char* operation, const Tensor& slice, const SliceRows& rows) const;
  void take(const SliceRows& rows);
  // Throws: ContractError where one is missing, and the second time.
  void finish(const char* operation);

 private:
  std::int64_t all_ = -1, chunk_ = -1;  // -1: no slice yet
  std::int64_t next_ = 0;               // where it begins
  bool is_finished_ = false;
};

// Which rows of slices hold some rows of a matrix, found for several slices together: as many as
// follow that are even, but for the last.
class FoundRows {
 public:
  // An id `ignored` stays that everywhere.
  explicit FoundRows(std::int32_t ignored = -2) : ignored_(ignored) {}
  // Of the rows `ids`, contiguous, those of one part of a slice that is walked in parts of
  // `part_rows`, or all at once where it has no more: i32 of the ids' shape, -1 for what is in
  // another part, -2 for what is in none.
  Tensor in(const Tensor& ids, const SliceRows& rows, std::int64_t part, std::int64_t part_rows);

 private:
  std::int32_t ignored_;
  Tensor found_;  // [slices, parts, N], from this slice on:
  SliceRows first_;
};

}  // namespace detail

// embedding(matrix, ids): ids [...] -> [..., C], with the same bits. An id outside [0, rows.all)
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

// linear(x, matrix): x [..., C] -> [..., V], the columns of V in the order of the matrix's rows,
// whatever the cut.
class SlicedLinear {
 public:
  explicit SlicedLinear(Tensor x) : x_(std::move(x)) {}
  // slice [rows.count(), C], of x's dtype.
  // Throws: ContractError for another shape or dtype.
  void add(const Tensor& slice, const SliceRows& rows);
  Tensor finish();

 private:
  detail::GivenSlices given_;
  Tensor x_, y_;
};

// cross_entropy(linear(x, matrix), targets): x [..., C], targets [N], N rows of x -> f32 [] (f64
// for f64), the mean over `count` where it is given (LossOrder). Where all logits are no more than
// `most_logits`, they are kept for backward; else there are so many at a time, but at least 256
// columns of a row, and they are made once more in backward. The gradient of x is added up in f32.
// A target outside [0, rows.all) makes the loss NaN.
class SlicedCrossEntropy {
 public:
  // Throws: ContractError for targets that are not N of i32 or i64, and for most_logits below 1.
  SlicedCrossEntropy(const Tensor& x, const Tensor& targets, std::int64_t most_logits,
                     const TargetCount& count = {});
  // slice [rows.count(), C].  Throws: ContractError for another shape or another dtype than x has,
  // and for a matrix without rows.
  void add(const Tensor& slice, const SliceRows& rows);
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
