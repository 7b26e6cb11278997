#include "tessera/autograd/sliced.hpp"

#include <optional>
#include <utility>

#include "runtime/autograd/logits.hpp"
#include "runtime/autograd/operands.hpp"
#include "runtime/tensor/rows_by_id.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/autograd/rows_in_8_bits.hpp"

namespace tessera {

using namespace autograd::logits;
using autograd::beta;
using autograd::Gradients;
using autograd::GradientSink;
using autograd::record;
using autograd::Saved;
using autograd::statistics_dtype;
using detail::launch;
using detail::reads;
using detail::table;
using detail::updates;
using detail::writes;
using raw::Transpose;

namespace {

// Columns of a product that is still a product.
constexpr std::int64_t kLeastColumns = 256;
// For so many slices ids are found together: four bytes an id and slice.
constexpr std::int64_t kFoundTogether = 32;

// A view that carries no history.
Tensor bare(const Tensor& x) { return x.view(x.shape(), x.strides(), 0); }

// Copies between the columns of y [N, V] that a slice has and those of part [N, rows.count()],
// contiguous.
template <class Copy>
void for_columns(const Tensor& y, const Tensor& part, const SliceRows& rows, const Copy& copy) {
  const std::int64_t n = y.size(0), full = rows.full_chunks(), rest = rows.rest();
  if (full > 0)
    copy(y.view({n, full, rows.rows}, {rows.all, rows.chunk, 1}, rows.begin),
         part.view({n, full, rows.rows}, {rows.count(), rows.rows, 1}, 0));
  if (rest > 0)
    copy(y.view({n, rest}, {rows.all, 1}, full * rows.chunk + rows.begin),
         part.view({n, rest}, {rows.count(), 1}, full * rows.rows));
}

}  // namespace

namespace detail {

// A slice as its products read it, kept for backward: values, or codes that are decoded each time.
class KeptSlice {
 public:
  KeptSlice(const Tensor& slice, const SliceRows& rows, const Tensor& scales)
      : slice_(slice), scales_(scales.defined() ? of(scales, rows) : scales) {}
  const Tensor& stored() const { return slice_.get(); }
  Tensor values(DType dtype) const {
    const Tensor& scales = scales_.get();
    return scales.defined() ? decode_rows(slice_.get(), scales, dtype) : slice_.get();
  }

 private:
  static Tensor of(const Tensor& scales, const SliceRows& rows) {
    const Tensor all = raw::reshape(raw::contiguous(scales), {1, rows.all}),
                 own = Tensor::empty({1, rows.count()}, scales.dtype(), scales.device());
    for_columns(all, own, rows,
                [](const Tensor& from, const Tensor& to) { raw::copy_into(to, from); });
    return raw::reshape(own, {rows.count(), 1});
  }

  Saved slice_, scales_;
};

}  // namespace detail

// --- which slices there are ---

void detail::GivenSlices::expect(const char* operation, const Tensor& slice,
                                 const SliceRows& rows) const {
  const bool is_empty = rows.all == 0 && rows.chunk == 0 && rows.rows == 0;
  TESSERA_EXPECT((rows.all == all_ && rows.chunk == chunk_) || all_ < 0, operation,
                 ": the slice is of ", rows.all, " rows in chunks of ", rows.chunk,
                 "; those before it were of ", all_, " in chunks of ", chunk_);
  TESSERA_EXPECT(
      !is_finished_ && rows.begin == next_ &&
          (is_empty || (rows.all > 0 && rows.rows > 0 && rows.rows <= rows.chunk - next_)),
      operation, ": the slice has rows [", rows.begin, ", ", rows.begin, " + ", rows.rows,
      ") of chunks of ", rows.chunk, " of ", rows.all, "; expected the slice at ", next_,
      ": each one once, in order, before finish");
  TESSERA_EXPECT(slice.ndim() == 2 && slice.size(0) == rows.count(), operation, ": the slice is ",
                 slice.shape(), "; expected [", rows.count(), ", C]");
}

void detail::GivenSlices::take(const SliceRows& rows) {
  all_ = rows.all;
  chunk_ = rows.chunk;
  next_ += rows.rows;
}

void detail::GivenSlices::finish(const char* operation) {
  TESSERA_EXPECT(all_ >= 0, operation, ": no slice was given; give each one before finish");
  TESSERA_EXPECT(next_ == chunk_, operation, ": the slice at ", next_, " of chunks of ", chunk_,
                 " is missing");
  TESSERA_EXPECT(!is_finished_, operation,
                 ": finish was called before; make a new object for another result");
  is_finished_ = true;
}

Tensor detail::FoundRows::in(const Tensor& ids, const SliceRows& rows, std::int64_t part,
                             std::int64_t part_rows) {
  const std::int64_t behind = rows.begin - first_.begin,
                     slice = found_.defined() ? behind / first_.rows : 0;
  const bool is_found = found_.defined() && slice < found_.size(0) && part < found_.size(1) &&
                        behind == slice * first_.rows &&
                        rows.rows == std::min(first_.rows, rows.chunk - rows.begin);
  if (!is_found) {
    const std::int64_t left = ceil_div(rows.chunk - rows.begin, rows.rows);
    first_ = rows;
    found_ = Tensor::empty(
        {std::min(left, kFoundTogether), ceil_div(rows.count(), part_rows), ids.numel()}, i32,
        ids.device());
    if (found_.numel() > 0 && !ids.device().is_meta())
      launch("locate", ids.device(), table(ids.device()).locate,
             kernels::LocateArgs{found_.data(), ids.data(), ids.numel(), rows.all, rows.chunk,
                                 rows.begin, rows.rows, part_rows,
                                 static_cast<std::int32_t>(found_.size(0)),
                                 static_cast<std::int32_t>(found_.size(1)), ignored_, ids.dtype()},
             {reads(ids), writes(found_)});
    return in(ids, rows, part, part_rows);
  }
  return found_.view(ids.shape(), ids.strides(), (slice * found_.size(1) + part) * ids.numel());
}

// --- embedding ---

SlicedEmbedding::SlicedEmbedding(const Tensor& ids)
    : ids_(raw::contiguous(ids)), order_(std::make_shared<Tensor>()) {
  TESSERA_EXPECT(ids.dtype() == i32 || ids.dtype() == i64, "embedding: ids are ", ids.dtype(),
                 "; expected i32 or i64");
}

void SlicedEmbedding::add(const Tensor& slice, const SliceRows& rows) {
  given_.expect("embedding", slice, rows);
  if (rows.count() == rows.all) {
    given_.take(rows);
    y_ = embedding(slice, ids_);
    return;
  }
  const Device& device = detail::common_device("embedding", slice, ids_);
  if (!y_.defined()) {
    Shape shape = ids_.shape();
    shape.push_back(slice.size(1));
    y_ = Tensor::empty(shape, slice.dtype(), device);
  }
  TESSERA_EXPECT(y_.size(-1) == slice.size(1) && y_.dtype() == slice.dtype(),
                 "embedding: the slice is ", slice.shape(), " of ", slice.dtype(),
                 "; those before it had rows of ", y_.size(-1), " in ", y_.dtype());
  given_.take(rows);
  const Tensor y = bare(y_), at = found_.in(ids_, rows, 0, slice.size(0));
  if (y.numel() > 0 && !device.is_meta())
    autograd::look_up(
        kernels::EmbeddingArgs{y.data(), slice.data(), at.data(), at.numel(), slice.size(0),
                               slice.size(1), slice.dtype(), i32, true},
        slice, {detail::reads_some(slice, y), reads(at), updates(y, false)});
  // The order of all ids serves every slice: it has those of a row side by side.
  y_ = record("embedding", {y_, slice}, y,
              [at = Saved(at), ids = Saved(ids_), order = order_, rows, shape = slice.shape()](
                  const Tensor& gradient, Gradients& out) {
                if (out.wants(1)) {
                  if (!order->defined()) *order = detail::order_by_id(ids.get(), rows.all);
                  autograd::set_table(out, 1, gradient, at.get(), *order, shape);
                }
                if (rows.begin == 0) *order = {};  // backward ends with the first slice
                out.set(0, gradient);
              });
}

Tensor SlicedEmbedding::finish() {
  given_.finish("embedding");
  return std::move(y_);
}

// --- linear ---

void SlicedLinear::add(const Tensor& slice, const SliceRows& rows, const Tensor& scales) {
  given_.expect("linear", slice, rows);
  if (rows.count() == rows.all) {
    given_.take(rows);
    y_ = scales.defined() ? linear_in_8_bits(x_, slice, scales, {}) : linear(x_, slice);
    return;
  }
  const detail::KeptSlice kept(slice, rows, scales);
  const Tensor x = raw::contiguous(raw::reshape(x_, {-1, slice.size(1)}));
  if (!y_.defined()) {
    y_ = Tensor::empty(x_.shape().with(x_.ndim() - 1, rows.all), x_.dtype(), x_.device());
  }
  const Tensor y = bare(y_), columns = raw::reshape(y, {x.size(0), rows.all});
  Tensor part = Tensor::empty({x.size(0), rows.count()}, x.dtype(), x.device());
  raw::matmul_into(part, x, kept.values(x.dtype()), Transpose::no, Transpose::yes, 1, 0);
  given_.take(rows);
  for_columns(columns, part, rows,
              [](const Tensor& to, const Tensor& from) { raw::copy_into(to, from); });
  y_ = record(
      "linear", {y_, x_, slice}, y,
      [x = Saved(x), kept, shape = x_.shape(), rows](const Tensor& gradient, Gradients& out) {
        const Tensor g = raw::contiguous(raw::reshape(gradient, {x.get().size(0), rows.all}));
        Tensor g_part = Tensor::empty({g.size(0), rows.count()}, g.dtype(), g.device());
        for_columns(g, g_part, rows,
                    [](const Tensor& from, const Tensor& to) { raw::copy_into(to, from); });
        if (out.wants(2)) {
          Sum d_slice(out, 2, kept.stored());
          const GradientSink to = d_slice.next();
          raw::matmul_into(to.tensor, g_part, x.get(), Transpose::yes, Transpose::no, to.scale,
                           beta(to));
          d_slice.finish();
        }
        if (out.wants(1)) {
          Tensor dx = Tensor::empty(x.get().shape(), g.dtype(), g.device());
          raw::matmul_into(dx, g_part, kept.values(g.dtype()), Transpose::no, Transpose::no, 1, 0);
          out.set(1, raw::reshape(dx, shape));
        }
        out.set(0, gradient);
      });
}

Tensor SlicedLinear::finish() {
  given_.finish("linear");
  return std::move(y_);
}

// --- cross-entropy ---

// What the nodes of all slices have in common. The last node tells the others `gradient`, and they
// add up `dx`, which the first hands on.
struct SlicedCrossEntropy::Shared {
  Saved x, targets, lse, divisor;  // [N, C], [N], [N], []
  Shape x_shape;                   // as it was given
  bool wants_dx = false;
  std::int64_t most_logits = 0;
  Tensor gradient, dx;  // of the losses' sum; [N, C] f32

  std::int64_t count() const { return targets.get().size(0); }
};

// One slice, walked in parts of its rows, which are columns of logits, and these in parts of the
// rows of x.
struct SlicedCrossEntropy::Slice {
  std::shared_ptr<Shared> shared;
  detail::KeptSlice weight;
  SliceRows rows;
  Saved logits;                // [N * rows.count()], where those of all slices may be kept
  std::vector<Saved> targets;  // [N] of each part of the columns, as FoundRows has them

  bool keeps_logits() const { return shared->count() * rows.all <= shared->most_logits; }
  std::int64_t columns_at_once() const {
    const std::int64_t fitting = shared->most_logits / shared->count();
    return std::min(std::max(fitting, kLeastColumns), rows.count());
  }
  std::int64_t parts() const { return ceil_div(rows.count(), columns_at_once()); }
  // Calls f(first, targets, part of the weight) for each part of the columns.
  template <class F>
  void for_each_part(const F& f) const {
    const Tensor w = weight.values(dtype());
    for (std::size_t part = 0; part < targets.size(); ++part) {
      const std::int64_t first = static_cast<std::int64_t>(part) * columns_at_once(),
                         end = std::min(first + columns_at_once(), rows.count());
      f(first, targets[part].get(), raw::slice(w, 0, first, end));
    }
  }
  // Calls f(begin, end, logits) for parts of x's rows; the logits lie in `buffer`, and may be there
  // already.
  template <class F>
  void for_each_logits(const Tensor& buffer, bool are_there, const Tensor& part, const F& f) const {
    const std::int64_t columns = part.size(0), at_once = buffer.numel() / columns;
    for (std::int64_t begin = 0; begin < shared->count(); begin += at_once) {
      const std::int64_t end = std::min(begin + at_once, shared->count());
      const Tensor logits = buffer.view({end - begin, columns}, {columns, 1}, 0);
      if (!are_there)
        raw::matmul_into(logits, raw::slice(shared->x.get(), 0, begin, end), part, Transpose::no,
                         Transpose::yes, 1, 0);
      f(begin, end, logits);
    }
  }
  Tensor buffer() const {
    const std::int64_t columns = columns_at_once(),
                       at_once = std::clamp<std::int64_t>(shared->most_logits / columns, 1,
                                                          shared->count());
    return Tensor::empty({at_once * columns}, dtype(), shared->x.get().device());
  }
  DType dtype() const { return shared->x.get().dtype(); }  // of logits
  // That of forward, or a copy where they are needed again: their gradient overwrites the logits.
  Tensor buffer_for_backward(bool graph_is_retained) const {
    const Tensor& kept = logits.get();
    if (!kept.defined() || !graph_is_retained) return kept.defined() ? kept : buffer();
    Tensor copy = Tensor::empty(kept.shape(), kept.dtype(), kept.device());
    raw::copy_into(copy, kept);
    return copy;
  }
  void backward(Gradients& out, int input) const;
};

void SlicedCrossEntropy::Slice::backward(Gradients& out, int input) const {
  const Tensor& x = shared->x.get();
  bool adds_dx = shared->dx.defined();
  if (shared->wants_dx && !adds_dx)
    shared->dx = Tensor::empty(x.shape(), statistics_dtype(x.dtype()), x.device());
  std::optional<Sum> d_weight;
  if (out.wants(input)) d_weight.emplace(out, input, weight.stored());
  const GradientSink to = d_weight ? d_weight->next() : GradientSink{};
  const bool are_there = logits.get().defined();
  const Tensor logits_of = buffer_for_backward(out.graph_is_retained());
  for_each_part([&](std::int64_t first, const Tensor& targets, const Tensor& part) {
    bool adds_weight = to.accumulate;
    for_each_logits(
        logits_of, are_there, part, [&](std::int64_t begin, std::int64_t end, const Tensor& some) {
          logit_gradients(some, some, raw::slice(targets, 0, begin, end),
                          raw::slice(shared->lse.get(), 0, begin, end), shared->gradient, true);
          if (d_weight)
            raw::matmul_into(raw::slice(to.tensor, 0, first, first + part.size(0)), some,
                             raw::slice(x, 0, begin, end), Transpose::yes, Transpose::no, to.scale,
                             adds_weight ? 1 : 0);
          if (shared->wants_dx)
            raw::matmul_into(raw::slice(shared->dx, 0, begin, end), some, part, Transpose::no,
                             Transpose::no, 1, adds_dx ? 1 : 0);
          adds_weight = true;
        });
    adds_dx = true;
  });
  if (d_weight) d_weight->finish();
}

SlicedCrossEntropy::SlicedCrossEntropy(const Tensor& x, const Tensor& targets,
                                       std::int64_t most_logits, const TargetCount& count)
    : shared_(std::make_shared<Shared>()), x_(x) {
  TESSERA_EXPECT(x.ndim() >= 1 && x.size(-1) > 0 && most_logits > 0, "cross_entropy: x is ",
                 x.shape(), ", at most ", most_logits, " logits; expected [..., C] and at least 1");
  const std::int64_t rows = x.numel() / x.size(-1);
  check_targets("cross_entropy", targets, rows, 1);
  shared_->x = Saved(raw::contiguous(raw::reshape(x, {rows, x.size(-1)})));
  shared_->targets = Saved(raw::contiguous(targets));
  shared_->divisor = Saved(
      divisor_of("cross_entropy", shared_->targets.get(), count, statistics_dtype(x.dtype())));
  shared_->x_shape = x.shape();
  shared_->wants_dx = x.requires_grad();
  shared_->most_logits = most_logits;
}

// The first slice says how many there will be; slices that grow move what is there.
void SlicedCrossEntropy::reserve(std::int64_t parts, std::int64_t slices, DType dtype,
                                 const Device& device) {
  const std::int64_t room = lse_.defined() ? lse_.size(0) : 0;
  if (parts <= room) return;
  for (Tensor* table : {&losses_, &lse_}) {
    const Tensor larger =
        Tensor::empty({std::max(parts * slices, 2 * room), shared_->count()}, dtype, device);
    if (parts_ > 0)
      raw::copy_into(raw::slice(larger, 0, 0, parts_), raw::slice(*table, 0, 0, parts_));
    *table = larger;
  }
}

void SlicedCrossEntropy::add(const Tensor& weight, const SliceRows& rows, const Tensor& scales) {
  given_.expect("cross_entropy", weight, rows);
  TESSERA_EXPECT(rows.all > 0, "cross_entropy: the matrix is ", weight.shape(),
                 "; the mean of nothing is undefined");
  TESSERA_EXPECT(
      weight.size(1) == x_.size(-1) && (scales.defined() || weight.dtype() == x_.dtype()),
      "cross_entropy: x is ", x_.shape(), " of ", x_.dtype(), ", the slice is ", weight.shape(),
      " of ", weight.dtype(), "; expected [..., C] and [rows, C]");
  given_.take(rows);
  const Device& device = weight.device();
  Slice slice{shared_, {weight, rows, scales}, rows, {}, {}};
  for (std::int64_t part = 0; part < slice.parts(); ++part)
    slice.targets.emplace_back(
        found_.in(shared_->targets.get(), rows, part, slice.columns_at_once()));
  reserve(parts_ + slice.parts(), ceil_div(rows.chunk, rows.rows), statistics_dtype(x_.dtype()),
          device);
  {
    const Tensor buffer = slice.buffer();
    slice.for_each_part([&](std::int64_t, const Tensor& targets, const Tensor& part) {
      const Tensor loss = raw::reshape(raw::slice(losses_, 0, parts_, parts_ + 1), {-1}),
                   lse = raw::reshape(raw::slice(lse_, 0, parts_, parts_ + 1), {-1});
      slice.for_each_logits(
          buffer, false, part, [&](std::int64_t begin, std::int64_t end, const Tensor& logits) {
            losses(raw::slice(loss, 0, begin, end), raw::slice(lse, 0, begin, end), logits,
                   raw::slice(targets, 0, begin, end), true);
          });
      ++parts_;
    });
    if (slice.keeps_logits()) slice.logits = Saved(buffer);
  }
  const bool is_first = !chain_.defined();
  chain_ =
      record("cross_entropy_slice", {is_first ? x_ : chain_, weight},
             bare(raw::reshape(raw::slice(lse_, 0, parts_ - 1, parts_), {-1})),
             [slice, is_first](const Tensor& gradient, Gradients& out) {
               slice.backward(out, 1);
               Shared& shared = *slice.shared;
               if (!is_first)
                 out.set(0, gradient);
               else if (Tensor dx = std::exchange(shared.dx, {}); dx.defined())
                 out.set(0, raw::reshape(raw::cast(dx, shared.x.get().dtype()), shared.x_shape));
             });
}

Tensor SlicedCrossEntropy::finish() {
  given_.finish("cross_entropy");
  const std::int64_t rows = shared_->count();
  const Device& device = chain_.device();
  const Tensor losses = raw::slice(losses_, 0, 0, parts_), lses = raw::slice(lse_, 0, 0, parts_),
               &targets = shared_->targets.get();
  const Tensor loss = Tensor::empty({rows}, chain_.dtype(), device),
               lse = Tensor::empty({rows}, chain_.dtype(), device);
  if (!device.is_meta())
    launch("cross_entropy_of_parts", device, table(device).cross_entropy_of_parts,
           kernels::CrossEntropyOfPartsArgs{loss.data(), lse.data(), losses.data(), lses.data(),
                                            targets.data(), rows, parts_, kIgnoredTarget,
                                            chain_.dtype(), targets.dtype()},
           {reads(losses), reads(lses), reads(targets), writes(loss), writes(lse)});
  shared_->lse = Saved(lse);
  return record("cross_entropy", {chain_}, mean_of(loss, shared_->divisor.get()),
                [shared = shared_](const Tensor& gradient, Gradients& out) {
                  shared->gradient = raw::binary(raw::Binary::div, gradient, shared->divisor.get());
                  shared->dx = {};
                  out.set(0, shared->lse.get());
                });
}

}  // namespace tessera
